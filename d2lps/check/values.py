"""Values that say where they come from.

Element `e` of rank r's tensor is 16**r, so in a sum the r-th hexadecimal digit counts how often rank r was added: 0x0211
is rank 0 once, rank 1 once, rank 2 twice, rank 3 never. Where nothing is added, an element is its rank, its part and
its place. Everything is int64, which holds 15 ranks' digits.
"""

import torch

BASE = 16
_PART, _PLACE = 1000, 1000  # up to as many parts of a list, and elements of a tensor


def countable(rank: int, elements: int) -> torch.Tensor:
    """`countable(2, 3)` is tensor([256, 256, 256])."""
    return torch.full((elements,), BASE**rank, dtype=torch.int64)


def counts(value: int, ranks: int) -> list[int] | None:
    """How often each rank was added to reach `value`; None if no sum of the ranks' values gives it.

    >>> counts(0x0211, 4)
    [1, 1, 2, 0]
    """
    if not 0 <= value < BASE**ranks:
        return None
    return [value // BASE**rank % BASE for rank in range(ranks)]


def labelled(rank: int, part: int, elements: int) -> torch.Tensor:
    """Elements that name their rank, their part of its list, and their place in it, never 0."""
    return (1 + rank) * _PART * _PLACE + part * _PLACE + torch.arange(elements)


def origin(value: int) -> tuple[int, int, int] | None:
    """(rank, part, place) of a labelled element; None for a value that is none.

    >>> origin(int(labelled(2, 1, 5)[4]))
    (2, 1, 4)
    """
    rank, rest = divmod(value, _PART * _PLACE)
    return (rank - 1, *divmod(rest, _PLACE)) if rank > 0 else None
