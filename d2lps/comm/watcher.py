"""Who is told what a rank does with others: recorders, logs and dashboards."""

from typing import Any


class Watcher:
    """What is told of a rank's communication, in all of its groups and lanes, while it is in `comm.watchers`.

    >>> class Calls(Watcher):                               # prints what is called         # doctest: +SKIP
    ...     def entered(self, comm, collective): print(comm.name, collective)
    >>> comm.watchers.append(Calls())                                                       # doctest: +SKIP

    comm: the group's communicator. Lanes tell at the same time, each with its own `comm.lane`. A simulation, whose trace has
    messages and waits, tells of collectives only.
    """

    def entered(self, comm: Any, collective: str) -> None:
        """The outermost collective has begun."""

    def left(self, comm: Any) -> None:
        """It is through; not if it has failed."""

    def moved(self, comm: Any, action: str, nbytes: int) -> None:
        """A message has been posted; action: "send" or "recv"."""

    def waited(self, comm: Any, seconds: float) -> None:
        """A wait for others, or for their messages, has ended."""
