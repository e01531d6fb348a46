"""Which modules' forward passes need which parameters: those that the same ones need travel together."""

from collections.abc import Iterator, Mapping

from torch import nn

_HOLDERS = nn.ModuleList | nn.ModuleDict  # without a forward pass: what is in them is of the module around them,
_LISTS = nn.ParameterList | nn.ParameterDict  # as a child, or as its own parameters


def together(
    module: nn.Module, trained: Mapping[str, nn.Parameter], layers: bool
) -> list[tuple[list[nn.Module], dict[str, nn.Parameter]]]:
    """The modules, and the parameters that just these have: of children, or of single layers.

    >>> tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    >>> tied["b"].weight = tied["a"].weight
    >>> [(len(owners), list(names)) for owners, names in together(nn.Sequential(tied), dict(tied.named_parameters()), True)]
    [(2, ['a.weight']), (1, ['a.bias']), (1, ['b.bias'])]
    """
    parts = list(dict((_layers if layers else _parts)(module)).items())
    found: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
    for name, parameter in trained.items():
        owners = tuple(k for k, (_, owned) in enumerate(parts) if any(parameter is other for other in owned))
        found.setdefault(owners, {})[name] = parameter
    return [([parts[k][0] for k in owners], members) for owners, members in found.items()]


def _own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters for which a module's own forward pass is the only one."""
    own = list(module.parameters(recurse=False))
    for child in module.children():
        own += child.parameters() if isinstance(child, _LISTS) else _own(child) if isinstance(child, _HOLDERS) else ()
    return own


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Those that have forward passes."""
    for child in module.children():
        if isinstance(child, _HOLDERS):
            yield from _children(child)
        elif not isinstance(child, _LISTS):
            yield child


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """What has a forward pass of its own, and the parameters that are there for it: the module, and its children."""
    yield module, _own(module)
    yield from ((child, list(child.parameters())) for child in _children(module))


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """As `_parts`, to the very bottom: every module, and what it has itself; one that two others share comes twice."""
    if isinstance(module, nn.MultiheadAttention):  # it uses its layer's weight itself
        yield module, list(module.parameters())
        return
    yield module, _own(module)
    for child in _children(module):
        yield from _layers(child)
