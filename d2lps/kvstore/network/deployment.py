"""What all processes of a run agree on: how many there are, by which rules, and where they find one another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field
from msgspec.structs import replace

from d2lps.kvstore.core.optimizers import OPTIMIZERS
from d2lps.kvstore.core.placement import Placement
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.table import MORE, OPERATIONS
from d2lps.kvstore.network.sockets import Keys, check_address, derive_keys, new_secret
from d2lps.kvstore.storage.durable import read_mark, write_mark

# What "durability" may be, and what each level survives; "replica" keeps every server twice, the others on disk or not at all.
LEVELS = ("memory", "log", "fsync", "replica")
REGISTERS: tuple[dict[str, Any], ...] = OPTIMIZERS, OPERATIONS, MORE  # to which users may add their own
HEAD = 1 << 20  # bytes of a message beside its tensors, at most
Bytes = Annotated[int, Meta(ge=1, lt=1 << 31)]


class Deployment(msgspec.Struct, frozen=True):
    """The options of a run, and what it adds to them. A node is a server process: server 0 is node 0 at first; with replicas, its
    backup is node `servers` + 0.

    durability: what survives a server that is killed. "memory": nothing, the run ends. "log": all that was acknowledged; it
    is started again from its log. "fsync": that, and a power cut. "replica": all that was acknowledged; each server has a
    backup, which takes over when the server is dead or has been silent for `patience` seconds, and then gets a backup itself.
    folder: where the logs stay: new, empty, or that of an earlier run with as many servers, the same split and
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
    absent: tuple[int, ...] = ()
    split: int = 1_000_000
    placement: str = "hash"
    folder: str = ""
    log_bytes: Bytes = 1 << 30
    memory_budget: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)] | None = None
    patience: Annotated[float, Meta(gt=0)] = 2.0
    address: str = "ipc"
    secret: Any = None
    limit: Bytes = 1 << 30
    trace: bool = False
    # What a run adds.
    room: str = ""  # a folder of its own, which nobody else can enter
    keys: Keys | None = None
    registered: tuple[dict[str, Any], ...] = ()  # what the tables in REGISTERS have here, for servers to have it too
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
        # A server that came later began without members: its number is none of the first ones'.
        return same | {"members": self.members, "rules": self.rules, "first": self.servers}

    def note(self, **more: Any) -> None:
        """Leave in the folder how a later run is to read what the servers leave there."""
        if self.durability in ("log", "fsync"):
            write_mark(Path(self.folder), self.mark | more)

    def placed(self) -> Placement:
        return Placement(range(self.servers), self.split, self.placement)


OWN = {"workers", "servers", "room", "keys", "registered", "earlier"}  # not to be given as options
OPTIONS = {*Deployment.__struct_fields__} - OWN
SAME = ("servers", "split", "placement")  # must be as in the run whose folder it is: they say which server has what


def deploy(workers: int, servers: int, **options: Any) -> Deployment:
    """`deploy(2, 1, durability="log")`: the plan of a run, checked; an error for what cannot be, before anything is started."""
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"options {sorted(unknown)} are unknown: choose {', '.join(sorted(OPTIONS))}")
    if isinstance(folder := options.get("folder"), Path):
        options["folder"] = str(folder)
    try:
        plan = msgspec.convert({"workers": workers, "servers": servers, **options}, Deployment)
    except msgspec.ValidationError as error:
        raise ValueError(_explained(str(error), options)) from error
    if plan.durability not in LEVELS:
        raise ValueError(f"durability={plan.durability!r} is unknown: choose {', '.join(map(repr, LEVELS))}")
    if plan.absent and not {*plan.absent} < {*range(workers)}:
        raise ValueError(f"absent={plan.absent!r} are not ranks from 0 to {workers - 1}, or nobody else is there")
    plan.placed(), Server((), **plan.rules)  # to hear what is wrong with them
    where, secret = check_address(plan.address), plan.secret
    keys = None if where == "ipc" and secret is None else derive_keys(new_secret() if secret is None else secret)
    folder, earlier = _folder(plan)
    more: dict[str, Any] = {"folder": folder, "earlier": earlier, "registered": tuple(map(dict, REGISTERS))}
    return replace(plan, address=where, keys=keys, secret=None, **more)


def _explained(error: str, options: dict[str, Any]) -> str:
    """msgspec's words with the option's name and value: `limit=0: expected int >= 1`."""
    words, _, place = error.replace("`", "").partition(" - at ")
    [name] = re.findall(r"^\$\.(\w+)", place)
    return f"{name}={options[name]!r}: {words[0].lower()}{words[1:]}"


def _folder(plan: Deployment) -> tuple[str, dict[str, Any]]:
    """The folder for logs, made if need be, and the mark of the run that has left something there."""
    if not plan.folder:
        return "", {}
    said = f"folder={plan.folder!r}"
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
