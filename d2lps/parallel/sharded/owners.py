"""Which modules' forward passes need which parameters: those that the same ones need travel together."""

from collections.abc import Iterator, Mapping

from torch import nn

_HOLDERS = nn.ModuleList | nn.ModuleDict  # without a forward pass: what is in them is of the module around them,
_LISTS = nn.ParameterList | nn.ParameterDict  # as a child, or as its own parameters


def together(
    module: nn.Module, trained: Mapping[str, nn.Parameter]
) -> list[tuple[tuple[nn.Module, ...], dict[str, nn.Parameter]]]:
    """The module and its children, as far as they share parameters, and the parameters that just these have.

    >>> tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    >>> tied["b"].weight = tied["a"].weight
    >>> [(len(owners), list(names)) for owners, names in together(nn.Sequential(tied), dict(tied.named_parameters()))]
    [(2, ['a.weight']), (1, ['a.bias']), (1, ['b.bias'])]
    """
    parts = {module: {*_own(module)}} | {child: {*child.parameters()} for child in _children(module)}
    found: dict[tuple[nn.Module, ...], dict[str, nn.Parameter]] = {}
    for name, parameter in trained.items():
        owners = tuple(part for part, owned in parts.items() if parameter in owned)
        found.setdefault(owners, {})[name] = parameter
    return list(found.items())


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters for which a module's own forward pass is the only one."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, _LISTS):
            yield from child.parameters()
        elif isinstance(child, _HOLDERS):
            yield from _own(child)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Those that have forward passes."""
    for child in module.children():
        if isinstance(child, _HOLDERS):
            yield from _children(child)
        elif not isinstance(child, _LISTS):
            yield child
