"""Checks of *The eight collectives*: what arrives where, and in how many steps, to whom and with how many bytes it is sent."""

from typing import Any

import torch
import torch.distributed as dist

from d2lps import collectives
from d2lps_book.check.exercise import Function, Wrong, among, answered, judged, plural, unfinished
from d2lps_book.check.exercises import all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter
from d2lps_book.check.tools import own, refuse
from d2lps_book.check.traced_runs import GROUPS, PART, in_steps, to_the_right, traced_run, traced_runs, with_bytes

EIGHT = (broadcast, scatter, gather, reduce, all_reduce, all_gather, reduce_scatter, all_to_all)
_SINCE = {"all_to_all": (2, 10), "reduce_scatter": (2, 7)}  # which PyTorch's Gloo has them
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def torchs_own(name: str, *call: Any, torch: tuple[int, ...] = _TORCH) -> None:
    """PyTorch's own collective; where its Gloo has none yet, the same by its scatter, or its reduce, to each rank in turn."""
    if torch >= _SINCE.get(name, (0,)):
        return getattr(dist, name)(*call)
    for root in range(dist.get_world_size()):
        mine = root == dist.get_rank()
        if name == "all_to_all":
            dist.scatter(call[0][root], call[1] if mine else None, root)
        else:
            dist.reduce(total := call[1][root].clone(), root)
            call[0].copy_(total) if mine else None


# ---- the exercises ------------------------------------------------------------------------------------------------------


def _spoken(word: object) -> str:
    return str(word).lower().strip().replace("-", "_").replace(" ", "_")


def _name(word: object) -> str:
    if (name := _spoken(word)) not in {one.__name__ for one in EIGHT}:
        raise Wrong(f"{word!r} is none of the eight: {', '.join(one.__name__.replace('_', '-') for one in EIGHT)}")
    return name


_JOBS = [("reduce", "one rank needs one number, made of everybody's"),
         ("scatter", "one rank has all, and each needs another part"),
         ("all_reduce", "what goes into the result, and who needs it? Nobody needs to see the scores of the others"),
         ("all_gather", "is anything added up, or compared? And who ends with how much?"),
         ("all_to_all", "draw the matrix, and mark what rank 0 has before and after: from how many ranks does it come?"),
         ("reduce_scatter", "something is added up, but who needs how much of the sum?")]  # fmt: skip


@answered
def which(*names: str) -> str:
    """Check the names of the collectives for the six jobs."""
    refuse((len(names) != len(_JOBS), f"{len(names)} names for {len(_JOBS)} jobs"))
    for job, (name, (right, hint)) in enumerate(zip(names, _JOBS, strict=True), 1):
        refuse((_name(name) != right, f"job {job} is no {name}: {hint}"))
    return "six jobs, six collectives"


@answered
def picture(number: int, really: str) -> str:
    """Check which of the eight pictures does not fit, and of what collective it is a picture."""
    refuse((number not in range(1, 9), f"there are pictures 1 to 8, and no {number!r}"))
    refuse((number != 7, f"picture {number} fits: ask of each who has what at the end, and whether anything is added up"))
    if _name(really) != "all_gather":
        raise Wrong(f"number 7 it is, but no picture of {really}: what does each pupil know at the end, and how much is that?")
    return "nothing is added up in picture 7: everyone ends with everybody's wish"


def _five() -> dict[str, tuple[int, float]]:
    """(steps, tensors in a row) among five ranks, counted on the library's own; a step has the size of its largest message."""
    asked = {"tree_broadcast": "tree", "tree_all_reduce": "tree", "ring_all_reduce": "ring", "bruck_all_gather": "bruck"}
    answers = {}
    for what, algorithm in asked.items():
        name = what.removeprefix(f"{algorithm}_")
        ours = getattr(collectives, name)
        trace = traced_run(name, lambda comm, *given, ours=ours, algorithm=algorithm: ours(comm, *given, algorithm=algorithm), 5)
        steps, sizes = trace.replay.round_of, trace.messages["nbytes"]
        row = sum(int(sizes[steps == step].max()) for step in range(1, trace.rounds + 1))
        answers[what] = trace.rounds, row / (5 * PART * torch.int64.itemsize)
    return answers


@answered
def five(idle: Any, **pairs: tuple[float, float]) -> str:
    """Check four algorithms among five ranks: (steps, bytes in a row / n) each; and who is idle in the tree's last step."""
    for what, (steps, row) in _five().items():
        mine, spoken = pairs.get(what), what.replace("_", " ", 1)
        if not isinstance(mine, tuple) or len(mine) != 2 or ... in mine:
            raise Wrong(f"{spoken}: give a pair, (steps, bytes in a row as a multiple of n)")
        refuse((mine[0] != steps, f"{spoken}: not {mine[0]} steps; draw who has what after each"))
        if abs(mine[1] - row) > 0.005:
            raise Wrong(f"{spoken}: the steps are right, but not {mine[1]} n; how large is the largest message of each step?")
    if set(idle) != {1, 2, 3}:
        raise Wrong(f"idle in the last step of the tree broadcast: not {idle}; who has the tensor by then, and who lacks it?")
    return "as the traces count it"


@judged
def ring_all_gather(function: Function) -> str:
    """Check `function(comm, room, tensor)`: an all-gather round a ring."""
    traces = traced_runs("all_gather", function)
    to_the_right(traces)
    in_steps(traces, lambda p: p - 1, "in each step everyone sends and receives one part")
    with_bytes(traces, lambda p: p - 1, "pass on what came in the step before, and nothing else")
    return "p - 1 steps to the right, p - 1 parts sent by each, among 2 to 11 ranks"


@judged
def tree_reduce(function: Function) -> str:
    """Check `function(comm, tensor, dst)`: a reduce by a binomial tree."""
    traces = traced_runs("reduce", function)
    in_steps(traces, lambda p: (p - 1).bit_length(), "film the tree broadcast, and play it backwards")
    for p, trace in traces.items():
        if len(trace) != p - 1:
            raise Wrong(f"with {p} ranks {len(trace)} messages are sent; each rank but the root has one partial sum to hand on")
    return "as many steps as the tree broadcast, among 2 to 11 ranks, and nobody's tensor but the root's is touched"


@judged
def pairwise_reduce_scatter(function: Function) -> str:
    """Check `function(comm, output, parts)`: a reduce-scatter in which every pair of ranks exchanges its parts directly."""
    traces = traced_runs("reduce_scatter", function)
    for p, trace in traces.items():
        pairs = list(zip(trace.messages["src"].tolist(), trace.messages["dst"].tolist(), strict=True))
        if len(set(pairs)) != p * (p - 1):
            raise Wrong(f"with {p} ranks, {len(set(pairs))} pairs talk, not all {p * (p - 1)}: here no part is passed on")
    with_bytes(traces, lambda p: p - 1, "each rank needs only the part that is its to keep")
    in_steps(traces, lambda p: p - 1, "in step k send k places to the right, receive from k places to the left, with sendrecv")
    return "p - 1 steps, one partner to each side in each, p - 1 parts sent, among 2 to 11 ranks"


@judged
def transpose(function: Function) -> str:
    """Check `function(comm, rows)`: returns this rank's rows of the transposed matrix."""
    for p, height in ((1, 2), (2, 3), (3, 2), (5, 1), (4, 4)):
        side = p * height
        whole = torch.randint(10**9, (side, side), generator=torch.Generator().manual_seed(side))

        def work(comm: Any, whole: torch.Tensor = whole) -> torch.Tensor:
            return torch.as_tensor(function(comm, whole.chunk(comm.size)[comm.rank].clone()))

        run = among(p, work)
        for rank, (mine, right) in enumerate(zip(run, whole.T.chunk(p), strict=True)):
            _compare(mine, right, f"{side} x {side} on {plural(p, 'rank')}, rank {rank}")
        if run.trace.bytes_sent().max(initial=0) > (p - 1) * height**2 * torch.int64.itemsize:
            raise Wrong(f"right, but with {p} ranks some rank sends more than it has for others: a block for each is enough")
    return "matrices of 2 to 16 rows on 1 to 5 ranks, and no byte too many"


def _compare(mine: torch.Tensor, right: torch.Tensor, where: str) -> None:
    refuse((mine.shape != right.shape, f"{where}: a tensor of shape {tuple(mine.shape)}, not {tuple(right.shape)}"))
    if not torch.equal(mine, right):
        row, column = (mine != right).nonzero()[0].tolist()
        raise Wrong(f"{where}: row {row}, column {column} is wrong; which rank had that number, and in which block does it lie?")


@judged
def chain_broadcast(function: Function) -> str:
    """Check `function(comm, tensor, src, chunks)`: a broadcast down a chain, in chunks that follow one another."""
    function = own(function)
    for p in (1, *GROUPS):
        for chunks, size in ((1, 24), (4, 24), (7, 25)):
            _chain(function, p, chunks, size)
    return "p - 2 + c steps of n / c bytes, among 2 to 11 ranks with 1, 4 and 7 chunks"


def _chain(function: Function, p: int, chunks: int, size: int) -> None:
    where, src = f"with {plural(p, 'rank')}, rank {p // 2} the root and {plural(chunks, 'chunk')}", p // 2
    sent = torch.randint(10**9, (size,), generator=torch.Generator().manual_seed(p))

    def work(comm: Any) -> list[int]:
        tensor = sent.clone() if comm.rank == src else torch.zeros_like(sent)
        function(comm, tensor, src, chunks=chunks)
        return [int(number) for number in tensor]

    run = among(p, work)
    for rank, got in enumerate(run):
        refuse((got != sent.tolist(), f"{where}: rank {rank} does not end with the root's tensor"))
    refuse((late := unfinished(run.trace), f"{where}: {late}"))
    largest = -(-size // chunks) * torch.int64.itemsize
    if len(run.trace) and run.trace.messages["nbytes"].max() > largest:
        raise Wrong(f"{where}: a message has {run.trace.messages['nbytes'].max()} bytes, and a chunk at most {largest}")
    to_the_right({p: run.trace})
    steps = p - 2 + chunks if p > 1 else 0
    in_chain = f"{where}: {plural(run.trace.rounds, 'step')}, and a chain needs {steps}"
    together = "a link carries one chunk at a time: let a rank wait for each before it asks for the next"
    apart = "does a rank wait for chunk k + 1 to arrive before it hands on chunk k, or the other way round?"
    refuse((run.trace.rounds < steps, f"{in_chain}; {together}"), (run.trace.rounds > steps, f"{in_chain}; {apart}"))


@answered
def pipeline(chunks: float, chain: float, tree: float) -> str:
    """Check the best number of chunks of the chain, and the times of chain and tree in seconds."""
    n_beta, alpha = 160e6 / 12.5e9, 10e-6
    best = (6 * n_beta / alpha) ** 0.5
    if abs(chunks - best) > 1:
        raise Wrong(f"{chunks:g} chunks are not the best: which term of T(c) grows with c, which falls, and where do they meet?")
    for what, mine, right in (("chain", chain, (6 + best) * (alpha + n_beta / best)), ("tree", tree, 3 * (alpha + n_beta))):
        refuse((abs(mine / right / 1e3 - 1) <= 0.01, f"the {what} does not take {mine:g} s, but ms: give it in seconds"))
        if abs(mine / right - 1) > 0.01:
            raise Wrong(f"the {what} does not take {mine:g} s: how many steps are there, of how many bytes each?")
    return "the chain comes within a seventh of n beta, which no broadcast can beat"


@judged
def ring_all_reduce(function: Function) -> str:
    """Check `function(comm, tensor)`: the all-reduce round a ring, mended."""
    traces = traced_runs("all_reduce", function)
    to_the_right(traces)
    in_steps(traces, lambda p: 2 * (p - 1), "p - 1 to add up, p - 1 to hand round")
    with_bytes(traces, lambda p: 2 * (p - 1), "one chunk in each step")
    return "2(p - 1) steps to the right, 2(p - 1) chunks sent by each, among 2 to 11 ranks"
