"""Checks of the exercises of *Long sequences and experts*."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from d2lps.check.exercise import Function, answered, judged
from d2lps.check.tools import own, parts, refuse, without
from d2lps.parallel import Mesh
from d2lps.simulator import simulate
from d2lps.topology import Device, star

__all__ = ["average", "dispatch", "llama", "merge", "ring_causal", "slots"]


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
            refuse((not isinstance(got, tuple) or len(got) != 2, f"{got!r} is not two tensors, the output and its logsum"))
            nan, share = any(not tensor.isfinite().all() for tensor in got), "how large is each side's share of the sum?"
            refuse((nan, f"{case}: there is a nan or an inf; which exponentials overflow, which differences are no numbers?"),
                   (not torch.allclose(got[1], logsum), f"{case}: logsum is not the logarithm of the sum over all keys"),
                   (not torch.allclose(got[0], out), f"{case}: off by {(got[0] - out).abs().max():.2g}; {share}"))  # fmt: skip
    return "two finished parts make the whole, also in the thousands, and where one has seen nothing"


@answered
def llama(answer: Any) -> str:
    """Check three numbers: MB of a message, ms of half a block, the most ranks."""
    bound = "Each rank needs 2 (h_kv / h) F / B tokens; how many such parts has the sequence, rounded down to a power of two?"
    parts("the answer", answer, ("MB", 8.389, "16,384 tokens a rank, keys and values of one head on each device, 2 bytes each."),
          ("ms", 2.749, "2 n² h operations, with the width h of the 16 heads of queries that a device has."),
          ("ranks", 1024, bound))  # fmt: skip
    return "8.4 MB in 0.17 ms under 2.7 ms of computing; on 1,024 ranks the two are nearly equal"


@judged
def ring_causal(function: Function) -> str:
    """Check `function(comm, query, key, value)`: causal attention, each rank with its part in turn, messages under computing."""
    without(function, "ring_attention")
    for p, n in ((1, 5), (2, 4), (3, 3), (5, 2)):
        torch.manual_seed(p)
        given = torch.randn(3, 2, 2, p * n, 4).double() * torch.tensor([9.0, 1, 1]).view(3, 1, 1, 1, 1)
        right = scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)
        run = simulate(lambda comm, given=given, n=n: own(function)(comm, *given.split(n, -2)[comm.rank]), star(p, 1e9, 1e-6))
        case, block = f"{p} rank{'s' * (p > 1)}, {n} tokens each: ", 2 * 2 * 2 * n * 4 * 8
        for rank, (got, wanted) in enumerate(zip(run, right.split(n, -2), strict=True)):
            wrong = not isinstance(got, torch.Tensor) or got.shape != wanted.shape or not torch.allclose(got, wanted)
            refuse((wrong, f"{case}the output of rank {rank} is not that of attention to the whole sequence; "
                    "which position does each query and key have, and what is done when the maximum changes?"))  # fmt: skip
        most = int(run.trace.bytes_sent().max(initial=0))
        refuse((most > (p - 1) * block, f"{case}a rank sends {most} bytes, and {p - 1} blocks have {(p - 1) * block}"))
    alone = _seconds(function, 1e18)
    least = alone / 4 / 2  # what a message takes: half of a block's computing
    took = _seconds(function, 2 * 8 * 64 * 64 * 4 / least)
    refuse((took > alone + 1.5 * least, f"4 ranks: computing takes {1e6 * alone:.1f} µs, and you need {1e6 * took:.1f}: "
            "each message could be on its way while a block is computed"))  # fmt: skip
    return "the whole sequence's attention, and the messages go on under the computing"


def _seconds(function: Function, bandwidth: float) -> float:
    """On 4 devices whose computing is priced."""

    def work(comm: Any) -> None:
        given = torch.randn(3, 1, 8, 64, 64)
        with comm.compute("attention"):
            function(comm, *given)

    return simulate(work, star(4, bandwidth, device=Device(1e12, 1e12, 1e15)), trace=False).time


@judged
def slots(function: Function) -> str:
    """Check `function(choices, experts, size)`: each choice's slot, or -1, first choices before second ones."""
    for tokens, experts, k, size in ((6, 3, 1, 2), (9, 4, 2, 3), (20, 5, 3, 7), (7, 2, 2, 2), (1, 4, 4, 1)):
        torch.manual_seed(tokens)
        choices = torch.rand(tokens, experts).argsort(1)[:, :k]
        right, by_token = (_queued(choices, size, turns) for turns in (True, False))
        got, said = function(choices.clone(), experts, size), f"choices {choices.tolist()}, {size} slots: "
        refuse((not isinstance(got, torch.Tensor) or got.shape != choices.shape, f"{said}{got!r} is no tensor of their shape"))
        refuse((torch.equal(got, by_token) and not torch.equal(right, by_token),
                f"{said}a token's second choice has a place before a later token's first"),
               (bool((got >= size).any()), f"{said}slot {int(got.max())} is beyond the last one, {size - 1}: drop it, by -1"),
               (not torch.equal(got, right), f"{said}{got.tolist()}; and {right.tolist()} is right"))  # fmt: skip
    return "first choices first, tokens in order, and -1 for whoever comes too late"


def _queued(choices: torch.Tensor, size: int, first: bool) -> torch.Tensor:
    right, taken = torch.full_like(choices, -1), dict[int, int]()
    everyone = [(t, j) for t in range(choices.shape[0]) for j in range(choices.shape[1])]
    for t, j in sorted(everyone, key=lambda one: one[::-1]) if first else everyone:
        expert = int(choices[t, j])
        taken[expert] = taken.get(expert, 0) + 1
        right[t, j] = taken[expert] - 1 if taken[expert] <= size else -1
    return right


@judged
def dispatch(function: Function) -> str:
    """Check `function(comm, tokens, owner)`: all tokens at their owners, by rank and in order, counts told first."""
    for p in (1, 2, 3, 5):
        torch.manual_seed(p)
        owners = [torch.randint(p, (int(n),)) for n in torch.randint(9, (p,))]
        tokens = [torch.randn(len(owner), 3) + 10 * rank for rank, owner in enumerate(owners)]
        run = simulate(lambda comm, t=tokens, o=owners: function(comm, t[comm.rank].clone(), o[comm.rank].clone()), star(p, 1e9))
        for rank, sent in enumerate(run.trace.bytes_sent()):
            right = torch.cat([some[owner == rank] for some, owner in zip(tokens, owners, strict=True)])
            got, case = run[rank], f"{p} rank{'s' * (p > 1)}, rank {rank}: "
            shape = list(got.shape) if isinstance(got, torch.Tensor) else got
            refuse((shape != list(right.shape), f"{case}{shape} received, and {list(right.shape)} were sent to it"))
            most = 12 * int((owners[rank] != rank).sum()) + 8 * (p - 1)
            refuse((not torch.equal(got, right), f"{case}not its tokens by the sender's rank, each sender's in their order"),
                   (sent > most, f"{case}{sent} bytes sent; its tokens for others and their counts have {most}"))  # fmt: skip
    return "every token is at its owner, and nothing was sent but tokens and counts"


@judged
def average(function: Function) -> str:
    """Check `function(mesh, shared, experts)`: gradients of the mean of all ranks' losses, in place."""
    for dp, ep in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 4), (6, 3)):
        run = simulate(lambda comm, dp=dp, ep=ep: _averaged(Mesh(comm, dp=dp, ep=ep), function), star(dp, 1e9, 1e-6))
        given = torch.stack([before for before, *_ in run])
        for rank, (_, shared, experts) in enumerate(run):
            same = given[rank % ep :: ep, 1].sum(0) / dp
            for what, got, right in (("a shared weight", shared, given[:, 0].mean(0)), ("an expert", experts, same)):
                times, said = got / right, f"dp={dp}, ep={ep}: the gradient of {what} on rank {rank} is "
                how = f"{times.mean():.3g} times what it should be" if times.std() < 1e-9 else "not of the right ranks' losses"
                more = f"{said}{how}; who holds the same weight, and how many losses have been added up?"
                refuse((not torch.allclose(got, right), more))
    return "each gradient is that of the mean of all losses, and no two experts are mixed"


def _averaged(mesh: Mesh, function: Function) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    before = torch.randn(2, 3, generator=mesh.comm.generator).double()
    shared, experts = before.clone()
    function(mesh, [shared], [experts])
    return before, shared, experts
