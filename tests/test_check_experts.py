"""The checks of *Experts*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps.collectives import all_to_all


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


OUT, ADDED = "return out, dropped -> return ", "out[t] += weights[t, j] * experts[i](x[t]) -> "
EXPERTS, AN_EXPERT = "(experts, mesh.edp) -> ", "dp=2, ep=1: the gradient of an expert"

test_refused = refusing({
    "ex-experts-dropped mixture": [
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
    "ex-experts-counts dispatch": [
        (padded, "bytes sent"),
        ("parts = [tokens -> tokens, owner = tokens.flip(0), owner.flip(0)\n    parts = [tokens",
         "each sender's in their order"),
        (("[tokens[owner == rank] -> [tokens[owner == rank][:, :3]", "(n, tokens.shape[1]) -> (n, min(3, tokens.shape[1]))"),
         "were sent to it"),
        (lambda comm, tokens, owner: tokens[owner == comm.rank], "were sent to it"),
    ],
    "ex-experts-gradients average": [
        (f"{EXPERTS}(experts, mesh.data)",
         "dp=2, ep=2: the gradient of an expert on rank 0 is not of the right ranks' losses"),
        ("gradient /= mesh.data.size -> gradient /= group.size", "dp=2, ep=2: the gradient of an expert on rank 0 is 2 times"),
        (f"{EXPERTS}([], mesh.edp)", AN_EXPERT),
        (f"{EXPERTS}(experts, mesh.ep)", AN_EXPERT),
        ("in gradients: -> in gradients[:1]:", "dp=2, ep=1: the gradient of a shared weight"),
        (lambda mesh, shared, experts: shared.clear(), "the gradient of a shared weight"),
    ],
    "ex-experts-machines machines": [
        ("(8, 2.722, 3.653)", "which share leaves"), ("(6, 3, 3.653)", "left out with the probability"),
        ("(6, 3.63, 3.653)", "left out with the probability"), ("(6, 2.722, 8.053)", "once for each machine"),
        ("(6, 2.722)", "3 numbers are wanted"),
    ],
})  # fmt: skip
