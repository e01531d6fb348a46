"""Which memory a tensor is part of, and what the reader calls it.

Chunks of one tensor are views of one storage, so (storage, offset, length) says which part of what a message carried.
Names are those of the reader's own variables, looked up once, when a storage is first seen.
"""

import os
import sys
from dataclasses import dataclass
from threading import Lock
from traceback import walk_stack
from types import FrameType

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_new = Lock()  # the lanes of a rank are threads
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Buffer:
    """One storage of one rank. `scratch`: only the library has a name for it, no caller's variable holds it."""

    rank: int
    name: str
    nbytes: int
    itemsize: int
    scratch: bool


class Buffers:
    """The storages that a run's messages came from or went to, numbered as they are first seen."""

    def __init__(self) -> None:
        self.seen: list[Buffer] = []
        # The weak reference keeps a freed storage's address from being given to another one, but not its memory alive.
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._names: dict[int, tuple[str, bool, StorageWeakRef]] = {}

    def part(self, rank: int, tensor: torch.Tensor) -> tuple[int, int, int]:
        """(buffer, offset, length) of a rank's tensor, in bytes; for a strided tensor, the bytes that it spans."""
        storage, itemsize = tensor.untyped_storage(), tensor.element_size()
        known = self._numbers.get(storage._cdata)
        number = known[0] if known else self._number(rank, storage, itemsize)
        length = tensor.nbytes if tensor.is_contiguous() else _span(tensor) * itemsize
        return number, tensor.storage_offset() * itemsize, length  # type: ignore[return-value]

    def moved(self, number: int, tensor: torch.Tensor) -> None:
        """From now on this buffer is where this tensor lies: what was there has been copied by its owner, which is no message."""
        storage = tensor.untyped_storage()
        self._numbers[storage._cdata] = number, StorageWeakRef(storage)

    def _number(self, rank: int, storage: torch.UntypedStorage, itemsize: int) -> int:
        key = storage._cdata
        if key not in self._names:  # all that can be seen from here are looked up at once: a list may hold a thousand
            self.look_around()
        name, scratch, held = self._names.get(key) or ("", True, StorageWeakRef(storage))
        with _new:
            if key not in self._numbers:
                self._numbers[key] = len(self.seen), held
                self.seen.append(Buffer(rank, name, storage.nbytes(), itemsize, scratch))
        return self._numbers[key][0]

    def look_around(self) -> None:
        """Learn by which names the callers' variables hold storages, and whether the outermost function that knows one is the
        library's: what is started now will not see them."""
        found: dict[int, tuple[str, bool, StorageWeakRef]] = {}
        for frame, _ in walk_stack(sys._getframe(1)):
            inside = frame.f_code.co_filename.startswith(_PACKAGE)
            if frame.f_code.co_filename.startswith(os.path.join(_PACKAGE, "launch")):
                break  # below here is the launcher, not the algorithm
            found |= {key: (name, inside, StorageWeakRef(storage)) for key, (_, name, storage) in _local_names(frame).items()}
        self._names = found | self._names  # whoever has known it first knows it best

    def __getstate__(self) -> dict[str, object]:
        """On its way to another process: nothing more will be added."""
        return {"seen": self.seen, "_numbers": {}, "_names": {}}


def _span(tensor: torch.Tensor) -> int:
    """From the first element to the last, in elements."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _local_names(frame: FrameType) -> dict[int, tuple[int, str, torch.UntypedStorage]]:
    """(elements, name, storage) of the local variables that hold whole storages, or else the largest part of one."""
    best: dict[int, tuple[int, str, torch.UntypedStorage]] = {}
    for name, value in list(frame.f_locals.items()):
        listed = isinstance(value, list | tuple)
        for index, item in enumerate(value if listed else [value]):
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                storage = item.untyped_storage()
                if storage._cdata not in best or item.numel() > best[storage._cdata][0]:
                    best[storage._cdata] = item.numel(), f"{name}[{index}]" if listed else name, storage
    return best
