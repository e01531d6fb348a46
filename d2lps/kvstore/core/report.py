"""What a run with parameter servers gives back."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from d2lps.comm import Mismatch
from d2lps.kvstore.core.events import Event
from d2lps.kvstore.core.placement import join_parts
from d2lps.kvstore.core.server import Server
from d2lps.result import Run


@dataclass
class ServerReport:
    """One server's, at the end of a run. Bytes are those of tensors."""

    node: Any  # where it lived
    received: int = 0  # bytes pushed to it
    sent: int = 0  # bytes pulled from it
    requests: Counter[str] = field(default_factory=Counter)  # how many it got, by op
    staleness: Counter[int] = field(default_factory=Counter)  # reads, by how many clocks the slowest worker was behind
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # by the names of parts
    number: int = 0  # of the last event that it executed, in all runs that its folder has seen
    nbytes: int = 0  # of values and the optimizer's state
    tiers: Any = None  # what went to the disk and came back, if there was a memory budget
    log: list[tuple[float, Event]] = field(default_factory=list)  # (time, event), if it was asked for

    def closed(self, server: Server) -> ServerReport:
        """With what the server knows itself."""
        self.staleness, self.number = server.seen, server.number
        self.values = {key: entry.peek() for key, entry in server.entries.items()}
        self.tiers = deepcopy(getattr(server.store, "counts", None))
        self.nbytes = sum(entry.nbytes for entry in server.entries.values())
        return self


class StoreRun(Run):
    """A Run whose results are the workers', with what its servers have to report.

    >>> run = kvstore.simulate(worker, topology, 4, 2)      # doctest: +SKIP
    >>> run[0], run.staleness, run.values["w"], [server.nbytes for server in run.servers]       # doctest: +SKIP
    """

    def __init__(self, run: Run, workers: int) -> None:
        found = [result or (None, 0.0) for result in run.results[:workers]]  # of a worker that was killed, there is none
        super().__init__([result for result, _ in found], max(end for _, end in found), run._trace)
        self.servers: list[ServerReport] = run.results[workers:]
        _check_homes(self.servers)

    @property
    def staleness(self) -> Counter[int]:
        """How many reads were answered when the slowest worker was so many clocks behind the reader."""
        return sum((server.staleness for server in self.servers), Counter())

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """What the servers have at the end, by key, put together again."""
        return join_parts({name: value for server in self.servers for name, value in server.values.items()})


def _check_homes(servers: list[ServerReport]) -> None:
    """Every value has one home, but for copies. By load, each worker reckons where keys are by their order."""
    homes: dict[str, int] = {}
    for number, server in enumerate(servers):
        for name in server.values:
            if name in homes and not name.endswith("[*]"):
                where = f"{name!r} is on servers {homes[name]} and {number}"
                raise Mismatch(f"{where}: under placement='load' all workers must name the keys in the same order")
            homes[name] = number
