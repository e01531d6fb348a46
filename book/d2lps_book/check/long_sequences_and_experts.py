"""Checks of the exercises of *Long sequences and experts*."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from d2lps.parallel import Mesh
from d2lps.simulator import simulate
from d2lps.topology import Device, star
from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import own, parts, refuse, without

__all__ = ["average", "dispatch", "llama", "merge", "mixture", "ring_causal"]


@judged
def merge(function: Function) -> str:
    """Check `function(out, logsum, more, more_logsum)`: attention to two sets of keys, as (output, logarithm of the sum)."""
    torch.manual_seed(3)
    cases = {"small scores": (1, 5), "scores in the thousands": (3000, 5), "no key at all on one side": (1, 0)}
    for case, (size, first) in cases.items():
        scores, values = size * torch.randn(2, 4, 9).double(), torch.randn(2, 9, 3).double()
        sides = [(scores[..., keys], values[:, keys]) for keys in (slice(first), slice(first, None), slice(None))]
        one, other, (out, logsum) = [(side.softmax(-1) @ value, side.logsumexp(-1, keepdim=True)) for side, value in sides]
        for given in ((*one, *other), (*other, *one)):
            got = function(*(tensor.clone() for tensor in given))
            refuse((not isinstance(got, tuple) or len(got) != 2, f"{_kind(got)} is not two tensors, the output and its logsum"))
            nan, share = any(not tensor.isfinite().all() for tensor in got), "how large is each side's share of the sum?"
            refuse((nan, f"{case}: there is a nan or an inf; which exponentials overflow, which differences are no numbers?"),
                   (not torch.allclose(got[1], logsum), f"{case}: logsum is not the logarithm of the sum over all keys"),
                   (not torch.allclose(got[0], out), f"{case}: off by {(got[0] - out).abs().max():.2g}; {share}"))  # fmt: skip
    return "two finished parts make the whole, also in the thousands, and where one has seen nothing"


def _kind(got: Any) -> str:
    """What came back, in few words: a tensor's numbers would fill the page."""
    if isinstance(got, tuple | list):
        return f"({', '.join(map(_kind, got))})"
    return f"a tensor of {list(got.shape)}" if isinstance(got, torch.Tensor) else repr(got)


@answered
def llama(answer: Any) -> str:
    """Check three numbers: MB of a message, ms of half a block, the most ranks."""
    parts("the answer", answer, ("MB", 8.389, "16,384 tokens a rank, keys and values of one head on each device, 2 bytes each."),
          ("ms", 2.749, "2 n² h operations, with the width h of the 16 heads of queries that a device has."),
          ("ranks", 1024, "Each has 2 (h_kv / h) F / B tokens or more; round down to a power of two."))  # fmt: skip
    return "8.4 MB in 0.17 ms under 2.7 ms of computing; on 1,024 ranks the two are nearly equal"


@judged
def ring_causal(function: Function) -> str:
    """Check `function(comm, query, key, value)`: causal attention, each rank with its part in turn, messages under computing."""
    without(function, "ring_attention")
    for p, n in ((1, 5), (2, 4), (3, 3), (5, 2)):
        torch.manual_seed(p)
        given = torch.randn(3, 2, 2, p * n, n + 1).double() * torch.tensor([9.0, 1, 1]).view(3, 1, 1, 1, 1)
        right = scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)
        run = among(p, lambda comm, given=given, n=n: own(function)(comm, *given.split(n, -2)[comm.rank]))
        case, block = f"{plural(p, 'rank')}, {n} tokens each: ", 2 * 2 * 2 * n * (n + 1) * 8
        for rank, (got, wanted) in enumerate(zip(run, right.split(n, -2), strict=True)):
            wrong = not isinstance(got, torch.Tensor) or got.shape != wanted.shape or not torch.allclose(got, wanted)
            refuse((wrong, f"{case}the output of rank {rank} is not that of attention to the whole sequence; "
                    "which position does each query and key have, and what is done when the maximum changes?"))  # fmt: skip
        most = int(run.trace.bytes_sent().max(initial=0))
        refuse((most > (p - 1) * block, f"{case}a rank sends {most} bytes, and {p - 1} blocks have {(p - 1) * block}"))
    alone = _seconds(function, 1e18)  # and now messages that take half as long as a block's computing
    took = _seconds(function, 2 * 8 * 64 * 64 * 4 / (alone / 8))
    refuse((took > alone + 1.5 * alone / 8, f"4 ranks: computing takes {1e6 * alone:.1f} µs, and you need {1e6 * took:.1f}: "
            "each message could be on its way while a block is computed"))  # fmt: skip
    return "the whole sequence's attention, and the messages go on under the computing"


def _seconds(function: Function, bandwidth: float) -> float:
    """On 4 devices whose computing is priced."""

    def work(comm: Any) -> None:
        with comm.compute("attention"):
            function(comm, *torch.randn(3, 1, 8, 64, 64))

    return simulate(work, star(4, bandwidth, device=Device(1e12, 1e12, 1e15)), trace=False).time


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
        refuse((not two, f"{said}{_kind(got)} is not the output, {list(right.shape)}, and the number of choices dropped"))
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
