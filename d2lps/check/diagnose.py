"""From a wrong element to a sentence: which rank lacks whose data, and which message should have brought it."""

from __future__ import annotations

import torch

from d2lps.check.values import counts, origin
from d2lps.trace import Origins, Trace


def wrong_sum(rank: int, got: torch.Tensor, wanted: torch.Tensor, ranks: int, trace: Trace) -> str:
    """What is wrong with a sum of countable values, and how it came about."""
    first, last = _wrong_run(got, wanted)
    where = f"rank {rank}, {_elements(first, last)}"
    value = int(got[first])
    counted = counts(value, ranks)
    if counted is None:
        return f"{where}: {value} is no sum of the ranks' values; was the tensor written before its message was complete?"
    should = counts(int(wanted[first]), ranks) or []
    missing = [r for r in range(ranks) if counted[r] < should[r]]
    extra = [r for r in range(ranks) if counted[r] > should[r]]
    says = []
    if missing:
        says.append(f"{_ranks(missing)} missing")
    if extra:
        says.append(", ".join(f"rank {r} counted {counted[r]} times" for r in extra))
    history = _history(trace, rank, first, missing[0]) if missing else ""
    return f"{where}: " + "; ".join(says) + history


def wrong_copy(rank: int, name: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    """What is wrong with data that should have been moved as it was."""
    first, last = _wrong_run(got, wanted)
    where = f"rank {rank}, {name}, {_elements(first, last)}"
    expected, found = origin(int(wanted[first])), origin(int(got[first]))
    should = f"should be {_spelled(expected)}" if expected else f"should be {int(wanted[first])}, as it was"
    if int(got[first]) == -1:
        return f"{where}: never written; {should}"
    return f"{where}: holds {_spelled(found) if found else int(got[first])}; {should}"


def _spelled(source: tuple[int, int, int]) -> str:
    rank, part, place = source
    return f"element {place} of part {part} of rank {rank}" if part else f"element {place} of rank {rank}"


def _wrong_run(got: torch.Tensor, wanted: torch.Tensor) -> tuple[int, int]:
    """First and last of the first wrong elements that are wrong in the same way."""
    wrong = (got != wanted).nonzero().flatten().tolist()
    first = last = wrong[0]
    while last + 1 in wrong and got[last + 1] - wanted[last + 1] == got[first] - wanted[first]:
        last += 1
    return first, last


def _elements(first: int, last: int) -> str:
    return f"element {first}" if first == last else f"elements {first} to {last}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _history(trace: Trace, rank: int, element: int, missing: int) -> str:
    """The last message that brought this element here, and that it lacked the missing rank's data when it left."""
    itemsize = 8
    m = trace.messages
    last = None
    for index in range(len(trace)):
        begin = m["dst_offset"][index]
        if m["dst"][index] == rank and begin <= element * itemsize < begin + m["dst_length"][index]:
            last = index if last is None or m["dst_seq"][index] > m["dst_seq"][last] else last
    if last is None:
        return f" (no message brought rank {rank} this element)"
    src, step = m["src"][last], trace.steps[m["step"][last]]
    sources = {trace.buffers[buffer].rank for piece in Origins(trace).carried.get(last, []) for buffer, _ in piece.sources}
    label = f" in step {step!r}" if step else ""
    if missing not in sources:
        return f" (rank {src} sent it{label} before adding rank {missing}'s)"
    return f" (rank {src}'s last message{label} brought it, but it was not added)"
