"""Which server has what: big tensors are cut into blocks of rows, one on each server; small ones live on one server whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
        self.held = dict.fromkeys(self.servers, 0)  # bytes of values that each server has

    def place(self, key: str, shape: Sequence[int], dtype: torch.dtype, everywhere: bool = False) -> list[Part]:
        """The parts of a key, in the order of its rows, or its copies; of one that is known, as they are."""
        if key not in self.parts:
            self.shapes[key] = tuple(shape), dtype
            self.everywhere |= {key} if everywhere else set()
            self._put(key, self._place(key))
        return self.parts[key]

    def forget(self, key: str) -> None:
        """It was refused."""
        self._put(key, [])
        del self.parts[key], self.shapes[key]
        self.everywhere.discard(key)

    def describe(self, key: str) -> str:
        """What a key is, in words that are equal if two workers mean the same: "float32[100, 2]", "float32[3] everywhere"."""
        return described(*self.shapes[key], key in self.everywhere)

    def home(self, key: str) -> Part:
        """Where a key would lie whole, and small: known to all who know its name, whatever they take its shape for."""
        return Part(self.ring.owner(key), name_of(key), 0)

    def found(self, server: int, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """A server has this part. Of a tensor in blocks they must be told in the order of rows; the last one says how many."""
        key, first, last = key_of(name)
        self.shapes[key] = tuple(shape) if last is None else (last, *shape[1:]), dtype
        part = Part(server, name, math.prod(shape) * dtype.itemsize, first, last)
        self.everywhere |= {key} if part.copied else set()
        self._put(key, [*self.parts.get(key, ()), part])

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
        return dict(self.held)

    def add(self, server: int) -> list[Move]:
        """A server more; what has to move to it. Of small tensors about 1/s, by hash or by load."""
        return self.follow({*self.servers, server})

    def remove(self, server: int) -> list[Move]:
        """A server less; where what it had goes. Of small tensors nothing else moves."""
        if self.servers == [server]:
            raise ValueError(f"server {server} is the last one")
        return self.follow({*self.servers} - {server})

    def follow(self, servers: Iterable[int]) -> list[Move]:
        """Other servers; what has to move. It depends on what lies where, and not on the order in which it came there."""
        before, new = dict(self.parts), set(servers) - set(self.servers)
        self.servers = sorted(servers)
        self.ring = HashRing(self.servers)
        self.held = dict.fromkeys(self.servers, 0) | self.held
        by_size = sorted(before, key=lambda key: (-self._size(key), key))
        for key in by_size:
            stays = self.by == "load" and before[key][0].last is None and before[key][0].server in self.servers
            if not stays or self._cuts(key) or key in self.everywhere:
                self._put(key, self._place(key))
        if self.by == "load":
            self._fill(new, [key for key in by_size if self.parts[key][0].last is None and key not in self.everywhere])
        self.held = {server: self.held[server] for server in self.servers}
        return [move for key, parts in before.items() for move in self._moves(key, parts)]

    def _moves(self, key: str, before: list[Part]) -> list[Move]:
        """What of this key has to move. A copy comes from the first server that has one."""
        now = self.parts[key]
        if key in self.everywhere:
            had = {part.server for part in before}
            before, now = before[:1], [part for part in now if part.server not in had]
        moves = [_overlap(key, old, new, self.shapes[key][0]) for old in before for new in now]
        return [move for move in moves if move is not None]

    def _fill(self, new: set[int], keys: list[str]) -> None:
        """Bring each newcomer close to its share of the bytes, from those who have more than theirs."""
        share = sum(self.held.values()) / len(self.servers)
        for server in sorted(new):
            for key in keys:
                [part] = self.parts[key]
                if self.held[server] + part.nbytes <= share < self.held[part.server]:
                    self._put(key, [replace(part, server=server)])

    def _put(self, key: str, parts: list[Part]) -> None:
        for part in self.parts.get(key, ()):
            self.held[part.server] -= part.nbytes
        for part in parts:
            self.held[part.server] += part.nbytes
        self.parts[key] = parts

    def _cuts(self, key: str) -> bool:
        """Whether a tensor is so big that each server gets some rows of it."""
        shape = self.shapes[key][0]
        return self._size(key) >= self.split and bool(shape) and shape[0] > 1 and len(self.servers) > 1

    def _size(self, key: str) -> int:
        shape, dtype = self.shapes[key]
        return math.prod(shape) * dtype.itemsize

    def _place(self, key: str) -> list[Part]:
        if key in self.everywhere:
            return [Part(server, f"{key}[*]", self._size(key)) for server in self.servers]
        if self._cuts(key):
            rows = self.shapes[key][0][0]
            return self._blocks(key, rows, self._size(key) // rows)
        home = self.home(key)
        server = min(self.servers, key=self.held.__getitem__) if self.by == "load" else home.server
        return [Part(server, home.name, self._size(key))]

    def _blocks(self, key: str, rows: int, row_bytes: int) -> list[Part]:
        """One block a server, the longer ones first."""
        blocks = min(rows, len(self.servers))
        edges = [number * (rows // blocks) + min(number, rows % blocks) for number in range(blocks + 1)]
        pairs = zip(self.servers, edges, edges[1:], strict=False)
        return [Part(s, name_of(key, first, last), (last - first) * row_bytes, first, last) for s, first, last in pairs]


def _overlap(key: str, old: Part, new: Part, shape: tuple[int, ...]) -> Move | None:
    """What the one server had and the other one has now."""
    if old.server == new.server:
        return None
    if old.last is None and new.last is None:
        return Move(key, 0, None, old.server, new.server, old.nbytes)
    first, last = max(old.first, new.first), min(old.last or shape[0], new.last or shape[0])
    row_bytes = old.nbytes // ((old.last or shape[0]) - old.first)
    return Move(key, first, last, old.server, new.server, (last - first) * row_bytes) if first < last else None


def described(shape: Sequence[int], dtype: torch.dtype, everywhere: bool = False) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{' everywhere' * everywhere}"


def name_of(key: str, first: int = 0, last: int | None = None) -> str:
    """What a server calls these rows of a key, or, with last=None, all of it; see `key_of`."""
    return f"{key}[{first}:{last}]" if last is not None else f"{key}[:]" if key.endswith("]") else key


def key_of(name: str) -> tuple[str, int, int | None]:
    """The key of a part, its first row and the one after its last, None of a whole tensor.

    Any string is a key: a whole one that ends like a block has "[:]" after it; one of many copies has "[*]".

    >>> key_of("w"), key_of("w[5:9]"), key_of("w[5:9][:]"), key_of("w[*]")
    (('w', 0, None), ('w', 5, 9), ('w[5:9]', 0, None), ('w', 0, None))
    """
    if not name.endswith("]"):
        return name, 0, None
    key, _, rows = name.rpartition("[")
    first, _, last = rows.removesuffix("]").removesuffix("*").partition(":")
    return key, int(first or 0), int(last) if last else None


def join_parts(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors, of what all servers have by their names.

    >>> join_parts({"w[2:3]": torch.tensor([3.]), "w[0:2]": torch.tensor([1., 2.]), "b": torch.zeros(1)})
    {'b': tensor([0.]), 'w': tensor([1., 2., 3.])}
    """
    blocks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(values, key=lambda name: key_of(name)[:2]):
        blocks.setdefault(key_of(name)[0], []).append(values[name])
    return {key: parts[0] if len(parts) == 1 else _joined(parts) for key, parts in blocks.items()}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """One after another; of an optimizer's count of steps, which each part has, the largest."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts).amax(0)
