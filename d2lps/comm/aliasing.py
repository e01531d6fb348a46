"""Memory in which tensors meet: what one of them receives is lost there, or spoils what another one sends.

Two tensors can share an element only where the stretches meet that reach from their first to their last one. Columns of a matrix
have such stretches, and lie side by side in each row: tensors that step through memory by one stride are looked at within a step
of it. Of those that meet even there numpy knows, exactly, whether they have an element in common.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from d2lps.comm.rank import describe

Tensors = Sequence[Tensor]
Addressed = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from
InPlace = Callable[[Tensor, Tensor], bool]  # of what receives and what is sent there: does the call come out right nevertheless?
Stretch = tuple[int, int, int]  # the first byte, the one after the last, and the number of the tensor


def check_apart(
    receives: Tensors, sends: Tensors, names: Sequence[str], right: InPlace = lambda *_: False, blanks: Container[int] = ()
) -> None:
    """Refuse memory that is received into twice, or received into and sent from; what is only sent may be sent often.

    >>> row, names = torch.zeros(4), ("receives[{}]", "sends[{}]")
    >>> check_apart([row[:2]], [row[2:], row[2:]], names)
    >>> check_apart([row[:2]], [row[3:], row[1:]], names)
    Traceback (most recent call last):
    ValueError: receives[0], float32[2], and sends[1], float32[3], share memory: what arrives would overwrite what is to be sent

    blanks: storages of meta tensors that stand for others. Costs a microsecond a tensor.
    """
    tensors, count = [*receives, *sends], len(receives)
    for number, tensor in enumerate(receives):
        check_writable(tensor, names[0], number)
    groups = _meeting((_stretch(tensor, number, blanks) for number, tensor in enumerate(tensors)), count)
    near = [closer for group in groups for closer in _meeting(_within_a_step(group, tensors), count)]
    for one, other in sorted(pair for group in near for pair in combinations(sorted(number for *_, number in group), 2)):
        into, met, sent = tensors[one], tensors[other], other >= count
        if one < count and np.shares_memory(_in_numpy(into), _in_numpy(met)) and not (sent and right(into, met)):
            first, second = names[0].format(one), names[sent].format(other - count * sent)
            why = "what arrives would overwrite what is to be sent" if sent else "both are received into"
            raise ValueError(f"{first}, {describe(into)}, and {second}, {describe(met)}, share memory: {why}")


def check_messages(
    receives: Sequence[Addressed], sends: Sequence[Addressed], names: Sequence[str], blanks: Container[int] = ()
) -> None:
    """The same of messages that are posted together; most are two tensors that lie one after the other: that is seen quickly."""
    if len(receives) == 1 == len(sends):
        first, last = receives[0][0], sends[0][0]
        if first.is_meta:
            storage = first.untyped_storage()._cdata
            if first.is_contiguous() and (storage in blanks or storage != last.untyped_storage()._cdata):
                return
            start, end = first.storage_offset() * first.itemsize, last.storage_offset() * last.itemsize
        else:
            start, end = first.data_ptr(), last.data_ptr()
        if end < start:
            first, start, end = last, end, start
        if start + first.nbytes <= end and first.is_contiguous():
            return
    check_apart([tensor for tensor, _ in receives], [tensor for tensor, _ in sends], names, blanks=blanks)


def check_writable(tensor: Tensor, name: str = "a tensor", number: int = 0) -> None:
    """Refuse, before anything is sent, a tensor that cannot take what arrives: an expanded one has no place for it."""
    if tensor.is_contiguous():
        return
    reach, doubtful = 0, False  # of the shorter strides together
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        doubtful |= size > 1 and stride <= reach
        reach += stride * (size - 1)
    if doubtful and (tensor.numel() > reach + 1 or _different(tensor, reach + 1) < tensor.numel()):
        told = "was expanded: several elements share one place in memory"
        raise ValueError(f"{name.format(number)} of shape {list(tensor.shape)} {told}")


def _different(tensor: Tensor, places: int) -> int:
    """How many of so many places in memory have an element."""
    return torch.arange(places, device="cpu").as_strided(tensor.shape, tensor.stride()).unique().numel()


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    alike = (one.shape, one.stride()) == (other.shape, other.stride()) or (one.is_contiguous() and other.is_contiguous())
    return alike and one.dtype == other.dtype and _stretch(one) == _stretch(other)


def _stretch(tensor: Tensor, number: int = 0, blanks: Container[int] = ()) -> Stretch:
    """A meta tensor has no address, but a storage, which stands for one."""
    start, nbytes = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous():
        last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        nbytes = (last + 1) * tensor.itemsize
    if tensor.is_meta:
        storage = tensor.untyped_storage()._cdata
        start, nbytes = (storage << 64) + tensor.storage_offset() * tensor.itemsize, 0 if storage in blanks else nbytes
    return start, start + nbytes, number


def _meeting(stretches: Iterable[Stretch], count: int) -> list[list[Stretch]]:
    """Groups that hang together, and in which something is received into: the tensors below `count` are."""
    groups: list[list[Stretch]] = []
    end = -1
    for stretch in sorted(stretches):
        if stretch[0] >= end:
            groups.append([])
        groups[-1].append(stretch)
        end = max(end, stretch[1])
    return [group for group in groups if len(group) > 1 and min(number for *_, number in group) < count]


def _within_a_step(group: list[Stretch], tensors: Tensors) -> list[Stretch]:
    """The same modulo the longest stride, if they have one in common and none goes on from one step into the next.

    Of float32[3, 2] in rows of 16 bytes, the bytes 0 to 40 and 8 to 48 become 0 to 8 and 8 to 16.
    """
    longest = [max(zip(tensors[number].stride(), tensors[number].shape, strict=True), default=(0, 1)) for *_, number in group]
    step, within = longest[0][0] * tensors[group[0][2]].itemsize, []
    for (start, end, number), (stride, size) in zip(group, longest, strict=True):
        begin = (start - group[0][0]) % step if step else 0
        within.append((begin, begin + end - start - step * (size - 1), number))
        if stride * tensors[number].itemsize != step or within[-1][1] > step:
            return group
    return within


def _in_numpy(tensor: Tensor) -> np.ndarray:
    """An array at the same place, of which nobody reads the elements: they may be a GPU's, or none."""
    size, start = tensor.itemsize, _stretch(tensor)[0] % (1 << 62) + (1 << 61)  # not 0, where numpy would make room of its own
    layout = {"shape": tuple(tensor.shape), "strides": tuple(size * stride for stride in tensor.stride()), "typestr": f"|V{size}"}
    return np.asarray(SimpleNamespace(__array_interface__={"version": 3, "data": (start, False), **layout}))
