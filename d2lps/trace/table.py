"""Columns of numbers that grow by rows, and numbers for the strings that some of them stand for.

A simulated run has millions of messages. A row as a Python object costs hundreds of bytes, as numbers in one long `array`
8 bytes a column; numpy then looks at the same memory.
"""

from array import array
from collections.abc import Hashable
from threading import Lock

import numpy as np


class Table:
    """
    >>> table = Table("peer", "start", times={"start"})
    >>> row = table.append(1, 0.5)
    >>> table.set(row, "start", 0.75)
    >>> table.columns()
    {'peer': array([1]), 'start': array([0.75])}
    """

    def __init__(self, *names: str, times: set[str] | frozenset[str] = frozenset()) -> None:
        self.names, self.times = names, times  # whole numbers but for the times; a double holds them up to 2**53
        self.cells = array("d")

    def append(self, *row: float) -> int:
        """Add a row, a number for each column; return its index."""
        index = len(self)
        self.cells.extend(row)
        return index

    def set(self, row: int, name: str, value: float) -> None:
        self.cells[row * len(self.names) + self.names.index(name)] = value

    def __len__(self) -> int:
        return len(self.cells) // len(self.names)

    def columns(self) -> dict[str, np.ndarray]:
        """All columns as numpy arrays."""
        rows = np.frombuffer(self.cells, dtype=np.float64).reshape(-1, len(self.names))
        kinds = [np.float64 if name in self.times else np.int64 for name in self.names]
        return {name: rows[:, k].astype(kind) for k, (name, kind) in enumerate(zip(self.names, kinds, strict=True))}


_new = Lock()  # the lanes of a rank are threads, and no two labels may get one number


class Names:
    """Labels as small integers, so that a column can hold them; one with numbers in it is put together when it is read.

    >>> names = Names()
    >>> names.number(("step {}/{}", 1, 3)), names.number(("tree",)), names.number(("step {}/{}", 1, 3))
    (0, 1, 0)
    >>> names.strings
    ['step 1/3', 'tree']
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, ...], int] = {}

    def number(self, label: tuple[Hashable, ...]) -> int:
        number = self._numbers.get(label)
        if number is None:
            with _new:
                number = self._numbers.setdefault(label, len(self._numbers))
        return number

    @property
    def strings(self) -> list[str]:
        return [str(label[0]).format(*label[1:]) if label[1:] else str(label[0]) if label else "" for label in self._numbers]
