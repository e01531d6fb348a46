"""Samples in a shuffled order, in batches that ranks share, loaded ahead of time; resumed anywhere, on any number of ranks.

There is one order of an epoch for all ranks, and one line drawn in it: what is before the line has been handed out. A step takes
the next `batch` places behind the line, and cuts them into as many runs as there are ranks. So the line is all that must be
remembered, it is the same on every rank, and it says nothing of how many there are.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import default_collate

from d2lps.arguments import named, whole
from d2lps.feeding.shuffle import Shuffle
from d2lps.result import pickled

ENDS = {"short": 1, "pad": 1, "drop": 0}  # how many batches are made of what is left of an epoch when no whole one is


@dataclass(frozen=True)
class Source:
    """What a worker needs: samples, what is done to each, and the seed of what is random in that."""

    dataset: Any
    transform: Callable[[Any, torch.Generator], Any] | None = None
    seed: int = 0

    def load(self, epoch: int, samples: Sequence[int]) -> Any:
        """A batch of these samples of the dataset; RuntimeError that names what went wrong at which of them."""
        values = [self._one(epoch, sample) for sample in samples]
        try:
            return together(values)
        except Exception as error:
            raise RuntimeError(f"samples {samples} of epoch {epoch} are no batch: {type(error).__name__}: {error}") from error

    def _one(self, epoch: int, sample: int) -> Any:
        try:
            value = self.dataset[sample]
            return value if self.transform is None else self.transform(value, self._dice(epoch, sample))
        except Exception as error:
            raise RuntimeError(f"sample {sample} of epoch {epoch}: {type(error).__name__}: {error}") from error

    def _dice(self, epoch: int, sample: int) -> torch.Generator:
        """A sample's own random numbers: whoever loads it, and when, they are the same."""
        (seed,) = np.random.SeedSequence([self.seed % 2**64, epoch, sample]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(seed >> np.uint64(1)))


class Loader:
    """This rank's part of each batch, in an order that is the same however many ranks and workers there are.

    >>> loader = Loader(range(10), batch=4, rank=0, ranks=2)
    >>> for batch in loader:
    ...     print(len(batch), loader.state_dict()["position"])
    2 4
    2 8
    1 0
    >>> loader.state_dict()
    {'epoch': 1, 'position': 0, 'seed': 0, 'length': 10, 'shuffled': True}

    dataset: has a length, and gives sample i as `dataset[i]`. batch: samples a step of all ranks together; where ranks do not
    divide it, the first have one more. Iterating gives what is left of the epoch, and leads to the next one's beginning.
    state_dict() and load_state_dict(state): the place behind the last batch that was handed out, the same on every rank; what has
    only been loaded ahead does not count. Another number of ranks, another batch or other workers may go on from it.
    last: of an epoch that `batch` does not divide, the last batch is "short" (a rank without a sample gets None), or filled up
    from the epoch's beginning ("pad": those samples come twice), or left out ("drop").
    workers: threads that load, or processes, for what holds Python's lock. ahead: batches that are loaded, or being loaded,
    beside the one in use; they are what memory must have room for. transform(sample, generator): done to each, its randomness a
    function of (seed, epoch, sample). RuntimeError names a sample that could not be loaded, when its batch is asked for;
    the state is still that before the batch. Nothing is left running when the loop ends, is left, or fails.
    """

    def __init__(
        self, dataset: Any, batch: int, rank: int = 0, ranks: int = 1, *, seed: int = 0, shuffled: bool = True,
        last: str = "short", workers: int = 1, processes: bool = False, ahead: int = 2,
        transform: Callable[[Any, torch.Generator], Any] | None = None,
    ) -> None:  # fmt: skip
        if not (isinstance(rank, int) and 0 <= rank < whole("ranks", ranks)):
            raise ValueError(f"rank={rank} is none of {ranks} ranks")
        named("last", last, ENDS)
        self.batch, self.workers, self.ahead = whole("batch", batch), whole("workers", workers), whole("ahead", ahead, least=0)
        self.rank, self.ranks, self.last, self.processes = rank, ranks, last, processes
        self.source, self.shuffled = Source(dataset, transform, seed), shuffled
        self.order = Shuffle(len(dataset), seed)
        if last == "drop" and batch > self.order.length:
            raise ValueError(f"batch={batch} of {self.order.length} samples: with last='drop' there would be none")
        self.epoch = self.position = 0

    @property
    def steps(self) -> int:
        """How many batches are left of the epoch."""
        full, rest = divmod(self.order.length - self.position, self.batch)
        return full + (ENDS[self.last] if rest else 0)

    def samples(self, epoch: int, first: int) -> list[int]:
        """This rank's samples of the batch that begins at a place of an epoch's order."""
        end = first + self.batch if self.last == "pad" else min(first + self.batch, self.order.length)
        places = np.array_split(np.arange(first, end), self.ranks)[self.rank] % self.order.length
        return (self.order(places, epoch) if self.shuffled else places).tolist()

    def __iter__(self) -> Iterator[Any]:
        if not self.steps:  # only the part of a batch that is dropped
            self.epoch, self.position = self.epoch + 1, 0
            return
        epoch, place = self.epoch, self.position
        starts = range(place, place + self.steps * self.batch, self.batch)
        pool = self._pool()
        loading = (pool.submit(_load, self._given, epoch, self.samples(epoch, first)) for first in starts)  # when it is asked for
        queue: deque[Future[Any]] = deque()
        try:
            for first in starts:
                if (self.epoch, self.position) != (epoch, first):
                    raise RuntimeError(f"at epoch {epoch}, position {first} the state was changed by others: iterate anew")
                queue.extend(islice(loading, max(1, self.ahead) - len(queue)))
                batch = queue.popleft().result()
                queue.extend(islice(loading, self.ahead - len(queue)))
                if first != starts[-1]:
                    self.position = first + self.batch
                else:
                    self.epoch, self.position = epoch + 1, 0
                yield pickle.loads(batch) if self.processes else batch
        finally:
            pool.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Where this run is in its data: JSON can hold it."""
        return {"epoch": self.epoch, "position": self.position} | self._same()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. ValueError, before anything is changed, for a state of another order of samples."""
        for name, ours in self._same().items():
            if state.get(name) != ours:
                raise ValueError(f"the state's {name} is {state.get(name)}, and {ours} here: its place means other samples")
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position < self.order.length):
            raise ValueError(f"epoch {epoch!r}, position {position!r}: no place in {self.order.length} samples")
        self.epoch, self.position = epoch, position

    def _same(self) -> dict[str, Any]:
        return {"seed": self.order.seed, "length": self.order.length, "shuffled": self.shuffled}

    # ---- workers --------------------------------------------------------------------------------------------------

    @property
    def _given(self) -> Source | None:
        """What a worker is told with each batch: a process has been told once, when it began."""
        return None if self.processes else self.source

    def _pool(self) -> Executor:
        if not self.processes:
            return ThreadPoolExecutor(self.workers, "loader")
        told = (cloudpickle.dumps(self.source),)  # which takes what is defined in a notebook, too
        return ProcessPoolExecutor(self.workers, _Context(), _become, told)


class _Process(ForkServerProcess):
    """One that does not run the program's script anew, as multiprocessing's do: all that it needs of it, it is told."""

    def start(self) -> None:
        script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


class _Context(ForkServerContext):
    Process = _Process


_source: Source  # a worker process's


def _become(source: bytes) -> None:
    global _source
    torch.set_num_threads(1)
    _source = cloudpickle.loads(source)


def _load(source: Source | None, epoch: int, samples: list[int]) -> Any:
    """A batch, or from another process its bytes: a tensor itself would come in shared memory, which may be small."""
    if source is None:
        return pickled(_source.load(epoch, samples) if samples else None)
    return source.load(epoch, samples) if samples else None


def together(samples: list[Any]) -> Any:
    """Samples as a batch, as PyTorch's default_collate makes it, but that tuples stay tuples."""
    batch = default_collate(samples)
    return tuple(batch) if isinstance(samples[0], tuple) and isinstance(batch, list) else batch


@dataclass(frozen=True)
class Stream:
    """A dataset's epochs one after the other, as a line of numbered samples: what `d2lps.parallel.train` asks for.

    >>> stream = Stream([torch.tensor(10 * i) for i in range(5)], seed=1)
    >>> first, second = stream.batch(0, 5), stream.batch(5, 5)
    >>> first.sort().values.tolist() == second.sort().values.tolist() == [0, 10, 20, 30, 40], torch.equal(first, second)
    (True, False)

    A sample's number says its epoch and its place there: a trainer that knows how many steps it has done knows where it is in its
    data, under any plan, so that its checkpoints need not say. Loads what it is asked for, when it is asked.
    """

    dataset: Any
    seed: int = 0
    transform: Callable[[Any, torch.Generator], Any] | None = None

    def batch(self, first: int, count: int) -> Any:
        """The samples numbered `first` to `first + count - 1`, from the first epoch's first; ValueError for none."""
        if first < 0 or count < 1:
            raise ValueError(f"first={first}, count={count}: samples are numbered from 0, and a batch has at least one")
        order, source = Shuffle(len(self.dataset), self.seed), Source(self.dataset, self.transform, self.seed)
        epochs, places = np.divmod(np.arange(first, first + count), order.length)
        each = np.split(places, np.flatnonzero(np.diff(epochs)) + 1)  # the places of one epoch are looked up together
        samples = [(epoch, sample) for epoch, there in enumerate(each, int(epochs[0])) for sample in order(there, epoch).tolist()]
        return together([source._one(epoch, sample) for epoch, sample in samples])
