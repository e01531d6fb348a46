"""The worker processes of a run: a group of ranks that may outlive one of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import zmq

from d2lps.comm import RankHung
from d2lps.kvstore.chaos import Cluster
from d2lps.kvstore.coordinator import Coordinator
from d2lps.launch.group import Group
from d2lps.launch.rank import Job, Success


class Workers(Group):
    """As the ranks of `d2lps.run`, but with an eye on the servers; and the death of one need not be the end of all."""

    def __init__(
        self, job: Job, live: bool, memory: int, coordinator: Coordinator, go_on: bool, begun: Callable[[int], bool]
    ) -> None:
        super().__init__(job, live, coordinator.plan.room)
        self.memory = memory  # the file that they share, as a descriptor; -1 if they share none
        self.coordinator, self.go_on, self.begun = coordinator, go_on, begun
        self.lost: dict[int, str] = {}
        self.cluster: Cluster | None = None  # in the hands of a saboteur

    def meeting_place(self) -> Any:
        """The servers have this file already."""
        return open(self.memory, "r+b", 0, closefd=False) if self.memory >= 0 else super().meeting_place()

    def collect(self, patience: float) -> None:
        """Wait for words of workers or servers; take in both, and what the saboteur raises."""
        own = [self.keeper.fileno(), *(control.fileno() for control in self.pending.values())]
        zmq.select([self.coordinator.control, *own, *self.coordinator.waited_for()], [], [], patience)
        super().collect(0)
        if self.go_on and len(self.dead) + len(self.lost) < self.job.ranks and all(map(self.begun, self.dead)):
            for rank in list(self.dead):
                self._lose(rank)
        self.coordinator.look()
        if self.cluster is not None:
            self.cluster.check()

    def check_waits(self) -> None:
        """A hang may be a server's."""
        try:
            super().check_waits()
        except RankHung as error:
            for server, node in enumerate(self.coordinator.serving):
                if node.stopped:
                    error.add_note(f"server {server} is stopped (SIGSTOP)")
            raise

    def _lose(self, rank: int) -> None:
        """The run goes on without it."""
        death = self.died(rank)
        del self.dead[rank]
        self.lost[rank] = str(death)
        warnings.warn(f"{death}; the others go on without it", stacklevel=2)
        self.outcomes[rank] = Success(cloudpickle.dumps((None, 0.0)), float("inf"), 0.0)
        self.coordinator.say(str(death).splitlines()[0])
        self.coordinator.lose(rank)
