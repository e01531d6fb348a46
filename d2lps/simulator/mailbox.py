"""Where sends and receives find each other: first in, first out, by (group, source, destination, tag)."""

from __future__ import annotations

from typing import Any

import torch

from d2lps.comm import Mismatch, RankDied
from d2lps.simulator.model import Model
from d2lps.simulator.network import Flow, Network
from d2lps.simulator.recording import POSTED, WAITED, Recording
from d2lps.simulator.scheduler import Scheduler, Task
from d2lps.topology import Route

Key = tuple[str, int, int, int]  # group, source and destination (ranks of the whole run), tag


class Stream:
    """The messages of one key that have been posted at one end only; of the two queues one is always empty."""

    # Queues as lists: they are short, and a thousand ranks' empty deques would fill a processor's cache.
    __slots__ = ("bandwidth", "dst_thread", "key", "latency", "links", "number", "recvs", "sends", "src_thread")

    def __init__(self, number: int, key: Key, route: Route, model: Model) -> None:
        self.number, self.key = number, key
        self.src_thread = self.dst_thread = 0  # which of their ranks' threads of control the two ends are
        self.links, self.bandwidth = route.links, route.bandwidth
        self.latency = route.latency + model.per_message if route.links else 0.0
        self.sends: list[Message] = []
        self.recvs: list[Message] = []


# One end of a message, as it is posted: where, the tensor if it has contents, its bytes, its dtype, what the trace is to say
# of it (see recording.py), and whether it is the sender's.
End = tuple[Stream, Any, int, torch.dtype, Any, bool]


class Message(Flow):
    """A message: made by whichever end is posted first, complete for both ends at the same time."""

    __slots__ = ("done", "incoming", "mailbox", "outgoing", "receiver", "row", "sender")

    incoming: End
    outgoing: End

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox, self.done = mailbox, False
        self.sender: Task | None = None  # the task that waits at either end
        self.receiver: Task | None = None

    def arrived(self) -> None:
        content = self.incoming[1]
        if content is not None:
            content.copy_(self.outgoing[1])
        self.done = True
        mailbox, sent = self.mailbox, self.outgoing
        if mailbox.under_way is not None:
            mailbox.under_way.discard(self)
        if mailbox.recording is not None:
            notes = sent[4], self.incoming[4]
            self.row = mailbox.recording.arrived(sent[0].number, sent[2], mailbox.network.now, *notes)
        for task in (self.sender, self.receiver):
            if task is not None:
                task.wanted -= 1
                if not task.wanted:
                    mailbox.ready.append(task)


class Buffered(Message):
    """A message under the eager rule: it travels at once, and is delivered when it has both arrived and been asked for."""

    __slots__ = ("asked", "here")

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.here = self.asked = False

    def arrived(self) -> None:
        self.here = True
        self.deliver()

    def deliver(self) -> None:
        if self.here and self.asked:
            super().arrived()


class Mailbox:
    """All streams of a simulation, and the way from them to the network."""

    def __init__(self, network: Network, ready: Any, model: Model, recording: Recording | None) -> None:
        self.network, self.ready, self.model, self.recording = network, ready, model, recording
        self.eager = model.eager
        self.careful = bool(model.eager or recording is not None)
        self.streams: dict[Key, Stream] = {}
        self.under_way: set[Message] | None = None  # kept where ranks are going to die
        self._sizes: dict[int, int] = {}
        self.dead: dict[int, str] = {}  # rank -> how it died
        self.ends: dict[int, Any] = {}  # by rank: who takes what arrives on lines (see lines.py)

    def stream(self, key: Key, route: Route) -> Stream:
        if key not in self.streams:
            self.streams[key] = Stream(len(self.streams), key, route, self.model)
        return self.streams[key]

    def one(self, nbytes: int) -> int:
        """One object for all equal numbers: a thousand ranks' own would fill the processor's cache."""
        return self._sizes.setdefault(nbytes, nbytes)

    def send(self, end: End) -> Message:
        """Post a send. Under the eager rule the network carries a copy, and the sender need not wait."""
        stream = end[0]
        if self.careful:
            self._look_at(end)
            if self.is_buffered(end):
                return self._send_eagerly(end)
        if stream.recvs:
            message = stream.recvs.pop(0)
            message.outgoing = end
            self._depart(message)
        else:
            message = Message(self)
            message.outgoing = end
            stream.sends.append(message)
        return message

    def recv(self, end: End) -> Message:
        """Post a receive."""
        stream = end[0]
        if self.careful:
            self._look_at(end)
        if stream.sends:
            message = stream.sends.pop(0)
            message.incoming = end
            if self.careful and isinstance(message, Buffered):
                check(message)
                message.asked = True
                message.deliver()
            else:
                self._depart(message)
        else:
            message = Message(self)
            message.incoming = end
            stream.recvs.append(message)
        return message

    def is_buffered(self, end: End) -> bool:
        """Whether nobody need wait for what is sent."""
        return 0 < end[2] <= self.eager

    def _look_at(self, end: End) -> None:
        """What most simulations have no need of: is the other rank alive, and when was this posted?"""
        self.check_alive(end)
        if end[4] is not None:
            end[4][POSTED] = self.network.now

    def check_alive(self, end: End) -> None:
        for rank in end[0].key[1:3] if self.dead else ():
            if rank in self.dead:
                raise RankDied(self.dead[rank])

    def _send_eagerly(self, end: End) -> Message:
        stream, content, nbytes, dtype, note, _ = end
        if note is not None:
            note[WAITED] = -self.network.now  # nobody waits for it
        copied = stream, None if content is None else content.clone(), nbytes, dtype, note, True
        if stream.recvs:
            message = stream.recvs.pop(0)
            message.outgoing = copied
            self._depart(message)
        else:
            message = Buffered(self)
            message.outgoing = copied
            stream.sends.append(message)
            if self.under_way is not None:
                self.under_way.add(message)
            self.network.send(message, stream.links, stream.latency, nbytes, stream.bandwidth)
        return message

    def lost(self, rank: int, how: str, scheduler: Scheduler) -> None:
        """A rank has died: what it has posted, and what was under way to it or from it, is no more; who waits for that hears
        of it, and waits for nothing else that it had posted together with it."""
        self.dead[rank], self.careful = how, True
        for stream in self.streams.values():
            if rank in stream.key[1:3]:
                stream.sends, stream.recvs = [], []
        for message in [message for message in self.under_way or () if rank in message.outgoing[0].key[1:3]]:
            self.under_way.discard(message)  # type: ignore[union-attr]
            self.network.cancel(message)
        for task in scheduler.tasks:
            ends = [end for end in task.waiting_for if isinstance(end, tuple)] if task.wanted > 0 else []
            if task.rank != rank and any(rank in end[0].key[1:3] for end in ends):
                self.let_go(task)
                scheduler.fail(task, RankDied(how))

    def let_go(self, task: Task) -> None:
        """Whatever arrives from now on is not what this task waits for."""
        posted = [message for stream in self.streams.values() for message in (*stream.sends, *stream.recvs)]
        for message in (*posted, *(flow for flow in self.network.flows() if isinstance(flow, Message))):
            if message.sender is task:
                message.sender = None
            if message.receiver is task:
                message.receiver = None

    def _depart(self, message: Message) -> None:
        """Both ends are there, and speak of the same: the bytes set out."""
        stream, _, nbytes, dtype, _, _ = message.outgoing
        if nbytes != message.incoming[2] or dtype is not message.incoming[3]:
            check(message)
        if self.under_way is not None:
            self.under_way.add(message)
        self.network.send(message, stream.links, stream.latency, nbytes, stream.bandwidth)


def check(message: Message) -> None:
    """Both ends must speak of as many bytes of one dtype."""
    outgoing, incoming = message.outgoing, message.incoming
    if outgoing[2] != incoming[2] or outgoing[3] is not incoming[3]:
        _, src, dst, tag = outgoing[0].key
        said = (f"{str(dtype).removeprefix('torch.')}[{n // dtype.itemsize}]" for _, _, n, dtype, *_ in (outgoing, incoming))
        where = f"message from rank {src} to rank {dst}, tag {tag}"
        raise Mismatch(f"{where}: the sender sends {next(said)}, the receiver expects {next(said)}")
