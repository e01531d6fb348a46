"""What the formulas are fed with, and how their results are written: in words, and as speeds."""

import math

from d2lps.arguments import named, whole


def log2_up(ranks: int) -> int:
    """ceil(log2 p): `[log2_up(p) for p in (1, 2, 3, 4, 5)] == [0, 1, 2, 2, 3]`"""
    return (ranks - 1).bit_length()


def check(nbytes: float, ranks: int, alpha: float, beta: float) -> None:
    whole("ranks", ranks)
    for name, value in (("nbytes", nbytes), ("alpha", alpha), ("beta", beta)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} is not a number from 0 up")


def in_words(seconds: float) -> str:
    """`in_words(0.005185) == "5.185 ms"`"""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


# ---- speeds, as NVIDIA's nccl-tests print them (PERFORMANCE.md there) --------------------------------------------------


def algbw(nbytes: float, seconds: float) -> float:
    """n / t, bytes per second: what the caller sees. `algbw(16e9, 2.0) == 8e9`

    nbytes: of the whole array, for reduce-scatter and all-gather too.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r} is not above 0")
    return nbytes / seconds


def busbw(collective: str, nbytes: float, seconds: float, ranks: int) -> float:
    """algbw times what the best algorithm moves through a port for each byte: to compare with the hardware's bandwidth.

    2(p - 1)/p for all_reduce; (p - 1)/p for reduce_scatter, all_gather, all_to_all, gather and scatter; 1 for broadcast
    and reduce.

    >>> round(busbw("all_reduce", 2**30, 8142.6e-6, 8) / 1e9, 1)     # 8 A100, NVIDIA/nccl issue 527
    230.8
    """
    check(nbytes, ranks, 0.0, 0.0)
    part = (ranks - 1) / ranks
    parts = dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"), part)
    factor = named("collective", collective, {"all_reduce": 2 * part, **parts, "broadcast": 1.0, "reduce": 1.0})
    return algbw(nbytes, seconds) * factor
