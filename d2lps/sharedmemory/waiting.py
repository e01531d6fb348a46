"""Waiting: a rank looks a few times, offers its core to the others in between, and then sleeps until another wakes it.

Two ranks on two cores see each other's writes within a microsecond, so a moment of looking is worth its while; and where
ranks outnumber cores, offering the core lets the very rank run that is waited for. But only for a moment: a rank that waits
long sleeps, and burns nothing. A sleeper says so on its desk, and for whom it waits, so that nobody wakes it in vain.

A long wait also looks for those who will never come, but only among the ranks that it waits for. Leaving is not dying: a rank
that has nothing more to do says so on its desk, and breaks nobody; who needs something of it still learns that it has left.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from d2lps.comm import RankDied, RankFailed, RankHung
from d2lps.sharedmemory import futex
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE
from d2lps.sharedmemory.procfs import is_alive

_BELL, _SLEEPS_FOR, _PROCESS, _END, _CULPRIT = 0, 8, 16, 24, 32  # bytes from the start of a desk
_AWAKE, _ANYONE = 0, 1  # what a sleeper says; from 2 on it is the only rank that may wake it, + 2
_HERE, _LEFT, _FAILED = range(3)  # how a rank has ended, as it says itself
_YIELDS = 20  # how often a core is offered before sleep, a microsecond each if nobody takes it
_FIRST_SLEEP, _SLEEP = 0.002, 0.1  # seconds; after the first, a note says where the rank stands; after each, who is gone?
_ENDINGS = {_HERE: "has died", _LEFT: "has left", _FAILED: "has failed, which tells why itself"}

Note = Callable[[bool], bool]


class Waiting:
    """How one rank waits for others and wakes them. numbers: what the ranks are called in messages; timeout: of one wait."""

    def __init__(self, arena: Arena, timeout: float = math.inf, numbers: Sequence[int] = ()) -> None:
        desks, self.rank = arena.layout.desks, arena.rank
        self.timeout, self.numbers = timeout, numbers or range(arena.ranks)
        self.ints, self.words = arena.ints, arena.words
        self._desk = [desks + rank * LINE for rank in range(arena.ranks)]
        self._addresses = [ctypes.c_void_p(arena.base + desk + _BELL) for desk in self._desk]
        self._sleeps_for = [(desk + _SLEEPS_FOR) // 8 for desk in self._desk]
        self._wakings, self._sleepers = itertools.count(), 0
        self._lock = threading.Lock()  # a rank may have several threads, each with a wait and a note of its own
        self._notes = threading.local()
        self._patience = _YIELDS if arena.ranks > len(os.sched_getaffinity(0)) else 4 * _YIELDS
        self._write(_PROCESS, os.getpid())
        at = (self._desk[self.rank] + _END) // 8
        weakref.finalize(self, _leave, self.words, at, os.getpid())  # with the last reference, or the interpreter

    def _read(self, rank: int, what: int) -> int:
        return self.words[(self._desk[rank] + what) // 8]

    def _write(self, what: int, value: int) -> None:
        self.words[(self._desk[self.rank] + what) // 8] = value

    # ---- the one who has something to tell ------------------------------------------------------------------------

    def wake(self, rank: int) -> None:
        """Wake a rank that sleeps until anyone comes."""
        futex.full_fence()  # what it will look for is there before we look whether it sleeps
        if self.words[self._sleeps_for[rank]] == _ANYONE:
            self._ring(rank)

    def wake_all(self, ranks: Sequence[int]) -> None:
        """Wake those of the ranks that sleep until this rank comes, or anyone."""
        futex.full_fence()
        for rank in ranks:
            if self.words[self._sleeps_for[rank]] in (_ANYONE, self.rank + 2):
                self._ring(rank)

    def leave(self) -> None:
        """Say that this rank will do nothing for the others any more, and wants nothing of them."""
        self._end(_LEFT)

    def give_up(self) -> None:
        """Say that this rank has failed: who waits for it fails too, at once."""
        self._end(_FAILED)

    def _end(self, how: int) -> None:
        if self._read(self.rank, _END) == _HERE:
            self._write(_END, how)
        futex.full_fence()
        for rank in range(len(self._desk)):
            self._ring(rank)

    def _ring(self, rank: int) -> None:
        # Any rank may write a bell, without a lock: what counts is that the number is never the one that a sleeper has seen.
        self.ints[self._desk[rank] // 4] = self.rank << 20 | next(self._wakings) % (1 << 20)
        futex.wake(self._addresses[rank])

    # ---- the one who waits ----------------------------------------------------------------------------------------

    def noting(self, note: Note | None) -> None:
        """What to call once when a wait of this thread turns out to be long, and again if it is in vain (True).

        Then it says whether somebody reads it, and ends the ranks with a better explanation than this one could give.
        """
        self._notes.note, self._notes.noted = note, False

    def noted(self) -> bool:
        """Whether it was called."""
        return getattr(self._notes, "noted", False)

    def wait(self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]], only: int | None = None) -> None:
        """Return when `ready()`; an error if one of the ranks that are `awaited()` is gone. only: who alone can change it."""
        if self._soon(ready):
            return
        started, noted = time.monotonic(), False
        self._sleep_for(1, only)
        try:
            while True:
                seen = self.ints[self._desk[self.rank] // 4]
                futex.full_fence()  # the desk says that we wait before we look for the last time
                if ready():
                    return
                slow = time.monotonic() - started > _FIRST_SLEEP
                if slow and not noted:
                    noted = True
                    self._note(in_vain=False)
                if slow:
                    self._look_for_the_gone(ready, awaited)
                if time.monotonic() - started > self.timeout:
                    raise RankHung(f"rank {self.numbers[self.rank]} has waited for more than timeout={self.timeout:g} s")
                futex.wait(self._addresses[self.rank], seen, _SLEEP if slow else _FIRST_SLEEP)
        finally:
            self._sleep_for(-1, None)

    def _note(self, in_vain: bool) -> bool:
        note: Note | None = getattr(self._notes, "note", None)
        self._notes.noted = True
        return note is not None and note(in_vain)

    def _sleep_for(self, change: int, only: int | None) -> None:
        """Say on this rank's desk who may wake it, when one of its threads more, or one less, is waiting."""
        with self._lock:
            self._sleepers += change
            said = _ANYONE if self._sleepers else _AWAKE
            if self._sleepers == 1 and only is not None:
                said = only + 2
            self.words[self._sleeps_for[self.rank]] = said

    def _soon(self, ready: Callable[[], bool]) -> bool:
        """Look again for a moment. Even where every rank could have a core, the one that is waited for may lack it just now."""
        for _ in range(self._patience):
            if ready():
                return True
            os.sched_yield()
        return ready()

    # ---- those who will never come --------------------------------------------------------------------------------

    def _look_for_the_gone(self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Raise if a rank is gone that this one waits for, and has not done its part before it went."""
        gone = [rank for rank in awaited() if self._is_gone(rank)]
        if not gone or ready():
            return
        rank = self._read(gone[0], _CULPRIT) - 1  # one that went for want of another: that is to be told
        rank = rank if rank >= 0 else gone[0]
        how = self._read(rank, _END)
        if how == _LEFT and self._note(in_vain=True):
            return
        self._write(_CULPRIT, rank + 1)
        told = f"rank {self.numbers[rank]} {_ENDINGS[how]}, while rank {self.numbers[self.rank]} was waiting"
        raise RankFailed(told) if how == _FAILED else RankDied(told)

    def _is_gone(self, rank: int) -> bool:
        process = self._read(rank, _PROCESS)
        if rank == self.rank or not process:  # it has not begun yet
            return False
        return self._read(rank, _END) != _HERE or not is_alive(process)


def _leave(words: memoryview, at: int, process: int) -> None:
    """The mark of a rank that ends by itself; a process that it has forked is not the rank."""
    if os.getpid() == process and words[at] == _HERE:
        words[at] = _LEFT
