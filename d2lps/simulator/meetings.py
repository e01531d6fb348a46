"""Calls that every rank of a group makes together: they return when the last one has come, and take no time."""

from __future__ import annotations

from collections import defaultdict

from d2lps.comm import RankDied
from d2lps.simulator.scheduler import Scheduler, Task


class Meetings:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._said: defaultdict[tuple[str, str], dict[int, object]] = defaultdict(dict)  # (group, call) -> rank -> word
        self._waiting: defaultdict[tuple[str, str], dict[int, Task]] = defaultdict(dict)
        self.dead: dict[int, str] = {}  # rank of the run -> how it died

    def meet(self, task: Task, members: list[int], group: str, call: str, word: object) -> dict[int, object]:
        """What every rank of the group said, by rank of the run."""
        for rank in members:
            if rank in self.dead:
                raise RankDied(self.dead[rank])
        key = group, call
        words = self._said[key]
        words[task.rank] = word
        if len(words) < len(members):
            self._waiting[key][task.rank] = task
            self.scheduler.block(task, (call, group))
        else:
            del self._said[key]
            for other in self._waiting.pop(key, {}).values():
                self.scheduler.happened(other)
        return words

    def lost(self, rank: int, how: str, members: dict[str, list[int]]) -> None:
        """A rank has died: who waits for it at a meeting hears of it, and whoever comes to one with it."""
        self.dead[rank] = how
        for group, call in list(self._said):
            if rank in members[group]:
                del self._said[group, call]
                for other, task in self._waiting.pop((group, call), {}).items():
                    if other != rank:
                        self.scheduler.fail(task, RankDied(how))
