"""What a server process keeps on disk: a log of all it executed, and now and then a checkpoint, so that the log stays short."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from d2lps.kvstore.core.events import Event
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.storage import checkpoint
from d2lps.kvstore.storage.frame import frame, parse
from d2lps.kvstore.storage.log import Level, Log


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
    >>> Durable(again, folder, "log").close()
    >>> again.entries["w"].value
    tensor([1., 1.])

    Made with a new server, it brings that to where the last one was: from the newest checkpoint, by what the log has after
    it, through the same `step`. level, log_bytes: see `Log`, and how long that may become. Cost of a restart: all that is
    read once; of a checkpoint, the server's state written once, to the disk itself, while nobody is answered.
    """

    def __init__(self, server: Server, folder: Path, level: str, limit: int = 1 << 30, log_bytes: int = 1 << 30) -> None:
        self.server, self.folder, self.log_bytes = server, folder, log_bytes
        self.log = Log(folder / "log", cast(Level, level))
        self.kept = load_state(server, folder / "checkpoints")
        if (begin := self.log.begin) > self.kept:
            self.log.close()
            raise checkpoint.CheckpointMissing(
                f"{folder}: its log begins at position {begin}, and there is no checkpoint of what came before, "
                f"only of position {self.kept}: what was acknowledged in between is lost"
            )
        self.log.skip_to(self.kept)
        for _, data in self.log.read(self.kept):
            server.step(cast(Event, parse([data], limit)))

    def append(self, event: Event) -> None:
        """Before anybody is told."""
        self.log.append(*frame(event))

    def sync(self) -> None:
        """Return when all that was appended is as safe as the level promises."""
        self.log.sync()
        if self.log.end - self.kept > self.log_bytes:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write down the state, and let go of the log that led to it."""
        end = self.log.end
        save_state(self.server, self.folder / "checkpoints", end)
        self.kept = end
        self.log.drop_before(end)

    def close(self) -> None:
        self.log.close()


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
