"""From a wrong element to a sentence: which rank lacks whose data, and which message should have brought it."""

from collections.abc import Callable

import torch

from d2lps.check.values import common_element, counts, origin
from d2lps.trace import Origins, Trace
from d2lps.trace.origins import Piece


def wrong_sum(rank: int, got: torch.Tensor, wanted: torch.Tensor, ranks: int, parts: int, trace: Trace) -> str:
    """What is wrong with a sum of countable values, and how it came about. parts: of the list that each rank gave."""

    def how(element: int) -> object:
        """Whose addends, from which part, and from how far away."""
        value = int(got[element])
        part, came_from = common_element(value, parts, len(got)) or (None, element)
        return counts(value, ranks), part, came_from - element

    first, last = _wrong_run(got, wanted, how)
    where = f"rank {rank}, {_elements(first, last)}"
    value = int(got[first])
    counted = counts(value, ranks)
    if counted is None:
        return f"{where}: {value} is no sum of the ranks' values; was the tensor written before its message was complete?"
    should = counts(int(wanted[first]), ranks) or []
    if counted == should:
        return f"{where}: {_displaced(value, parts, len(got), last - first + 1)}"
    missing = [r for r in range(ranks) if counted[r] < should[r]]
    extra = [r for r in range(ranks) if counted[r] > should[r]]
    says = [f"{_ranks(missing)} missing" if missing else "", ", ".join(f"rank {r} counted {counted[r]} times" for r in extra)]
    history = _history(trace, rank, first, missing[0]) if missing and parts == 1 else ""
    return f"{where}: " + "; ".join(filter(None, says)) + history


def _displaced(value: int, parts: int, elements: int, length: int) -> str:
    """Every rank has been added as often as it should, but not with this element; `length` elements in a row."""
    if not (found := common_element(value, parts, elements)):
        return "every rank is in the sum, but not with the same element"
    part, from_ = found
    return f"the sum of all ranks, but of {_elements(from_, from_ + length - 1)}" + (f" of part {part}" if parts > 1 else "")


def wrong_copy(rank: int, name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    """What is wrong with data that should have been moved as it was."""

    def how(element: int) -> int | None:
        """None if nothing was written, else how far off."""
        return None if got[element] == -1 else int(got[element] - wanted[element])

    first, last = _wrong_run(got, wanted, how)
    where = f"rank {rank}, {name}, {_elements(first, last)}"
    expected, found = origin(int(wanted[first])), origin(int(got[first]))
    should = f"should be {_spelled(expected)}" if expected else f"should be {int(wanted[first])}, as it was"
    if int(got[first]) == -1:
        return f"{where}: never written; {should}"
    return f"{where}: holds {_spelled(found) if found else int(got[first])}; {should}"


def _spelled(source: tuple[int, int, int]) -> str:
    rank, part, element = source
    return f"element {element} of part {part} of rank {rank}" if part else f"element {element} of rank {rank}"


def _wrong_run(got: torch.Tensor, wanted: torch.Tensor, how: Callable[[int], object]) -> tuple[int, int]:
    """First and last of the first wrong elements in a row that are wrong in the same way, which `how` tells."""
    wrong = (got != wanted).nonzero().flatten().tolist()
    first = last = wrong[0]
    while last + 1 in wrong and how(last + 1) == how(first):
        last += 1
    return first, last


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
