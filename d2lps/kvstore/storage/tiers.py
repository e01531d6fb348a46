"""Hot and cold: the keys that are in use in memory, the rest on disk.

Of an embedding table with a billion rows, few are looked up often. A budget says how many bytes stay in memory; whatever
was used least recently goes to the disk when another needs its place, and is written there only if it was changed since
it was read (a dirty page). A page is a file with one key and its tensor, and in it the frame that would carry them.

The disk is more room here, not safety: what survives a crash is the log's and the checkpoint's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from d2lps.kvstore.core.entry import Store
from d2lps.kvstore.core.events import Request
from d2lps.kvstore.storage.frame import frame, parse


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
        self._dirty: set[Hashable] = set()  # those in memory that differ from their page, or have none
        self._pages: dict[Hashable, Path | None] = {}  # every key's file; None if it was never written
        self._made = 0
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
        self._make_room(tensor.nbytes)
        self._admit(key, tensor)
        return tensor

    def __setitem__(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Put a tensor in, or take note that the one read was changed; it is the store's from now on."""
        if tensor.nbytes > self.budget:
            raise ValueError(f"{key!r} has {tensor.nbytes} bytes, and the budget for all tensors in memory is {self.budget}")
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a view of something larger would keep all of that in memory
        if key in self._hot:  # the last that would leave: if the disk is full, what it held is still there
            self._hot.move_to_end(key)
        self._make_room(tensor.nbytes - (self._hot[key].nbytes if key in self._hot else 0))
        self._drop(key)
        self._admit(key, tensor)
        self._pages.setdefault(key, None)
        self._dirty.add(key)

    def __delitem__(self, key: Hashable) -> None:
        page = self._pages.pop(key)
        self._drop(key)
        if page:
            page.unlink()

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

    def close(self) -> None:
        """Delete all files."""
        for page in filter(None, self._pages.values()):
            page.unlink()
        self._pages, self._dirty = {}, set()
        self._hot.clear()
        self.counts.bytes_hot = 0

    # ---- between memory and disk ------------------------------------------------------------------------------------

    def _admit(self, key: Hashable, tensor: torch.Tensor) -> None:
        self._hot[key] = tensor
        self.counts.bytes_hot += tensor.nbytes

    def _drop(self, key: Hashable) -> None:
        if key in self._hot:
            self.counts.bytes_hot -= self._hot.pop(key).nbytes
            self._dirty.discard(key)

    def _make_room(self, nbytes: int) -> None:
        while self.counts.bytes_hot + nbytes > self.budget:
            self._evict()

    def _evict(self) -> None:
        """The least recently used leaves memory, and is written if its page is not what it is now."""
        key, tensor = next(iter(self._hot.items()))
        if key in self._dirty:
            self._write(key, tensor)
        self._drop(key)
        self.counts.evictions += 1

    def _write(self, key: Hashable, tensor: torch.Tensor) -> None:
        page = self._pages[key] or self._new_page()
        try:
            with page.open("wb") as file:
                file.writelines(frame(Request("init", repr(key), tensor), checked=True))
        except OSError as error:
            error.filename = str(page)
            raise
        self._pages[key] = page
        self.counts.bytes_written += tensor.nbytes

    def _read(self, key: Hashable) -> torch.Tensor:
        page = self._pages[key]
        assert page is not None, f"{key!r} is neither in memory nor on disk"
        record = parse([np.fromfile(page, np.uint8).data], limit=self.budget)
        if not isinstance(record, Request) or record.key != repr(key) or record.value is None:
            raise ValueError(f"{page} is not the page of {key!r}")
        self.counts.bytes_read += record.value.nbytes
        return record.value

    def _new_page(self) -> Path:
        self._made += 1
        return self.folder / f"{self._made:08d}.page"
