"""The checks of *Long sequences and experts*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps.collectives import all_gather, all_to_all
from d2lps.parallel import ring_attention
from d2lps.parallel.context import in_turn


def by_plain_exponentials(out, logsum, more, more_logsum):
    one, other = logsum.exp(), more_logsum.exp()
    return (out * one + more * other) / (one + other), (one + other).log()


def of_all_that_are_gathered(comm, query, key, value):
    parts = [torch.empty_like(key) for _ in range(comm.size)]
    all_gather(comm, parts, key)
    return query


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


MERGED = "return share * out + other * more, total -> return "
SEE = "state = see(query, *block, hidden, state) -> state = see("
OUT, ADDED = "return out, dropped -> return ", "out[t] += weights[t, j] * experts[i](x[t]) -> "
EXPERTS, AN_EXPERT = "(experts, mesh.edp) -> ", "dp=2, ep=1: the gradient of an expert"

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
    "ex-long-dropped mixture": [
        ("x.clone() -> torch.zeros_like(x)", "have become zero, for good"),
        (("for j in range(choices.shape[1]) -> for t in range(len(x))",
          "for t, i in enumerate(choices[:, j].tolist()) -> for j, i in enumerate(choices[t].tolist())"),
         "before a later token's first"),
        (f"{ADDED}out[t] = x[t] + weights[t, j] * experts[i](x[t])", "what is added to what"),
        (f"{ADDED}out[t] += experts[i](x[t])", "what is added to what"),
        ("if taken[i] < size -> if True", "off by up to"),
        ("range(choices.shape[1]) -> range(1)", "off by up to"),
        ("dropped += 1 -> pass", "choices found no slot"),
        (f"{OUT}out", "a tensor of [6, 3] is not the output"),
        (f"{OUT}x[:, :2], 0", "is not the output"),
        (f"{OUT}x, 0", "off by up to"),
    ],
    "ex-long-counts dispatch": [
        (padded, "bytes sent"),
        ("parts = [tokens -> tokens, owner = tokens.flip(0), owner.flip(0)\n    parts = [tokens",
         "each sender's in their order"),
        (("[tokens[owner == rank] -> [tokens[owner == rank][:, :3]", "(n, tokens.shape[1]) -> (n, min(3, tokens.shape[1]))"),
         "were sent to it"),
        (lambda comm, tokens, owner: tokens[owner == comm.rank], "were sent to it"),
    ],
    "ex-long-gradients average": [
        (f"{EXPERTS}(experts, mesh.data)",
         "dp=2, ep=2: the gradient of an expert on rank 0 is not of the right ranks' losses"),
        ("gradient /= mesh.data.size -> gradient /= group.size", "dp=2, ep=2: the gradient of an expert on rank 0 is 2 times"),
        (f"{EXPERTS}([], mesh.edp)", AN_EXPERT),
        (f"{EXPERTS}(experts, mesh.ep)", AN_EXPERT),
        ("in gradients: -> in gradients[:1]:", "dp=2, ep=1: the gradient of a shared weight"),
        (lambda mesh, shared, experts: shared.clear(), "the gradient of a shared weight"),
    ],
})  # fmt: skip
