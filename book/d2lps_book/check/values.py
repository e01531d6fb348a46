"""Values that say where they come from.

An element of rank r is 16**r: in a sum the r-th hexadecimal digit counts how often rank r was added; 0x0211 is rank 0 once,
rank 1 once, rank 2 twice, rank 3 never. Above the digits stands a random number that is the same for this element on all
ranks, so that a sum also shows of which element its addends were. What was only moved is a sum of one.
Everything is int64: digits of 8 ranks, and random numbers of 24 bits.
"""

import torch

BASE = 16
MOST = 8  # ranks
_ABOVE = BASE**MOST  # where the random numbers begin
BLANK = -1  # no value of any rank's


def countable(rank: int, elements: int, part: int = 0) -> torch.Tensor:
    """`countable(2, 3) % 16**8` is tensor([256, 256, 256]); what stands above is another number for each element."""
    return BASE**rank + _ABOVE * _marks(part, elements)


def _marks(part: int, elements: int) -> torch.Tensor:
    """The random numbers of one part's elements."""
    return torch.randint(1, 2**24, (elements,), generator=torch.Generator().manual_seed(part))


def counts(value: int, ranks: int) -> list[int] | None:
    """How often each rank was added to reach `value`; None if no sum of the ranks' values gives it.

    >>> counts(0x0211, 4)
    [1, 1, 2, 0]
    """
    if value < 0 or value % _ABOVE >= BASE**ranks:
        return None
    return [value // BASE**rank % BASE for rank in range(ranks)]


def common_element(value: int, parts: int, elements: int) -> tuple[int, int] | None:
    """(part, element) of which all addends of a sum were; None if they were not all of one.

    >>> common_element(int((countable(0, 5) + countable(1, 5))[3]), 1, 5)
    (0, 3)
    """
    addends = sum(counts(value, MOST) or [])
    for part in range(parts):
        for element, mark in enumerate(_marks(part, elements).tolist()):
            if addends and mark * addends == value // _ABOVE:
                return part, element
    return None
