"""What all processes of a run agree on: how many there are, by which rules, and where they find one another."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from d2lps.kvstore.core.optimizers import OPTIMIZERS
from d2lps.kvstore.core.placement import Placement
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.network.sockets import Keys, check_address, derive_keys, new_secret
from d2lps.kvstore.storage.durable import read_mark

# What "durability" may be, and what each level survives; "replica" keeps every server twice, the others on disk or not at all.
LEVELS = ("memory", "log", "fsync", "replica")
HEAD = 1 << 20  # bytes of a message beside its tensors, at most


@dataclass(frozen=True)
class Deployment:
    """The options of a run, and what it adds to them. A node is a server process: server 0 is node 0 at first; with replicas, its
    backup is node `servers` + 0.

    durability: what survives a server that is killed. "memory": nothing, the run ends. "log": all that was acknowledged; it
    is started again from its log. "fsync": that, and a power cut. "replica": all that was acknowledged; each server has a
    backup, which takes over when the server is dead or has been silent for `patience` seconds, and then gets a backup itself.
    folder: where logs and checkpoints stay: new, empty, or that of an earlier run with as many servers, the same split and
    placement by "hash". Then its values, its optimizer and the optimizer's state are there from the start, and `init` leaves them
    as they are; its workers, clocks and open rounds are gone. log_bytes: after so many comes a checkpoint, or
    sooner, after 128 MB at least and four times what the server holds.
    memory_budget: bytes of tensors, the optimizer's too, that each server keeps in memory, those used last; the others lie on
    disk, in `folder` or else with the run's temporary files. A checkpoint, and the report at the end, read them all.
    absent: workers that begin with kv.join(). split, placement: see `Placement`. address: "ipc", "tcp" (loopback), or
    "tcp://host". secret: what workers and servers prove to know before they are heard, 16 characters or more; over tcp, by
    default, a random one for each run. limit: bytes of one part of a tensor. trace: record all messages, and what servers add up.
    """

    workers: int
    servers: int
    consistency: str = "bsp"
    staleness: int = 0
    durability: str = "memory"
    absent: Sequence[int] = ()
    split: int = 1_000_000
    placement: str = "hash"
    folder: str | Path = ""
    log_bytes: int = 1 << 30
    memory_budget: int | None = None
    patience: float = 2.0
    address: str = "ipc"
    secret: str | None = None
    limit: int = 1 << 30
    trace: bool = False
    # What a run adds.
    room: str = ""  # a folder of its own, which nobody else can enter
    keys: Keys | None = None
    optimizers: dict[str, Any] = field(default_factory=dict)  # all that are registered, for servers to know them too
    earlier: dict[str, Any] = field(default_factory=dict)  # the mark of the run whose folder this one goes on with

    @property
    def largest(self) -> int:
        """Bytes of one part of a message, at most."""
        return self.limit + HEAD

    @property
    def replicated(self) -> bool:
        return self.durability == "replica"

    @property
    def near(self) -> bool:
        """Whether workers and servers may read one another's memory."""
        return self.address == "ipc"

    @property
    def coordinator(self) -> str:
        """Where the coordinator hears servers."""
        return f"ipc://{self.room}/c"

    @property
    def news(self) -> str:
        """Where the coordinator tells workers who serves."""
        return f"ipc://{self.room}/n"

    def endpoint(self, node: int) -> str:
        """Where a node listens when it first starts: a port of its own choice, unless it has a file."""
        return f"ipc://{self.room}/{node}" if self.address == "ipc" else f"{self.address}:*"

    def server(self, node: int) -> int:
        """Which server a node is, or a backup of."""
        return node % self.servers if self.replicated else node

    def disk(self, node: int) -> Path:
        return Path(self.folder) / f"server-{node}"

    def pages(self, node: int) -> Path:
        """Where a server puts the tensors for which it has no room in memory."""
        return Path(self.folder) / f"pages-{node}"

    @property
    def rules(self) -> dict[str, Any]:
        """The arguments of Server."""
        return {"consistency": self.consistency, "staleness": self.staleness}

    @property
    def members(self) -> list[int]:
        """The workers that are there from the start."""
        return [worker for worker in range(self.workers) if worker not in self.absent]

    @property
    def mark(self) -> dict[str, Any]:
        """By what the folder's logs are to be read."""
        same = {name: getattr(self, name) for name in (*SAME, "durability")}
        return same | {"members": self.members, "rules": self.rules}

    def placed(self) -> Placement:
        return Placement(range(self.servers), self.split, self.placement)


OWN = {"workers", "servers", "room", "keys", "optimizers", "earlier"}  # not to be given as options
OPTIONS = {field.name for field in fields(Deployment)} - OWN
SAME = ("servers", "split", "placement")  # must be as in the run whose folder it is: they say which server has what


def deploy(workers: int, servers: int, **options: Any) -> Deployment:
    """`deploy(2, 1, durability="log")`: the plan of a run, checked; an error for what cannot be, before anything is started."""
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"options {sorted(unknown)} are unknown: choose {', '.join(sorted(OPTIONS))}")
    plan = Deployment(workers, servers, **options)
    for name in ("durability", "consistency", "placement", "address"):
        if not isinstance(given := getattr(plan, name), str):
            raise ValueError(f"{name}={given!r} is not a text")
    if not isinstance(plan.folder, str | Path):
        raise ValueError(f"folder={plan.folder!r} is not a path")
    if plan.durability not in LEVELS:
        raise ValueError(f"durability={plan.durability!r} is unknown: choose {', '.join(map(repr, LEVELS))}")
    _check_bytes(31, limit=plan.limit, log_bytes=plan.log_bytes)
    if plan.memory_budget is not None:
        _check_bytes(63, memory_budget=plan.memory_budget)
    patience, secret = plan.patience, plan.secret
    if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 < patience < math.inf:
        raise ValueError(f"patience={patience!r} is not a number of seconds")
    absent, everyone = plan.absent, {*range(workers)}
    listed = isinstance(absent, Sequence | Set) and all(type(rank) is int for rank in absent)
    if not listed or ({*absent} and not {*absent} < everyone):
        raise ValueError(f"absent={absent!r} are not ranks from 0 to {workers - 1}, or nobody else is there")
    plan.placed(), Server((), **plan.rules)  # to hear what is wrong with them
    where = check_address(plan.address)
    keys = None if where == "ipc" and secret is None else derive_keys(new_secret() if secret is None else secret)
    folder, earlier = _folder(plan)
    kept = {"folder": folder, "earlier": earlier, "optimizers": dict(OPTIMIZERS)}
    return replace(plan, absent=tuple(absent), address=where, keys=keys, secret=None, **kept)  # type: ignore[arg-type]


def _check_bytes(bits: int, **given: int) -> None:
    for name, nbytes in given.items():
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 1 <= nbytes < 1 << bits:
            raise ValueError(f"{name}={nbytes!r} is not a number of bytes from 1 to 2**{bits} - 1")


def _folder(plan: Deployment) -> tuple[str, dict[str, Any]]:
    """The folder for logs, made if need be, and the mark of the run that has left something there."""
    if not plan.folder:
        return "", {}
    said = f"folder={str(plan.folder)!r}"
    if plan.durability not in ("log", "fsync"):
        raise ValueError(f"{said}, but durability={plan.durability!r} writes nothing: choose 'log' or 'fsync'")
    path = Path(plan.folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    mark = read_mark(path)
    if not mark and any(path.iterdir()):
        raise FileExistsError(f"{said} is not empty, and no earlier run has left it: choose another one")
    if isinstance(left := mark.get("servers", 0), list | str):
        told = f"{said} is of a run whose servers have come or gone, servers={left!r}: no other run can go on there"
        raise ValueError(f"{told}; let such a run end with kv.save, and the next one begin with kv.load, in a folder of its own")
    for name in SAME if mark else ():
        if mark.get(name) != getattr(plan, name):
            raise ValueError(f"{said} is of a run with {name}={mark.get(name)!r}, not {getattr(plan, name)!r}")
    if mark and plan.placement == "load":
        raise ValueError(f"{said} is of an earlier run, and placement='load' does not say where that has put its keys")
    return str(path), mark
