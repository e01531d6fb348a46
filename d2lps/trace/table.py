"""Named columns that grow by rows.

A simulated run has millions of messages. A row as a Python object costs hundreds of bytes, as one entry in each of a
few `array`s 8 bytes a column; numpy then looks at the same memory without a copy.
"""

from array import array
from collections.abc import Iterable

import numpy as np


class Table:
    """
    >>> table = Table(peer="q", start="d")
    >>> row = table.append(peer=1, start=0.5)
    >>> table.set(row, start=0.75)
    >>> table["start"].tolist(), len(table)
    ([0.75], 1)
    """

    def __init__(self, **typecodes: str) -> None:
        self._columns = {name: array(code) for name, code in typecodes.items()}

    def append(self, **row: float) -> int:
        """Add a row, every column named; return its index."""
        for name, column in self._columns.items():
            column.append(row[name])  # type: ignore[arg-type]
        return len(column) - 1

    def set(self, row: int, **values: float) -> None:
        for name, value in values.items():
            self._columns[name][row] = value  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> np.ndarray:
        column = self._columns[name]
        return np.array(column, dtype=np.float64 if column.typecode == "d" else np.int64)

    def columns(self) -> dict[str, np.ndarray]:
        """All columns as numpy arrays."""
        return {name: self[name] for name in self._columns}


class Names:
    """Strings as small integers, so that a column can hold them.

    >>> names = Names()
    >>> names.number("ring"), names.number("tree"), names.number("ring")
    (0, 1, 0)
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self.strings: list[str] = []
        self._numbers: dict[str, int] = {}
        for string in strings:
            self.number(string)

    def number(self, string: str) -> int:
        if string not in self._numbers:
            self._numbers[string] = len(self.strings)
            self.strings.append(string)
        return self._numbers[string]
