"""Waiting: a rank looks a few times, offers its core to the others in between, and then sleeps until another wakes it.

Two ranks on two cores see each other's writes within a microsecond, so a moment of looking is worth its while; and where
ranks outnumber cores, offering the core lets the very rank run that is waited for. But only for a moment: a rank that waits
long sleeps, and burns nothing. A sleeper says so on its desk, and for whom it waits, so that nobody wakes it in vain.

A long wait also looks for those who will never come, but only among the ranks that it waits for. Leaving is not dying: a rank
that has nothing more to do says so on its desk, and breaks nobody; who needs something of it still learns that it has left.
"""

import ctypes
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from d2lps.comm import RankDied, RankFailed, RankHung
from d2lps.comm.status import IN_VAIN
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import LINE, Arena

_BELL, _SLEEPS_FOR, _PROCESS, _END, _CULPRIT = range(5)  # the words of a desk
_AWAKE, _ANYONE = 0, 1  # what a sleeper says; from 2 on it is the only rank that may wake it, + 2
_HERE, _LEFT, _FAILED = range(3)  # how a rank has ended, as it says itself
_YIELDS = 20  # how often a core is offered before sleep, a microsecond each if nobody takes it
_FIRST_SLEEP, _SLEEP = 0.002, 0.1  # seconds; after the first, a note says what the rank waits for; after each, who is gone?
_ENDINGS = {_HERE: "has died", _LEFT: "has left", _FAILED: "has failed, which tells why itself"}


class _Note(threading.local):
    """What a thread calls once when its wait turns out to be long, and again if it is in vain (`IN_VAIN`).

    It says whether somebody reads it, and ends the ranks with a better explanation than this one could give.
    """

    write: Callable[..., bool] | None = None
    written = False

    def leave(self, *since: float) -> bool:
        self.written = self.write is not None
        return self.write is not None and self.write(*since)


class Waiting:
    """How one rank waits for others and wakes them. numbers: what the ranks are called in messages; timeout: of one wait."""

    def __init__(self, arena: Arena, timeout: float, numbers: Sequence[int]) -> None:
        self.words, self.rank, self.timeout, self.numbers = arena.words, arena.rank, timeout, numbers or range(arena.ranks)
        self._desk = [(arena.layout.desks + rank * LINE) // 8 for rank in range(arena.ranks)]
        self._sleeps_for = [desk + _SLEEPS_FOR for desk in self._desk]
        self._addresses = [ctypes.c_void_p(arena.base + 8 * (desk + _BELL)) for desk in self._desk]
        self._wakings, self._sleepers = itertools.count(), 0
        self._lock = threading.Lock()  # a rank may have several threads, each with a wait and a note of its own
        self.note = _Note()
        self._patience = _YIELDS if arena.ranks > len(os.sched_getaffinity(0)) else 4 * _YIELDS
        self._write(_PROCESS, os.getpid())
        weakref.finalize(self, _end, self.words, self._desk[self.rank])  # with the last reference, or the interpreter

    def _read(self, rank: int, what: int) -> int:
        return self.words[self._desk[rank] + what]

    def _write(self, what: int, value: int) -> None:
        self.words[self._desk[self.rank] + what] = value

    # ---- the one who has something to tell ------------------------------------------------------------------------

    def wake(self, ranks: Iterable[int], come: bool = False) -> None:
        """Wake those that sleep until anyone has news, or until this rank has come."""
        linux.full_fence()  # what they will look for is there before we look whether they sleep
        may_wake = (_ANYONE, self.rank + 2) if come else (_ANYONE,)
        for rank in ranks:
            if self.words[self._sleeps_for[rank]] in may_wake:
                self._ring(rank)

    def leave(self, failed: bool) -> None:
        """Say that this rank will do nothing for the others any more; if it has failed, who waits for it fails too, at once."""
        if self._read(self.rank, _END) == _HERE:
            self._write(_END, _FAILED if failed else _LEFT)
        linux.full_fence()
        for rank in range(len(self._desk)):
            self._ring(rank)

    def _ring(self, rank: int) -> None:
        # Any rank may write a bell, without a lock: what counts is that the number is never the one that a sleeper has seen.
        self.words[self._desk[rank] + _BELL] = self.rank << 20 | next(self._wakings) % (1 << 20)
        linux.wake(self._addresses[rank])

    # ---- the one who waits ----------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]], only: int | None = None) -> None:
        """Return when `ready()`; an error if one of the ranks that are `awaited()` is gone. only: who alone can change it."""
        for _ in range(self._patience):  # even where every rank could have a core, the awaited one may lack it just now
            if ready():
                return
            os.sched_yield()
        started, slow = time.monotonic(), False
        self._sleep_for(1, only)
        try:
            while True:
                seen = self._read(self.rank, _BELL)
                linux.full_fence()  # the desk says that we wait before we look for the last time
                if ready():
                    return
                if (waited := time.monotonic() - started) > _FIRST_SLEEP:
                    if not slow:
                        self.note.leave()
                    slow = True
                    self._look_for_the_gone(ready, awaited)
                if waited > self.timeout:
                    raise RankHung(f"rank {self.numbers[self.rank]} has waited for more than timeout={self.timeout:g} s")
                linux.wait(self._addresses[self.rank], seen, _SLEEP if slow else _FIRST_SLEEP)
        finally:
            self._sleep_for(-1, None)

    def wait_in_vain(self, *awaited: int) -> None:
        """An error, as soon as it is known why one of them will not come; or until somebody who watches ends it."""
        self.wait(lambda: False, lambda: awaited)

    def _sleep_for(self, change: int, only: int | None) -> None:
        """Say on this rank's desk who may wake it, when one of its threads more, or one less, is waiting."""
        with self._lock:
            self._sleepers += change
            only = only if self._sleepers == 1 else None
            self._write(_SLEEPS_FOR, _AWAKE if not self._sleepers else _ANYONE if only is None else only + 2)

    # ---- those who will never come --------------------------------------------------------------------------------

    def _look_for_the_gone(self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Raise if a rank is gone that this one waits for, and has not done its part before it went."""
        gone = [rank for rank in awaited() if self._is_gone(rank)]
        if not gone or ready():
            return
        rank = self._read(gone[0], _CULPRIT) - 1  # one that went for want of another: that is to be told
        rank = rank if rank >= 0 else gone[0]
        how = self._read(rank, _END)
        if how == _LEFT and self.note.leave(IN_VAIN):
            return
        self._write(_CULPRIT, rank + 1)
        told = f"rank {self.numbers[rank]} {_ENDINGS[how]}, while rank {self.numbers[self.rank]} was waiting"
        raise RankFailed(told) if how == _FAILED else RankDied(told)

    def _is_gone(self, rank: int) -> bool:
        process = self._read(rank, _PROCESS)
        if rank == self.rank or not process:  # it has not begun yet
            return False
        return self._read(rank, _END) != _HERE or not linux.is_alive(process)


def _end(words: memoryview, desk: int) -> None:
    """The mark of a rank that ends by itself; a process that it has forked is not the rank."""
    if words[desk + _PROCESS] == os.getpid() and words[desk + _END] == _HERE:
        words[desk + _END] = _LEFT
