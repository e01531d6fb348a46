"""What a server process keeps on disk: a checkpoint, and a log of all that it executed since, so that neither becomes too long.

    folder/step-000000000042.safetensors    its state after 42 events, if there were so many
    folder/log-000000000042                 the events after these
    folder/spare                            a log that nobody needs any more, to become the next one

A checkpoint after 99 events goes like this, and may be stopped anywhere:

    1. spare becomes log-99, empty            if it ends here, 42 is still the newest state, and its log goes on; log-99 is spare
    2. step-99 appears, whole, by a rename    from here on 99 is the newest state, and its log is there
    3. step-42 goes
    4. log-42 becomes spare                   else it becomes that when the server starts again

So a state without its log, or a log without its state, is no crash, but a loss, and an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from d2lps import disk
from d2lps.kvstore.core.events import Event
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.storage import checkpoint
from d2lps.kvstore.storage.frame import frame, parse
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

    Made with a new server, it brings that to where the last one was: from the checkpoint, by what the log has after it, through
    the same `step`. folder: there, and nobody else uses it (see `lock`). level: see `Log`. limit: bytes of the tensors of an
    event. log_bytes: when a log is longer, a checkpoint comes, or sooner (see `_longest`). promised: how many events somebody
    knows to have been executed.
    LogDamaged where fewer are found, or files are missing. Cost of a restart: all that is read once; of a checkpoint, the
    server's state written once, to the disk itself, while nobody is answered; on disk, the state and twice `log_bytes`.
    """

    def __init__(
        self, server: Server, folder: Path, level: str, limit: int = 1 << 30, log_bytes: int = 1 << 30, promised: int = 0
    ) -> None:
        self.server, self.folder, self.log_bytes = server, folder, log_bytes
        begin = load_state(server, folder)
        logs = {int(path.name.removeprefix("log-")): path for path in folder.glob("log-*")}
        if begin not in logs and (logs or checkpoint.steps(folder)):
            found = f"its state is that after event {begin}, and its logs begin at {sorted(logs)}"
            raise LogDamaged(f"{folder}: {found}: acknowledged requests are lost")
        self.log = Log(self._path(begin), cast(Level, level), begin)
        try:
            if self.number < promised:
                counts = f"there are {self.number} events, and {promised} were promised"
                raise LogDamaged(f"{self.log.path}: {counts}: acknowledged requests are lost")
            for path in logs.values():
                if path != self.log.path:
                    path.rename(folder / "spare")
            for _, data in self.log.read():
                server.step(cast(Event, parse([data], limit)))
            self.until = self._longest()
        except BaseException:
            self.log.close()
            raise

    @property
    def number(self) -> int:
        """How many events are written down; as safe as the level promises, after a `sync`."""
        return self.log.number

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
        """Write down the state, and begin a new log, unless this one is still empty."""
        number, following = self.number, self.log
        if number > self.log.begin:
            following = Log(self._path(number), self.log.level, number)
        try:
            save_state(self.server, self.folder, number)
        except BaseException:
            following.close()
            raise
        if following is not self.log:
            self.log.close()
            self.log.path.rename(self.folder / "spare")
            self.log = following
        self.until = self._longest()

    def _longest(self) -> int:
        """Bytes: the shorter logs are, the sooner they are written over, in pages that the kernel still has; but the state, which
        is written each time, shall be a small part of what is written."""
        return min(self.log_bytes, max(_SHORT, _TIMES * sum(entry.nbytes for entry in self.server.entries.values())))

    def close(self) -> None:
        self.log.close()

    def _path(self, number: int) -> Path:
        return self.folder / f"log-{number:012d}"


def renew(server: Server, earlier: Server, folder: Path, level: str, limit: int = 1 << 30, promised: int = 0) -> int:
    """Let the server of a new run begin with what is in the folder of an earlier one, which `earlier` has the rules of.

    What workers have taught it stays, and nothing about them: lives, clocks, open rounds, who waits. It may be stopped anywhere,
    and done again. The bytes of an unfinished event that were cut off. Cost: a restart, and a checkpoint.
    """
    last = Durable(earlier, folder, level, limit, promised=promised)
    try:
        state = earlier.state()
        lasting = {name: found for name, found in state.items() if name in LASTING}
        begun = {"open": {key: {} for key in state["values"]}, "number": last.number}
        server.restore(server.state() | lasting | begun)
        last.server = server
        last.checkpoint()
        return last.cut
    finally:
        last.close()


def save_state(server: Server, folder: Path, step: int) -> None:
    """A checkpoint of all that a server knows, in place of those before it."""
    tensors, plain = checkpoint.flatten(server.state())
    checkpoint.save(folder, step, tensors, {"state": plain}, keep=1)


def load_state(server: Server, folder: Path) -> int:
    """Let a server know what the newest checkpoint holds; its step, 0 if there is none."""
    if not checkpoint.steps(folder):
        return 0
    newest = checkpoint.load(folder)
    state: dict[str, Any] = checkpoint.unflatten(newest.tensors, newest.meta["state"])
    server.restore(state)
    return newest.step


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
