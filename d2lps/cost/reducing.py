"""The time of an all-reduce, a function for each algorithm: (nbytes, ranks, alpha, beta) -> seconds.

The worked values are for D2L's machine without its latency: n = 160 MB, 4 ranks, 16 GB/s, so that n beta is 10 ms.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from d2lps.arguments import named
from d2lps.cost.numbers import check, log2_up

Levels = Sequence[tuple[int, float, float]]  # (how many in a group, alpha and beta among them), from the inside out
MOST_CHUNKS = 1024  # beyond, pipelining gains nothing that one could see


def all_reduce(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float, **options: Any) -> float:
    """Seconds by the formula of that name; `options` are those of the formula's own function.

    >>> all_reduce("tree", 160e6, 4, alpha=0, beta=1 / 16e9)
    0.04
    """
    formula = named("algorithm", algorithm, FORMULAS)
    check(nbytes, ranks, alpha, beta)
    return formula(nbytes, ranks, alpha, beta, **options)


def flat(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2(p - 1)(alpha + n beta) + (p - 1) n gamma: one after another to rank 0, one after another back. 60 ms.

    Source: Zhang et al., Dive into Deep Learning, "Parameter Servers": sum on one GPU.
    """
    return (ranks - 1) * (2 * (alpha + nbytes * beta) + nbytes * gamma)


def flat_together(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2 alpha + 2(p - 1) n beta + (p - 1) n gamma: all at once, sharing the port of the rank that adds. 60 ms."""
    return 2 * alpha * (ranks > 1) + (ranks - 1) * nbytes * (2 * beta + gamma)


def through_host(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2 alpha + 2 p n beta + (p - 1) n gamma: a host adds up, which has nothing of its own to add. 80 ms.

    Source: Zhang et al., Dive into Deep Learning, "Parameter Servers": sum on the CPU. The host is not one of the p ranks.
    """
    return 2 * alpha + 2 * ranks * nbytes * beta + (ranks - 1) * nbytes * gamma


def tree(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2 L (alpha + n beta) + L n gamma: a binomial tree to rank 0, and one back. 40 ms.

    Source: Thakur, Rabenseifner, Gropp 2005.
    """
    return log2_up(ranks) * (2 * (alpha + nbytes * beta) + nbytes * gamma)


def recursive_doubling(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """L (alpha + n beta + n gamma) for a power of two: each swaps all it has with a partner, 1, 2, 4, ... away. 20 ms.

    Else (floor(log2 p) + 2)(alpha + n beta), and one n gamma less: the excess ranks hand in their data first and get the
    result last. Source: Thakur, Rabenseifner, Gropp 2005.
    """
    floor = ranks.bit_length() - 1
    excess = 0 if ranks == 2**floor else 1
    return (floor + 2 * excess) * (alpha + nbytes * beta) + (floor + excess) * nbytes * gamma


def halving_doubling(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2 L alpha + 2(p - 1)/p n beta + (p - 1)/p n gamma for a power of two. 15 ms.

    Else, with q the power of two below: (2 log2 q + 2) alpha + (2(q - 1)/q + 2) n beta + ((q - 1)/q + 1) n gamma.
    Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005.
    """
    floor = ranks.bit_length() - 1
    share, excess = 1 - 1 / 2**floor, 0 if ranks == 2**floor else 1
    return 2 * (floor + excess) * alpha + (share + excess) * nbytes * (2 * beta + gamma)


def ring(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2(p - 1) alpha + 2(p - 1)/p n beta + (p - 1)/p n gamma: two times round, n/p bytes a step. 15 ms.

    Source: Patarasuk, Yuan 2009, who prove that no all-reduce sends fewer bytes.
    """
    return (ranks - 1) * (2 * alpha + nbytes / ranks * (2 * beta + gamma))


def two_rings(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """2(p - 1) alpha + (p - 1)/p n beta + (p - 1)/p n gamma: half of the data each way round. 7.5 ms.

    beta is that of one ring's links, which the other does not use. Where each rank has only one port both rings share
    it, and take as long as one.
    """
    return (ranks - 1) * (2 * alpha + nbytes / ranks * (beta + gamma))


def blockwise(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0, overhead: float = 0.0) -> float:
    """2 alpha + 2(p - 1)/p n beta + (p - 1)/p n gamma: everyone adds up one block, all messages at once. 15 ms.

    overhead: seconds between two messages that a rank sends (the gap of LogP, Culler et al. 1993): 2(p - 2) of them more.
    Source: Zhang et al., Dive into Deep Learning, "Parameter Servers".
    """
    latency = 2 * alpha + 2 * (ranks - 2) * overhead if ranks > 1 else 0.0
    return latency + (ranks - 1) / ranks * nbytes * (2 * beta + gamma)


def best_chunks(nbytes: float, ranks: int, alpha: float, beta: float) -> int:
    """The C that makes `double_tree` fastest: sqrt((H - 1) n beta / alpha), from 1 to 1024, with H = floor(log2 p).

    >>> best_chunks(160e6, 16, alpha=10e-6, beta=1 / 16e9)
    55
    """
    work = (ranks.bit_length() - 2) * nbytes * beta
    if work <= 0:
        return 1
    return max(1, round(math.sqrt(work / alpha))) if work < MOST_CHUNKS**2 * alpha else MOST_CHUNKS


def double_tree(nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0, chunks: int | None = None) -> float:
    """At most 2(C + H - 1)(alpha + n beta / C) + (C + H - 1) n gamma / C. 22 ms for C = 10 chunks.

    H = floor(log2 p) is the height of the trees. At the best C this is 2(H - 1) alpha + 2 n beta and a term for the
    pipeline's filling, 4 sqrt((H - 1) n alpha beta). A bound: ranks near the roots have less to wait for. Source: derived;
    within the bound of Sanders, Speck, Traeff 2009: 4 L alpha + 2 n beta, and a term of the order of sqrt(L n alpha beta).
    """
    count = best_chunks(nbytes, ranks, alpha, beta) if chunks is None else chunks
    turns = count + ranks.bit_length() - 2
    return turns * (2 * alpha + nbytes / count * (2 * beta + gamma)) if ranks > 1 else 0.0


def hierarchical(
    nbytes: float, ranks: int, alpha: float, beta: float,
    *, inner: Levels = (), ports: str = "device", by: str = "ring", gamma: float = 0.0,
) -> float:
    """2(g - 1) a + 2(g - 1)/g n b inside groups of g, then 2(k - 1) alpha + 2(k - 1)/k n/g beta across the k = p/g groups.

    inner: (g, a, b) of each level inside the outermost one, from the inside out; each divides n by its g. ports: "device",
    each rank has its own port to the outside; "node", all ranks of an innermost group share one, which carries n, not n/g.
    With inner=[(2, 0, 1 / 160e9)], so that n b is 1 ms: 1 + 5 = 6 ms; 1 + 10 = 11 ms by one port. Gamma counts as in `ring`.
    by: what runs on each level. "halving_doubling" over all ranks is that of itself, where g and k are powers of two and
    the ranks of a group follow one another: its nearest partners come first. Source: Cho et al. 2019 (BlueConnect).
    """
    named("ports", ports, {"device": 0, "node": 0})
    formula = named("by", by, {"ring": ring, "halving_doubling": halving_doubling})
    groups = math.prod(size for size, _, _ in inner)
    if ranks % groups:
        raise ValueError(f"inner={inner!r}: {ranks} ranks cannot be divided into such groups")
    seconds, below = 0.0, 1  # so many ranks share the data by now
    for size, a, b in [*inner, (ranks // groups, alpha, beta)]:
        crowd = below if ports == "node" else 1
        seconds += formula(nbytes / below, size, a, b * crowd, gamma=gamma)
        below *= size
    return seconds


def in_switch(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """alpha + n (1 + 1/p) beta: the switch adds up, and each rank's port carries n and a little more. 12.5 ms.

    As NVLink SHARP does. Derived; fits what is measured on 5 to 8 H100 within 2% (NVIDIA/nccl issue 1455).
    """
    return alpha + nbytes * (1 + 1 / ranks) * beta if ranks > 1 else 0.0


_FORMULAS: list[Callable[..., float]] = [flat, flat_together, through_host, tree, double_tree, recursive_doubling]
_FORMULAS += [halving_doubling, ring, two_rings, blockwise, hierarchical, in_switch]
FORMULAS = {formula.__name__: formula for formula in _FORMULAS}
