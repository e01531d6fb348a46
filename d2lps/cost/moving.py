"""The time of the other seven collectives, by algorithm; the names are those of `d2lps.collectives`.

n is all the data: the sum of the list that scatter, gather, all_gather, reduce_scatter and all_to_all work on, one's own
part included. The worked values are for 4 ranks and n beta = 10 ms, without latency. Source of all, where no other is
given: Thakur, Rabenseifner, Gropp 2005.
"""

from d2lps.arguments import named
from d2lps.cost.numbers import check, log2_up


def broadcast(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """flat: (p - 1)(alpha + n beta), 30 ms. tree: L (alpha + n beta), 20 ms.

    >>> broadcast("tree", 160e6, 4, alpha=0, beta=1 / 16e9)
    0.02
    """
    check(nbytes, ranks, alpha, beta)
    return named("algorithm", algorithm, {"flat": ranks - 1, "tree": log2_up(ranks)}) * (alpha + nbytes * beta)


def reduce(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """flat: (p - 1)(alpha + n beta + n gamma), 30 ms. tree: L (alpha + n beta + n gamma), 20 ms."""
    return broadcast(algorithm, nbytes, ranks, alpha, beta + gamma)


def scatter(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """linear: (p - 1) alpha + (p - 1)/p n beta. tree: L alpha + (p - 1)/p n beta. 7.5 ms."""
    return _parts(algorithm, {"linear": ranks - 1, "tree": log2_up(ranks)}, nbytes, ranks, alpha, beta)


def gather(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """As `scatter`, whose way back it is. 7.5 ms."""
    return scatter(algorithm, nbytes, ranks, alpha, beta)


def all_gather(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """ring: (p - 1) alpha + (p - 1)/p n beta. bruck: L alpha + (p - 1)/p n beta (Bruck et al. 1997). 7.5 ms."""
    return _parts(algorithm, {"ring": ranks - 1, "bruck": log2_up(ranks)}, nbytes, ranks, alpha, beta)


def reduce_scatter(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float, *, gamma: float = 0.0) -> float:
    """ring and pairwise: (p - 1) alpha + (p - 1)/p n (beta + gamma). 7.5 ms."""
    return _parts(algorithm, {"ring": ranks - 1, "pairwise": ranks - 1}, nbytes, ranks, alpha, beta + gamma)


def all_to_all(algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """pairwise: (p - 1) alpha + (p - 1)/p n beta, 7.5 ms. direct: alpha + (p - 1)/p n beta, 7.5 ms.

    bruck: L alpha + n/2 L beta for a power of two, 10 ms: fewer messages, but each part travels several times. It has a price
    alone: the library does not implement it.
    """
    if algorithm == "bruck":
        check(nbytes, ranks, alpha, beta)
        if ranks & (ranks - 1):
            raise ValueError(f"ranks={ranks}: the formula of Bruck's all-to-all is for powers of two")
        return log2_up(ranks) * (alpha + nbytes / 2 * beta)
    return _parts(algorithm, {"pairwise": ranks - 1, "direct": int(ranks > 1), "bruck": 0}, nbytes, ranks, alpha, beta)


def _parts(algorithm: str, messages: dict[str, int], nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """So many messages one after another, which bring all parts but one's own."""
    check(nbytes, ranks, alpha, beta)
    return named("algorithm", algorithm, messages) * alpha + (ranks - 1) / ranks * nbytes * beta
