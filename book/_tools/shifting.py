"""Other random numbers for a program that names its seeds: each seed is shifted, in the program and in all that it starts.

A Python that is begun with the environment of `shifted` imports this file before anything else, as `sitecustomize`; so do the
ranks, servers and scripts that it starts. Numbers for which no seed is named differ in every run anyway.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

by = 0  # how far seeds are shifted in this process


def shifted(amount: int, folder: Path) -> dict[str, str]:
    """This process's environment, for one whose seeds are shifted; `folder` is empty, and must stay while that one runs."""
    (folder / "sitecustomize.py").write_text(f"{Path(__file__).read_text()}\n\nbegin({amount})\n")
    path = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def other(seed: Any) -> Any:
    """What stands for a seed: a whole number, or a list of them. None is no seed, and dice that have one keep it.

    >>> other(3), other([5, 1]), other(None)
    (3, [5, 1], None)
    """
    match seed:
        case None | np.random.Generator() | np.random.BitGenerator() | np.random.SeedSequence():
            return seed
        case list() | tuple():
            return [other(each) for each in seed]
        case int() | np.integer():
            return seed + by
    raise TypeError(f"{seed!r} is a seed of a kind that is not shifted yet")


def seeding(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of a seed, with another one."""
    return lambda seed=None, *more: function(other(seed), *more)


class Generator(torch.Generator):
    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(other(seed))


class Default:
    """What stands for torch's own dice, an object of which there can be no other: `torch.default_generator`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._C.default_generator, name)

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch._C.default_generator.manual_seed(other(seed))


class RandomState(np.random.RandomState):
    def __init__(self, seed: Any = None) -> None:
        super().__init__(other(seed))


class Random(random.Random):
    def seed(self, a: Any = None, version: int = 2) -> None:
        super().seed(other(a), version)


def begin(amount: int) -> None:
    """From now on, in this process."""
    global by
    by = amount
    torch.Generator, torch.default_generator = Generator, Default()
    torch.manual_seed = torch.random.manual_seed = seeding(torch.manual_seed)
    np.random.seed, np.random.default_rng, np.random.RandomState = (
        seeding(np.random.seed), seeding(np.random.default_rng), RandomState)  # fmt: skip
    random.seed, random.Random = seeding(random.seed), Random
    torch.manual_seed(torch.initial_seed() % 2**32)  # a process that names none begins with the same one each time
