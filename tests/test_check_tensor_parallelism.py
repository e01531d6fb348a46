"""The checks of *Tensor parallelism*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refused
from torch.nn.functional import gelu

from d2lps.collectives import all_gather, all_gather_into_tensor, all_reduce
from d2lps.comm import ReduceOp
from d2lps.parallel import vocab_cross_entropy
from d2lps.parallel.tensor.f_and_g import copy, reduce
from d2lps_book.check import tensor_parallelism as check

# ---- row ----------------------------------------------------------------------------------------------------------------


def as_printed(comm, x, weight, bias):
    y = x @ weight.chunk(comm.size, 1)[comm.rank] + bias
    all_reduce(comm, y)
    return y


def bias_on_every_rank(comm, x, weight, bias):
    y = x @ weight.chunk(comm.size, 0)[comm.rank] + bias
    all_reduce(comm, y)
    return y


def no_bias(comm, x, weight, bias):
    all_reduce(comm, y := x @ weight.chunk(comm.size, 0)[comm.rank])
    return y


def not_added_up(comm, x, weight, bias):
    return x @ weight.chunk(comm.size, 0)[comm.rank] + bias


def another_ranks_rows(comm, x, weight, bias):
    all_reduce(comm, y := x @ weight.chunk(comm.size, 0)[comm.rank - 1])
    return y + bias


def gathered(comm, x, weight, bias):
    whole = x.new_empty(comm.size, *x.shape)
    all_gather_into_tensor(comm, whole, x)
    return torch.cat(list(whole), 1) @ weight + bias


def summed_twice(comm, x, weight, bias):
    all_reduce(comm, y := x @ weight.chunk(comm.size, 0)[comm.rank])
    all_reduce(comm, y.clone())
    return y + bias


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(as_printed, "mat1 and mat2"), (bias_on_every_rank, "the bias is in y 2 times"), (no_bias, "the bias is missing"),
     (not_added_up, "are the products added up"), (another_ranks_rows, "which rows"), (gathered, "one all-reduce of y takes"),
     (summed_twice, "one all-reduce of y takes"), (lambda *given: given[1].sum(), "gives no tensor of shape [4, 7]"),
     (lambda comm, x, weight, bias: torch.zeros(7, 4), "gives no tensor of shape [4, 7]")],
)  # fmt: skip
def test_row_refuses(wrong, word):
    refused(check.row(wrong), word)


# ---- cross_entropy ------------------------------------------------------------------------------------------------------


def loss(comm, logits, targets, top=True, target_everywhere=False, add=reduce, backward=True):
    highest = logits.detach().amax(-1)
    if top == "own":
        pass
    elif top:
        all_reduce(comm, highest, ReduceOp.MAX)
    logits = logits - highest[:, None] if top else logits
    place = targets - comm.rank * logits.shape[-1]
    here = (place >= 0) & (place < logits.shape[-1])
    own = logits.gather(-1, (place * here)[:, None])[:, 0] * (1 if target_everywhere else here)
    return (add(comm, logits.exp().sum(-1)).log() - add(comm, own)).sum()


def with_four_columns_on_each_rank(comm, logits, targets):
    top = logits.detach().amax(-1)
    all_reduce(comm, top, ReduceOp.MAX)
    logits, place = logits - top[:, None], targets - 4 * comm.rank
    here = (place >= 0) & (place < 4)
    own = logits.gather(-1, (place * here)[:, None])[:, 0] * here
    return (reduce(comm, logits.exp().sum(-1)).log() - reduce(comm, own)).sum()


def of_six_targets(comm, logits, targets):
    return loss(comm, logits, targets) / len(targets) * 6


def with_a_maximum_of_zero_at_least(comm, logits, targets):
    top = logits.detach().amax(-1).clamp(min=0)
    all_reduce(comm, top, ReduceOp.MAX)
    return loss(comm, logits - top[:, None], targets, top=False)


def both_ways(comm, x):
    return reduce(comm, copy(comm, x))


def gathering(comm, logits, targets):
    whole = logits.new_empty(comm.size, *logits.shape)
    all_gather_into_tensor(comm, whole, logits.detach())
    whole[comm.rank] = logits
    return torch.nn.functional.cross_entropy(torch.cat(list(whole), -1), targets, reduction="sum")


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda *given: loss(*given, top=False), "an exponential overflows"),
     (lambda *given: loss(*given, top="own"), "the maximum of its own piece"),
     (lambda *given: loss(*given, target_everywhere=True), "the one rank that has it"),
     (lambda *given: loss(*given) / 6, "the mean over the targets"), (lambda *given: loss(*given) / 7, "the loss is"),
     (lambda *given: loss(*given, add=both_ways), "as g does"),
     (with_four_columns_on_each_rank, "out of bounds"), (of_six_targets, "the loss is"),
     (with_a_maximum_of_zero_at_least, "all of them vanish"),
     (gathering, "three numbers a target take"), (lambda *given: loss(*given).detach(), "does not require grad")],
)  # fmt: skip
def test_cross_entropy_refuses(wrong, word):
    refused(check.cross_entropy(wrong), word)


def test_cross_entropy_refuses_the_librarys_own():
    refused(check.cross_entropy(lambda *given: vocab_cross_entropy(*given)), "vocab_cross_entropy")


# ---- gradients ----------------------------------------------------------------------------------------------------------


def step(mesh, x, up, down, f="tp", g="tp", average="dp", mean=True):
    """As it should be, but for the groups that are named."""
    y = reduce(getattr(mesh, g), gelu(copy(getattr(mesh, f), x) @ up) @ down)
    y.square().mean().backward()
    for weight in (up, down):
        group = getattr(mesh, average)
        all_reduce(group, weight.grad)
        weight.grad /= group.size if mean else 1
    return up.grad, down.grad


@pytest.mark.parametrize(
    "wrong",
    [{"f": "dp", "g": "dp", "average": "tp"}, {"g": "dp"}, {"f": "dp"}, {"average": "tp"}, {"average": "comm"}, {"mean": False}],
    ids=["as printed", "g along dp", "f along dp", "averaged along tp", "averaged over all", "summed"],
)
def test_gradients_refuses(wrong):
    name, hint = ("x", "what does f do on the way back") if wrong == {"f": "dp"} else ("up", "which group adds up")
    refused(check.gradients(lambda *given: step(*given, **wrong)), f"gradient of {name} is wrong", hint)


def with_whole_weights_on_every_rank(mesh, x, up, down):
    """Right, and no tensor parallelism."""
    wholes = []
    for weight, dim in ((up, 1), (down, 0)):
        pieces = [torch.empty_like(weight).detach() for _ in range(mesh.tp.size)]
        all_gather(mesh.tp, pieces, weight.detach())
        wholes.append(torch.cat(pieces, dim).requires_grad_())
    (gelu(x @ wholes[0]) @ wholes[1]).square().mean().backward()
    for weight, whole, dim in ((up, wholes[0], 1), (down, wholes[1], 0)):
        weight.grad = whole.grad.chunk(mesh.tp.size, dim)[mesh.tp.rank].contiguous()
        all_reduce(mesh.dp, weight.grad)
        weight.grad /= mesh.dp.size
    return up.grad, down.grad


def test_gradients_refuses_gathered_weights():
    refused(check.gradients(with_whole_weights_on_every_rank), "weights stay at home")


def test_gradients_refuses_none():
    refused(check.gradients(lambda mesh, x, up, down: (None, None)), "gradient of up has not the shape [5, 24]")


# ---- generator ----------------------------------------------------------------------------------------------------------


def seeded(number):
    return lambda seed, dp, tp, tp_size, sequence: torch.Generator().manual_seed(number(seed, dp, tp, tp_size, sequence))


@pytest.mark.parametrize(
    ("number", "word"),
    [(lambda seed, dp, tp, size, sequence: seed, "drop the same places; do they hold"),
     (lambda seed, dp, tp, size, sequence: seed * 10**6 + dp + tp * sequence, "drop the same places; do they hold"),
     (lambda seed, dp, tp, size, sequence: seed * 10**6 + dp * size + tp, "drop different places; do they hold"),
     (lambda seed, dp, tp, size, sequence: seed * 10**6 + dp * size + tp * (not sequence), "drop different places"),
     (lambda seed, dp, tp, size, sequence: seed * 1000 + dp * size + tp * sequence, "(0, 0) drops the same places as (125, 0)"),
     (lambda seed, dp, tp, size, sequence: seed * 1000 + dp * 100 + tp * sequence, "(0, 0) drops the same places as (10, 0)"),
     (lambda seed, dp, tp, size, sequence: dp * size + tp * sequence, "with seed 1 the rank (dp, tp) (0, 0) drops the same"),
     (lambda seed, dp, tp, size, sequence: seed + dp * size + tp * sequence, "with seed 1 the rank (dp, tp) (0, 7) drops the"),
     (lambda seed, dp, tp, size, sequence: seed * 10**6 + dp * 4 + tp * sequence, "8 along tp, sequence=True: the ranks")],
    ids=["one for all", "dp + tp", "never alike", "the other way round", "few replicas", "two digits for tp",
         "no seed", "seed beside place", "always four"],
)  # fmt: skip
def test_generator_refuses(number, word):
    refused(check.generator(seeded(number)), word)


def one_stream_at_several_places(seed, dp, tp, tp_size, sequence):
    generator = torch.Generator().manual_seed(seed)
    torch.rand(dp * tp_size + tp * sequence, generator=generator, dtype=torch.double)
    return generator


def test_generator_refuses_one_stream():
    refused(check.generator(one_stream_at_several_places), "from the same numbers, some steps apart")


# ---- answers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [({"norm2"}, "3 are missing"), ({"embed", "norm1", "attention", "norm2", "up"}, "do not pass it"),
     ({"embed", "norm1", "attention", "norm2", "head"}, "comes after"), ({"mlp"}, "are none of"), (set(), "4 are missing"),
     ({"embed", "norm2", "norm1"}, "1 is missing: what leaves"), ("norm2", "3 are missing"), ("mlp", "['mlp'] are none of")],
)  # fmt: skip
def test_missing_refuses(wrong, word):
    refused(check.missing(wrong), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [((50.33, 0.587, 7.55), "two backward"), ((50.33, 1.174, 14.09), "slowest link"), ((25.2, 1.174, 15.1), "Two bytes"),
     ((50.33, 1.342, 16.1), "2(p - 1)/p"), ((50.33, 1.174), "3 numbers are wanted")],
)  # fmt: skip
def test_cost_refuses(wrong, word):
    refused(check.cost(wrong), word)
