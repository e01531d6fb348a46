"""Where sends and receives find each other: first in, first out, by (group, source, destination, tag)."""

from __future__ import annotations

from typing import Any, Literal

import torch

from d2lps.comm import Mismatch
from d2lps.comm.communicator import describe
from d2lps.simulator.model import Model
from d2lps.simulator.network import Flow, Network
from d2lps.simulator.scheduler import Scheduler, Task
from d2lps.topology import Route

Key = tuple[str, int, int, int]  # group, source and destination (ranks of the whole run), tag


class Stream:
    """The messages of one key that have been posted at one end only; of the two queues one is always empty."""

    # Queues as lists: they are short, and a thousand ranks' empty deques would fill a processor's cache.
    __slots__ = ("bandwidth", "key", "latency", "links", "recvs", "sends")

    def __init__(self, key: Key, route: Route, model: Model) -> None:
        self.key = key
        self.links, self.bandwidth = route.links, route.bandwidth
        self.latency = route.latency + model.per_message if route.links else 0.0
        self.sends: list[Message] = []
        self.recvs: list[Message] = []


class Message(Flow):
    """A message: made by whichever end is posted first, complete for both ends at the same time."""

    __slots__ = ("done", "incoming", "outgoing", "receiver", "scheduler", "sender", "stream")

    def __init__(self, stream: Stream, scheduler: Scheduler) -> None:
        self.stream, self.scheduler = stream, scheduler
        self.outgoing: Any = None  # the sender's tensor, once it has been posted
        self.incoming: Any = None  # the receiver's
        self.sender: Task | None = None  # the task that waits at either end
        self.receiver: Task | None = None
        self.done = False

    def arrived(self) -> None:
        if not self.incoming.is_meta:
            self.incoming.copy_(self.outgoing)
        self.done = True
        for task in (self.sender, self.receiver):
            if task is not None:
                self.scheduler.happened(task)

    def check(self) -> int:
        """The bytes of the message; both ends must speak of as many elements of one dtype."""
        outgoing, incoming = self.outgoing, self.incoming
        nbytes: int = outgoing.nbytes
        if outgoing is incoming or (nbytes == incoming.nbytes and outgoing.dtype is incoming.dtype):
            return nbytes
        _, src, dst, tag = self.stream.key
        sends, expects = (describe(end.flatten()) for end in (self.outgoing, self.incoming))
        stream = f"message from rank {src} to rank {dst}, tag {tag}"
        raise Mismatch(f"{stream}: the sender sends {sends}, the receiver expects {expects}")


class EagerMessage(Message):
    """A buffered message: it travels at once, and is delivered when it has both arrived and been asked for."""

    __slots__ = ("here",)

    def arrived(self) -> None:
        self.here = True
        self.deliver()

    def deliver(self) -> None:
        if self.here and self.incoming is not None:
            super().arrived()


class End:
    """One end of a message, as a rank waits for it."""

    __slots__ = ("message", "side", "task")

    def __init__(self, message: Message, side: Literal["sender", "receiver"], task: Task) -> None:
        self.message, self.side, self.task = message, side, task

    def wait(self) -> None:
        if not self.message.done:
            setattr(self.message, self.side, self.task)
            self.message.scheduler.block(self.task, 1, (self.message,))


class Mailbox:
    """All streams of a simulation, and the way from them to the network."""

    def __init__(self, network: Network, scheduler: Scheduler, model: Model) -> None:
        self.network, self.scheduler, self.model = network, scheduler, model
        self.streams: dict[Key, Stream] = {}
        self._alike: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.ends: dict[int, Any] = {}  # by rank: who takes what arrives on lines (see lines.py)

    def stream(self, key: Key, route: Route) -> Stream:
        if key not in self.streams:
            self.streams[key] = Stream(key, route, self.model)
        return self.streams[key]

    def alike(self, blank: torch.Tensor) -> torch.Tensor:
        """One tensor without contents stands for all of its length and dtype: a thousand would fill the processor's cache."""
        return self._alike.setdefault((blank.nbytes, blank.dtype), blank)

    def send(self, stream: Stream, tensor: torch.Tensor) -> Message:
        """Post a send. Under the eager rule what comes back is complete, and the network carries a copy."""
        if self.model.eager and 0 < tensor.nbytes <= self.model.eager:
            return self._send_eagerly(stream, tensor)
        if stream.recvs:
            message = stream.recvs.pop(0)
            message.outgoing = tensor
            self._depart(message)
        else:
            message = Message(stream, self.scheduler)
            message.outgoing = tensor
            stream.sends.append(message)
        return message

    def recv(self, stream: Stream, tensor: torch.Tensor) -> Message:
        """Post a receive."""
        if stream.sends:
            message = stream.sends.pop(0)
            message.incoming = tensor
            if isinstance(message, EagerMessage):
                message.check()
                message.deliver()
            else:
                self._depart(message)
        else:
            message = Message(stream, self.scheduler)
            message.incoming = tensor
            stream.recvs.append(message)
        return message

    def _depart(self, message: Message) -> None:
        """Both ends are there: the bytes set out."""
        nbytes, stream = message.check(), message.stream
        self.network.send(message, stream.links, stream.latency, nbytes, stream.bandwidth)

    def _send_eagerly(self, stream: Stream, tensor: torch.Tensor) -> Message:
        message = EagerMessage(stream, self.scheduler)
        message.outgoing, message.here = tensor.clone(), False
        if stream.recvs:
            # Who receives already waits on a message of its own making: that one becomes the buffered one.
            posted = stream.recvs.pop(0)
            posted.outgoing = message.outgoing
            self._depart(posted)
        else:
            stream.sends.append(message)
            self.network.send(message, stream.links, stream.latency, tensor.nbytes, stream.bandwidth)
        taken = Message(stream, self.scheduler)
        taken.done = True
        return taken
