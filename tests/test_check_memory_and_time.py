"""The checks of *Memory and time*: wrong answers are refused in words, and so is what forgets a part of a run."""

from itertools import islice

import torch
from solutions import refusing

from d2lps_book.check import memory_and_time as check

SAVED = "zero.pieces()) -> {name: piece for "

test_refused = refusing({
    "ex-memory-segments segments": [
        ("(64, 79, 2, 63, 127)", "nothing forgotten"), ("(1024, 80, 2, 64, 128)", "is kept already"),
        ("(1024, 79, 8, 135, 127)", "the best k"), ("(1024, 79, 2, 32, 127)", "units at the best k"),
        ("(1024, 79, 2, 63, 4 * 63)", "Is the best k the same"),
    ],
    "ex-memory-again again": [
        ("torch.set_rng_state(ctx.dice) -> pass", "which numbers has dropout drawn"),
        ("torch.random.fork_rng(devices=[]), torch.enable_grad() -> torch.enable_grad()", "must not notice"),
        ("torch.ones((), requires_grad=True) -> torch.ones(())", "0.0.weight gets no gradient"),
        ("return None, x.grad, None -> return None, None, None", "is not that of block(x)"),
        ("y.backward(gradient) -> y.backward(torch.ones_like(y))", "is not that of block(x)"),
        (lambda block, x: block(x), "times the input is kept"),
        (lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), "uses checkpoint"),
        (torch.no_grad()(lambda block, x: block(x)), "gets no gradient"),
        (lambda block, x: x, "the result is not the block's"),
    ],
    "ex-memory-interval interval": [
        ("(0.205, 4.44, 0.154, 4.44, 0.166)", "stall, s"), ("(20.5, 2662, 1.54, 4.44, 0.166)", "disk, minutes"),
        ("(20.5, 44.4, 0.77, 4.44, 0.166)", "half an interval at each failure"),
        ("(20.5, 44.4, 1.54, 44.4, 0.166)", "background, minutes"),
        ("(20.5, 44.4, 1.54, 4.44, 0.154)", "on its way"),
    ],
    "ex-memory-moments moments": [
        (f"{SAVED}unit in zero.units for name, piece in unit.pieces().items()}})", "what of Adam"),
        (f"{SAVED}name, piece in zero.pieces().items() if not name.endswith('/step')}})", "KeyError: 'step'"),
        ("zero.refresh() -> pass", "do all ranks have"),
        ("folder, zero.pieces) -> folder, zero.pieces())", "gets the function that tells the pieces"),  # before the first step
        ("return loaded.step -> return 0", "begins at 0"),
        ("return loaded.step -> return 3", "begins at 3; 4 steps"),
        ("save_run, lambda comm, folder, zero: ...", "begins at"),
        ("save_run, lambda comm, folder, zero: None", "resumes is still empty"),
        ("lambda comm, folder, step, zero: zero.pieces(), resume_run", "no checkpoint"),
    ],
    "ex-memory-place batches": [
        ("divmod(begin, size // batch) -> 0, 0", "reads those of step 0"),
        ("divmod(begin, size // batch) -> 0, begin % (size // batch)", "reads those of step"),
        ("divmod(begin, -> divmod(begin + 1,", "those of step 1"),
        ("yield own[comm.rank] -> yield own[-1 - comm.rank]", "exchanged"),
        ("manual_seed(seed) -> manual_seed(seed + begin)", "examples of no step"),
    ],
    "ex-memory-dice dice": [
        ("dice/{comm.rank} -> dice", "dice: rank 0 and rank 1 have different ones"),
        ("dice.set_state(state) -> pass", "anew"),
        ("save_dice, lambda comm, folder, dice: dice.manual_seed(comm.rank)", "anew"),
        ("checkpoint.load(comm, folder, piece_of(comm, state)) -> "
         "checkpoint.load(comm, folder, {'dice/0': Piece(state, tuple(state.shape))})", "numbers of rank 0"),
    ],
})  # fmt: skip


def everything(comm, size, batch, seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=dice)
        for first in range(0, size - batch + 1, batch):
            yield order[first : first + batch].chunk(comm.size)[comm.rank]


def test_batches_may_count_in_any_way():
    assert check.batches(lambda comm, size, batch, seed, begin: islice(everything(comm, size, batch, seed), begin, None))
