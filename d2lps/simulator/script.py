"""What a rank will do, written down before it happens.

A message without contents tells its receiver only that it has come. So inside a collective a rank need not wait for each:
it goes through the algorithm at once, writes down the messages that it would have waited for, and waits for all of them,
while they are played one after the other in virtual time. No collective can tell the difference: whatever looks at the
clock, meets other ranks or sends anything else first waits until the script has been played (`SimulatedCommunicator.catch_up`).
A function of one's own that says `comm.inside` can, in what it does besides: what it prints there is printed ahead of time.

Why: of a thousand ranks that take turns after every message, none finds its own things still in the processor's cache. A
rank that goes on for hundreds of messages finds them there, and the player of the scripts needs only a few lists of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from d2lps.simulator.mailbox import Mailbox, Stream
from d2lps.simulator.scheduler import Task

Step = tuple[Stream, torch.Tensor, Stream, torch.Tensor]  # receive here into this, and at the same time send there that

LONGEST = 512  # steps; a rank that has written so many waits for them, or all of a long program would stand in memory


class Script:
    """One rank's messages to come."""

    __slots__ = ("_error", "_mailbox", "_rest", "_task", "_told", "_written", "steps")

    def __init__(self, task: Task, mailbox: Mailbox) -> None:
        self.steps: list[Step] = []
        self._task, self._mailbox = task, mailbox
        self._told: Step | tuple[None, ...] = (None,) * 4  # the last step, in the rank's own tensors
        self._written: Step  # and in those that stand for them
        self._rest: Iterator[Step] = iter(())
        self._error: Exception | None = None

    def write(self, stream_in: Stream, into: torch.Tensor, stream_out: Stream, tensor: torch.Tensor) -> None:
        """Called by the rank, in place of waiting."""
        told, alike = self._told, self._mailbox.alike
        if into is not told[1] or tensor is not told[3] or stream_in is not told[0] or stream_out is not told[2]:
            self._told = stream_in, into, stream_out, tensor
            self._written = stream_in, alike(into), stream_out, alike(tensor)
        self.steps.append(self._written)  # round a ring, the same as before but for some
        if len(self.steps) == LONGEST:
            self.play()

    def play(self) -> None:
        """Called by the rank: returns when all that is written has happened."""
        self._rest, self.steps = iter(self.steps), []
        self._task.go_on = self._next
        self._mailbox.scheduler.block(self._task, 0, ())
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _next(self) -> None:
        """Called by the scheduler where the rank itself would have gone on: post a step, and wait for it."""
        task, mailbox = self._task, self._mailbox
        try:
            for stream_in, into, stream_out, tensor in self._rest:
                received, sent = mailbox.recv(stream_in, into), mailbox.send(stream_out, tensor)
                received.receiver = sent.sender = task
                task.waiting_for = received, sent
                task.wanted = 2 - received.done - sent.done  # what is buffered may be here already
                if task.wanted:
                    return
        except Exception as error:  # the rank's own
            self._error = error
        task.go_on = task.greenlet.switch
        task.go_on()
