"""Checks of the exercises of *Ring synchronization*."""

import random
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from d2lps.collectives import all_reduce as ready_made
from d2lps.topology import hgx_h100, multi_node, ring, star
from d2lps_book.check.exercise import Function, Wrong, among, answered, judged
from d2lps_book.check.exercises import all_reduce, contest
from d2lps_book.check.tools import number, own, played, refuse, right, without

__all__ = ["all_reduce", "beat_the_ring", "both_ways", "bytes_on_links", "carried", "contest", "half_as_fast", "isend_ring"]
__all__ += ["ring_mean", "ring_of_rings"]

_N = 8_000_000  # bytes of what is timed
_SMALL = 16_000


@judged
def both_ways(function: Function) -> str:
    """Check `function(comm, tensor)`: half of the tensor goes round to the right while the other half goes to the left."""
    function = own(function)
    right(all_reduce, function)
    for p in (4, 5, 8):
        run = played(function, ring(p, 25e9), _N)
        links = run.trace.bytes_by_link()
        far = [pair for pair in links if (pair[0] - pair[1]) % p not in (1, p - 1)][:1]
        ways = [sum(links.get((r, (r + way) % p), 0) for r in range(p)) / _N for way in (1, -1)]
        least = (p - 1) / p * _N / 25e9
        refuse(
            (far, f"with {p} ranks, {far} (from, to): that is not its neighbor"),
            (min(ways) < 0.49 * sum(ways), f"with {p} ranks, {ways[0]:.2f} n go to the right and {ways[1]:.2f} n to the left: "
             "half should go each way"),
            (run.time > 1.01 * least, f"with {p} ranks it takes {run.time * 1e3:.3f} ms, a ring one way {2e3 * least:.3f} ms: "
             "half of that is possible; are both directions under way in every step?"),
        )  # fmt: skip
    return "half of the bytes go each way at once, and a ring of cables needs half of the time"


@answered
def bytes_on_links(to_the_right: float, to_the_left: float, first: int, second: int) -> str:
    """Check the answers: p = 5, n = 200: bytes from rank 1 to 2, from 2 to 1; chunks that never cross from 1 to 2, by half."""
    number(to_the_right, 320, "bytes", "in how many steps does rank 1 send, and how long is a chunk?")
    crosses = "does cross in the {} half: where does a chunk's way round the ring begin, and end?".format
    refuse((to_the_left != 0, f"{to_the_left!r} bytes to the left: who ever sends to the left?"),
           (first != 2, f"chunk {first!r} {crosses('first')}"), (second != 3, f"chunk {second!r} {crosses('second')}"))
    return "one chunk a step, and each half spares the link one chunk"


@judged
def carried(function: Function) -> str:
    """Check `function(shares, r)`: how much of the tensor the link to rank r carries, if chunk c is shares[c] of it."""
    dice = random.Random(0)
    for p in (2, 3, 4, 7):
        for shares in ([1 / p] * p, [w / 100 for w in dice.sample(range(1, 40), p)]):
            shares = [w / sum(shares) for w in shares]
            for r in range(p):
                got, wanted = float(function(list(shares), r)), 2 - shares[r] - shares[(r + 1) % p]
                said = f"shares {[round(w, 3) for w in shares]}: you say {got:.3f} n to rank {r}, a run says {wanted:.3f} n"
                refuse((not abs(got - wanted) < 1e-9, f"{said}; which chunk is it spared in the first half, and in the second?"))
    return "to spare a link bytes, two chunks must be larger, and these cross all the other links"


@judged
def isend_ring(function: Function) -> str:
    """Check `function(comm, tensor)`: a ring of isend and recv that has waited for all it sent."""
    without(function, "sendrecv", "exchange", "together")
    function = _apart(own(function))
    right(all_reduce, function)
    for p in (2, 3, 8):
        trace = played(function, star(p, 1e9, 1e-6), _SMALL).trace
        far = [pair for pair in trace.bytes_by_link() if (pair[1] - pair[0]) % p != 1 % p][:1]
        refuse(
            (far, f"with {p} ranks, {far} (from, to): a ring has only right neighbors"),
            (trace.rounds > 2 * (p - 1), f"with {p} ranks it takes {trace.rounds} steps, and a ring {2 * (p - 1)}: what waits "
             "too early?"),
        )  # fmt: skip
    return "every send was waited for, in as many steps as with sendrecv"


def _apart(function: Function) -> Function:
    """The function, where no sendrecv works, not even in another function that it calls."""

    def refused(*message: Any, **more: Any) -> NoReturn:
        raise Wrong("a function that yours calls uses sendrecv, and the exercise is to do without")

    def alone(comm: Any, tensor: torch.Tensor) -> Any:
        vars(comm)["sendrecv"] = refused
        try:
            return function(comm, tensor)
        finally:
            vars(comm).pop("sendrecv", None)

    return alone


class _Divisions(TorchDispatchMode):
    """Counts the elements that a rank divides or scales."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in ("div", "mul", "true_divide", "divide", "multiply"):
            self.elements += out.numel()
        return out


@judged
def ring_mean(function: Function) -> str:
    """Check `function(comm, tensor)`: every rank ends with the mean, of which each has divided only a p-th."""
    function = own(function)
    for p, size in ((p, 40 * p + more) for p in (1, 2, 3, 5, 8) for more in (0, 3)):  # and where the chunks are not all alike

        def work(comm: Any, size: int = size) -> tuple[torch.Tensor, torch.Tensor, int]:
            tensor = torch.rand(size, generator=torch.Generator().manual_seed(comm.rank))
            total = tensor.clone()
            ready_made(comm, total, algorithm="ring")
            with _Divisions() as divisions:
                function(comm, tensor)
            return tensor, total / comm.size, divisions.elements

        run = among(p, work)
        for rank, (got, mean, divided) in enumerate(run):
            least = -(-size // p)
            k, case = int((got - mean).abs().argmax()), f"with {p} ranks and {size} elements, rank {rank}"
            refuse(
                (not torch.allclose(got, mean, rtol=1e-5), f"{case}, element {k}: {got[k]:.6f}, and the mean is {mean[k]:.6f}"),
                (not torch.equal(got, run[0][0]), f"{case} differs from 0 in the last bits: is each element divided only once?"),
                (divided > least, f"{case} divides {divided} of {size} elements: {least} are enough. Where does it hold "
                 "a sum that is complete, and that all others get from it?"),
            )  # fmt: skip
    return "each element is divided once, on one rank, and copied"


@judged
def ring_of_rings(function: Function) -> str:
    """Check `function(comm, tensor, inside)`: rings inside machines of `inside` ranks, and between them."""
    function = own(function)
    for inside in (2, 4, 8):
        right(all_reduce, lambda comm, tensor, inside=inside: function(comm, tensor, inside))
    for machines, inside in ((4, 2), (2, 4), (3, 2)):
        links = played(function, star(machines * inside, 1e9, 1e-6), _N, inside).trace.bytes_by_link()
        out = [0] * machines * inside
        for (src, dst), nbytes in links.items():
            out[src] += nbytes * (src // inside != dst // inside)
        most, least = max(out) / _N, 2 * (machines - 1) / machines / inside
        said = f"{machines} machines of {inside}: rank {out.index(max(out))} sends {most:.2f} n to other machines"
        refuse((most > 1.02 * least, f"{said}, and {least:.2f} n are enough; what has each rank to do with its chunk only?"))
    cluster = multi_node(hgx_h100(), 4)
    mine, flat = (played(f, cluster, 160_000_000, trace=False).time for f in (lambda c, t: function(c, t, 8), ready_made))
    said = f"four machines of eight H100: {mine * 1e3:.2f} ms, a flat ring {flat * 1e3:.2f} ms, {flat / mine:.1f} times as fast"
    refuse((mine > flat / 4, f"{said}; four times should be possible"))
    return said


@judged
def beat_the_ring(function: Function) -> str:
    """Check `function(comm, tensor)`: an all-reduce that is three times as fast as the ring for 16 kB on eight H100."""
    function = own(function)
    right(partial(contest, topology=hgx_h100(), nbytes=_SMALL), function)
    ring, run = (played(f, hgx_h100(), _SMALL) for f in (ready_made, function))
    gain, each = ring.time / run.time, len(run.trace) / 8
    said = f"16 kB on eight H100: {run.time * 1e6:.1f} µs, {gain:.1f} times as fast as the ring"
    refuse((gain < 3, f"{said}; {run.trace.rounds} steps, where the ring has 14: with how few can you do?"))
    asked = "; can a real rank post so many at once for nothing?" if each > 3 * run.trace.rounds else ""
    return f"{said}, in {run.trace.rounds} steps and {each:g} messages a rank{asked}"


@answered
def half_as_fast(before: float, shares: tuple[float, float], after: float) -> str:
    """Check the answers: milliseconds with shares 2:1; the best shares, as a pair; milliseconds with these."""
    number(before, 160 / 3 * 1.75 / 9, "ms", "which ring is last, with a third of the data, and how fast is its slowest link?")
    pair = hasattr(shares, "__len__") and len(shares) == 2
    refuse((not pair, f"{shares!r} is no pair: the shares are two numbers, first that of the doubled links, as in (2, 1)"))
    one, other = shares
    slowest = max(one / 36, other / 9) / (one + other) * 280
    bad = not abs(one - 4 * other) <= 0.01 * other
    refuse((bad, f"shares of {one}:{other} take {slowest:.2f} ms; both rings should be done at the same time"))
    number(after, 1.75 * 160 / 45, "ms", "how much do both rings carry together in a second?")
    return "one link in 24 at half speed costs a fifth"
