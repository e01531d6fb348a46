"""From a wrong element to a sentence: which rank lacks whose data, and which message should have brought it."""

from itertools import count
from typing import NamedTuple

import torch

from d2lps.trace import Origins, Piece, Trace
from d2lps_book.check.values import BLANK, common_element, counts


class Left(NamedTuple):
    """A tensor as a rank left it, beside what should be in it."""

    got: torch.Tensor
    wanted: torch.Tensor
    name: str = "tensor"
    parts: int = 0  # of a sum: how many parts the list had that each rank gave; 0 where nothing is added
    root: bool = False  # of a sum: whether it is made on this rank alone
    only: str = ""  # where it should be as it was: which one should not


def wrong(rank: int, left: Left, ranks: int, trace: Trace) -> str:
    """What is wrong with what a rank has left of `ranks`, and how it came about; empty if it is as it should be."""
    if (left.got.shape, left.got.dtype) != (left.wanted.shape, left.wanted.dtype):
        return f"rank {rank}'s {left.name} has become {left.got.numel()} elements of {left.got.dtype}; write into it instead"
    if torch.equal(left.got, left.wanted):
        return ""
    if left.only:
        return f"rank {rank}'s {left.name} was changed; only {left.only} should be"
    first, last = _wrong_run(left, ranks)
    if left.parts:
        return f"rank {rank}, {_elements(first, last)}: {_wrong_sum(rank, left, first, last, ranks, trace)}"
    return f"rank {rank}, {left.name}, {_elements(first, last)}: {_wrong_copy(left, first, ranks)}"


def _wrong_run(left: Left, ranks: int) -> tuple[int, int]:
    """First and last of the first wrong elements in a row that are wrong in the same way."""

    def how(element: int) -> object:
        """Whose addends, from which part, and from how far away."""
        value = int(left.got[element])
        found = common_element(value, left.parts or ranks, len(left.got))
        return counts(value, ranks), found and (found[0], found[1] - element)

    wrong = (left.got != left.wanted).nonzero().flatten().tolist()
    first = wrong[0]
    return first, next(last for last in count(first) if last + 1 not in wrong or how(last + 1) != how(first))


def _wrong_sum(rank: int, left: Left, first: int, last: int, ranks: int, trace: Trace) -> str:
    """What is wrong with a sum from element `first` to `last`, and how it came about."""
    value = int(left.got[first])
    counted = counts(value, ranks)
    if value == BLANK:
        return "never written"
    if counted is None:
        return f"{value} is no sum of the ranks' values; was the tensor written before its message was complete?"
    if counted == [1] * ranks:  # every rank has been added once, as it should, but not with this element
        if not (found := common_element(value, left.parts, len(left.got))):
            wanted = common_element(int(left.wanted[first]), left.parts, len(left.got))
            of_part = f"; this one is to be made of everybody's part {wanted[0]}" if wanted and left.parts > 1 else ""
            return f"every rank is in the sum, but not with the same element{of_part}"
        of_part = f" of part {found[0]}" if left.parts > 1 else ""
        return f"the sum of all ranks, but of {_elements(found[1], found[1] + last - first)}{of_part}"
    missing = [r for r, times in enumerate(counted) if times < 1]
    extra = [f"rank {r} counted {times} times" for r, times in enumerate(counted) if times > 1]
    says = "; ".join(filter(None, [f"{_ranks(missing)} missing" if missing else "", ", ".join(extra)]))
    if left.root and missing[:1] == [rank]:  # nobody else was to add it
        return f"{says} (was a message received in its place, where it should have been added to it?)"
    return says + (_history(trace, rank, first, missing[0]) if missing and left.parts == 1 else "")


def _wrong_copy(left: Left, first: int, ranks: int) -> str:
    """What is wrong with data that should have been moved as it was."""

    def spelled(value: int) -> str:
        counted = counts(value, ranks) or []
        source = common_element(value, ranks, len(left.got))
        if sum(counted) > 1:
            return "a sum, of ranks " + ", ".join(str(rank) for rank, times in enumerate(counted) for _ in range(times))
        if not counted or source is None:
            return str(value)
        part, element = source
        return f"element {element}{f' of part {part}' if part else ''} of rank {counted.index(1)}"

    value = int(left.got[first])
    found = "never written" if value == BLANK else f"holds {spelled(value)}"
    return f"{found}; should be {spelled(int(left.wanted[first]))}"


def _elements(first: int, last: int) -> str:
    return f"element {first}" if first == last else f"elements {first} to {last}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _history(trace: Trace, rank: int, element: int, missing: int) -> str:
    """What the messages to this rank carried of this element of the ranks' tensors, and why the missing one's is not there."""
    carried, m = Origins(trace).carried, trace.messages
    to_here = sorted((index for index in carried if m["dst"][index] == rank), key=lambda index: m["dst_seq"][index])
    brought = {index: whose for index in to_here if (whose := _owners(carried[index], element, trace))}
    if not brought:
        return f" (no message brought rank {rank} this element)"
    with_it = [index for index, whose in brought.items() if missing in whose]
    last = (with_it or list(brought))[-1]
    step = trace.steps[m["step"][last]]
    src, label = m["src"][last], f" in step {step!r}" if step else ""
    if with_it:
        return f" (rank {src}'s message{label} brought it, but it was not added)"
    return f" (rank {src} sent it{label} before adding rank {missing}'s)"


def _owners(pieces: list[Piece], element: int, trace: Trace) -> set[int]:
    """The ranks whose element is in the sums that a message carried."""
    at = element * torch.int64.itemsize
    sources = [(buffer, at - offset, piece.length) for piece in pieces for buffer, offset in piece.sources]
    return {trace.buffers[buffer].rank for buffer, inside, length in sources if 0 <= inside < length}
