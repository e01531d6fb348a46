"""A handle to the processes of a run, for those who want to see it suffer: `run(..., saboteur=fn)` calls `fn(cluster)`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


class RunIsOver(Exception):
    """Raised by what a `Cluster` can do when the run is over; it ends a saboteur, and nobody hears of it."""


class Victim:
    """A process that can be killed, paused and resumed."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._find = find

    @property
    def pid(self) -> int:
        """Its number now; of a server that is being restarted, when it is there again."""
        return self._find()

    def kill(self) -> None:
        """SIGKILL: it cannot even say goodbye."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: as if its machine hung."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if (pid := self.pid) > 0:  # 0 would be ourselves
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Cluster:
    """
    >>> def saboteur(cluster):
    ...     cluster.sleep(0.5)                  # let the training begin
    ...     cluster.servers[0].kill()
    >>> kvstore.run(worker, 2, 2, durability="log", saboteur=saboteur).history      # doctest: +SKIP
    ['0.54 s: server 0 was killed by SIGKILL', '0.61 s: server 0 runs again, with all that is in its log']

    >>> def grow(cluster):
    ...     cluster.add_server()                # keys move to it, while the training goes on
    ...     cluster.remove_server(0)
    >>> kvstore.run(worker, 2, 2, saboteur=grow).history                            # doctest: +SKIP
    ['0.08 s: server 2 has come: 9 keys have moved, 6,400 bytes of their values', '0.15 s: server 0 has gone: ...']

    servers, backups, workers: their processes, by number; servers[i] is the first primary of server i, whoever serves now.
    addresses: where workers reach the servers, and their backups. `over` is set when the workers are done.
    """

    def __init__(
        self, servers: Sequence[Victim], backups: Sequence[Victim], workers: Sequence[Victim], addresses: Sequence[str]
    ) -> None:
        self.servers, self.backups, self.workers, self.addresses = [*servers], backups, workers, addresses
        self.resize: Callable[[int | None], tuple[int, Callable[[], int]]]
        self.history: list[str] = []  # what has happened so far, as the Run will have it
        self.over = threading.Event()
        self.thread: threading.Thread | None = None
        self.wrong: BaseException | None = None  # what the saboteur has raised

    def sleep(self, seconds: float) -> None:
        """Let the run go on for a while; ends the saboteur when the run is over."""
        if self.over.wait(seconds):
            raise RunIsOver

    def add_server(self) -> int:
        """Start one more server, which takes its share of the keys over; its number, as soon as it has them.

        That is at the end of an iteration, the same for all workers, where they wait for one another; so one that calls
        kv.clock() no more holds it up, and all of them. What moves is written to the disk, and read, once; meanwhile nothing
        is served. Not with durability "replica", nor over tcp: ValueError. RunIsOver if the run ends before.
        """
        number, find = self.resize(None)
        self.servers.append(Victim(find))
        return number

    def remove_server(self, number: int) -> None:
        """Let the other servers take over what this one has, and end it; else as `add_server`."""
        self.resize(number)

    def start(self, saboteur: Callable[[Cluster], Any]) -> None:
        """Let a saboteur loose, in a thread of its own."""

        def life() -> None:
            try:
                saboteur(self)
            except RunIsOver:
                pass
            except BaseException as error:
                self.wrong = error

        self.thread = threading.Thread(target=life, name="saboteur", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise what the saboteur has raised."""
        if self.wrong is not None:
            raise self.wrong

    def stop(self) -> None:
        """The workers are done. A saboteur that sleeps in its own way is not waited for."""
        self.over.set()
        if self.thread is not None:
            self.thread.join(1.0)
