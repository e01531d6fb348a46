"""Checks of the exercises of *Experts*."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from d2lps.parallel import Mesh
from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import in_short, parts, refuse

__all__ = ["average", "dispatch", "machines", "mixture"]


@judged
def mixture(function: Function) -> str:
    """Check `function(x, choices, weights, experts, size)`: x and its experts' outputs, and the number of drops."""
    for tokens, count, k, size in ((6, 3, 1, 2), (9, 4, 2, 3), (20, 5, 3, 7), (7, 2, 2, 2), (1, 4, 4, 1)):
        torch.manual_seed(tokens)
        given = torch.randn(tokens, k + 2).double(), torch.rand(tokens, count).argsort(1)[:, :k], torch.rand(tokens, k).double()
        experts = [lambda rows, i=i: rows.sin() * (i + 2) + i for i in range(count)]
        right, kept = _mixed(*given, experts, size, True)
        got, said = function(*(tensor.clone() for tensor in given), experts, size), f"{tokens} tokens, {size} slots: "
        two = isinstance(got, tuple) and len(got) == 2 and getattr(got[0], "shape", None) == right.shape
        refuse((not two, f"{said}{in_short(got)} is not the output, {list(right.shape)}, and the number of choices dropped"))
        lost, same = [t for t in range(tokens) if not kept[t].any() and not got[0][t].any()], torch.allclose(got[0], right)
        refuse((lost, f"{said}tokens {lost} found no slot and have become zero, for good; what goes on past the experts?"),
               (not same and torch.allclose(got[0], _mixed(*given, experts, size, False)[0]),
                f"{said}a token's second choice has a place before a later token's first"),
               (not same, f"{said}off by up to {(got[0] - right).abs().max():.2g}; what is added to what?"),
               (got[1] != (~kept).sum(), f"{said}{got[1]} dropped? {(~kept).sum()} choices found no slot"))  # fmt: skip
    return "first choices first, all that found a slot are added, nobody is wiped out, and the drops are counted"


def _mixed(x: Any, choices: Any, weights: Any, experts: Any, size: int, first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and which choices found a slot."""
    out, kept, taken = x.clone(), torch.zeros_like(choices, dtype=torch.bool), Counter[int]()
    for t, j in sorted(np.ndindex(*choices.shape), key=lambda pair: pair[::-1] if first else pair):
        taken[i := int(choices[t, j])] += 1
        kept[t, j] = taken[i] <= size
        out[t] += kept[t, j] * weights[t, j] * experts[i](x[t])
    return out, kept


@judged
def dispatch(function: Function) -> str:
    """Check `function(comm, tokens, owner)`: all tokens at their owners, by rank and in order, counts told first."""
    for p in (1, 2, 3, 5):
        torch.manual_seed(p)
        owners = [torch.randint(p, (int(n),)) for n in torch.randint(9, (p,))]
        tokens = [torch.randn(len(owner), p + 1) + 10 * rank for rank, owner in enumerate(owners)]
        run = among(p, lambda comm, t=tokens, o=owners: function(comm, t[comm.rank].clone(), o[comm.rank].clone()))
        for rank, sent in enumerate(run.trace.bytes_sent()):
            right = torch.cat([some[owner == rank] for some, owner in zip(tokens, owners, strict=True)])
            got, case = run[rank], f"{plural(p, 'rank')}, rank {rank}: "
            shape = list(got.shape) if isinstance(got, torch.Tensor) else got
            refuse((shape != list(right.shape), f"{case}{shape} received, and {list(right.shape)} were sent to it"))
            most = 4 * (p + 1) * int((owners[rank] != rank).sum()) + 8 * (p - 1)
            refuse((not torch.equal(got, right), f"{case}not its tokens by the sender's rank, each sender's in their order"),
                   (sent > most, f"{case}{sent} bytes sent; its tokens for others and their counts have {most}"))  # fmt: skip
    return "every token is at its owner, and nothing was sent but tokens and counts"


@judged
def average(function: Function) -> str:
    """Check `function(mesh, shared, experts)`: gradients of the mean of all ranks' losses, in place."""
    for dp, ep in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (6, 3)):
        run = among(dp, lambda comm, dp=dp, ep=ep: _averaged(Mesh(comm, dp=dp, ep=ep), function))
        given = torch.stack([before for before, *_ in run])
        for rank, (_, shared, experts) in enumerate(run):
            same = given[rank % ep :: ep, 1].sum(0) / dp
            for what, got, right in (("a shared weight", shared, given[:, 0].mean(0)), ("an expert", experts, same)):
                times, said = got / right, f"dp={dp}, ep={ep}: the gradient of {what} on rank {rank} is "
                how = f"{times.mean():.3g} times what it should be" if times.std() < 1e-9 else "not of the right ranks' losses"
                refuse((not torch.allclose(got, right), f"{said}{how}; who holds the same, and how many losses were added up?"))
    return "each gradient is that of the mean of all losses, and no two experts are mixed"


def _averaged(mesh: Mesh, function: Function) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    before = torch.randn(2, 2, 3, generator=mesh.comm.generator).double()
    shared, experts = before.clone()
    function(mesh, list(shared), list(experts))
    return before, shared, experts


@answered
def machines(answer: Any) -> str:
    """Check three numbers: copies of a token that leave, other machines that it visits, ms one way."""
    parts("the answer", answer, ("copies", 6, "Each of 8 copies goes to any of four machines alike; which share leaves?"),
          ("machines", 2.722, "Three other machines, each left out with the probability C(96, 8) / C(128, 8)."),
          ("ms", 3.653, "8,192 tokens of 4,096 numbers, 2 bytes each, once for each machine visited, at 50 GB/s."))  # fmt: skip
    return "6 copies for 2.7 machines: one copy a machine takes 3.7 ms, each copy by itself 8.1"
