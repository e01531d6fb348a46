"""Point to point: which message goes into which receive, and whose turn it is to move it.

For each pair of ranks there is a ring in the shared file, where the one announces slips to the other. A rank looks into
the rings that lead to it whenever it posts or waits, for anything: so a send completes while its receiver stands at a
barrier, if the receive was posted before. Messages match first in, first out by (group, source, tag).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch

from d2lps.comm.explain import mismatch
from d2lps.comm.rank import describe
from d2lps.sharedmemory import futex
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import RING
from d2lps.sharedmemory.message import GROUP, SLIP, TAG, Receiving, Sending, beside
from d2lps.sharedmemory.space import Pool
from d2lps.sharedmemory.waiting import Waiting

Key = tuple[int, int, int]  # group, source, tag


class Mailbox:
    """The messages of one rank, of all groups that it belongs to."""

    def __init__(self, arena: Arena, waiting: Waiting) -> None:
        self.arena, self.waiting, self.words = arena, waiting, arena.words
        self.rank, self.ranks, self.pool = arena.rank, arena.ranks, Pool(arena.space)
        self._expected: defaultdict[Key, deque[Receiving]] = defaultdict(deque)
        self._arrived: defaultdict[Key, deque[int]] = defaultdict(deque)  # slips
        self._moving: list[tuple[Sending | Receiving, int]] = []  # bytes are still to be copied; the other end
        self._unannounced: defaultdict[int, deque[int]] = defaultdict(deque)  # slips, where a ring was full
        self._lock = threading.Lock()  # a rank may have several threads
        self.open = 0  # receives that no message has been found for
        row = arena.layout.posted + 8 * self.rank * self.ranks
        self._row, self._seen = slice(row, row + 8 * self.ranks), bytes(8 * self.ranks)  # the counters that lead here

    # ---- posting --------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, group: int, tag: int) -> Sending:
        with self._lock:
            slip = self.pool.take(SLIP + (0 if self.arena.offset_of(tensor) >= 0 else beside(tensor, -1)))
            message = Sending(self.arena, slip, tensor, group, tag)
            if not self._announce(dst, slip):
                self._unannounced[dst].append(slip)
            if message.moves():
                self._moving.append((message, dst))
        return message

    def receive(self, tensor: torch.Tensor, src: int, group: int, tag: int) -> Receiving:
        message, key = Receiving(self.arena, tensor), (group, src, tag)
        with self._lock:
            self._expected[key].append(message)
            self.open += 1
            self._match(key)
        return message

    def wait(self, message: Sending | Receiving, peer: int, tag: int) -> None:
        """Return when a message is complete; Mismatch if its ends disagree."""
        if not self.is_done(message):
            self.waiting.wait(lambda: self.is_done(message), lambda: [peer])
        if isinstance(message, Sending):
            refused = message.refused()
            with self._lock:
                self.pool.give(message.slip)
            if refused:
                raise mismatch(self.rank, peer, tag, describe(message.tensor), refused)
        elif message.sent:
            raise mismatch(peer, self.rank, tag, message.sent, describe(message.tensor))

    def is_done(self, message: Sending | Receiving) -> bool:
        self.progress()
        return message.is_done()

    # ---- moving ---------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Look for what has been announced, and copy what can be copied."""
        with self._lock:
            self._progress()

    def _progress(self) -> None:
        if (row := self.arena.memory[self._row]) != self._seen:
            self._seen = row
            futex.ordering_fence()
            for src in range(self.ranks):
                self._look(src)
        if self._moving:
            for message, peer in self._moving:
                if message.advance():
                    self.waiting.wake(peer)
            self._moving = [entry for entry in self._moving if entry[0].moves()]
        if self._unannounced:
            self._announce_more()

    def busy(self) -> bool:
        """Whether a message may come, or go on, that this rank has to do something for."""
        return bool(self.open or self._moving or self._unannounced)

    def _match(self, key: Key) -> None:
        """Let announced messages and posted receives meet, in order."""
        expected, arrived = self._expected[key], self._arrived[key]
        while expected and arrived:
            message = expected.popleft()
            self.open -= 1
            message.take_up(arrived.popleft())
            if message.advance() or message.done:
                self.waiting.wake(key[1])
            if message.moves():
                self._moving.append((message, key[1]))

    # ---- the rings ------------------------------------------------------------------------------------------------

    def _place(self, dst: int, src: int) -> tuple[int, int, int]:
        """The words of one pair's ring: how many were announced, how many of them seen, and the first slip."""
        pair, layout = dst * self.ranks + src, self.arena.layout
        return layout.posted // 8 + pair, layout.seen // 8 + pair, layout.rings // 8 + RING * pair

    def _announce(self, dst: int, slip: int) -> bool:
        """Tell `dst` of a slip; False if it has not looked for so long that the ring is full."""
        posted, seen, ring = self._place(dst, self.rank)
        count = self.words[posted]
        if count - self.words[seen] >= RING or self._unannounced[dst]:
            return False
        self.words[ring + count % RING] = slip
        futex.ordering_fence()
        self.words[posted] = count + 1
        self.waiting.wake(dst)
        return True

    def _announce_more(self) -> None:
        for dst, slips in list(self._unannounced.items()):
            del self._unannounced[dst]
            while slips and self._announce(dst, slips[0]):
                slips.popleft()
            if slips:
                self._unannounced[dst] = slips

    def _look(self, src: int) -> None:
        """Take the announcements of one rank out of its ring."""
        posted, seen, ring = self._place(self.rank, src)
        count, before = self.words[posted], self.words[seen]
        if count == before:
            return
        keys = []
        for number in range(before, count):
            slip = self.words[ring + number % RING]
            key = (self.words[slip // 8 + GROUP], src, self.words[slip // 8 + TAG])
            self._arrived[key].append(slip)
            keys.append(key)
        self.words[seen] = count
        if count - before == RING:  # it was full: the other may be waiting for a place
            self.waiting.wake(src)
        for key in keys:
            self._match(key)


