"""What the tests compare with: collectives in numpy and in torch.distributed, and traces told line by line.

The ranks of a run import this file too, so it needs nothing that they have not loaded already (no pytest).
"""

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from d2lps import Communicator, Trace, collectives, kvstore
from d2lps.kvstore import Reply, Request, Server
from d2lps.kvstore.core.client import Session
from d2lps.topology import star
from d2lps.trace import Origins, Recorder

# ---- a call of a collective, the same on all ranks --------------------------------------------------------------------

ALL_REDUCE = ["flat", "tree", "ring", "native", "double_tree", "two_rings", "blockwise"]
ALL_REDUCE += ["halving_doubling", "hierarchical", "auto"]
ALGORITHMS = {
    "broadcast": ["flat", "tree"],
    "scatter": ["linear", "tree"],
    "reduce": ["flat", "tree"],
    "all_reduce": ALL_REDUCE,
    "gather": ["linear", "tree"],
    "all_gather": ["ring", "bruck"],
    "all_gather_into_tensor": ["ring", "bruck"],
    "reduce_scatter": ["ring", "pairwise"],
    "reduce_scatter_tensor": ["ring", "pairwise"],
    "all_to_all": ["direct", "pairwise"],
}
IN_PLACE = ("broadcast", "reduce", "all_reduce")  # these write into the tensor that they read
REDUCING = ("reduce", "all_reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("broadcast", "scatter", "reduce", "gather")
LAYOUTS = ("flat", "shaped", "transposed", "column")
SHAPES = {0: (0, 3), 1: (), 2: (2, 1), 7: (7, 1), 64: (4, 2, 8), 1001: (7, 11, 13)}  # other sizes stay flat
GAP = 77  # what lies between the elements of a column


@dataclass(frozen=True)
class Call:
    """`n` elements from or for each rank; `uneven`: lists hold more and fewer; `layout`: that of rank 0's first tensor."""

    collective: str
    algorithm: str
    op: str = "SUM"
    dtype: torch.dtype = torch.float32
    root: int = 0
    n: int = 7
    uneven: bool = False
    layout: int = 0

    def __str__(self) -> str:
        name = f"{self.collective}({self.algorithm}, {self.op}, {str(self.dtype)[6:]}, root {self.root}, n={self.n})"
        return f"{name}, layout {self.layout}" + (", uneven" if self.uneven else "")


def part_sizes(call: Call, rank: int, ranks: int) -> list[int]:
    """How many elements each tensor has that `rank` brings."""

    def size(k: int) -> int:
        return call.n if not call.uneven else call.n // 2 if k % 2 == 0 else call.n + k

    match call.collective:
        case "scatter":
            return [call.n] * ranks if rank == call.root else []
        case "all_gather":
            return [size(rank)]
        case "reduce_scatter":
            return [size(k) for k in range(ranks)]
        case "reduce_scatter_tensor":
            return [call.n * ranks]
        case "all_to_all":
            return [size(rank + 2 * k) for k in range(ranks)]
        case _:
            return [call.n]


def inputs(call: Call, rank: int, ranks: int) -> list[torch.Tensor]:
    """The flat tensors that `rank` brings, from the call alone: integers of all sizes, floats of 0.5 to 2, either sign."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{call} {rank}".encode()))
    sizes = part_sizes(call, rank, ranks)
    if not call.dtype.is_floating_point:
        return [torch.randint(-(2**62), 2**62, (n,), generator=random).to(call.dtype) for n in sizes]
    signs = [2.0 * torch.randint(0, 2, (n,), generator=random) - 1 for n in sizes]
    return [(sign * (0.5 + 1.5 * torch.rand(len(sign), generator=random))).to(call.dtype) for sign in signs]


# ---- numpy: from the inputs of all ranks at once ----------------------------------------------------------------------

Answer = tuple[np.ndarray, np.ndarray | float]  # the values, and how far from them a result may be

UFUNCS = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
UFUNCS |= {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


def exact(tensor: torch.Tensor) -> np.ndarray:
    """Integers as they are, floats as numpy's widest, in which every dtype of torch is exact."""
    return tensor.double().numpy().astype(np.longdouble) if tensor.is_floating_point() else tensor.numpy()


def reduced(op: str, dtype: torch.dtype, arrays: Sequence[np.ndarray]) -> Answer:
    """The reduction, and its tolerance: 0 for integers, MIN and MAX; else each rounding may be off by half an eps.

    A sum of p numbers is rounded p - 1 times, each time by at most eps/2 of what is not more than the sum of all
    absolute values; an average once more; a product by eps/2 of itself, and a little for errors of errors.
    With numbers of 0.5 to 2 this is less than one forgotten number, even for 8 ranks and bfloat16.
    """
    value = functools.reduce(UFUNCS[op], arrays)
    if not dtype.is_floating_point or op in ("MIN", "MAX"):
        return value, 0.0
    half = torch.finfo(dtype).eps / 2
    p, total = len(arrays), sum(abs(array) for array in arrays)
    if op == "PRODUCT":
        return value, 1.1 * (p - 1) * half * abs(value)
    return (value / p, half * total) if op == "AVG" else (value, (p - 1) * half * total)


def answer(call: Call, rank: int, given: list[list[np.ndarray]]) -> list[Answer]:
    """The tensors that `rank` must end with; `given[i][k]` is the k-th tensor that rank i brings."""
    ranks, root = len(given), call.root
    combined = functools.partial(reduced, call.op, call.dtype)
    match call.collective:
        case "reduce" if rank != root:
            return [(given[rank][0], 0.0)]
        case "reduce" | "all_reduce":
            return [combined([theirs[0] for theirs in given])]
        case "reduce_scatter":
            return [combined([theirs[rank] for theirs in given])]
        case "reduce_scatter_tensor":
            return [combined([theirs[0].reshape(ranks, call.n)[rank] for theirs in given])]
        case "broadcast":
            moved = given[root]
        case "scatter":
            moved = [given[root][rank]]
        case "gather" if rank != root:
            moved = []
        case "gather" | "all_gather":
            moved = [theirs[0] for theirs in given]
        case "all_gather_into_tensor":
            moved = [np.concatenate([theirs[0] for theirs in given])]
        case "all_to_all":
            moved = [theirs[rank] for theirs in given]
    return [(array, 0.0) for array in moved]


def answers(call: Call, ranks: int) -> list[list[Answer]]:
    """What every rank must end with."""
    given = [[exact(tensor) for tensor in inputs(call, rank, ranks)] for rank in range(ranks)]
    return [answer(call, rank, given) for rank in range(ranks)]


def difference(result: torch.Tensor, wanted: Answer) -> str:
    """Where a result leaves its tolerance first; "" if nowhere."""
    value, tolerance = wanted
    got = exact(result)
    if got.shape != value.shape:
        return f"{got.size} elements, not {value.size}"
    wrong = got != value if isinstance(tolerance, float) else ~(abs(got - value) <= tolerance)
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    return f"element {first} is {got[first]}, not {value[first]} ({wrong.sum()} of {wrong.size} are wrong)"


# ---- the same calls, made by the ranks --------------------------------------------------------------------------------


def lay_out(data: torch.Tensor, layout: str) -> torch.Tensor:
    """The elements of a flat tensor, in their order, in a tensor of another layout."""
    shape = SHAPES.get(len(data), (len(data),))
    if layout == "transposed":
        tensor = data.new_empty(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    elif layout == "column":
        tensor = data.new_full((len(data), 3), GAP)[:, 1]
    else:
        tensor = data.new_empty(shape if layout == "shaped" else data.shape)
    return tensor.copy_(data.view(tensor.shape))


def spilled(tensor: torch.Tensor, layout: str) -> bool:
    """Whether somebody wrote between the elements of a column."""
    return layout == "column" and bool((tensor._base[:, ::2] != GAP).any())


def ours(comm: Communicator, call: Call, mine: list[torch.Tensor], out: list[torch.Tensor]) -> None:
    """d2lps's collective: from the tensors `mine` into the tensors `out` (in place: `out` holds the input)."""
    function = functools.partial(getattr(collectives, call.collective), comm)
    op, algorithm = getattr(ReduceOp, call.op), call.algorithm
    match call.collective:
        case "broadcast":
            function(out[0], call.root, algorithm)
        case "reduce":
            function(out[0], call.root, op, algorithm)
        case "all_reduce":
            function(out[0], op, algorithm)
        case "scatter":
            function(out[0], mine or None, call.root, algorithm)
        case "gather":
            function(mine[0], out or None, call.root, algorithm)
        case "all_gather":
            function(out, mine[0], algorithm)
        case "all_gather_into_tensor":
            function(out[0], mine[0], algorithm)
        case "reduce_scatter":
            function(out[0], mine, op, algorithm)
        case "reduce_scatter_tensor":
            function(out[0], mine[0], op, algorithm)
        case "all_to_all":
            function(out, mine, algorithm)


def torchs(
    comm: Communicator,
    call: Call,
    mine: list[torch.Tensor],
    out: list[torch.Tensor],
    group: Any = None,
    wait: Callable[[Any], Any] = dist.Work.wait,
) -> None:
    """The same by torch.distributed, over a process group of these ranks: by default that which the run has joined."""
    op, how = getattr(ReduceOp, call.op), {"group": group, "async_op": True}
    match call.collective:
        case "broadcast":
            wait(dist.broadcast(out[0], group_src=call.root, **how))
        case "reduce":  # gloo writes into the others' tensors too
            wait(dist.reduce(scratch := out[0].clone(), op=op, group_dst=call.root, **how))
            out[0].copy_(scratch if comm.rank == call.root else out[0])
        case "all_reduce":
            wait(dist.all_reduce(out[0], op, **how))
        case "scatter":
            wait(dist.scatter(out[0], mine or None, group_src=call.root, **how))
        case "gather":
            wait(dist.gather(mine[0], out or None, group_dst=call.root, **how))
        case "all_gather":
            wait(dist.all_gather(out, mine[0], **how))
        case "all_gather_into_tensor":
            wait(dist.all_gather_into_tensor(out[0], mine[0], **how))
        case "reduce_scatter":
            wait(dist.reduce_scatter(out[0], mine, op, **how))
        case "reduce_scatter_tensor":
            wait(dist.reduce_scatter_tensor(out[0], mine[0], op, **how))
        case "all_to_all":
            wait(dist.all_to_all(out, mine, **how))


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def gloo_has(call: Call) -> bool:
    """Whether this version's gloo can make the call at all: 2.6's cannot reduce-scatter or average, 2.9's not exchange lists."""
    if TORCH < (2, 7) and (call.collective.startswith("reduce_scatter") or (call.collective in REDUCING and call.op == "AVG")):
        return False
    return TORCH >= (2, 10) or call.collective != "all_to_all"


@dataclass
class Outcome:
    """What a call left on one rank: its output, flat, and what it should not have done."""

    output: list[torch.Tensor] = field(default_factory=list)
    complaint: str = ""


def perform(
    comm: Communicator, calls: Sequence[Call], rooms: Sequence[list[list[int]]], make: Callable[..., None] = ours
) -> list[Outcome]:
    """Make all calls, one after another; `rooms[c][r]` says how large the outputs of rank r are in call c."""
    outcomes = []
    for call, room in zip(calls, rooms, strict=True):
        try:
            outcomes.append(_perform(comm, call, room[comm.rank], make))
        except Exception as error:
            raise RuntimeError(f"{call}: {type(error).__name__}: {error}") from error
    return outcomes


def _perform(comm: Communicator, call: Call, room: list[int], make: Callable[..., None]) -> Outcome:
    given = inputs(call, comm.rank, comm.size)
    # Every tensor of a rank, and every rank, has another layout; torch's own collectives want them flat.
    layouts = [LAYOUTS[(call.layout + comm.rank + k) % 4] if make is ours else "flat" for k in range(2 * comm.size + 2)]
    mine = [lay_out(data, layout) for data, layout in zip(given, layouts, strict=False)]
    starts = given if call.collective in IN_PLACE else [torch.full((n,), 55, dtype=call.dtype) for n in room]
    out = [lay_out(data, layout) for data, layout in zip(starts, layouts[::-1], strict=False)]
    make(comm, call, mine, out)
    outcome = Outcome([tensor.detach().reshape(-1).clone() for tensor in out])
    if not all(torch.equal(tensor.reshape(-1), data) for tensor, data in zip(mine, given, strict=True)):
        outcome.complaint = "an input was changed"
    if any(map(spilled, mine + out, layouts[: len(mine)] + layouts[::-1][: len(out)])):
        outcome.complaint = "something was written between the elements of a column"
    return outcome


def rooms_for(calls: Sequence[Call], ranks: int) -> list[list[list[int]]]:
    return [[[value.size for value, _ in theirs] for theirs in answers(call, ranks)] for call in calls]


def complaints(calls: Sequence[Call], outcomes: Sequence[Sequence[Outcome]]) -> list[str]:
    """All that is wrong with the outcomes (one list of them a rank), each named by its call and rank."""
    found = []
    for index, call in enumerate(calls):
        for rank, wanted in enumerate(answers(call, len(outcomes))):
            outcome = outcomes[rank][index]
            told = [outcome.complaint] if outcome.complaint else map(difference, outcome.output, wanted)
            found += [f"{call}: rank {rank} of {len(outcomes)}: {text}" for text in told if text]
    return found


# ---- traces told line by line, without a run --------------------------------------------------------------------------


def told(*programs: str) -> Trace:
    """The trace of a run in which each rank did what its text says; every rank has the buffers x, y, ... of 16 bytes.

    Lines are separated by ";": send 1, recv 0, isend, irecv, wait (for all of them), barrier, and with parts of buffers:
    send 1 x[0:4], recv 0 y[4:8], copy x y (x[:] = y), add x y (x += y). A word after barrier names a group.

    >>> told("send 1; recv 1", "recv 0; send 0")
    <Trace: 2 ranks, 2 messages, 32 bytes>
    """
    return Trace([log for rank, program in enumerate(programs) for log in _tell(rank, program)], len(programs))


def _tell(rank: int, program: str) -> list[Recorder]:
    clock = count()
    recorder = Recorder(rank, lambda: float(next(clock)))
    tensors: dict[str, torch.Tensor] = {}
    open_ends: list[Callable[[], None]] = []

    def part(text: str) -> torch.Tensor:
        name, _, piece = text.rstrip("]").partition("[")
        tensors.setdefault(name, torch.zeros(16, dtype=torch.uint8))
        begin, end = map(int, piece.split(":")) if piece else (0, 16)
        return tensors[name][begin:end]

    for line in program.split(";"):
        match line.split():
            case ["send" | "recv" | "isend" | "irecv" as action, peer, *which]:
                done = recorder.message(action.lstrip("i"), part(*which or "x"), "world", int(peer), 0)
                open_ends.append(done) if action[0] == "i" else done()
            case ["wait"]:
                while open_ends:
                    open_ends.pop(0)()
            case ["barrier", *group]:
                recorder.waited("barrier", *group or ["world"], -1, 0, 0, recorder.now())
            case ["copy" | "add" as how, into, other]:
                recorder.local("COPY" if how == "copy" else "SUM", part(into), part(other), recorder.now(), recorder.now())
    for buffer, name in zip(recorder.vocabulary.buffers.seen, _in_order_of_use(recorder, tensors), strict=True):
        buffer.name, buffer.scratch = name, False
    return recorder.logs(0.0, recorder.now())


def _in_order_of_use(recorder: Recorder, tensors: dict[str, torch.Tensor]) -> list[str]:
    return sorted(tensors, key=lambda name: recorder.vocabulary.buffers.part(recorder.rank, tensors[name])[0])


# ---- what there is to learn --------------------------------------------------------------------------------------------


def digits(number: int = 1797) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of scikit-learn's images, float32[number, 64] of 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32)[:number] / 16, torch.tensor(labels)[:number]


# ---- parameter servers ------------------------------------------------------------------------------------------------------


def stored(real: bool, worker: Any, workers: int, servers: int, *args: Any, **options: Any) -> Any:
    """The run of some workers and their servers, on processes or in a simulation."""
    if real:
        return kvstore.run(worker, workers, servers, *args, **options)
    return kvstore.simulate(worker, star(workers + servers, 1e9, 1e-6), workers, servers, *args, **options)


class Asking:
    """A client on a perfect wire: what it is called with is asked, and answered, at once."""

    def __init__(self, server: Server, rank: int, epoch: int = 0) -> None:
        self.server, self.session, self.last = server, Session(rank, epoch), Request("")

    def __call__(self, op: str, key: str = "", value: Any = None, **fields: Any) -> list[Reply]:
        """The replies, to anybody, that the request has led to."""
        value = torch.tensor(value) if isinstance(value, list) else value
        self.last = self.session.number(Request(op, key, value, **fields), op)
        replies = [effect for effect in self.server.step(self.last) if isinstance(effect, Reply)]
        for reply in replies:
            self.session.answered(reply)
        return replies


def joins_later(kv: Any, late: int) -> int:
    """Worker 2 joins when worker 0 has ended `late` of ten iterations; each pushes ones. How many it sees at its end."""
    out, word = torch.zeros(1), torch.zeros(1)
    if kv.rank == 2:
        kv.comm.recv(word, src=0)
        kv.join()
        kv.comm.send(word, dst=0)
    kv.init("w", out)
    while kv.iteration < 10:
        if kv.rank == 0 and kv.iteration == late:
            kv.comm.send(word, dst=2)
            kv.comm.recv(word, src=2)
        kv.push("w", torch.ones(1))
        kv.clock()
        kv.pull("w", out).wait()
    return int(out.item())


def sources(trace: Trace, name: str) -> list[Counter[tuple[int, str]]]:
    """What is in the buffers of this name at the end, piece by piece: how often whose, `{(0, "gradient"): 2}`."""
    origins = Origins(trace)
    held = [piece for index, buffer in enumerate(trace.buffers) if buffer.name == name for piece in origins.held(index)]
    return [
        Counter({(trace.buffers[at].rank, trace.buffers[at].name): count for (at, _), count in piece.sources.items()})
        for piece in held
    ]


def gradients(found: Counter[tuple[int, str]]) -> dict[int, int]:
    """How often each rank's gradient is among them."""
    return {rank: count for (rank, name), count in found.items() if name == "gradient"}
