"""Checks of the exercises of *Long sequences*."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from d2lps.parallel.context import folded, in_turn
from d2lps.simulator import simulate
from d2lps.topology import Device, star
from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import in_short, own, parts, refuse, without

__all__ = ["llama", "merge", "pairs", "ring_causal"]


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
            two = isinstance(got, tuple) and len(got) == 2
            refuse((not two, f"{in_short(got)} is not two tensors, the output and its logsum"))
            nan, share = any(not tensor.isfinite().all() for tensor in got), "how large is each side's share of the sum?"
            refuse((nan, f"{case}: there is a nan or an inf; which exponentials overflow, which differences are no numbers?"),
                   (not torch.allclose(got[1], logsum), f"{case}: logsum is not the logarithm of the sum over all keys"),
                   (not torch.allclose(got[0], out), f"{case}: off by {(got[0] - out).abs().max():.2g}; {share}"))  # fmt: skip
    return "two finished parts make the whole, also in the thousands, and where one has seen nothing"


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
def pairs(function: Function) -> str:
    """Check `function(lengths, place, ranks)`: each rank's pairs of a query and a key of one text."""
    for lengths, ranks in (([8], 2), ([1] * 12, 3), ([5, 1, 10], 4), ([30, 2, 16], 4), ([7, 7, 2], 1)):
        text = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        seen = torch.ones(len(text), len(text)).tril().bool() & (text[:, None] == text)
        for name, place in (("in_turn", in_turn), ("folded", folded), ("one that deals like cards", _cards)):
            right = [int(seen[place(ranks, rank, len(text))].sum()) for rank in range(ranks)]
            got, case = function(list(lengths), place, ranks), f"texts of {lengths}, {plural(ranks, 'rank')}, {name}: "
            listed = isinstance(got, list | tuple) and len(got) == ranks
            refuse((not listed, f"{case}{got!r} is not a list of {plural(ranks, 'number')}"))
            whole = len(text) * (len(text) + 1) // 2
            refuse((sum(got) == whole != sum(right), f"{case}{whole} pairs in all, as if it were one text"),
                   (sum(got) == sum(right) - len(text), f"{case}each token sees itself, too"),
                   (list(got) != right, f"{case}not {list(got)}; which positions has a rank, what does each see?"))  # fmt: skip
    return "each rank's pairs, whatever texts there are and whoever has which positions"


def _cards(ranks: int, rank: int, sequence: int) -> torch.Tensor:
    """Rank r has every `ranks`-th position, from r on."""
    return torch.arange(rank, sequence, ranks)
