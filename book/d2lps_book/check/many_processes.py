"""Checks of *Many processes*: a second lap, alpha and beta, deadlocks, messages in flight, a table of bytes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from d2lps.result import Run
from d2lps.trace import Trace
from d2lps_book.check.exercise import Function, Wrong, among, answered, judged, plural, unfinished
from d2lps_book.check.tools import near, own, refuse
from d2lps_book.check.traced_runs import to_the_right


@judged
def everybody_knows(function: Function) -> str:
    """Check `function(comm, mine)`: returns the sum of all ranks' numbers, on every rank, by a token that goes to the right."""
    function = own(function)
    for p in (2, 3, 5, 8, 11):
        numbers = torch.randint(10**6, (p,), generator=torch.Generator().manual_seed(p)).tolist()
        run = among(p, lambda comm, numbers=numbers: function(comm, float(numbers[comm.rank])))
        for rank, result in enumerate(run):
            if result is None or float(result) != sum(numbers):
                raise Wrong(f"with {p} ranks, which bring {numbers}, rank {rank} returns {result}, not {sum(numbers)}")
        refuse((late := unfinished(run.trace), f"with {p} ranks {late}"))
        to_the_right({p: run.trace})
        if run.trace.rounds > 2 * (p - 1):
            least = f"{2 * (p - 1)} are enough: whom does the token visit that knows the sum already?"
            raise Wrong(f"right, but with {p} ranks in {run.trace.rounds} rounds, and {least}")
    return "every rank knows the sum after at most 2(p - 1) rounds, among 2 to 11 ranks"


@answered
def two_points(alpha: float, beta: float, n_half: float, one_by_one: float, packed: float) -> str:
    """Check alpha (s), beta (s per byte), n_half (bytes) and the times of 10,000 messages of 1 kB and of one of 10 MB (s)."""
    slope = (450e-6 - 52e-6) / (1e6 - 1e3)
    start = 52e-6 - 1e3 * slope
    for what, given, right, hint in (
        ("beta, in seconds per byte", beta, slope, "By how much does the time grow, and by how many bytes the message?"),
        ("alpha, in seconds", alpha, start, "What is left of the 52 µs when its 1,000 bytes are paid?"),
        ("n_half, in bytes", n_half, start / slope, "For how many bytes is n beta as large as alpha?"),
        ("one by one, in seconds", one_by_one, 1e4 * (start + 1e3 * slope), "How often is alpha paid?"),
        ("packed, in seconds", packed, start + 1e7 * slope, "How often is alpha paid, and for how many bytes beta?"),
    ):
        near(what, given, right, hint, within=0.01)
    return "all five"


def _shift(comm: Any, first: Iterable[int] | None) -> None:
    """Everyone sends to the right; ranks in `first` receive first, and with None all do both at once."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = torch.ones(1), torch.zeros(1)
    if first is None:
        comm.sendrecv(mine, right, theirs, left)
        return
    for receives in (True, False) if comm.rank in first else (False, True):
        comm.recv(theirs, left) if receives else comm.send(mine, right)


@answered
def ways(*mine: Any) -> str:
    """Check the four ways to shift round a ring: "deadlock", or (rounds among 6 ranks, rounds among 5)."""
    plans: list[Any] = [None, {0}, {1, 3, 5}, None]
    for number, (answer, first) in enumerate(zip(mine, plans, strict=True), 1):
        locked = isinstance(answer, str) and answer.strip().lower() == "deadlock"
        if number == 1:
            refuse((not locked, "way 1: who is the first that can send?"))
            continue
        right = tuple(among(p, _shift, first).trace.rounds for p in (6, 5))
        refuse((locked, f"way {number} is no deadlock: find one rank whose first message goes through; what does that set free?"))
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise Wrong(f'way {number}: say "deadlock", or a pair, the rounds of 6 ranks and of 5')
        for p, said, rounds in zip((6, 5), answer, right, strict=True):
            refuse((isinstance(said, str), f"way {number} is no deadlock among {p} ranks either: who waits for nobody?"))
            refuse((said != rounds, f"way {number}, {p} ranks: not {said} rounds; draw each message, and beside it when it goes"))
    return "one deadlock, and rounds from one to p"


def _delivered(function: Function, count: int, size: int = 250) -> Trace:
    sent = torch.rand((count, size), generator=torch.Generator().manual_seed(count))

    def work(comm: Any) -> torch.Tensor:
        parcels = [row.clone() if comm.rank == 0 else torch.full((size,), -1.0) for row in sent]
        comm.sleep(comm.rank * 1e-3)  # rank 1 comes late
        function(comm, parcels)
        left = torch.stack(parcels)
        for parcel in parcels:
            parcel.fill_(-2)  # from now on rank 0 may use them for something else
        return left

    run: Run = among(2, work)
    wrong = (run[1] != sent).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        found = {-1.0: "never arrives", -2.0: "is overwritten before it has left: rank 0 does not wait for its sends"}
        how = found.get(run[1][wrong[0]][0].item(), "arrives with wrong contents")
        raise Wrong(f"of {count} parcels, number {wrong[0]} {how}")
    sent_and_come = run.trace.messages["src_done_seq"], run.trace.messages["dst_done_seq"]
    if left := run.trace.unmatched + sum(int((done < 0).sum()) for done in sent_and_come):
        raise Wrong(f"{left} sends and receives are started and nobody waits for them: each has a `wait` of its own")
    if len(run.trace) != count or set(run.trace.messages["dst"].tolist()) != {1}:
        raise Wrong(f"{len(run.trace)} messages for {count} parcels: send each parcel once, from rank 0 to rank 1")
    return run.trace


@judged
def in_a_row(function: Function) -> str:
    """Check `function(comm, parcels)`: rank 0's parcels reach rank 1, one after the other."""
    for count in (1, 7, 200):
        if (trace := _delivered(function, count)).rounds != count:
            raise Wrong(f"{count} parcels in {trace.rounds} rounds: here each is to wait for the one before")
    return "200 parcels in 200 rounds"


@judged
def in_flight(function: Function) -> str:
    """Check `function(comm, parcels)`: rank 0's parcels reach rank 1, all under way at once."""
    for count in (1, 7, 200):
        if (trace := _delivered(function, count)).rounds != 1:
            raise Wrong(f"{count} parcels in {trace.rounds} rounds: start all of them before you wait for the first")
    return "200 parcels in one round"


def _traffic(comm: Any, pairs: list[tuple[int, int, int]]) -> None:
    works = [comm.isend(torch.zeros(size), dst) for src, dst, size in pairs if src == comm.rank]
    works += [comm.irecv(torch.zeros(size), src) for src, dst, size in pairs if dst == comm.rank]
    for work in works:
        work.wait()


@judged
def byte_table(function: Function) -> str:
    """Check `function(trace)`: how many bytes each rank (row) sent to each (column)."""
    for p in (2, 4, 5):
        dice = np.random.default_rng(p)
        drawn = [(*dice.choice(p, 2, replace=False).tolist(), int(dice.integers(1, 99))) for _ in range(3 * p)]
        trace = among(p, _traffic, drawn).trace
        table, right = np.asarray(function(trace)), np.zeros((p, p))
        for src, dst, size in drawn:
            right[src, dst] += 4 * size
        refuse((table.shape != right.shape, f"for {p} ranks the table has shape {table.shape}, not {right.shape}"))
        if not np.array_equal(table, right):
            row, column = np.argwhere(table != right)[0]
            count = sum((src, dst) == (row, column) for src, dst, _ in drawn)
            messages = f"{plural(count, 'message')} with {right[row, column]:g} bytes"
            raise Wrong(f"rank {row} sent rank {column} {messages}, and the table has {table[row, column]:g}")
    return "tables of 2, 4 and 5 ranks, several messages between the same two among them"
