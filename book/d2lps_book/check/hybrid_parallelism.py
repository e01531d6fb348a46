"""Checks of the exercises of *Hybrid parallelism*."""

from collections.abc import Iterator
from operator import index
from typing import Any

import torch

from d2lps.parallel import Mesh
from d2lps.parallel.prediction.prices import axis_groups
from d2lps.parallel.training.plan import Plan
from d2lps_book.check.exercise import Function, among, answered, judged
from d2lps_book.check.tools import near, parts, refuse

__all__ = ["fewest", "fit", "gradient", "groups", "memory", "micro_batches"]


@judged
def groups(function: Function) -> str:
    """Check `function(axis, dp, tp, pp)`: all groups of an axis, tp innermost, then dp, then pp."""
    for dp, tp, pp in ((1, 1, 1), (1, 4, 1), (2, 2, 2), (3, 2, 2), (2, 1, 3), (4, 3, 2)):
        for axis in ("tp", "dp", "pp"):
            case, right = f"{axis} of dp={dp}, tp={tp}, pp={pp}: ", [list(one) for one in axis_groups(Plan(dp, tp, pp), axis)]
            got = function(axis, dp, tp, pp)
            try:
                got = sorted(sorted(map(index, one)) for one in got)
            except TypeError:
                refuse((True, f"{case}{got!r} is not a list of lists of ranks"))
            other = [list(one) for one in axis_groups(Plan(pp, tp, dp), {"dp": "pp", "pp": "dp"}.get(axis, axis))]
            everyone = sorted(rank for one in got for rank in one)
            size = {"tp": tp, "dp": dp, "pp": pp}[axis]
            refuse((everyone != list(range(dp * tp * pp)), f"{case}every rank is in exactly one group; yours have {everyone}"),
                   (any(len(one) != size for one in got), f"{case}a group has {size} ranks"),
                   (got == sorted(other) and got != sorted(right), f"{case}here pp's ranks are nearer to each other than dp's"),
                   (got != sorted(right), f"{case}group {got[:1]}: which ranks differ from rank 0 in {axis} alone?"))  # fmt: skip
    return "each rank is in one group along each axis, tp's neighbors are neighbors, and pp's are furthest apart"


@judged
def gradient(function: Function) -> str:
    """Check `function(mesh, x, w, y)`: this rank's piece of the gradient of the whole batch's mean square error."""
    for dp, tp in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 4)):
        given = torch.Generator().manual_seed(dp * 8 + tp)
        x, w, y = (torch.randn(*size, generator=given).double() for size in ((6, 8), (8,), (6,)))
        run = among(dp * tp, _piece, function, dp, tp, x, w, y)
        right = 2 * x.T @ (x @ w - y) / 6
        for rank, got in enumerate(run):
            mine, said = right.chunk(tp)[rank % tp], f"dp={dp}, tp={tp}, rank {rank}: "
            tensor = isinstance(got, torch.Tensor)
            shape = list(got.shape) if tensor else got
            refuse((not tensor or got.shape != mine.shape, f"{said}{shape} came back; this rank's w has {list(mine.shape)}"))
            got = got.detach().double()
            wrong = not torch.allclose(got, mine)
            refuse((dp > 1 and torch.allclose(got, mine * dp), f"{said}{dp} times too large: the loss is a mean over all rows"),
                   (wrong and torch.allclose(2 * got, mine), f"{said}half of it: the derivative of a square has a factor of 2"),
                   (wrong and tp == 1, f"{said}whose rows does this gradient come from?"),
                   (wrong and dp == 1, f"{said}is `x @ w` the whole product, before y is taken off?"),
                   (wrong, f"{said}not its piece of the gradient; what is missing?"))  # fmt: skip
        messages, axes = run.trace.messages, (dp > 1) + (tp > 1)
        most = 8 * 2 * dp * tp * (6 // dp * (tp > 1) + 8 // tp * (dp > 1))
        refuse((axes and messages["nbytes"].sum() > most, f"dp={dp}, tp={tp}: two all-reduces would send {most} bytes in all"))
    return "products are added up along tp, gradients along dp, and never the other way round"


def _piece(comm: Any, function: Function, dp: int, tp: int, x: Any, w: Any, y: Any) -> Any:
    mesh = Mesh(comm, dp=dp, tp=tp)
    row, column = mesh.at["dp"], mesh.at["tp"]
    return function(mesh, x.chunk(dp)[row].chunk(tp, 1)[column].clone(), w.chunk(tp)[column].clone(), y.chunk(dp)[row].clone())


@answered
def memory(answer: Any) -> str:
    """Check three numbers: GB a device without and with ZeRO 1, and the smallest power of two for tp x pp."""
    parts("memory", answer, ("without ZeRO", 30.286, "16 bytes for each of 530 / 280 billion parameters, in GB."),
          ("ZeRO 1", 10.095, "Which of 2 + 2 + 12 bytes does ZeRO 1 share out, and among how many ranks?"),
          ("tp x pp", 128, "530 billion times 16 bytes, and 80 GB each; then the next power of two."))  # fmt: skip
    return "30.3 GB, 10.1 GB, and 128 ranks for one copy of the model"


@answered
def micro_batches(answer: Any) -> str:
    """Check (a) to (d): micro-batches, a bubble, another bubble, chunks."""
    many = "A batch of 1,536 is shared out along dp; a rank of a pipeline computes its share one micro-batch at a time."
    parts("micro-batches", answer, ("(a)", 96, many), ("(b)", 7 / 96, "(p - 1)/m; m is what (a) gives."),
          ("(c)", 3 / 12, "dp = 64: how many micro-batches of 2 are left for a pipeline?"),
          ("(d)", 6, "(p - 1)/(v m) is to be at most 0.05, and v must divide the layers of a rank, 24."))  # fmt: skip
    return "more replicas, fewer micro-batches for each, and a larger bubble; chunks mend it"


@judged
def fit(function: Function) -> str:
    """Check `function(rows)`: efficiency and overhead from two rows of (computing, passes, rest, measured)."""
    for efficiency, overhead, rows in (
        (0.5, 0.001, ((1.0, 100, 0.5), (2.0, 1000, 0.25))), (0.8, 0.0005, ((0.3, 48, 0.0), (40.0, 20_000, 9.0))),
        (0.65, 0.0, ((5.0, 96, 1.0), (7.0, 960, 2.0))),
    ):  # fmt: skip
        told = [(computing, passes, rest, computing / efficiency + overhead * passes + rest) for computing, passes, rest in rows]
        got = function([tuple(row) for row in told])
        refuse((not isinstance(got, tuple | list) or len(got) != 2, f"{got!r} is not two numbers, efficiency and overhead"))
        near(f"efficiency of {told}", float(got[0]), efficiency, "What is multiplied by what? The unknown is 1/efficiency.")
        off = abs(float(got[1]) - overhead)
        refuse((not off <= 1e-9, f"overhead of {told}: not {got[1]!r}. Two equations, two unknowns; is the rest off first?"))
    return "two rows give two numbers, exactly; only a third could say whether the model is right"


@judged
def fewest(function: Function) -> str:
    """Check `function(ranks, machine, layers, heads, state, memory)`: (dp, tp, pp) by the rule, or None."""
    cases = (
        (1024, 8, 96, 96, 2.8e12, 80e9), (64, 8, 48, 64, 1e9, 80e9), (128, 8, 36, 32, 120e9, 80e9), (48, 8, 24, 24, 800e9, 80e9),
        (512, 8, 48, 64, 624e9, 80e9), (16, 4, 30, 12, 500e9, 40e9), (16, 8, 4, 16, 9e12, 80e9), (96, 8, 30, 20, 880e9, 80e9),
        (64, 8, 24, 12, 480e9, 80e9), (36, 6, 12, 12, 400e9, 80e9), (64, 8, 24, 32, 640e9, 80e9),
    )  # fmt: skip
    for case in cases:
        ranks, machine, layers, heads, state, room = case
        got, right = function(*case), min(_allowed(*case), default=None)
        plan = None if right is None else (ranks // right[0], -right[1], right[0] // -right[1])
        said = f"ranks={ranks}, machine={machine}, layers={layers}, heads={heads}, state={state:.3g}, memory={room:.3g}: "
        if plan is None or got is None:
            refuse((got is not plan, f"{said}{got}? " + ("it does fit" if plan else "nothing that is allowed fits: None")))
            continue
        refuse((not isinstance(got, tuple | list) or len(got) != 3, f"{said}{got!r} is not (dp, tp, pp)"))
        dp, tp, pp = got
        refuse((dp * tp * pp != ranks, f"{said}{dp} x {tp} x {pp} is not all ranks"),
               (state / (tp * pp) > room, f"{said}{state / (tp * pp) / 1e9:.0f} GB a device with {tuple(got)}"),
               (machine % tp or heads % tp or layers % pp, f"{said}{tuple(got)}: tp divides machine and heads, pp the layers"),
               (tp * pp > plan[1] * plan[2], f"{said}{tuple(got)} fits, but fewer ranks would do for a copy"),
               (tuple(got) != plan, f"{said}{tuple(got)}: of equally many, tp comes first"))  # fmt: skip
    return "the fewest ranks a copy, tp within the machine before pp across, and dp with the rest"


def _allowed(ranks: int, machine: int, layers: int, heads: int, state: float, memory: float) -> Iterator[tuple[int, int]]:
    for tp in range(1, machine + 1):
        for pp in range(1, layers + 1):
            fits = state / (tp * pp) <= memory
            if fits and ranks % (tp * pp) == machine % tp == heads % tp == layers % pp == 0:
                yield tp * pp, -tp
