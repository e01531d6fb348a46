"""Where sends and receives find each other: first in, first out, by (group, source, destination, tag). And where all ranks
of a group do, who make a call together: it returns when the last one has come, and takes no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import nan
from typing import Any

import torch

from d2lps.comm import Mismatch, RankDied
from d2lps.comm.explain import mismatch
from d2lps.simulator.model import Model
from d2lps.simulator.network import Flow, Network
from d2lps.simulator.scheduler import Scheduler, Task
from d2lps.topology import Route
from d2lps.trace.recorder import DONE, POSTED, WAITED

Key = tuple[str, int, int, int]  # group, source and destination (ranks of the whole run), tag


class Stream:
    """The messages of one key that have been posted at one end only: all at the same end."""

    # The queue as a list: it is short, and a thousand ranks' empty deques would fill a processor's cache.
    __slots__ = ("bandwidth", "key", "latency", "links", "number", "queue")

    def __init__(self, key: Key, route: Route, model: Model) -> None:
        self.key, self.number = key, -1  # in the trace, if there is one
        self.links, self.bandwidth = route.links, route.bandwidth
        self.latency = route.latency + model.per_message if route.links else 0.0
        self.queue: list[Message] = []


# One end of a message, as it is posted: where, the tensor if it has contents, its bytes, its dtype, whether it is the sender's,
# and where the trace tells of it: the cells of the rank's table, None without a trace, and the row (see Recorder.end).
End = tuple[Stream, Any, int, torch.dtype, bool, Any, int]


class Message(Flow):
    """A message: made by whichever end is posted first, complete for both ends at the same time."""

    __slots__ = ("done", "first", "mailbox", "one", "other", "second")

    def __init__(self, mailbox: Mailbox, first: End) -> None:
        self.mailbox, self.first, self.done = mailbox, first, False
        self.second: End | None = None  # the end that is posted last
        self.one: Task | None = None  # who waits for it, and the other who does
        self.other: Task | None = None

    def arrived(self) -> None:
        first, second, mailbox = self.first, self.second, self.mailbox
        if second is None:
            return  # buffered, and not yet asked for
        if first[1] is not second[1]:  # there are contents
            incoming, outgoing = (first, second) if second[4] else (second, first)
            if incoming[1] is not None:
                incoming[1].detach().copy_(outgoing[1])  # one of the inference mode can be written outside of it so
        self.done = True
        if mailbox.careful:
            for _, _, _, _, _, cells, row in (first, second):
                if cells is not None:
                    cells[row + DONE] = mailbox.network.now
        for task in (self.one, self.other):
            if task is not None:
                task.wanted -= 1
                if not task.wanted:
                    mailbox.ready.append(task)

    def wait(self, task: Task) -> None:
        if self.one is None:
            self.one = task
        else:
            self.other = task


class Mailbox:
    """All streams of a simulation, and the way from them to the network; all meetings."""

    def __init__(self, network: Network, scheduler: Scheduler, model: Model, traced: bool) -> None:
        self.network, self.scheduler, self.ready = network, scheduler, scheduler.ready
        self.model, self.eager = model, model.eager
        self.careful = bool(model.eager or traced)
        self.streams: dict[Key, Stream] = {}
        self.meetings: dict[tuple[str, str], dict[Task, Any]] = {}  # (call, group) -> who has come, and what it said
        self.dead: dict[int, str] = {}  # rank -> how it died
        self.gone: dict[Message, str] = {}  # with whom, and how
        self.ends: dict[int, Any] = {}  # by rank: who takes what arrives on lines (see lines.py)

    def post(self, end: End) -> Message:
        """Post a send or a receive. A buffered send travels at once, and is delivered when it has been asked for."""
        if self.careful:
            end = self._looked_at(end)
        stream, content, nbytes, dtype, sends, _, _ = end
        queue = stream.queue
        if not queue or queue[0].first[4] is sends:
            message = Message(self, end)
            queue.append(message)
            if not (self.eager and self.is_buffered(end)):
                return message
        else:
            message = queue.pop(0)
            message.second, first = end, message.first
            if nbytes != first[2] or dtype is not first[3] or (content is None) is not (first[1] is None):
                raise _differ(first, end)
            if self.eager and self.is_buffered(first):
                if message.end < 0:  # it is here
                    message.arrived()
                return message
        self.network.send(message, stream.links, stream.latency, nbytes, stream.bandwidth)
        return message

    def is_buffered(self, end: End) -> bool:
        """Whether nobody need wait for what is sent."""
        return end[4] and 0 < end[2] <= self.eager

    def _looked_at(self, end: End) -> End:
        """What most simulations have no need of: is the other rank alive, when was this posted, is it copied?"""
        if self.dead:
            self.check_alive(end[0].key[1:3])
        stream, content, nbytes, dtype, sends, cells, row = end
        if cells is not None:
            cells[row + POSTED] = cells[row + WAITED] = self.network.now
        if self.eager and self.is_buffered(end):
            if cells is not None:
                cells[row + DONE] = self.network.now  # for the sender
            return stream, None if content is None else content.clone(), nbytes, dtype, sends, None, 0
        return end

    def meet(self, task: Task, members: Sequence[int], call: str, group: str, word: object) -> dict[int, Any]:
        """What every rank of the group said, by rank of the run."""
        self.check_alive(members)
        meeting = self.meetings.setdefault((call, group), {})
        meeting[task] = word
        if len(meeting) < len(members):
            self.scheduler.block(task, (call, group))
        else:
            del self.meetings[call, group]
            for other in list(meeting)[:-1]:
                self.scheduler.happened(other)
        return {other.rank: said for other, said in meeting.items()}

    def check_alive(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self.dead:
                raise RankDied(self.dead[rank])

    def lost(self, rank: int, how: str) -> None:
        """A rank has died: what it has posted, and what was under way to it or from it, is no more; who waits for that hears
        of it, and waits for nothing else that it had posted together with it."""
        self.dead[rank], self.careful = how, True
        for message in self._messages():
            stream = message.first[0]
            if rank in stream.key[1:3]:
                self.network.cancel(message)
                self.gone[message] = how
                stream.queue = []
                for *_, cells, row in filter(None, (message.first, message.second)):
                    if cells is not None:
                        cells[row + POSTED] = nan  # as if it had never been
        for task in self.scheduler.tasks:
            ends = [end for end in task.waiting_for if isinstance(end, tuple)] if task.wanted > 0 else []
            if any(rank in end[0].key[1:3] for end in ends):
                self.let_go(task)
                self.scheduler.fail(task, RankDied(how))
        for (call, group), meeting in list(self.meetings.items()):
            if rank in next(iter(meeting)).groups[group].members:
                for task in self.meetings.pop((call, group)):
                    self.scheduler.fail(task, RankDied(how))

    def let_go(self, task: Task) -> None:
        """Whatever arrives from now on is not what this task waits for."""
        for message in self._messages():
            message.one, message.other = (None if other is task else other for other in (message.one, message.other))

    def _messages(self) -> list[Message]:
        """All that are posted, or under way."""
        posted = chain.from_iterable(stream.queue for stream in self.streams.values())
        return [flow for flow in (*posted, *self.network.flows()) if isinstance(flow, Message) and not flow.done]


def _differ(first: End, second: End) -> Mismatch:
    """Both ends must speak of as many bytes of one dtype, with contents or both without."""
    _, src, dst, tag = first[0].key
    rank, peer = (src, dst) if first[4] else (dst, src)
    mine, theirs = (f"{str(dtype).removeprefix('torch.')}[{n // dtype.itemsize}]" for _, _, n, dtype, *_ in (first, second))
    if (first[1] is None) is not (second[1] is None):
        mine, theirs = (f"{said} on {'meta' if end[1] is None else 'cpu'}" for said, end in ((mine, first), (theirs, second)))
    return mismatch(first[4], rank, peer, tag, mine, theirs)
