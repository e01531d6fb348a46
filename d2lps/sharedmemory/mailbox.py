"""Point to point: which message goes into which receive, and whose turn it is to move it.

For each pair of ranks there is a word in the shared file, by which the one tells the other of its last message; the slip of
that tells of the one before. A rank looks at the words that lead to it whenever it posts or waits, for anything: so a send
completes while its receiver stands at a barrier, if the receive was posted before. Messages match first in, first out by
(group, source, tag).
"""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from d2lps.comm.explain import mismatch
from d2lps.sharedmemory import linux
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.message import BEFORE, GROUP, TAG, Message, spell
from d2lps.sharedmemory.space import PAGE
from d2lps.sharedmemory.waiting import Waiting

Key = tuple[int, int, int]  # group, source, tag
# How often something was announced, and the page of the last slip, in one word.
_PAGES, _COUNTS = 1 << 36, 1 << 26


class Mailbox:
    """What one process has in the shared memory, and its messages of all groups that it belongs to."""

    def __init__(self, descriptor: int, ranks: int, rank: int, timeout: float = math.inf, numbers: Sequence[int] = ()) -> None:
        self.arena, self.rank = Arena(descriptor, ranks, rank), rank
        self.waiting = Waiting(self.arena, timeout, numbers)
        self._expected: defaultdict[Key, deque[Message]] = defaultdict(deque)
        self._arrived: defaultdict[Key, deque[int]] = defaultdict(deque)  # slips
        self._moving: list[Message] = []  # bytes are still to be copied
        self._lent: set[Message] = set()  # the receiver reads the tensor itself, which lives on although nobody waits
        self._lock = threading.Lock()  # a rank may have several threads
        first = self.arena.layout.posted // 8
        self._posted = [self.arena.words[first + dst * ranks : first + (dst + 1) * ranks] for dst in range(ranks)]
        self._heard = [0] * ranks  # what they said when this rank looked last

    def post(self, sends: bool, tensor: torch.Tensor, peer: int, group: int, tag: int) -> Message:
        """Begin to send or receive a flat tensor."""
        message, key = Message(self.arena, tensor, peer, tag, sends), (group, peer, tag)
        with self._lock:
            if sends:
                self._announce(peer, message.lay_out(group))
                if message.lends:
                    self._lent.add(message)
                if message.moves():
                    self._moving.append(message)
            else:
                self._expected[key].append(message)
                self._match(key)
        return message

    def wait(self, message: Message) -> None:
        """Return when a message is complete; Mismatch if its ends disagree."""
        if not self.is_done(message):
            self.waiting.wait(lambda: self.is_done(message), lambda: [message.peer])
        if message.sends:
            with self._lock:
                self._lent.discard(message)  # before its slip is another message's
            self.arena.space.keep(message.slip)
        if message.theirs != message.mine:
            raise mismatch(message.sends, self.rank, message.peer, message.tag, spell(message.mine), spell(message.theirs))

    def is_done(self, message: Message) -> bool:
        self.progress()
        return message.is_done()

    def progress(self) -> None:
        """Look for what has been announced, and copy what can be copied."""
        with self._lock:
            if (row := self._posted[self.rank].tolist()) != self._heard:
                for src, word in enumerate(row):
                    if word != self._heard[src]:
                        self._look(src, word)
            if self._moving:
                self.waiting.wake([message.peer for message in self._moving if message.advance()])
                self._moving = [message for message in self._moving if message.moves()]
            if self._lent:
                self._lent = {message for message in self._lent if not message.is_done()}

    def _match(self, key: Key) -> None:
        """Let announced messages and posted receives meet, in order."""
        expected, arrived = self._expected[key], self._arrived[key]
        while expected and arrived:
            message = expected.popleft()
            message.take_up(arrived.popleft())
            if message.advance() or message.is_done():
                self.waiting.wake([message.peer])
            if message.moves():
                self._moving.append(message)
        if not expected:  # each start of a collective beside others has keys of its own, and they would add up
            del self._expected[key]
        if not arrived:
            del self._arrived[key]

    # ---- what ranks tell one another -------------------------------------------------------------------------------

    def _announce(self, dst: int, slip: int) -> None:
        count, page = divmod(self._posted[dst][self.rank], _PAGES)
        self.arena.words[slip // 8 + BEFORE] = page * PAGE
        linux.fence()
        self._posted[dst][self.rank] = (count + 1) % _COUNTS * _PAGES + slip // PAGE
        self.waiting.wake([dst])

    def _look(self, src: int, word: int) -> None:
        """Take up what one rank has announced since this one looked last, from the last back to the first."""
        linux.fence()
        words, (count, page) = self.arena.words, divmod(word, _PAGES)
        slips = [page * PAGE]
        while len(slips) < (count - self._heard[src] // _PAGES) % _COUNTS:
            slips.append(words[slips[-1] // 8 + BEFORE])
        self._heard[src] = word
        for slip in reversed(slips):
            key = (words[slip // 8 + GROUP], src, words[slip // 8 + TAG])
            self._arrived[key].append(slip)
            self._match(key)
