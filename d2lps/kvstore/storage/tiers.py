"""Hot and cold: the keys that are in use in memory, the rest on disk.

Of an embedding table with a billion rows, few are looked up often. A budget says how many bytes stay in memory; whatever
was used least recently goes to the disk when another needs its place, and is written there only if it was changed since
it was read (a dirty page). A page is a file with the bytes of one tensor, and nothing else: what they mean stays in memory.

The disk is more room here, not safety: what survives a crash is the log's and the checkpoint's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from d2lps.kvstore.core.entry import Store
from d2lps.kvstore.storage.frame import bytes_of
from d2lps.kvstore.storage.log import checksum

Page = tuple[torch.Size, torch.dtype, int]  # what lies in the file of a key, and its checksum


@dataclass
class Counts:
    """What has happened, in times and in bytes."""

    hits: int = 0  # reads that found their key in memory
    misses: int = 0  # reads that went to the disk
    evictions: int = 0  # tensors that left memory
    bytes_read: int = 0  # of tensors, from the disk
    bytes_written: int = 0
    bytes_hot: int = 0  # of tensors in memory now


class Tiers(Store):
    """A dictionary of tensors of which at most `budget` bytes lie in memory, and the rest in files in a folder.

    >>> import tempfile
    >>> tiers = Tiers(tempfile.mkdtemp(), budget=16)
    >>> tiers["a"], tiers["b"], tiers["c"] = torch.zeros(2), torch.ones(2), torch.ones(2)  # 8 bytes each: "a" must leave
    >>> tiers["a"] += 5  # and comes back, in the place of "b"
    >>> tiers.peek("b"), tiers.hot, tiers.counts.misses
    (tensor([1., 1.]), ['c', 'a'], 1)
    >>> tiers.close()

    A tensor that was read belongs to the store, and may have left memory when the next key is used: changes count only
    when it is set again, as `tiers[key] += ...` does. ValueError for a tensor larger than the budget. `close` deletes the
    files.
    """

    budget: int

    def __init__(self, folder: str | Path, budget: int) -> None:
        if budget < 1:
            raise ValueError(f"a budget is at least 1 byte: {budget}")
        self.folder, self.budget, self.counts = Path(folder), budget, Counts()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._hot: OrderedDict[Hashable, torch.Tensor] = OrderedDict()  # the least recently used first
        self._pages: dict[Hashable, Page | None] = {}  # every key's; None if it is dirty: memory has something newer
        for page in self.folder.glob("*.page"):  # of a process that died, and so of no use
            page.unlink()

    @property
    def hot(self) -> list[Hashable]:
        """The keys in memory, the least recently used first."""
        return list(self._hot)

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """The tensor, in memory from now on, and the most recently used; from the disk it takes n bytes of reading."""
        if key in self._hot:
            self.counts.hits += 1
            self._hot.move_to_end(key)
            return self._hot[key]
        tensor = self._read(key)
        self.counts.misses += 1
        self._admit(key, tensor)
        return tensor

    def __setitem__(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Put a tensor in, or take note that the one read was changed; it is the store's from now on."""
        if tensor.nbytes > self.budget:
            raise ValueError(f"{key!r} has {tensor.nbytes} bytes, and the budget for all tensors in memory is {self.budget}")
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a view of something larger would keep all of that in memory
        self._admit(key, tensor)
        self._pages[key] = None

    def __delitem__(self, key: Hashable) -> None:
        del self._pages[key]
        if key in self._hot:
            self.counts.bytes_hot -= self._hot.pop(key).nbytes
        self._path(key).unlink(missing_ok=True)

    def peek(self, key: Hashable) -> torch.Tensor:
        """The tensor, to be looked at and not changed: nothing moves between the tiers, and nothing is written.

        What an evaluation over all keys needs: by `tiers[key]` it would put the keys in use out of memory.
        """
        return self._hot[key] if key in self._hot else self._read(key)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    def clear(self) -> None:
        """Forget all keys, and delete their files."""
        for key in list(self):
            del self[key]

    close = clear

    # ---- between memory and disk ------------------------------------------------------------------------------------

    def _admit(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Keep it in memory, as the one used last; the others leave until there is room."""
        held = 0
        if key in self._hot:  # should the disk be full, what it held is still there
            self._hot.move_to_end(key)
            held = self._hot[key].nbytes
        while self.counts.bytes_hot - held + tensor.nbytes > self.budget:
            self._evict()
        self._hot[key] = tensor
        self.counts.bytes_hot += tensor.nbytes - held

    def _evict(self) -> None:
        """The least recently used leaves memory, and is written if its page is not what it is now."""
        key, tensor = next(iter(self._hot.items()))
        if self._pages[key] is None:
            self._pages[key] = self._write(key, tensor)
        self.counts.bytes_hot -= self._hot.pop(key).nbytes
        self.counts.evictions += 1

    def _path(self, key: Hashable) -> Path:
        return self.folder / f"{blake2b(repr(key).encode(), digest_size=16).hexdigest()}.page"

    def _write(self, key: Hashable, tensor: torch.Tensor) -> Page:
        data = bytes_of(tensor)
        try:
            with self._path(key).open("wb") as file:
                file.write(data)
        except OSError as error:
            error.filename = str(self._path(key))
            raise
        self.counts.bytes_written += tensor.nbytes
        return tensor.shape, tensor.dtype, checksum(data)

    def _read(self, key: Hashable) -> torch.Tensor:
        page = self._pages[key]
        assert page is not None, f"{key!r} is neither in memory nor on disk"
        shape, dtype, sum_ = page
        tensor = torch.empty(shape, dtype=dtype)
        with self._path(key).open("rb") as file:
            file.readinto(data := bytes_of(tensor))
        if checksum(data) != sum_:
            raise ValueError(f"{self._path(key)}, the page of {key!r:.200}, is not what was written there")
        self.counts.bytes_read += tensor.nbytes
        return tensor
