"""The all-reduce that the explorers simulate: ours by name, or a reader's own function."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import Topology
from d2lps.widgets.texts import NAMES

Algorithm = str | Callable[[Communicator, torch.Tensor], Any]  # one of all_reduce's, or a function of one's own


def described(algorithms: Sequence[Algorithm]) -> list[dict[str, Any]]:
    """[{"name": what readers see, "style": the number of its color and dashes}]: the same in every widget."""
    if isinstance(algorithms, str) or not algorithms:
        raise ValueError(f"algorithms={algorithms!r} must be a list of at least one name or function")
    styles: dict[Any, int] = {algorithm: style for style, algorithm in enumerate(NAMES)}
    names: dict[Any, str] = NAMES  # a function has its own
    return [{"name": names.get(a, getattr(a, "__name__", str(a))), "style": styles.get(a, len(NAMES))} for a in algorithms]


def simulated(algorithm: Algorithm, topology: Topology, nbytes: float, trace: bool = False) -> Run:
    """One all-reduce of so many bytes of float32, on all devices, without contents.

    >>> from d2lps.topology import pcie_tree
    >>> round(simulated("ring", pcie_tree(4, bandwidth=16e9, latency=0), 160e6).time, 9)
    0.015
    """
    if not nbytes >= 4:
        raise ValueError(f"nbytes={nbytes!r} is less than one float32 of 4 bytes")
    function = partial(all_reduce, algorithm=algorithm) if isinstance(algorithm, str) else algorithm
    return simulate(function, topology, torch.empty(int(nbytes) // 4, device="meta"), device="meta", trace=trace)
