"""Checks of the exercises on saving and resuming in *Sharding the state*."""

from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from d2lps.check.exercise import Function, among, judged, plural, unwritten
from d2lps.check.tools import refuse
from d2lps.collectives import all_reduce
from d2lps.comm import ReduceOp
from d2lps.parallel import Zero

__all__ = ["batches", "dice", "moments"]


LOST = """what of Adam has been lost? Before its first step an optimizer has no tensors to load into; it makes them if `load` \
gets the function that tells the pieces, and not the pieces"""

# ---- saving and resuming ---------------------------------------------------------------------------------------------------


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
