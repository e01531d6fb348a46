"""Seconds as speeds, as NVIDIA's nccl-tests print them (PERFORMANCE.md there)."""

from d2lps.cost.numbers import check, named


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
