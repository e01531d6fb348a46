"""A handle to the processes of a run, for those who want to see it suffer: `run(..., saboteur=fn)` calls `fn(cluster)`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from d2lps.kvstore.launch.node import Node, Victim

Saboteur = Callable[["Cluster"], Any]


class RunIsOver(Exception):
    """Raised by what a `Cluster` can do when the run is over; it ends a saboteur, and nobody hears of it."""


class Cluster:
    """
    >>> def saboteur(cluster):
    ...     cluster.sleep(0.5)                  # let the training begin
    ...     cluster.servers[0].kill()
    >>> kvstore.run(worker, 2, 2, durability="log", saboteur=saboteur).history      # doctest: +SKIP
    ['0.54 s: server 0 was killed by SIGKILL', '0.61 s: server 0 runs again, with all that was acknowledged']

    >>> def grow(cluster):
    ...     cluster.add_server()                # keys move to it, at the workers' next barrier
    ...     cluster.remove_server(0)
    >>> kvstore.run(worker, 2, 2, saboteur=grow).history                            # doctest: +SKIP
    ['0.08 s: server 2 has come: 9 keys have moved, 6,400 bytes of their values', '0.15 s: server 0 has gone: ...']

    servers, backups, workers: their processes, by number; servers[i] is the first primary of server i, whoever serves now.
    addresses: where workers reach the servers, and their backups. `over` is set when the workers are done. history: what has
    happened so far, as the Run will have it.
    """

    def __init__(
        self,
        servers: Sequence[Node],
        backups: Sequence[Node],
        workers: Sequence[Victim],
        history: list[str],
        resize: Callable[[int | None], Node],
    ) -> None:
        self.servers, self.backups, self.workers, self.history = [*servers], backups, workers, history
        self.addresses, self.resize = [node.endpoint for node in (*servers, *backups)], resize
        self.over = threading.Event()
        self.wrong: BaseException | None = None  # what the saboteur has raised

    def sleep(self, seconds: float) -> None:
        """Let the run go on for a while; ends the saboteur when the run is over."""
        if self.over.wait(seconds):
            raise RunIsOver

    def add_server(self) -> int:
        """Start one more server, which takes its share of the keys over; its number, as soon as it has them.

        That is at the next kv.barrier() to which the workers come between two iterations, when each has ended by kv.clock() what
        it has pushed, and has the answers to what it has pulled. There all values, and the optimizer's state, are written into a
        file and read from it by one worker, which needs room for them; meanwhile nothing is served. Not with durability
        "replica", nor over tcp: ValueError. RuntimeError if the file cannot be written; RunIsOver if the run ends before.
        """
        self.servers.append(node := self.resize(None))
        return node.number

    def remove_server(self, number: int) -> None:
        """Let the other servers take over what this one has, and end it; else as `add_server`."""
        self.resize(number)

    @contextmanager
    def attacked(self, saboteur: Saboteur | None) -> Iterator[None]:
        """Let a saboteur loose, in a thread of its own, until the workers are done; then raise what it has raised."""
        thread = threading.Thread(target=self._life, args=[saboteur], name="saboteur", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join(1.0)  # one that sleeps in its own way is not waited for
        self.check()

    def _life(self, saboteur: Saboteur | None) -> None:
        try:
            if saboteur is not None:
                saboteur(self)
        except RunIsOver:
            pass
        except BaseException as error:
            self.wrong = error

    def check(self) -> None:
        """Raise what the saboteur has raised."""
        if self.wrong is not None:
            raise self.wrong
