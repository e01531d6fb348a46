"""The checks of *Data parallelism*: wrong answers are refused in words."""

import hashlib

import pytest
import torch
from solutions import refused

from d2lps import ReduceOp
from d2lps.collectives import all_gather_into_tensor, all_reduce
from d2lps_book.check import data_parallelism as check

# ---- token_loss -------------------------------------------------------------------------------------------------------


def own_mean(comm, total, count):
    return total / max(1, count)


def without_the_ranks(comm, total, count):
    all_reduce(comm, everybody := torch.tensor([float(count)]))
    return total / everybody.item()


def sends_the_losses(comm, total, count):
    room = torch.zeros(100, dtype=torch.float64)
    room[0] = count
    all_reduce(comm, room)
    return total * comm.size / room[0].item()


def nothing_to_tell(comm, total, count):
    if not count:
        return total
    all_reduce(comm, everybody := torch.tensor([float(count)]))
    return total * comm.size / everybody.item()


def not_a_number(comm, total, count):
    return total * float("nan")


def detached(comm, total, count):
    return total.detach()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(own_mean, "of all tokens alike"), (without_the_ranks, "3 times as large: who divides by the ranks?"),
     (sends_the_losses, "more than one number"), (nothing_to_tell, "all_reduce"), (not_a_number, "of all tokens alike"),
     (detached, "cannot call backward"), (lambda comm, total, count: 3.0, "cannot call backward")],
)  # fmt: skip
def test_token_loss_refuses(wrong, word):
    refused(check.token_loss(wrong), word)


def test_a_ranks_own_mean_is_not_taken_for_a_forgotten_factor():
    assert "who divides" not in check.token_loss(own_mean).text


# ---- indices ----------------------------------------------------------------------------------------------------------


def rightly(count, epoch, rank, ranks):
    return shuffled(count, epoch)[: count // ranks * ranks][rank::ranks]


def shuffled(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def begun_elsewhere(count, epoch, rank, ranks):
    return shuffled(count, 0).roll(epoch)[: count // ranks * ranks][rank::ranks]


def begun_elsewhere_by_ranks(count, epoch, rank, ranks):
    return shuffled(count, 0).roll(epoch * ranks)[: count // ranks * ranks][rank::ranks]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda count, epoch, rank, ranks: shuffled(count, rank)[rank::ranks].tolist(), "comes more than once"),
     (lambda count, epoch, rank, ranks: shuffled(count, 0)[: count // ranks * ranks][rank::ranks], "same order"),
     (lambda count, epoch, rank, ranks: rightly(count, epoch % 2, rank, ranks), "same order"),
     (lambda count, epoch, rank, ranks: shuffled(count, epoch)[rank::ranks], "waits forever"),
     (lambda count, epoch, rank, ranks: shuffled(count, epoch)[: count // ranks], "comes more than once"),
     (lambda count, epoch, rank, ranks: [], "of 12 examples come"),
     (lambda count, epoch, rank, ranks: range(rank, count // ranks * ranks, ranks), "same order"),
     (lambda count, epoch, rank, ranks: torch.randperm(count) if ranks == 1 else rightly(count, epoch, rank, ranks), "again"),
     (begun_elsewhere, "begun elsewhere"), (begun_elsewhere_by_ranks, "begun elsewhere"),
     (lambda count, epoch, rank, ranks: sorted(shuffled(count, epoch)[: count // ranks * ranks][rank::ranks]), "order|shuffled")],
)  # fmt: skip
def test_indices_refuses(wrong, word):
    verdict = check.indices(wrong)
    assert not verdict and any(each in verdict.text for each in word.split("|")), verdict


# ---- statistics -------------------------------------------------------------------------------------------------------


def mean_of_means(comm, x):
    both = torch.stack([x.mean(0), x.var(0, correction=0)])
    all_reduce(comm, both, ReduceOp.AVG)
    return both[0], both[1]


def without_the_means(comm, x):
    sums = torch.cat([x.new_tensor([len(x)]), x.sum(0), len(x) * x.var(0, correction=0)])
    all_reduce(comm, sums)
    return sums[1:4] / sums[0], sums[4:] / sums[0]


def divided_by_one_less(comm, x):
    sums = torch.cat([x.new_full((1, x.shape[1]), len(x)), x.sum(0, True), x.square().sum(0, True)])
    all_reduce(comm, sums)
    mean = sums[1] / sums[0]
    return mean, (sums[2] / sums[0] - mean**2) * sums[0] / (sums[0] - 1)


def sends_rows(comm, x):
    room, mine = torch.zeros(comm.size, 300, dtype=x.dtype), torch.zeros(300, dtype=x.dtype)
    mine[: x.numel()] = x.flatten()
    all_gather_into_tensor(comm, room.view(-1), mine)
    sizes = [20 + 17 * rank % 50 for rank in range(comm.size)]
    rows = torch.cat([row[: 3 * size].view(-1, 3) for row, size in zip(room, sizes, strict=True)])
    return rows.mean(0), rows.var(0, correction=0)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(mean_of_means, "over all"), (without_the_means, "the variance"), (divided_by_one_less, "not by 19"),
     (sends_rows, "more than a few numbers"),
     (lambda comm, x: (x.mean(0), x.var(0, correction=0)), "the mean")],
)  # fmt: skip
def test_statistics_refuses(wrong, word):
    refused(check.statistics(wrong), word)


# ---- odd_ranks --------------------------------------------------------------------------------------------------------


def voted(comm, mark):
    everybody = torch.empty(comm.size, dtype=torch.int64)
    all_gather_into_tensor(comm, everybody, torch.tensor([mark]))
    prints = everybody.tolist()
    return prints, max(set(prints), key=prints.count)


def bits(tensor):
    return int.from_bytes(hashlib.sha256(tensor.numpy().tobytes()).digest()[:7])


def by_the_sum(comm, tensor):
    prints, usual = voted(comm, int(100 * tensor.sum()))
    return [rank for rank, mark in enumerate(prints) if mark != usual] if 2 * prints.count(usual) > comm.size else None


def by_the_exact_sum(comm, tensor):
    prints, usual = voted(comm, int(tensor.double().sum() * 2**24))
    return [rank for rank, mark in enumerate(prints) if mark != usual] if 2 * prints.count(usual) > comm.size else None


def the_most_frequent(comm, tensor):
    prints, usual = voted(comm, bits(tensor))
    return [rank for rank, mark in enumerate(prints) if mark != usual]


def more_than_any_other(comm, tensor):
    prints, usual = voted(comm, bits(tensor))
    tie = any(prints.count(mark) == prints.count(usual) for mark in set(prints) - {usual})
    return None if tie else [rank for rank, mark in enumerate(prints) if mark != usual]


def rank_0_is_right(comm, tensor):
    prints, _ = voted(comm, bits(tensor))
    return [rank for rank, mark in enumerate(prints) if mark != prints[0]]


def whole_tensors(comm, tensor):
    room = torch.empty(comm.size * len(tensor))
    all_gather_into_tensor(comm, room, tensor)
    return the_most_frequent(comm, tensor)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(by_the_sum, "says []"), (by_the_exact_sum, "says []"), (the_most_frequent, "not None"), (rank_0_is_right, "not None"),
     (more_than_any_other, "A, B, C, A: rank 0 says [1, 2], not None"),
     (whole_tensors, "fingerprints are enough"), (lambda comm, tensor: [], "says []")],
)  # fmt: skip
def test_odd_ranks_refuses(wrong, word):
    refused(check.odd_ranks(wrong), word)


# ---- estimates, settings ----------------------------------------------------------------------------------------------


def biased(gradients, batch):
    noise = batch * gradients.var(0, correction=0).sum()
    return gradients.mean(0).square().sum() - noise / (len(gradients) * batch), noise


def noisy(gradients, batch):
    return gradients.mean(0).square().sum(), batch * gradients.var(0).sum()


def never_negative(gradients, batch):
    noise = batch * gradients.var(0).sum()
    return max(0, gradients.mean(0).square().sum() - noise / (len(gradients) * batch)), noise


def without_the_batch(gradients, batch):
    noise = gradients.var(0).sum()
    return gradients.mean(0).square().sum() - noise / len(gradients), noise


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(biased, "Too small by"), (noisy, "noise and all"), (without_the_batch, "3 ranks of 8: S"),
     (without_the_batch, "the variance of a single example's gradient"), (never_negative, "What of S is left")],
)  # fmt: skip
def test_estimates_refuses(wrong, word):
    refused(check.estimates(wrong), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda batch, rate, ranks, keep: (batch, rate * ranks**2), "a rank's batch"),
     (lambda batch, rate, ranks, keep: (batch // ranks, rate * ranks), "the rate"),
     (lambda batch, rate, ranks, keep: (batch // ranks, rate), "keep the work, a rank's batch"),
     (lambda batch, rate, ranks, keep: (batch // ranks if keep == "training" else batch, rate), "keep the work, the rate")],
)  # fmt: skip
def test_settings_refuses(wrong, word):
    refused(check.settings(wrong), word)


# ---- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ((250, 64, 12_800), "least steps"),
        ((200, 256, 12_800), "critical batch"),
        ((200, 64, 25_600), "examples more"),
        (200, "3 numbers"),
    ],
)
def test_critical_refuses(wrong, word):
    refused(check.critical(wrong), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [((1.1, 3.4, 5.4), "base"), ((109.5, 302, 5.4), "large"), ((110, 340, 5.44), "large"), ((109.5, 335.1, 1.34), "GB a device"),
     ((109.5, 335.1, 0.084), "that is ZeRO"), ((109_482_240, 335_141_888, 5.36), "base")],
)  # fmt: skip
def test_bert_refuses(wrong, word):
    refused(check.bert(wrong), word)
