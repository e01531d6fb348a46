"""Waiting: a rank looks a few times, offers its core to the others in between, and then sleeps until another wakes it.

Two ranks on two cores see each other's writes within a microsecond, so a moment of looking is worth its while; and where
ranks outnumber cores, offering the core lets the very rank run that is waited for. But only for a moment: a rank that waits
long sleeps, and burns nothing. A sleeper says so on its desk: to wake one who is awake would cost a call of the kernel.

A long wait also looks for those who will never come, but only among the ranks that it waits for. Leaving is not dying: a rank
that has nothing more to do says so on its desk, and breaks nobody; who needs something of it still learns that it has left.
"""

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from d2lps.comm import RankDied, RankFailed, RankHung
from d2lps.comm.rank import running
from d2lps.comm.status import IN_VAIN
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import LINE, Arena

_HERE, _LEFT, _FAILED = range(3)  # how a rank has ended, as it says on its desk
_YIELDS = 20  # how often a core is offered before sleep, a microsecond each if nobody takes it
_FIRST_SLEEP, _SLEEP = 0.002, 0.1  # seconds; after the first, a note says what the rank waits for; after each, who is gone?
_ENDINGS = {_HERE: "has died", _LEFT: "has left", _FAILED: "has failed, which tells why itself"}


class Waiting:
    """How one rank waits for others and wakes them. numbers: what the ranks are called in messages; timeout: of one wait."""

    def __init__(self, arena: Arena, timeout: float, numbers: Sequence[int]) -> None:
        self.timeout, self.numbers, self.me = timeout, numbers or range(arena.ranks), arena.rank
        self._bell, self._sleepers, self._process, self._end, self._culprit = arena.columns(0, arena.ranks, 5)
        self._addresses = [ctypes.c_void_p(arena.base + rank * LINE) for rank in range(arena.ranks)]  # of the bells
        self._lock = threading.Lock()  # a rank may have several threads
        self._patience = _YIELDS if arena.ranks > len(os.sched_getaffinity(0)) else 4 * _YIELDS
        self._process[self.me] = os.getpid()
        weakref.finalize(self, _mark, self._process, self._end, self.me, _LEFT)  # with the last reference, or the interpreter

    # ---- the one who has something to tell ------------------------------------------------------------------------

    def wake(self, ranks: Iterable[int]) -> None:
        """Let those look that sleep."""
        linux.fence(full=True)  # what they will look for is there before we look whether they sleep
        for rank in ranks:
            if self._sleepers[rank]:
                self._bell[rank] = time.monotonic_ns()  # any number that a sleeper has not seen yet: nothing to lock
                linux.wake(self._addresses[rank])

    def leave(self, failed: bool) -> None:
        """Say that this rank will do nothing for the others any more; if it has failed, who waits for it fails too, at once."""
        _mark(self._process, self._end, self.me, _FAILED if failed else _LEFT)
        self.wake(range(len(self._end)))

    # ---- the one who waits ----------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Return when `ready()`; an error if one of the ranks that are `awaited()` is gone."""
        for _ in range(self._patience):  # even where every rank could have a core, the awaited one may lack it just now
            if ready():
                return
            os.sched_yield()
        started, slow = time.monotonic(), False
        with self._lock:
            self._sleepers[self.me] += 1
        try:
            while True:
                seen = self._bell[self.me]
                linux.fence(full=True)  # the desk says that we wait before we look for the last time
                if ready():
                    return
                if (waited := time.monotonic() - started) > _FIRST_SLEEP:
                    if not slow and running.note:
                        running.note()
                    slow = True
                    self._look_for_the_gone(ready, awaited)
                if waited > self.timeout:
                    raise RankHung(f"rank {self.numbers[self.me]} has waited for more than timeout={self.timeout:g} s")
                linux.wait(self._addresses[self.me], seen, _SLEEP if slow else _FIRST_SLEEP)
        finally:
            with self._lock:
                self._sleepers[self.me] -= 1

    def wait_in_vain(self, *awaited: int) -> None:
        """An error, as soon as it is known why one of them will not come; or until somebody who watches ends it."""
        self.wait(lambda: False, lambda: awaited)

    # ---- those who will never come --------------------------------------------------------------------------------

    def _look_for_the_gone(self, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Raise if a rank is gone that this one waits for, and has not done its part before it went."""
        gone = [rank for rank in awaited() if self._is_gone(rank)]
        if not gone or ready():
            return
        rank = self._culprit[gone[0]] - 1  # one that went for want of another: that is to be told
        rank = rank if rank >= 0 else gone[0]
        how = self._end[rank]
        if how == _LEFT and running.note and running.note(IN_VAIN):
            return  # somebody reads the notes, and ends the ranks with a better explanation than this one could give
        self._culprit[self.me] = rank + 1
        told = f"rank {self.numbers[rank]} {_ENDINGS[how]}, while rank {self.numbers[self.me]} was waiting"
        raise RankFailed(told) if how == _FAILED else RankDied(told)

    def _is_gone(self, rank: int) -> bool:
        return self._process[rank] != 0 and (self._end[rank] != _HERE or not linux.is_alive(self._process[rank]))


def _mark(process: memoryview, end: memoryview, rank: int, how: int) -> None:
    """Say that a rank ends by itself, and how; a process that it has forked is not the rank."""
    if process[rank] == os.getpid() and end[rank] == _HERE:
        end[rank] = how
