"""Dropout that is the same in every plan: what is dropped depends on where a number stands, not on who computes it.

A rank that shares a layer needs the mask that its partners use where they hold the same numbers, and another one where they hold
others. If each number's fate is a function of its place in the model, the batch, the sequence and the vector, both are so by
themselves; nor has recomputation to put a generator back. JAX's random numbers are made in this manner.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from d2lps.parallel.transformer import Dropout


@dataclass
class Place:
    """Which step, sequences and positions a rank computes now; by default the first ones, all in turn."""

    seed: int = 0
    step: int = 0
    rows: Tensor | None = None  # the sequences' numbers within the whole batch
    positions: Tensor | None = None  # the tokens' within the whole sequence

    def uniform(self, layer: int, like: Tensor) -> Tensor:
        """Numbers from 0 to 1 for a tensor [rows, positions, hidden] of that layer."""
        rows, positions, features = (torch.arange(size, device=like.device) for size in like.shape)
        rows = rows if self.rows is None else self.rows
        positions = positions if self.positions is None else self.positions
        if (len(rows), len(positions)) != like.shape[:2]:
            raise ValueError(f"dropout on {list(like.shape)}, and its place is {len(rows)} rows of {len(positions)} positions")
        mixed = mix(mix(mix(torch.tensor(self.seed + 1, device=like.device)) + self.step) + layer)
        for places in (rows[:, None, None], positions[:, None], features):
            mixed = mix(mixed + places)
        return mixed / 2**32


def mix(numbers: Tensor) -> Tensor:
    """For each whole number one below 2**32, which looks random and is always the same.

    >>> mix(torch.tensor([0, 1, 2])).tolist()
    [0, 824515495, 1722258072]

    Source: the integer hash by Thomas Mueller (stackoverflow.com/a/12996028).
    """
    for _ in range(2):
        numbers = (numbers ^ numbers >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return numbers ^ numbers >> 16


def placed(model: nn.Module, place: Place) -> None:
    """Let all dropout in a whole model, not yet cut into stages, ask this place for its random numbers."""
    for layer, part in enumerate(part for part in model.modules() if isinstance(part, Dropout)):
        part.draw = partial(place.uniform, layer)
