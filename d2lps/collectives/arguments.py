"""What all collectives share: a name for those that wait, a comparison for those that debug, and checks."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from d2lps.comm import Communicator, ReduceOp, aliasing
from d2lps.comm.aliasing import InPlace, same_place
from d2lps.comm.ops import op_name
from d2lps.comm.rank import describe

Tensors = Sequence[Tensor]

Collective = TypeVar("Collective", bound=Callable[..., None])


def collective(*alike: str) -> Callable[[Collective], Collective]:
    """Mark a function as a collective; the arguments named must be alike on all ranks, which the debug mode compares."""

    def mark(function: Collective) -> Collective:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(comm: Communicator, *args: Any, **options: Any) -> None:
            if not isinstance(comm, Communicator):
                raise TypeError(f"{function.__name__}(comm, ...) begins with a communicator, not with a {type(comm).__name__}")
            with comm.inside(function.__name__, apart=True) as outermost:
                if comm.debug and outermost:
                    bound = signature.bind(comm, *args, **options)
                    bound.apply_defaults()
                    said = ", ".join(f"{name}={_spell(bound.arguments[name])}" for name in alike)
                    comm.agree(f"{function.__name__}({said})")
                function(comm, *args, **options)

        return call  # type: ignore[return-value]

    return mark


def _spell(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return describe(argument)
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(map(_spell, argument)) + "]"
    return op_name(argument) if isinstance(argument, ReduceOp) else str(argument)


def check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}: {tensor!r}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has the layout {tensor.layout}, whose elements cannot be sent as they lie; make it dense first")


def check_parts(comm: Communicator, name: str, whole: Any, part_name: str, part: Any, verb: str) -> None:
    """One tensor that holds as much for each rank as the other: "output has 7 elements, but 3 ranks give 2 each"."""
    check_tensor(name, whole)
    check_tensor(part_name, part)
    if whole.numel() != comm.size * part.numel():
        raise ValueError(f"{name} has {whole.numel()} elements, but {comm.size} ranks {verb} {part.numel()} each")
    if whole.dtype != part.dtype:
        raise ValueError(f"{name} is {describe(whole)} but {part_name} is {describe(part)}: they must have one dtype")


def check_rank(comm: Communicator, name: str, rank: Any) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < comm.size:
        raise ValueError(f"{name}={rank!r} is not a rank of this group of {comm.size} (0 to {comm.size - 1})")


def check_list(comm: Communicator, name: str, tensors: Any) -> None:
    """One tensor for each rank, all of one dtype."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"{name} must be a list of {comm.size} tensors, one for each rank, not {type(tensors).__name__}")
    if len(tensors) != comm.size:
        raise ValueError(f"{name} has {len(tensors)} tensors, but the group has {comm.size} ranks: one for each")
    for index, tensor in enumerate(tensors):
        check_tensor(f"{name}[{index}]", tensor)
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{name}[{index}] is {tensor.dtype}, {name}[0] is {tensors[0].dtype}: they must be alike")


def check_fits(name: str, tensor: Any, other_name: str, other: Tensor) -> None:
    """Two tensors between which elements will be copied: as many, of the same dtype."""
    check_tensor(name, tensor)
    if tensor.dtype != other.dtype or tensor.numel() != other.numel():
        raise ValueError(f"{name} is {describe(tensor)} but {other_name} is {describe(other)}: they must hold the same")
    if tensor.is_meta is not other.is_meta:
        raise ValueError(f"{name} is on {tensor.device} but {other_name} is on {other.device}: only one of them has contents")


def check_root_list(comm: Communicator, name: str, tensors: Any, root_name: str, root: int, tensor: Tensor) -> None:
    """The list of scatter and gather: the root gives one, of tensors like the others' own; nobody else does."""
    check_tensor("tensor", tensor)
    check_rank(comm, root_name, root)
    if comm.rank == root:
        check_list(comm, name, tensors)
        for index, part in enumerate(tensors):
            check_fits(f"{name}[{index}]", part, "tensor", tensor)
    elif tensors is not None and (not isinstance(tensors, list | tuple) or tensors):
        raise ValueError(f"{name} was given on rank {comm.rank}, but only the rank {root_name}={root} has one")


def check_apart(
    into_name: str, into: Tensor | Tensors, from_name: str = "", sent: Tensor | Tensors = (), right: InPlace = same_place
) -> None:
    """No memory is received into twice, or sent from as well, but where the call is `right` in place.

    Many need the same place: they keep what is to be sent until all is there, or lay it where it is to go before anything comes.
    """
    names = [name if isinstance(given, Tensor) else name + "[{}]" for name, given in ((into_name, into), (from_name, sent))]
    receives, sends = ([given] if isinstance(given, Tensor) else given for given in (into, sent))
    aliasing.check_apart(receives, sends, names, right)


def only(into: Tensor, sent: Tensor) -> InPlace:
    """What a rank sends to itself may lie where it is to go, and nothing else."""
    return lambda receive, send: receive is into and send is sent and same_place(into, sent)


def is_part(whole: Tensor, part: Tensor, ranks: int) -> bool:
    """Whether a part lies just where it is in the whole: `is_part(x, x[2:4], ranks=3)` of `x = torch.zeros(6)`."""
    whole = whole.view(-1) if whole.is_contiguous() else whole
    return whole.dim() > 0 and len(whole) % ranks == 0 and any(same_place(each, part) for each in whole.chunk(ranks))


def divide(tensor: Tensor, op: ReduceOp, ranks: int) -> None:
    """The last step of an average: the sum of all ranks, divided once."""
    if op == ReduceOp.AVG and not tensor.is_meta:
        tensor.detach().div_(ranks)


def doublings(size: int) -> list[int]:
    """The distances of a tree's steps: `doublings(5) == [1, 2, 4]`, one for each doubling that it takes to reach `size`."""
    return [1 << step for step in range((size - 1).bit_length())]
