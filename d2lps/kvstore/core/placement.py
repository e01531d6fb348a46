"""Which server has what: big tensors are cut into blocks of rows, one on each server; small ones live on one server whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from d2lps.kvstore.core.hashing import HashRing


@dataclass(frozen=True)
class Part:
    """Rows first to last of a tensor, on one server; or, with last=None, a whole one."""

    server: int
    name: str  # under which the server knows it: "w", "w[0:50]", or "w[*]", one of many copies; see `key_of`
    nbytes: int
    first: int = 0
    last: int | None = None

    @property
    def copied(self) -> bool:
        """Whether all servers have the same."""
        return self.name.endswith("[*]")

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows, as a view."""
        return tensor if self.last is None else tensor[self.first : self.last]


@dataclass(frozen=True)
class Move:
    """Rows first to last of a key go from one server to another; last=None: all of it."""

    key: str
    first: int
    last: int | None
    src: int
    dst: int
    nbytes: int


Rows = tuple[Part, torch.Tensor, torch.Tensor]  # of a part: which of the rows asked for lie there, and where


class Placement:
    """
    >>> placement = Placement(servers=[0, 1], split=100)
    >>> [part.name for part in placement.place("big", (50, 2), torch.float32)]      # 400 bytes
    ['big[0:25]', 'big[25:50]']
    >>> [part.name for part in placement.place("small", (3,), torch.float32)]
    ['small']
    >>> sum(placement.nbytes().values())
    412

    split: tensors of at least so many bytes are cut; they need at least two rows. by: "hash", small tensors lie where
    consistent hashing says, so whoever knows the servers knows where; "load", each goes to the server that has the fewest
    bytes then, so all workers must name the keys in the same order (a run that finds a key on two servers ends with
    Mismatch). Each worker keeps its own, and all come to the same.
    Source: Li et al., OSDI 2014 (hashing); MXNet's kvstore cuts at 10^6 elements.
    """

    def __init__(self, servers: Iterable[int], split: int = 1_000_000, by: str = "hash") -> None:
        self.servers = sorted(servers)
        if isinstance(split, bool) or not isinstance(split, int) or split < 1:
            raise ValueError(f"split={split!r} is not a number of bytes from 1 up")
        if not self.servers:
            raise ValueError("a placement needs at least one server")
        if by not in ("hash", "load"):
            raise ValueError(f"by={by!r} is unknown: choose 'hash' or 'load'")
        self.split, self.by = split, by
        self.ring = HashRing(self.servers)
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.parts: dict[str, list[Part]] = {}
        self.everywhere: set[str] = set()  # keys of which each server has a copy
        self.held = self.nbytes()  # kept up to date while keys come

    def place(self, key: str, shape: Sequence[int], dtype: torch.dtype, everywhere: bool = False) -> list[Part]:
        """The parts of a key, in the order of its rows, or its copies; of one that is known, as they are."""
        if key not in self.parts:
            self.shapes[key] = tuple(shape), dtype
            self.everywhere |= {key} if everywhere else set()
            self.parts[key] = self._place(key)
            for part in self.parts[key]:
                self.held[part.server] += part.nbytes
        return self.parts[key]

    def forget(self, key: str) -> None:
        """It was refused."""
        del self.parts[key], self.shapes[key]
        self.everywhere.discard(key)
        self.held = self.nbytes()

    def whole(self, key: str) -> str:
        """What a key is, in words that are equal if two workers mean the same: "float32[100, 2]", "float32[3] everywhere"."""
        return whole(*self.shapes[key], key in self.everywhere)

    def home(self, key: str) -> Part:
        """Where a key would lie whole, and small: known to all who know its name, whatever they take its shape for."""
        return Part(self.ring.owner(key), f"{key}[:]" if key.endswith("]") else key, 0)

    def split_rows(self, key: str, rows: torch.Tensor) -> list[Rows]:
        """For each part that is concerned: which of `rows` lie there, and where in the part."""
        parts = self.parts[key]
        if parts[0].last is None:
            return [(part, torch.arange(len(rows)), rows) for part in parts]
        edges = torch.tensor([part.last for part in parts])
        owner = torch.bucketize(rows, edges, right=True)
        split = [(part, (owner == number).nonzero().flatten()) for number, part in enumerate(parts)]
        return [(part, mine, rows[mine] - part.first) for part, mine in split if len(mine)]

    def nbytes(self) -> dict[int, int]:
        """{server: bytes of values that it has}."""
        totals = dict.fromkeys(self.servers, 0)
        for part in (part for parts in self.parts.values() for part in parts):
            totals[part.server] = totals.get(part.server, 0) + part.nbytes
        return totals

    def add(self, server: int) -> list[Move]:
        """A server more; what has to move to it. Of small tensors about 1/s, by hash or by load."""
        self.ring.add(server)
        self.servers = sorted([*self.servers, server])
        before = self._cut_anew()
        if self.by == "load":
            share = sum(self.nbytes().values()) / len(self.servers)
            for key in sorted(self._small(), key=lambda key: -self.parts[key][0].nbytes):
                load, part = self.nbytes(), self.parts[key][0]
                if load[server] + part.nbytes <= share and load[part.server] > share:
                    self.parts[key] = [Part(server, part.name, part.nbytes)]
        return self._moves(before)

    def remove(self, server: int) -> list[Move]:
        """A server less; where what it had goes. Of small tensors nothing else moves."""
        if self.servers == [server]:
            raise ValueError(f"server {server} is the last one")
        self.ring.remove(server)
        self.servers.remove(server)
        before = self._cut_anew()
        if self.by == "load":
            for key in [key for key in self._small() if self.parts[key][0].server == server]:
                del self.parts[key]
                self.held = self.nbytes()
                self.parts[key] = self._place(key)
        return self._moves(before)

    def _place(self, key: str) -> list[Part]:
        shape, dtype = self.shapes[key]
        nbytes = math.prod(shape) * dtype.itemsize
        if key in self.everywhere:
            return [Part(server, f"{key}[*]", nbytes) for server in self.servers]
        if nbytes >= self.split and shape and shape[0] > 1 and len(self.servers) > 1:
            return self._blocks(key, shape[0], nbytes // shape[0])
        home = self.home(key)
        server = min(self.servers, key=self.held.__getitem__) if self.by == "load" else home.server
        return [Part(server, home.name, nbytes)]

    def _blocks(self, key: str, rows: int, row_bytes: int) -> list[Part]:
        """One block a server, the longer ones first."""
        blocks = min(rows, len(self.servers))
        edges = [number * (rows // blocks) + min(number, rows % blocks) for number in range(blocks + 1)]
        pairs = zip(self.servers, edges, edges[1:], strict=False)
        return [Part(s, f"{key}[{first}:{last}]", (last - first) * row_bytes, first, last) for s, first, last in pairs]

    def _small(self) -> list[str]:
        return [key for key, parts in self.parts.items() if parts[0].last is None]

    def _cut_anew(self) -> dict[str, list[Part]]:
        """Place all but what lies by load; as it was before."""
        before, self.held = dict(self.parts), self.nbytes()
        for key in before:
            if self.by == "hash" or before[key][0].last is not None or self._place(key)[0].last is not None:
                self.parts[key] = self._place(key)
        return before

    def _moves(self, before: dict[str, list[Part]]) -> list[Move]:
        self.held = self.nbytes()
        return [
            move
            for key, parts in self.parts.items()
            for old in before[key]
            for new in parts
            if (move := _overlap(key, old, new, self.shapes[key][0]))
        ]


def _overlap(key: str, old: Part, new: Part, shape: tuple[int, ...]) -> Move | None:
    """What the one server had and the other one has now."""
    if old.server == new.server:
        return None
    if old.last is None and new.last is None:
        return Move(key, 0, None, old.server, new.server, old.nbytes)
    first, last = max(old.first, new.first), min(old.last or shape[0], new.last or shape[0])
    row_bytes = old.nbytes // ((old.last or shape[0]) - old.first)
    return Move(key, first, last, old.server, new.server, (last - first) * row_bytes) if first < last else None


def whole(shape: Sequence[int], dtype: torch.dtype, everywhere: bool = False) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{' everywhere' * everywhere}"


def key_of(name: str) -> tuple[str, int]:
    """The key of a part, and its first row: any string is a key, for a whole one that ends like a block has "[:]" after it.

    >>> key_of("w"), key_of("w[5:9]"), key_of("w[5:9][:]"), key_of("w[*]")
    (('w', 0), ('w', 5), ('w[5:9]', 0), ('w', 0))
    """
    if not name.endswith("]"):
        return name, 0
    key, _, rows = name.rpartition("[")
    return key, 0 if rows == "*]" else int(rows.partition(":")[0] or 0)


def join_parts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors, of what all servers have by their names.

    >>> join_parts({"w[2:3]": torch.tensor([3.]), "w[0:2]": torch.tensor([1., 2.]), "b": torch.zeros(1)})
    {'b': tensor([0.]), 'w': tensor([1., 2., 3.])}
    """
    blocks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(values, key=key_of):
        blocks.setdefault(key_of(name)[0], []).append(values[name])
    return {key: parts[0] if len(parts) == 1 else _joined(parts) for key, parts in blocks.items()}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One after another; of an optimizer's count of steps, which each part has, the largest."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).amax(0)
