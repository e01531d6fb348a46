"""What checks see in a run: whose work it is, what arrives, in how many steps, with how many bytes, and to whom it is sent."""

from collections.abc import Callable
from typing import Any

import torch

from d2lps import collectives
from d2lps.trace import Trace
from d2lps_book.check import exercises
from d2lps_book.check.exercise import Function, Wrong, among, plural
from d2lps_book.check.tools import own, right

GROUPS = (2, 3, 5, 8, 11)  # ranks; 11 is more than a tree written for eight can serve
PART = 3  # elements


def _arguments(name: str, rank: int, p: int, root: int) -> tuple[list[Any], list[torch.Tensor]]:
    """What a collective is called with, and the tensors to look at afterwards; numbers that nobody guesses."""
    whole = torch.randint(10**9, (PART * p,), generator=torch.Generator().manual_seed(rank))
    parts, room = list(whole.clone().split(PART)), list(torch.zeros_like(whole).split(PART))
    calls: dict[str, tuple[list[Any], list[torch.Tensor]]]
    calls = {"broadcast": ([whole, root], [whole]), "reduce": ([whole, root], [whole]), "all_reduce": ([whole], [whole]),
             "scatter": ([room[0], parts if rank == root else None, root], room),
             "gather": ([parts[0], room if rank == root else None, root], room), "all_gather": ([room, parts[0]], room),
             "reduce_scatter": ([room[0], parts], room), "all_to_all": ([room, parts], room)}  # fmt: skip
    return calls[name]


def traced_run(name: str, function: Function, p: int) -> Trace:
    """The trace of a collective among p ranks, not with rank 0 as root; it must leave what the library's leaves."""

    def work(comm: Any, one: Function) -> list[int]:
        given, left = _arguments(name, comm.rank, p, root=p // 2)
        one(comm, *given)
        return [int(number) for tensor in left for number in tensor]

    run, right = (among(p, work, one) for one in (function, getattr(collectives, name)))
    for rank, (mine, wanted) in enumerate(zip(run, right, strict=True)):
        if mine != wanted:
            root = f", rank {p // 2} the root" if name in ("broadcast", "reduce", "scatter", "gather") else ""
            raise Wrong(f"right for fewer ranks or another root, but with {p} ranks{root}, rank {rank} ends with wrong numbers")
    return run.trace


def traced_runs(name: str, function: Function) -> dict[int, Trace]:
    """Traces by the number of ranks, of a function that does all by itself and passes the check of its collective."""
    function = own(function)
    right(getattr(exercises, name), function)
    return {p: traced_run(name, function, p) for p in GROUPS}


def in_steps(traces: dict[int, Trace], steps: Callable[[int], int], hint: str) -> None:
    for p, trace in traces.items():
        if trace.rounds != steps(p):
            took = f"it takes {plural(trace.rounds, 'step')}"
            raise Wrong(f"right, but with {p} ranks {took}, not {steps(p)}: {hint}")


def with_bytes(traces: dict[int, Trace], parts: Callable[[int], float], hint: str) -> None:
    """No rank sends more than so many p-th parts of the whole."""
    for p, trace in traces.items():
        rank = int(trace.bytes_sent().argmax())
        sent = trace.bytes_sent()[rank] / (PART * torch.int64.itemsize)
        if sent > parts(p) + 1e-9:
            raise Wrong(f"with {p} ranks, rank {rank} sends {sent:g} parts, where {parts(p):g} are enough: {hint}")


def to_the_right(traces: dict[int, Trace]) -> None:
    for p, trace in traces.items():
        for src, dst in zip(trace.messages["src"], trace.messages["dst"], strict=True):
            if dst != (src + 1) % p:
                raise Wrong(f"with {p} ranks, rank {src} sends to rank {dst}; in a ring it talks to its right neighbor only")
