"""What a rank will do next, written down before it happens.

A message without contents tells its receiver only that it has come. So inside a collective a rank need not wait for each:
it goes through the algorithm at once, writes down the exchanges that it would have waited for, and waits for all of them,
while they are played one after the other in virtual time. No collective can tell the difference: whatever looks at the
clock, meets other ranks or sends anything else first waits until the script has been played (`SimulatedCommunicator.catch_up`).
Outside a collective, and where messages have contents, a script is one exchange long. A function of one's own that says
`comm.inside` can tell, in what it does besides: what it prints there is printed ahead of time.

Why: of a thousand ranks that take turns after every message, none finds its own things still in the processor's cache. A
rank that goes on for hundreds of messages finds them there, and the player of the scripts needs only a few lists of each.
"""

from __future__ import annotations

from collections.abc import Callable

from d2lps.simulator.mailbox import End, Mailbox
from d2lps.simulator.scheduler import Task

# An exchange: the ends of messages to be posted at the same time. Or something that happens within the rank: a function that
# is called when its time has come, and says how long the rank is busy with it, in seconds of its device.
Step = tuple[End, ...] | Callable[[], float]

LONGEST = 128  # steps; a rank that has written so many waits for them, or all of a long program would stand in memory


class Script:
    """One task's steps to come."""

    __slots__ = ("_mailbox", "_rest", "_task", "steps")

    def __init__(self, task: Task, mailbox: Mailbox) -> None:
        self.steps: list[Step] = []
        self._task, self._mailbox, self._rest = task, mailbox, iter(self.steps)

    def exchange(self, ends: tuple[End, ...]) -> None:
        """Called by the task, in place of waiting."""
        steps = self.steps
        # Round a ring, the same as before but for some: copies of it would fill the processor's cache.
        steps.append(steps[-1] if steps and steps[-1] == ends else ends)
        if len(steps) >= LONGEST:
            self.play()

    def write(self, step: Step) -> None:
        self.steps.append(step)
        if len(self.steps) >= LONGEST:
            self.play()

    def play(self) -> None:
        """Called by the task: returns when all that is written has happened."""
        task, self._rest, self.steps = self._task, iter(self.steps), []
        task.go_on, task.wanted = self._next, 0
        self._mailbox.ready.append(task)
        self._mailbox.scheduler.block(task)

    def _next(self) -> None:
        """Called by the scheduler where the task itself would have gone on: post a step, and wait for it."""
        task, mailbox = self._task, self._mailbox
        post, eager = mailbox.post, mailbox.eager > 0
        try:
            for step in self._rest:
                wanted = 0
                if type(step) is tuple:
                    for end in step:
                        message = post(end)
                        if message.done or (eager and mailbox.is_buffered(end)):
                            continue
                        wanted += 1
                        if message.one is None:  # as in Message.wait
                            message.one = task
                        else:
                            message.other = task
                elif seconds := step():  # type: ignore[operator]
                    mailbox.scheduler.busy(task, seconds)
                    wanted = 1
                if wanted:
                    task.waiting_for, task.wanted = step if type(step) is tuple else "compute", wanted
                    return
        except Exception as error:  # the rank's own
            task.error = error
            mailbox.let_go(task)
        task.go_on = task.greenlet.switch
        task.go_on()
