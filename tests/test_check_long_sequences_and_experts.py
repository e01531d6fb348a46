"""The checks of *Long sequences and experts*: wrong answers are refused in words."""

from functools import partial

import pytest
import torch
from solutions import refused, solution

from d2lps.collectives import all_gather, all_reduce, all_to_all
from d2lps.parallel import ring_attention
from d2lps.parallel.context import in_turn
from d2lps_book.check import long_sequences_and_experts as check

# ---- merge --------------------------------------------------------------------------------------------------------------


def their_mean(out, logsum, more, more_logsum):
    return (out + more) / 2, torch.logaddexp(logsum, more_logsum)


def by_plain_exponentials(out, logsum, more, more_logsum):
    one, other = logsum.exp(), more_logsum.exp()
    return (out * one + more * other) / (one + other), (one + other).log()


def by_a_maximum_of_nothing(out, logsum, more, more_logsum):
    total = logsum + (1 + (more_logsum - logsum).exp()).log()
    return (logsum - total).exp() * out + (more_logsum - total).exp() * more, total


def logsums_added(out, logsum, more, more_logsum):
    return solution("ex-long-merge")["merge"](out, logsum, more, more_logsum)[0], logsum + more_logsum


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(their_mean, "how large is each side's share"), (by_plain_exponentials, "scores in the thousands: there is a nan"),
     (by_a_maximum_of_nothing, "there is a nan"), (logsums_added, "not the logarithm of the sum"),
     (lambda *given: given[0], "a tensor of [2, 4, 3] is not two tensors"),
     (lambda *given: given[:3], "(a tensor of [2, 4, 3], a tensor of [2, 4, 1], a tensor of [2, 4, 3]) is not two tensors")],
)  # fmt: skip
def test_merge_refuses(wrong, word):
    refused(check.merge(wrong), word)


# ---- llama --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"),
    [((67.1, 2.749, 1024), "one head on each device"), ((8.389, 21.99, 1024), "the 16 heads"),
     ((8.389, 2.749, 1048.6), "power of two"), ((8.389, 2.749, 64), "power of two"), (8.389, "3 numbers are wanted")],
)  # fmt: skip
def test_llama_refuses(answer, word):
    refused(check.llama(answer), word)


# ---- ring_causal --------------------------------------------------------------------------------------------------------


def ring(comm, query, key, value, local=False, scaled=True, early=True, size=None):
    """The solution, and what is wrong with it in several ways."""
    n, block = query.shape[2], torch.stack([key, value])
    start = 0 if local else comm.rank * n
    mine = start + torch.arange(n)
    top = torch.full_like(query[..., :1], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(query)
    for step in range(comm.size):
        owner, coming = (comm.rank - step) % comm.size, torch.empty_like(block)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        last = step + 1 == comm.size
        work = [comm.irecv(coming, left), comm.isend(block, right)] if early and not last else []
        theirs = (0 if local else owner * n) + torch.arange(n)
        scores = (query @ block[0].mT / (size or query.shape[3]) ** 0.5).masked_fill(theirs > mine[:, None], -torch.inf)
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        scale = (top - highest).exp() if scaled else 1
        weights = (scores - highest).exp()
        total, out, top = total * scale + weights.sum(-1, keepdim=True), out * scale + weights @ block[1], highest
        if not early and not last:
            comm.sendrecv(block, right, coming, left)
        for message in work:
            message.wait()
        block = coming
    return out / total


def of_all_that_are_gathered(comm, query, key, value):
    parts = [torch.empty_like(key) for _ in range(comm.size)]
    all_gather(comm, parts, key)
    return query


def the_librarys(comm, query, key, value):
    return ring_attention(comm, query, key, value, place=in_turn)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(partial(ring, local=True), "which position"), (partial(ring, scaled=False), "when the maximum changes"),
     (partial(ring, early=False), "could be on its way"), (partial(ring, size=4), "attention to the whole sequence"),
     (of_all_that_are_gathered, "is the library's"),
     (the_librarys, "it uses ring_attention")],
)  # fmt: skip
def test_ring_causal_refuses(wrong, word):
    assert check.ring_causal(ring)
    refused(check.ring_causal(wrong), word)


# ---- mixture ------------------------------------------------------------------------------------------------------------


def mixed(x, choices, weights, experts, size, first=True, residual=True, adds=True, scaled=True):
    """Right, and wrong in several ways."""
    out, taken, dropped = x.clone() if residual else torch.zeros_like(x), [0] * len(experts), 0
    pairs = [(token, j) for token in range(len(x)) for j in range(choices.shape[1])]
    for token, j in sorted(pairs, key=lambda pair: pair[::-1]) if first else pairs:
        i = int(choices[token, j])
        taken[i] += 1
        if taken[i] > size:
            dropped += 1
            continue
        new = (weights[token, j] if scaled else 1) * experts[i](x[token])
        out[token] = out[token] + new if adds else x[token] + new
    return out, dropped


def never_dropped(x, choices, weights, experts, size):
    return mixed(x, choices, weights, experts, len(x) * choices.shape[1])


def of_the_first_alone(x, choices, weights, experts, size):
    return mixed(x, choices[:, :1], weights, experts, size)


def drops_not_counted(*given):
    return mixed(*given)[0], 0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(partial(mixed, residual=False), "have become zero, for good"),
     (partial(mixed, first=False), "before a later token's first"),
     (partial(mixed, adds=False), "what is added to what"), (partial(mixed, scaled=False), "what is added to what"),
     (never_dropped, "off by up to"), (of_the_first_alone, "off by up to"), (drops_not_counted, "choices found no slot"),
     (lambda *given: mixed(*given)[0], "a tensor of [6, 3] is not the output"),
     (lambda x, *given: (x[:, :2], 0), "is not the output"),
     (lambda x, *given: (x, 0), "off by up to")],
)  # fmt: skip
def test_mixture_refuses(wrong, word):
    assert check.mixture(mixed)
    refused(check.mixture(wrong), word)


# ---- dispatch -----------------------------------------------------------------------------------------------------------


def padded(comm, tokens, owner):
    size, width = 9, tokens.shape[1]
    rows = [tokens[owner == rank] for rank in range(comm.size)]
    parts = [torch.cat([some, tokens.new_zeros(size - len(some), width)]) for some in rows]
    received = [torch.empty_like(part) for part in parts]
    all_to_all(comm, received, parts)
    counts = torch.tensor([int((owner == rank).sum()) for rank in range(comm.size)])
    coming = torch.empty_like(counts)
    all_to_all(comm, list(coming.chunk(comm.size)), list(counts.chunk(comm.size)))
    return torch.cat([part[:n] for part, n in zip(received, coming.tolist(), strict=True)])


def backwards(comm, tokens, owner):
    return solution("ex-long-counts")["dispatch"](comm, tokens.flip(0), owner.flip(0))


def of_three_numbers_each(comm, tokens, owner):
    parts = [tokens[owner == rank][:, :3] for rank in range(comm.size)]
    sizes = [torch.tensor([len(part)]) for part in parts]
    coming = [torch.empty_like(size) for size in sizes]
    all_to_all(comm, coming, sizes)
    received = [tokens.new_empty(int(n), parts[0].shape[1]) for n in coming]
    all_to_all(comm, received, parts)
    return torch.cat(received)


def only_its_own(comm, tokens, owner):
    return tokens[owner == comm.rank]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(padded, "bytes sent"), (backwards, "each sender's in their order"), (only_its_own, "were sent to it"),
     (of_three_numbers_each, "were sent to it")],
)  # fmt: skip
def test_dispatch_refuses(wrong, word):
    refused(check.dispatch(wrong), word)


# ---- average ------------------------------------------------------------------------------------------------------------


def all_by_data(mesh, shared, experts):
    for gradient in shared + experts:
        all_reduce(mesh.data, gradient)
        gradient /= mesh.data.size


def over_edp_alone(mesh, shared, experts):
    for gradients, group in ((shared, mesh.data), (experts, mesh.edp)):
        for gradient in gradients:
            all_reduce(group, gradient)
            gradient /= group.size


def experts_left_out(mesh, shared, experts):
    all_by_data(mesh, shared, [])


def only_the_first(mesh, shared, experts):
    solution("ex-long-gradients")["average"](mesh, shared[:1], experts[:1])


def over_ep(mesh, shared, experts):
    all_by_data(mesh, shared, [])
    for gradient in experts:
        all_reduce(mesh.ep, gradient)
        gradient /= mesh.data.size


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(all_by_data, "dp=2, ep=2: the gradient of an expert on rank 0 is not of the right ranks' losses"),
     (over_edp_alone, "dp=2, ep=2: the gradient of an expert on rank 0 is 2 times"),
     (experts_left_out, "dp=2, ep=1: the gradient of an expert"), (over_ep, "dp=2, ep=1: the gradient of an expert"),
     (only_the_first, "dp=2, ep=1: the gradient of a shared weight"),
     (lambda mesh, shared, experts: shared.clear(), "the gradient of a shared weight")],
)  # fmt: skip
def test_average_refuses(wrong, word):
    refused(check.average(wrong), word)
