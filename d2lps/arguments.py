"""Arguments that are wrong are told so, by their name and value: what all parts of the library check alike."""

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def whole(name: str, value: int, least: int = 1) -> int:
    """`whole("chunks", 3) == 3`; ValueError for anything but a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not a whole number from {least} up")
    return value


def named(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """The entry of that name; an unknown one is named, beside those there are."""
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{kind}={name!r} is unknown: choose one of {', '.join(map(repr, table))}")
    return table[name]
