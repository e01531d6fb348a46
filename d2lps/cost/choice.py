"""Which all-reduce is the cheapest, by the formulas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from d2lps.cost.numbers import check, in_words
from d2lps.cost.reducing import Levels, all_reduce

# What is assumed of real processes before anything is measured: about what gloo's messages take within one machine. In shared
# memory both are several times smaller; the choice depends on alpha / beta, here 70 kB, which stays within a factor of three.
ALPHA = 100e-6  # seconds
BETA = 1 / 0.7e9  # seconds per byte: a ring of 4 ranks on gloo's send and receive moves 240 MB a rank in 0.35 s

# Of equally good ones the first wins. `two_rings` is none of them: it needs links of its own for each ring.
CANDIDATES = ("ring", "blockwise", "halving_doubling", "double_tree", "tree", "flat")


@dataclass(frozen=True)
class Choice:
    """The cheapest algorithm and its seconds; `table` has (algorithm, seconds, of which latency), best first.

    >>> print(choose(160e6, 6, alpha=10e-6, beta=1 / 16e9))
    all-reduce of 160,000,000 bytes, 6 ranks, alpha 10 us, 16 GB/s: ring
                         total     latency    transfer
    ring              16.77 ms      100 us    16.67 ms
    blockwise         16.77 ms      100 us    16.67 ms
    double_tree       21.29 ms       40 us    21.25 ms
    halving_doubling  35.06 ms       60 us       35 ms
    tree              60.06 ms       60 us       60 ms
    flat              100.1 ms      100 us      100 ms
    """

    question: str
    table: tuple[tuple[str, float, float], ...]

    @property
    def algorithm(self) -> str:
        return self.table[0][0]

    @property
    def seconds(self) -> float:
        return self.table[0][1]

    def __str__(self) -> str:
        lines = [f"{self.question}: {self.algorithm}", f"{'':16}{'total':>10}{'latency':>12}{'transfer':>12}"]
        for name, total, latency in self.table:
            lines.append(f"{name:16}{in_words(total):>10}{in_words(latency):>12}{in_words(total - latency):>12}")
        return "\n".join(lines)


def choose(
    nbytes: float, ranks: int, alpha: float, beta: float,
    *, overhead: float | None = None, inner: Levels = (), ports: str = "device", candidates: Sequence[str] = CANDIDATES,
) -> Choice:
    """The cheapest all-reduce, and what the others would take.

    >>> choose(1e3, 6, alpha=10e-6, beta=1 / 16e9).algorithm, choose(1e9, 6, alpha=10e-6, beta=1 / 16e9).algorithm
    ('double_tree', 'ring')

    overhead: seconds between two messages that a rank sends at once. By default alpha: a rank deals with one message
    after another, as real ones by and large do; 0, as in our simulator, lets `blockwise` win. inner, ports: levels inside
    the one of alpha and beta, as of `hierarchical`, which is then a candidate too. The others are charged the outermost
    level for every message, except "halving_doubling", where all numbers are powers of two: its ranks are taken to be
    in the order of their groups. No formula knows of crowded switches, and the one of `double_tree` is a bound.
    """
    check(nbytes, ranks, alpha, beta)
    asked: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in candidates}
    if "blockwise" in asked:
        asked["blockwise"] = "blockwise", {"overhead": alpha if overhead is None else overhead}
    if inner:
        asked["hierarchical"] = "hierarchical", {"inner": inner, "ports": ports}
        if "halving_doubling" in asked and all(size.bit_count() == 1 for size in (ranks, *(level[0] for level in inner))):
            asked["halving_doubling"] = "hierarchical", {"inner": inner, "ports": ports, "by": "halving_doubling"}
    table = []
    for name, (formula, options) in asked.items():
        total, latency = (all_reduce(formula, n, ranks, alpha, beta, **options) for n in (nbytes, 0))
        table.append((name, total, latency))
    speed = f"{1 / beta / 1e9:.4g} GB/s" if beta else "infinite bandwidth"
    question = f"all-reduce of {nbytes:,.0f} bytes, {ranks} ranks, alpha {in_words(alpha)}, {speed}"
    # To 12 digits: of equally good ones the first shall win, whatever the last digit says.
    return Choice(question, tuple(sorted(table, key=lambda row: float(f"{row[1]:.12g}"))))
