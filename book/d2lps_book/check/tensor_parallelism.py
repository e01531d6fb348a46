"""Checks of the exercises of *Tensor parallelism*."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from d2lps.collectives import all_reduce
from d2lps.parallel import Mesh
from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import parts, refuse, without

__all__ = ["cost", "cross_entropy", "generator", "gradients", "missing", "row"]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _sent(work: Callable[..., Any], ranks: int) -> int:
    return int(among(ranks, work).trace.bytes_sent().max())


@judged
def row(function: Function) -> str:
    """Check `function(comm, x, weight, bias)`: all of y on every rank, from pieces of x, by one all-reduce."""
    for p in (1, 2, 3, 5, 8):
        case, x, weight, bias = plural(p, "rank"), _random(4, 120), _random(120, 7), _random(7) + 3
        run = among(p, lambda comm, x=x, w=weight, b=bias: function(comm, x.chunk(comm.size, 1)[comm.rank].clone(), w, b.clone()))
        few, wanted = _sent(lambda comm: all_reduce(comm, torch.zeros(28).double()), p), x @ weight + bias
        for rank, y in enumerate(run):
            refuse((not isinstance(y, Tensor) or y.shape != (4, 7), f"{case}: rank {rank} gives no tensor of shape [4, 7]"))
            refuse((p > 1 and _near(y, wanted + (p - 1) * bias), f"{case}: the bias is in y {p} times: what is summed up?"),
                   (_near(y, wanted - bias), f"{case}: the bias is missing"),
                   (not _near(y, wanted), f"{case}: rank {rank} is off by {(y - wanted).abs().max():.3g}: which rows of the "
                    "weight belong to its piece of x, and are the products added up?"))  # fmt: skip
        sent = int(run.trace.bytes_sent().max())
        refuse((sent > few, f"{case}: a rank sends {sent} bytes, and one all-reduce of y takes {few}"))
    return "one sum of the products, and the bias once after it"


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9)


@judged
def cross_entropy(function: Function) -> str:
    """Check `function(comm, logits, targets)`: the sum of losses from a piece of the vocabulary each, three numbers a target."""
    without(function, "vocab_cross_entropy")
    for (p, wide, count), (scale, shift) in itertools.product(((1, 4, 6), (2, 3, 5), (3, 4, 6), (5, 2, 7)),
                                                              ((1, 0), (1000, 0), (1000, -9000))):  # fmt: skip
        case, logits = plural(p, "rank"), scale * _random(count, wide * p) + shift
        targets = torch.randint(wide * p, (count,), generator=torch.Generator().manual_seed(p))
        wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        slope = logits.softmax(-1) - torch.nn.functional.one_hot(targets, wide * p)
        tops = torch.cat([piece - piece.amax(-1, True) for piece in logits.chunk(p, -1)], -1)  # each piece's own maximum
        apart = torch.nn.functional.cross_entropy(tops, targets, reduction="sum")

        def work(comm: Any, logits: Tensor = logits, targets: Tensor = targets) -> Any:
            mine = logits.chunk(comm.size, -1)[comm.rank].clone().requires_grad_()
            loss = function(comm, mine, targets.clone())
            loss.backward()
            return loss.item(), mine.grad

        run = among(p, work)
        for rank, (loss, got) in enumerate(run):
            said = f"{case}: {count} targets, logits of about {scale + shift}, rank {rank}: "
            refuse((not math.isfinite(loss), f"{said}the loss is {loss}; an exponential overflows, or all of them vanish: which "
                    "maximum is to be taken off the logits?"),
                   (abs(loss - wanted / count) < 1e-8 * abs(wanted), f"{said}the loss is the mean over the targets, and their "
                    "sum is asked"),
                   (p > 1 and abs(loss - apart) < 1e-8 * abs(apart) < abs(loss - wanted), f"{said}the loss is {loss:.4f}, not "
                    f"{wanted:.4f}: each rank takes off the maximum of its own piece, and they differ"),
                   (abs(loss - wanted) > 1e-8 * abs(wanted), f"{said}the loss is {loss:.4f}, not {wanted:.4f}; is a target's "
                    "own logit taken from the one rank that has it?"),
                   (got is None or not torch.allclose(got, slope.chunk(p, -1)[rank]), f"{said}the gradient is not softmax "
                    "minus one for the target: does each sum pass it back as g does?"))  # fmt: skip
        few = _sent(lambda comm, n=count: [all_reduce(comm, torch.zeros(n).double()) for _ in range(3)], p)
        sent = int(run.trace.bytes_sent().max())
        refuse((sent > few, f"{case}: a rank sends {sent} bytes; three numbers a target take {few}"))
    return "a maximum, a sum and a target's own logit: three numbers for each target"


@judged
def gradients(function: Function) -> str:
    """Check `function(mesh, x, up, down)`: what each rank has of the gradients of a mean loss, on a mesh of dp x tp ranks."""
    for dp, tp in ((1, 2), (2, 1), (2, 2), (3, 2), (2, 4)):
        x, up, down = (_random(*size).requires_grad_() for size in ((6, 5), (5, 48), (48, 5)))
        whole: Any = torch.autograd.grad((gelu(x @ up) @ down).square().mean(), (x, up, down))

        def work(comm: Any, tensors: Any = (x, up, down), dp: int = dp, tp: int = tp) -> Any:
            mesh = Mesh(comm, dp=dp, tp=tp)
            cuts = (0, dp, mesh.dp.rank), (1, tp, mesh.tp.rank), (0, tp, mesh.tp.rank)
            mine = [w.detach().chunk(pieces, dim)[place].clone().requires_grad_()
                    for w, (dim, pieces, place) in zip(tensors, cuts, strict=True)]  # fmt: skip
            up, down = function(mesh, *mine)
            return [("up", up, 1, 1, cuts[1]), ("down", down, 2, 1, cuts[2]), ("x", mine[0].grad, 0, dp, cuts[0])]

        def few(comm: Any, dp: int = dp, tp: int = tp) -> None:
            mesh = Mesh(comm, dp=dp, tp=tp)
            for group, count in ((mesh.tp, 30 // dp), (mesh.tp, 30 // dp), (mesh.dp, 240 // tp), (mesh.dp, 240 // tp)):
                all_reduce(group, torch.zeros(count).double())

        run = among(dp * tp, work)
        for rank, found in enumerate(run):
            for name, one, number, times, (dim, pieces, place) in found:
                mine = times * whole[number].chunk(pieces, dim)[place]  # x's is of the mean of this rank's own examples
                said = f"dp={dp}, tp={tp}: rank {rank}'s gradient of {name}"
                refuse((not isinstance(one, Tensor) or one.shape != mine.shape, f"{said} has not the shape {list(mine.shape)}"))
                refuse((name == "x" and not _near(one, mine), f"{said} is wrong: it is that of the mean over this rank's own "
                        "examples, and every rank along tp finds a part of it; what does f do on the way back?"),
                       (not _near(one, mine), f"{said} is wrong; which group adds up parts of one example's sum, and which "
                        "averages over examples?"))  # fmt: skip
        sent, enough = int(run.trace.bytes_sent().max()), _sent(few, dp * tp)
        refuse((sent > enough, f"dp={dp}, tp={tp}: a rank sends {sent} bytes, and {enough} would do: weights stay at home"))
    return "tensor parallelism in both passes, data parallelism after them"


@judged
def generator(function: Function) -> str:
    """Check `function(seed, dp, tp, tp_size, sequence)`: a torch.Generator, so that dropout is alike where vectors are."""
    for size, sequence in itertools.product((4, 1, 8), (False, True)):
        places = itertools.product((0, 1, 5), range(size))
        masks = [(where, torch.rand(64, generator=function(0, *where, size, sequence), dtype=torch.double)) for where in places]
        for (a, mask), (b, other) in itertools.combinations(masks, 2):
            alike, want = torch.equal(mask, other), a[0] == b[0] and not sequence
            said = f"the ranks (dp, tp) {a} and {b} drop {'the same' if alike else 'different'} places"
            refuse((alike != want, f"{size} along tp, sequence={sequence}: {said}; do they hold the same vectors?"),
                   (not alike and {*mask.tolist()} & {*other.tolist()}, f"{size} along tp, sequence={sequence}: {said}, but from "
                    "the same numbers, some steps apart: give each a seed of its own"))  # fmt: skip
    for sequence in (False, True):  # with many replicas a large dp can reach the next seed's numbers
        met: dict[float, tuple[int, ...]] = {}
        for seed, *rank in itertools.product(range(3), range(4000), (0, 7) if sequence else (0,)):
            first = torch.rand(1, generator=function(seed, *rank, 8, sequence), dtype=torch.double).item()
            earlier, *there = met.setdefault(first, (seed, *rank))
            refuse(((earlier, there) != (seed, rank), f"8 along tp, sequence={sequence}: with seed {seed} the rank (dp, tp) "
                    f"{tuple(rank)} drops the same places as {tuple(there)} with seed {earlier}"))  # fmt: skip
    return "alike where ranks hold the same vectors, and nowhere else"


@answered
def missing(answer: Any) -> str:
    """Check the names of those gradients that are wrong where f is missing before an MLP."""
    right, given = {"embed", "norm1", "attention", "norm2"}, {answer} if isinstance(answer, str) else set(answer)
    every = right | {"up", "down", "head"}
    lacks = f"{len(right - given)} {'is' if len(right - given) == 1 else 'are'} missing"
    refuse((given - every, f"{sorted(given - every)} are none of {sorted(every)}"),
           (given & {"up", "down"}, "up and down get their gradients before f on the way back: they do not pass it"),
           ("head" in given, "the head comes after the MLP, and its gradient has been computed by then"),
           (right - given, f"{lacks}: what leaves the MLP on the way back is a part, and goes on to the first layer"))
    return "all that the gradient still has to pass is wrong, and what stands behind is right"


@answered
def cost(answer: Any) -> str:
    """Check MB, ms in a machine, ms over two."""
    ring = "A ring sends 2(p - 1)/p of the tensor; there are two all-reduces forward and two backward."
    parts("the layer", answer, ("MB", 50.33, "Two bytes for each of 2,048 x 12,288 numbers."), ("ms in one machine", 1.174, ring),
          ("ms over two", 15.10, f"{ring} Every step waits for the slowest link."), within=0.01)  # fmt: skip
    return "1.2 ms in one machine, and thirteen times that over two"
