"""What a server process keeps on disk: a log. Its first record is the server's state, the others are the events since.

    folder/log-000000000042     the state after 42 events, then event 43, event 44 ...
    folder/spare                a log that nobody needs any more, which the next one is written over

A checkpoint after 99 events is a new log, log-000000000099. It appears with its first record, the state, by one rename, and
from then on it is the newest log, with which the server goes on and would start again. After that log-000000000042 becomes the
spare. If the server is stopped between the two renames, it finds two logs, takes the newest, and renames the other one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from d2lps import disk
from d2lps.kvstore.core.events import Event
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.storage.frame import frame, pack, parse, unpack
from d2lps.kvstore.storage.log import Level, Log, LogDamaged

_SHORT, _TIMES = 1 << 27, 4  # bytes of a log that is long enough, unless the state is more than a quarter of them
LASTING = {"values", "moments", "versions", "options", "wholes"}  # what of a server's state is not about its run


class Durable:
    """
    >>> import tempfile, torch
    >>> from d2lps.kvstore.core.events import Append, Request
    >>> folder, server = Path(tempfile.mkdtemp()), Server([0], "asp")
    >>> durable = Durable(server, folder, "log")
    >>> for effect in server.step(Request("init", "w", torch.ones(2), sequence=1)):
    ...     durable.append(effect.event) if isinstance(effect, Append) else durable.sync()
    >>> durable.close()
    >>> again = Server([0], "asp")
    >>> Durable(again, folder, "log", promised=1).close()
    >>> again.entries["w"].value
    tensor([1., 1.])

    Made with a new server, it brings that to where the last one was: to the state that the log begins with, then by the events
    after it, through the same `step`. folder: there, and nobody else uses it (see `lock`). level: see `Log`. limit: bytes of the
    tensors of an event. log_bytes: when a log is longer, a checkpoint comes, or sooner (see `_longest`). promised: how many
    events somebody knows to have been executed.
    LogDamaged where fewer are found, or what is there is broken. Cost of a restart: all that is read once; of a checkpoint, the
    server's state written once, to the disk itself, while nobody is answered; on disk, the state and `log_bytes`, both twice.
    """

    def __init__(
        self, server: Server, folder: Path, level: str, limit: int = 1 << 30, log_bytes: int = 1 << 30, promised: int = 0
    ) -> None:
        self.server, self.folder, self.limit, self.log_bytes = server, folder, limit, log_bytes
        *older, newest = logs_in(folder) or [0]
        first = [] if _path(folder, newest).exists() else pack(server.state())
        self.until = min(log_bytes, _SHORT)
        self.log = Log(_path(folder, newest), cast(Level, level), newest, first, partial(self._read, newest))
        if self.number < promised:
            self.log.close()
            counts = f"there are {self.number} events, and {promised} were promised"
            raise LogDamaged(f"{self.log.path}: {counts}: acknowledged requests are lost")
        for number in older:
            _path(folder, number).rename(folder / "spare")

    def _read(self, begin: int, number: int, data: bytearray) -> None:
        """A record of the log: the first one is a state, the others are events."""
        if number == begin:
            self.server.restore(unpack(data))
            self.until = len(data) + self._longest()
        else:
            self.server.step(cast(Event, parse([data], self.limit)))

    @property
    def number(self) -> int:
        """How many events are written down; as safe as the level promises, after a `sync`."""
        return self.log.number - 1

    @property
    def cut(self) -> int:
        """How many bytes of an unfinished event were found at the end, of which nobody had been told."""
        return self.log.cut

    def append(self, event: Event) -> None:
        """Before anybody is told."""
        self.log.append(*frame(event))

    def sync(self) -> None:
        """Return when all that was appended is as safe as the level promises."""
        self.log.sync()
        if self.log.end > self.until and self.number > self.log.begin:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Begin a new log with the state, even if there was no event since the last one."""
        self.log.restart(_path(self.folder, self.number), self.number, *pack(self.server.state()))
        self.until = self.log.end + self._longest()

    def _longest(self) -> int:
        """Bytes of events. A short log is soon written over, in pages that the kernel still has. But each begins with the
        state, and that shall be a small part of what is written."""
        held = sum(entry.nbytes for entry in self.server.entries.values())
        return min(self.log_bytes, max(_SHORT, _TIMES * held))

    def close(self) -> None:
        self.log.close()


def renew(server: Server, earlier: Server, folder: Path, level: str, limit: int, log_bytes: int, promised: int = 0) -> Durable:
    """Let the server of a new run begin with what is in the folder of an earlier one, which `earlier` has the rules of.

    What workers have taught it stays, and nothing about them: lives, clocks, open rounds, who waits. It may be stopped anywhere,
    and done again. Cost: a restart, and a checkpoint.
    """
    durable = Durable(earlier, folder, level, limit, log_bytes, promised)
    state = earlier.state()
    lasting = {name: found for name, found in state.items() if name in LASTING}
    begun = {"open": {key: {} for key in state["values"]}, "number": durable.number}
    server.restore(server.state() | lasting | begun)
    durable.server = server
    durable.checkpoint()
    return durable


# ---- a state alone ----------------------------------------------------------------------------------------------------------


def logs_in(folder: Path) -> list[int]:
    """The numbers of the logs there, the newest last: how many events had been executed when each began."""
    return sorted(int(path.name.removeprefix("log-")) for path in folder.glob("log-*"))


def _path(folder: Path, number: int) -> Path:
    return folder / f"log-{number:012d}"


def save_state(folder: Path, number: int, state: Any) -> None:
    """Write a log that has a state after so many events, and nothing else: it is there as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    Log(_path(folder, number), begin=number, first=pack(state)).close()


def load_state(folder: Path) -> Any:
    """What `save_state` has written; None if it has not. LogDamaged where it is broken.

    >>> import tempfile
    >>> save_state(folder := Path(tempfile.mkdtemp()), 7, {"clocks": {0: 3}})
    >>> load_state(folder)
    {'clocks': {0: 3}}
    """
    found: list[Any] = [None]
    for number in logs_in(folder)[-1:]:
        Log(_path(folder, number), begin=number, each=lambda number, data: found.append(unpack(data))).close()
    return found[-1]


# ---- the mark of a run ------------------------------------------------------------------------------------------------------


def write_mark(folder: Path, mark: Mapping[str, Any]) -> None:
    """Note in a run's folder what must be known before anything in it is read, as JSON; it is there as a whole or as before.

    >>> import tempfile
    >>> write_mark(folder := Path(tempfile.mkdtemp()), {"servers": 2, "numbers": [7, 5]})
    >>> read_mark(folder)
    {'servers': 2, 'numbers': [7, 5]}
    """
    draft = folder / ".mark.draft"
    draft.write_text(json.dumps(mark))
    disk.settle(draft, folder / "mark.json")


def read_mark(folder: Path) -> dict[str, Any]:
    """What `write_mark` has noted; nothing if there is no mark. ValueError, which names the file, for a broken one."""
    path = folder / "mark.json"
    try:
        mark = json.loads(path.read_text()) if path.exists() else {}
        return dict(mark)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no mark of a run: {error}") from error
