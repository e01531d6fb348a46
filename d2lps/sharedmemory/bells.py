"""Waiting: a rank looks a few times, offers its core to the others in between, and then sleeps until another rings its bell.

Two ranks on two cores see each other's writes within a microsecond, so a moment of looking is worth its while; and where
ranks outnumber cores, offering the core lets the very rank run that is waited for. But only for a moment: a rank that waits
long sleeps, and burns nothing. A sleeper says so on its desk, and for whom it waits, so that nobody rings in vain.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from d2lps.comm import RankDied
from d2lps.sharedmemory import futex
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE

_BELL, _AWAITED, _PROCESS = 0, 8, 16  # bytes from the start of a desk
_AWAKE, _ANYONE = 0, 1  # what a desk says; from 2 on it is the awaited rank + 2
_YIELDS = 20  # how often a core is offered before sleep, a microsecond each if nobody takes it
_FIRST_SLEEP, _SLEEP = 0.002, 0.1  # seconds; after the first, a note says where the rank stands; after each, who has died?


class Bells:
    """The desks of all ranks, as one rank uses them."""

    def __init__(self, arena: Arena) -> None:
        desks, self.rank = arena.layout.desks, arena.rank
        self.ints, self.words = arena.ints, arena.words
        self._desk = [desks + rank * LINE for rank in range(arena.ranks)]
        self._addresses = [ctypes.c_void_p(arena.base + desk + _BELL) for desk in self._desk]
        self._awaited = [(desk + _AWAITED) // 8 for desk in self._desk]
        self._mine = self._desk[self.rank] // 4
        self._rung = self._sleepers = 0
        self._lock = threading.Lock()  # a rank may have several threads
        self.long_wait: Callable[[], None] = lambda: None  # called once when a wait turns out to be long
        self._patience = _YIELDS if arena.ranks > len(os.sched_getaffinity(0)) else 4 * _YIELDS
        self.words[(self._desk[self.rank] + _PROCESS) // 8] = os.getpid()

    # ---- the one who has something to tell ------------------------------------------------------------------------

    def ring(self, rank: int) -> None:
        """Wake a rank that sleeps until anyone comes."""
        futex.full_fence()  # what it will look for is there before we look whether it sleeps
        if self.words[self._awaited[rank]] == _ANYONE:
            self._wake(rank)

    def ring_all(self, ranks: Sequence[int]) -> None:
        """Wake those of the ranks that sleep until this rank comes, or anyone."""
        futex.full_fence()
        for rank in ranks:
            if self.words[self._awaited[rank]] in (_ANYONE, self.rank + 2):
                self._wake(rank)

    def _wake(self, rank: int) -> None:
        # Any rank may write a bell, without a lock: what counts is that the number is never the one that a sleeper has seen.
        self._rung = (self._rung + 1) % (1 << 20)
        self.ints[self._desk[rank] // 4] = self.rank << 20 | self._rung
        futex.wake(self._addresses[rank])

    # ---- the one who waits ----------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], group: Sequence[int], awaited: int | None = None) -> None:
        """Return when `ready()`; RankDied if meanwhile a rank of the group ends. `awaited`: the one rank that can change it."""
        if self._soon(ready):
            return
        started = time.monotonic()
        self._write(1, awaited)
        try:
            while True:
                seen = self.ints[self._mine]
                futex.full_fence()  # the desk says that we wait before we look for the last time
                if ready():
                    return
                slow = time.monotonic() - started > _FIRST_SLEEP
                if slow:
                    self._consider(group)
                futex.wait(self._addresses[self.rank], seen, _SLEEP if slow else _FIRST_SLEEP)
        finally:
            self._write(-1, None)

    def _write(self, change: int, awaited: int | None) -> None:
        """Say on this rank's desk for whom it waits, when one of its threads more, or one less, is waiting."""
        with self._lock:
            self._sleepers += change
            said = _ANYONE if self._sleepers else _AWAKE
            if self._sleepers == 1 and awaited is not None:
                said = awaited + 2
            self.words[self._awaited[self.rank]] = said

    def _soon(self, ready: Callable[[], bool]) -> bool:
        """Look again for a moment. Even where every rank could have a core, the one that is waited for may lack it just now."""
        for _ in range(self._patience):
            if ready():
                return True
            os.sched_yield()
        return ready()

    # ---- the dead -------------------------------------------------------------------------------------------------

    def _consider(self, group: Sequence[int]) -> None:
        """A long wait: leave a note, and see whether somebody of the group will never come."""
        note, self.long_wait = self.long_wait, lambda: None
        note()
        if not self.words[0]:
            dead = [rank for rank in group if not self._lives(rank)]
            if not dead:
                return
            self.words[0] = dead[0] + 1  # whoever waits for one who waits for the dead shall know too
            futex.full_fence()
            for rank in range(len(self._desk)):
                self._wake(rank)
        raise RankDied(f"rank {self.words[0] - 1} has died, while rank {self.rank} was waiting")

    def _lives(self, rank: int) -> bool:
        """A process that has ended is gone from /proc, or is there as a zombie until it is buried."""
        process = self.words[(self._desk[rank] + _PROCESS) // 8]
        if rank == self.rank or not process:  # it has not begun yet
            return True
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            return False
