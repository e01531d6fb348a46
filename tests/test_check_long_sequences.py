"""The checks of *Long sequences*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps.collectives import all_gather
from d2lps.parallel import ring_attention
from d2lps.parallel.context import in_turn


def by_plain_exponentials(out, logsum, more, more_logsum):
    one, other = logsum.exp(), more_logsum.exp()
    return (out * one + more * other) / (one + other), (one + other).log()


def of_all_that_are_gathered(comm, query, key, value):
    parts = [torch.empty_like(key) for _ in range(comm.size)]
    all_gather(comm, parts, key)
    return query


MERGED = "return share * out + other * more, total -> return "
SEE = "state = see(query, *block, hidden, state) -> state = see("
ONE = "torch.arange(1, length + 1) for length in lengths] -> "

test_refused = refusing({
    "ex-long-merge merge": [
        (f"{MERGED}(out + more) / 2, total", "how large is each side's share"),
        (by_plain_exponentials, "scores in the thousands: there is a nan"),
        ("torch.logaddexp(logsum, more_logsum) -> logsum + (1 + (more_logsum - logsum).exp()).log()", "there is a nan"),
        (f"{MERGED}share * out + other * more, logsum + more_logsum", "not the logarithm of the sum"),
        (lambda *given: given[0], "a tensor of [2, 4, 3] is not two tensors"),
        (lambda *given: given[:3],
         "(a tensor of [2, 4, 3], a tensor of [2, 4, 1], a tensor of [2, 4, 3]) is not two tensors"),
    ],
    "ex-long-llama llama": [
        ("(67.1, 2.749, 1024)", "one head on each device"), ("(8.389, 21.99, 1024)", "the 16 heads"),
        ("(8.389, 2.749, 1048.6)", "power of two"), ("(8.389, 2.749, 64)", "power of two"), ("8.389", "3 numbers are wanted"),
    ],
    "ex-long-ring ring_causal": [
        (("comm.rank * n + torch.arange(n) -> torch.arange(n)", "owner * n + torch.arange(n) -> torch.arange(n)"),
         "which position"),
        (f"{SEE}query, *block, hidden, (see(query, *block, hidden, state)[0], *state[1:]))", "when the maximum changes"),
        (("work = [] if -> talk = lambda: [] if", "in work: -> in talk():"), "could be on its way"),
        (f"{SEE}query * (query.shape[-1] / 4) ** 0.5, *block, hidden, state)", "attention to the whole sequence"),
        (of_all_that_are_gathered, "is the library's"),
        (lambda comm, query, key, value: ring_attention(comm, query, key, value, place=in_turn), "it uses ring_attention"),
    ],
    "ex-long-texts pairs": [
        (f"{ONE}torch.arange(1, sum(lengths) + 1)]", "as if it were one text"),
        (f"{ONE}torch.arange(length) for length in lengths]", "each token sees itself, too"),
        ("place(ranks, rank, len(work)) -> slice(rank * len(work) // ranks, (rank + 1) * len(work) // ranks)",
         "which positions has a rank"),
        (f"{ONE}torch.full((length,), length) for length in lengths]", "which positions has a rank"),
        ("in range(ranks)] -> in range(1)]", "is not a list of 2 numbers"),
        (lambda lengths, place, ranks: sum(lengths), "8 is not a list of 2 numbers"),
    ],
})  # fmt: skip
