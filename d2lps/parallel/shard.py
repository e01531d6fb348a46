"""What a parameter is of the whole model's: a piece of it, or all."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A parameter is piece `comm.rank` of the `comm.size` equal ones that the whole model's is cut into along `dim`."""

    comm: Communicator
    dim: int


def cut(comm: Communicator, whole: Tensor, dim: int) -> Tensor:
    """This rank's piece of a tensor that all ranks have: a copy, not a view.

    >>> cut(comm, torch.arange(6.0).view(2, 3), dim=1)      # on rank 2 of 3        # doctest: +SKIP
    tensor([[2.],
            [5.]])

    ValueError if the ranks can't have equal pieces.
    """
    if whole.shape[dim] % comm.size:
        raise ValueError(f"dimension {dim} of {tuple(whole.shape)} can't be cut into {comm.size} equal pieces")
    return whole.detach().chunk(comm.size, dim)[comm.rank].clone()


def sharded(comm: Communicator, whole: Tensor, dim: int) -> nn.Parameter:
    """This rank's piece as a parameter that knows what it is: `shard_of` tells. A frozen one stays frozen."""
    parameter = nn.Parameter(cut(comm, whole, dim), not isinstance(whole, nn.Parameter) or whole.requires_grad)
    parameter.shard = Shard(comm, dim)  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Tensor) -> Shard | None:
    """How it was cut, or None for a parameter that is whole."""
    return getattr(parameter, "shard", None)


def here(name: str, tensor: T) -> T:
    """The same; ValueError for a parameter that ZeRO 3 has taken away, and in whose place it shows NaN."""
    if getattr(tensor, "away", False):
        where = "its module's forward and backward pass, and in `with zero.gathered():`"
        raise ValueError(f"{name} is not on this rank now, which has a shard of it: with ZeRO 3 it is there in {where}")
    return tensor


def guard(module: nn.Module) -> None:
    """Have no `state_dict` give NaN for a parameter that is not `here`; with keep_vars, who reads it can ask."""

    def check(part: nn.Module, prefix: str, keep_vars: bool) -> None:
        for name, parameter in () if keep_vars else part.named_parameters(recurse=False):
            here(prefix + name, parameter)

    for part in module.modules():
        part.register_state_dict_pre_hook(check)


def add_up_partial(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Of (parameter, gradient), in place: what is a part of a sum over a group, `parameter.partial`, becomes that sum."""
    together: dict[tuple[Communicator, torch.dtype], list[Tensor]] = {}
    for parameter, gradient in gradients:
        if (comm := getattr(parameter, "partial", None)) is not None:
            together.setdefault((comm, gradient.dtype), []).append(gradient)
    for (comm, _), parts in together.items():
        flat = torch.cat([part.flatten() for part in parts])
        with comm.about("grads", "P", "P", partial=True):
            all_reduce(comm, flat)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))
