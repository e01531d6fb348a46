"""Checks of the exercises of *Memory and time*."""

from functools import partial
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from d2lps.collectives import all_reduce
from d2lps.comm import ReduceOp
from d2lps.parallel import Zero
from d2lps.parallel.activations import Kept, weights_of
from d2lps_book.check.exercise import Function, among, answered, judged, plural, unwritten
from d2lps_book.check.tools import parts, refuse, without

# ---- forgetting ------------------------------------------------------------------------------------------------------------


@answered
def segments(answer: Any) -> str:
    """Check five numbers: what 64 blocks hold, by how many of their inputs are kept, and what 256 do at best."""
    held = "64/k inputs, and all that the k blocks keep which are made again; the input of the first of these is kept already."
    parts("segments", answer, ("nothing forgotten", 1024, "64 blocks keep 16 units each."), ("k = 1", 79, held),
          ("the best k", 2, "Large k keep few inputs and make much again at a time, small k the reverse: try them."),
          ("units at the best k", 63, held), ("256 blocks", 127, "Is the best k the same as before?"))  # fmt: skip
    return "1024 units, or 79, or 63 with every second input; 127 for four times the blocks"


@judged
def again(function: Function) -> str:
    """Check `function(block, x)`: what `block(x)` gives, and its gradients, while its input alone is kept."""
    without(function, "checkpoint")
    for dropped, needed in product((0.0, 0.5), (True, False)):
        case = f"dropout {dropped}, an input that needs {'a' if needed else 'no'} gradient: "
        (y, _, right, after), (got, held, found, then) = (
            _both_passes(call, dropped, needed) for call in (lambda block, x: block(x), function)
        )
        refuse((not torch.equal(got, y), f"{case}the result is not the block's"),
               (held > 3, f"{case}of two blocks {held:.1f} times the input is kept; their inputs are 2 times"))  # fmt: skip
        for what, wanted in right.items():
            had = found[what]
            refuse((had is None, f"{case}{what} gets no gradient: does autograd know that there is something to do?"),
                   (had is not None and not torch.allclose(had, wanted), f"{case}the gradient of {what} is not that of "
                    "block(x)" + "; which numbers has dropout drawn the second time?" * (dropped > 0)))  # fmt: skip
        refuse((then != after, f"{case}after the backward pass the next random number is {then:.4f}, and would be {after:.4f}; "
                "whoever draws next must not notice"))  # fmt: skip
    return "the gradients of block(x), with its own dropout; of each block the input is kept, and no dice are spent"


def _both_passes(call: Function, dropped: float, needed: bool) -> tuple[Tensor, float, dict[str, Any], float]:
    """Two blocks, one after the other: their result, what was kept in units of the input, gradients, the next random number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Dropout(dropped), nn.Linear(128, 32))
                                 for _ in range(2)))  # fmt: skip
        y = x = torch.randn(256, 32).requires_grad_(needed)
        with (kept := Kept(weights_of(blocks))):
            for block in blocks:
                y = call(block, y)
        held = kept.nbytes / x.nbytes
        if y.requires_grad:
            y.square().mean().backward()
        gradients = {name: p.grad for name, p in blocks.named_parameters()} | ({"x": x.grad} if needed else {})
        return y.detach(), held, gradients, torch.rand(()).item()


# ---- writing down ----------------------------------------------------------------------------------------------------------


@answered
def interval(answer: Any) -> str:
    """Check five numbers: a stall, intervals and wasted shares, for one who waits for the disk and one who does not."""
    rule = "The interval is the root of twice the stall times the time between failures; in minutes."
    share = "The stall once in each interval, and half an interval at each failure"
    parts("saving", answer, ("stall, s", 20.5, "12 bytes of each of 175 billion parameters, by 1,024, at 0.1 GB/s."),
          ("disk, minutes", 44.4, rule), ("disk, %", 1.54, f"{share}."), ("background, minutes", 4.44, rule),
          ("background, %", 0.166, f"{share}; and what is on its way when it fails is lost as well."))  # fmt: skip
    return "1.5% in the foreground, a ninth of it in the background, with ten times as many checkpoints"


LOST = """what of Adam has been lost? Before its first step an optimizer has no tensors to load into; it makes them if `load` \
gets the function that tells the pieces, and not the pieces"""


def _both(save: Function, resume: Function, work: Function, ranks: tuple[int, int]) -> list[list[Any]]:
    """What `work` returns on the ranks that go on after `save`, and on those that go on after `resume`."""
    refuse((unwritten(resume), "the function that resumes is still empty"))
    with TemporaryDirectory() as folder:
        return [list(among(p, work, partial(call, folder=Path(folder)), call is resume))
                for call, p in zip((save, resume), ranks, strict=True)]  # fmt: skip


@judged
def moments(save: Function, resume: Function) -> str:
    """Check `save(comm, folder, step, zero)` and `resume(comm, folder, zero)`: training goes on as if nothing had been."""
    for stage, p, q in ((1, 1, 1), (2, 2, 2), (3, 4, 4), (2, 4, 2), (1, 1, 3), (3, 2, 4)):
        said = f"stage {stage}, saved by {p} and resumed by {plural(q, 'rank')}: "
        [(right, _), *_], after = _both(save, resume, partial(_trained, stage), (p, q))
        for rank, (losses, step) in enumerate(after):
            begin = 2 + stage
            refuse((step != begin, f"{said}rank {rank} begins at {step!r}; {begin} steps were done when it was saved"))
            for done, (loss, want) in enumerate(zip(losses, right, strict=True), begin):
                why = "do all ranks have the weights that were loaded?" if done == begin else LOST
                told = f"after {done} steps rank {rank} has the loss {loss:.6f}, and {want:.6f} uninterrupted: {why}"
                refuse((abs(loss - want) > 1e-6, said + told))
    return "6 pairs of plans: losses are those of the uninterrupted run"


def _trained(stage: int, comm: Any, call: Function, again: bool) -> tuple[list[float], Any]:
    """Losses of the three batches after the checkpoint, and what resuming has returned."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    zero, losses, step = Zero(comm, model, partial(torch.optim.Adam, lr=0.05), stage), list[float](), None
    begin = 2 + stage
    if again:
        step = call(comm, zero=zero)
    for number in range(begin if again else 0, begin + 3):
        x = torch.sin(torch.arange(36.0).view(12, 3) * (number + 1)).chunk(comm.size)[comm.rank]
        loss = (model(x).squeeze() - x.sum(1)).square().mean()
        all_reduce(comm, mean := loss.detach().clone(), ReduceOp.AVG)
        losses.append(mean.item())
        loss.backward()
        zero.step()
        if number == begin - 1:
            call(comm, step=begin, zero=zero)
    return losses[-3:], step


@judged
def batches(function: Function) -> str:
    """Check `batches(comm, size, batch, seed, begin)`: this rank's examples of each step from `begin` on."""
    for p, size, batch in ((1, 10, 4), (2, 24, 4), (2, 26, 8), (4, 40, 8)):
        dice, right = torch.Generator().manual_seed(p), list[Any]()
        for _ in range(8):
            right += torch.randperm(size, generator=dice)[: size // batch * batch].split(batch)
        for begin in (0, 1, 3, size // batch, 2 * size // batch + 1):
            read = partial(lambda first, comm, *how: list(islice(function(comm, *how, first), 4)), begin)
            run = among(p, read, size, batch, p)
            for k, got in enumerate(zip(*run, strict=True), begin):
                have = torch.cat([torch.as_tensor(part) for part in got])
                said = f"{size} examples, begun at step {begin}, {plural(p, 'rank')}: in step {k} "
                other = next((n for n, want in enumerate(right) if torch.equal(have.sort()[0], want.sort()[0])), None)
                known = "examples of no step" if other is None else f"those of step {other}"
                refuse((not torch.equal(have, right[k]) and other != k, f"{said}it reads {known} of the uninterrupted run"),
                       (not torch.equal(have, right[k]), f"{said}ranks have exchanged examples"))  # fmt: skip
    return "in 20 cases each example is read when it would have been"


@judged
def dice(save: Function, resume: Function) -> str:
    """Check `save(comm, folder, dice)` and `resume(comm, folder, dice)`: every rank's random numbers go on."""
    for p in (1, 2, 3, 5):
        before, after = _both(save, resume, _thrown, (p, p))
        for rank, (want, got) in enumerate(zip(before, after, strict=True)):
            whose, case = next((r for r, other in enumerate(before) if other == got), None), f"with {plural(p, 'rank')}"
            told = "has numbers of its own" if whose is None else f"goes on with the numbers of rank {whose}"
            refuse((want != got, f"{case}, rank {rank} {told}" + " anew, not the next ones" * (whose is None)))
    return "1, 2, 3 and 5 ranks: each goes on with its own numbers"


def _thrown(comm: Any, call: Function, again: bool) -> list[float]:
    """This rank's next numbers."""
    own = torch.Generator().manual_seed(comm.rank)
    if not again:
        torch.rand(3 + comm.rank, generator=own)
    call(comm, dice=own)
    return torch.rand(3, generator=own).tolist()
