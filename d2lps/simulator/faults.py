"""What happens to a described cluster while a function runs on it.

>>> from d2lps.simulator import simulate
>>> from d2lps.topology import star
>>> def pass_on(comm):
...     tensor = torch.ones(1000, device=comm.device)       # 4,000 bytes, 4 us at 1 GB/s
...     comm.send(tensor, 1) if comm.rank == 0 else comm.recv(tensor, 0)
>>> narrow = Narrow(("gpu0", "switch"), factor=2, at=2e-6)      # when half of it is through
>>> simulate(pass_on, star(2, bandwidth=1e9), faults=[narrow]).time
6e-06
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch  # noqa: F401  (for the example)

from d2lps.topology import Topology

Link = tuple[Hashable, Hashable]


@dataclass(frozen=True)
class Kill:
    """The ranks on a node die at a time; whoever waits for one of them gets a RankDied. `until`: then they begin anew, but for
    those that had returned before."""

    node: Hashable
    at: float
    until: float | None = None


@dataclass(frozen=True)
class Slow:
    """A node computes `factor` times as long."""

    node: Hashable
    factor: float
    at: float = 0.0
    until: float | None = None


@dataclass(frozen=True)
class Cut:
    """A cable (both directions) carries nothing: what is on it stands still, until it is mended."""

    link: Link
    at: float
    until: float | None = None


@dataclass(frozen=True)
class Narrow:
    """A cable (both directions) has `1 / factor` of its bandwidth."""

    link: Link
    factor: float
    at: float = 0.0
    until: float | None = None


Fault = Kill | Slow | Cut | Narrow


def check(faults: Sequence[Fault], topology: Topology, nodes: Sequence[Hashable]) -> None:
    """Name the fault that can't happen to this cluster, with ranks on these nodes."""
    if not isinstance(faults, list | tuple):
        raise TypeError(f"faults must be a list of Kill, Slow, Cut and Narrow, not {faults!r}")
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"faults must be Kill, Slow, Cut or Narrow, not {fault!r}")
        if not 0 <= fault.at < math.inf or not (fault.until is None or fault.at < fault.until < math.inf):
            raise ValueError(f"{fault}: at must be a time from 0 up, in seconds, and until a later one")
        if isinstance(fault, Slow | Narrow) and not 0 < fault.factor < math.inf:
            raise ValueError(f"{fault}: factor={fault.factor!r} is not a number above 0")
        if isinstance(fault, Kill | Slow) and fault.node not in nodes:
            raise ValueError(f"{fault}: no rank lives on {fault.node!r}")
        if isinstance(fault, Cut | Narrow) and not cables(fault.link, topology):
            raise ValueError(f"{fault}: {topology.name} has no link {fault.link!r}")


def cables(link: Link, topology: Topology) -> list[int]:
    """The numbers of a cable's two directions, of those that there are."""
    return [number for number, ends in enumerate(topology.links) if ends in (tuple(link), tuple(reversed(link)))]
