"""The checks of *Sharding the state* about checkpoints: what forgets a part of a run is refused in words."""

from functools import partial
from itertools import islice

import pytest
import torch
from solutions import refused

from d2lps.parallel import Piece
from d2lps.parallel.saving.checkpoint import load, save
from d2lps_book.check import sharding_the_state as check

# ---- moments ------------------------------------------------------------------------------------------------------------


def weights(zero):
    return {name: piece for unit in zero.units for name, piece in unit.pieces().items()}


def right_save(comm, folder, step, zero):
    save(comm, folder, step, zero.pieces())


def right_resume(comm, folder, zero):
    step = load(comm, folder, zero.pieces).step
    zero.refresh()
    return step


def only_weights(comm, folder, step, zero):
    save(comm, folder, step, weights(zero))


def without_refresh(comm, folder, zero):
    return load(comm, folder, zero.pieces).step


def into_what_is_there(comm, folder, zero):
    """Before the first step an optimizer has no tensors that could be loaded."""
    step = load(comm, folder, zero.pieces()).step
    zero.refresh()
    return step


def from_zero(comm, folder, zero):
    right_resume(comm, folder, zero)
    return 0


def always_three(comm, folder, zero):
    right_resume(comm, folder, zero)
    return 3


def without_counts(comm, folder, step, zero):
    save(comm, folder, step, {name: piece for name, piece in zero.pieces().items() if not name.endswith("/step")})


@pytest.mark.parametrize(
    ("saves", "resumes", "word"),
    [(only_weights, right_resume, "what of Adam"), (right_save, without_refresh, "do all ranks have"),
     (right_save, into_what_is_there, "gets the function that tells the pieces"), (right_save, from_zero, "begins at 0"),
     (right_save, always_three, "begins at 3; 4 steps"),
     (without_counts, right_resume, "KeyError: 'step'"), (right_save, lambda comm, folder, zero: ..., "begins at"),
     (lambda comm, folder, step, zero: zero.pieces(), right_resume, "no checkpoint")],
)  # fmt: skip
def test_moments_refuses(saves, resumes, word):
    verdict = check.moments(saves, resumes)
    assert not verdict and word in repr(verdict), verdict


def test_both_functions_must_be_written():
    def resume(comm, folder, zero): ...

    refused(check.moments(right_save, resume), "resumes is still empty")


# ---- batches ------------------------------------------------------------------------------------------------------------


def everything(comm, size, batch, seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(size, generator=dice)
        for first in range(0, size - batch + 1, batch):
            yield order[first : first + batch].chunk(comm.size)[comm.rank]


def from_the_start(comm, size, batch, seed, begin):
    return everything(comm, size, batch, seed)


def within_the_epoch(comm, size, batch, seed, begin):
    return islice(everything(comm, size, batch, seed), begin % (size // batch), None)


def one_too_far(comm, size, batch, seed, begin):
    return islice(everything(comm, size, batch, seed), begin + 1, None)


def ranks_exchanged(comm, size, batch, seed, begin):
    dice = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(size, generator=dice)[: size // batch * batch].split(batch) for _ in iter(int, 1))
    every = (step.chunk(comm.size)[-1 - comm.rank] for order in orders for step in order)
    return islice(every, begin, None)


def another_order(comm, size, batch, seed, begin):
    return islice(everything(comm, size, batch, seed + begin), begin, None)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(from_the_start, "reads those of step 0"), (within_the_epoch, "reads those of step"), (one_too_far, "those of step 1"),
     (ranks_exchanged, "exchanged"), (another_order, "examples of no step")],
)  # fmt: skip
def test_batches_refuses(wrong, word):
    refused(check.batches(wrong), word)


def test_batches_may_count_in_any_way():
    assert check.batches(lambda comm, size, batch, seed, begin: islice(everything(comm, size, batch, seed), begin, None))


# ---- dice ---------------------------------------------------------------------------------------------------------------


def saved(comm, folder, dice, name="dice/{}"):
    state = dice.get_state()
    save(comm, folder, 0, {name.format(comm.rank): Piece(state, tuple(state.shape))})


def resumed(comm, folder, dice, name="dice/{}", put=True):
    state = dice.get_state()
    load(comm, folder, {name.format(comm.rank): Piece(state, tuple(state.shape))})
    if put:
        dice.set_state(state)


def seeded(comm, folder, dice):
    dice.manual_seed(comm.rank)


@pytest.mark.parametrize(
    ("saves", "resumes", "word"),
    [(partial(saved, name="dice"), partial(resumed, name="dice"), "dice: rank 0 and rank 1 have different ones"),
     (saved, partial(resumed, put=False), "anew"), (saved, seeded, "anew"),
     (saved, lambda comm, folder, dice: resumed(comm, folder, dice, "dice/0"), "numbers of rank 0")],
)  # fmt: skip
def test_dice_refuses(saves, resumes, word):
    refused(check.dice(saves, resumes), word)


def test_the_librarys_way_is_right():
    assert check.moments(right_save, right_resume)
    assert check.dice(saved, resumed)
