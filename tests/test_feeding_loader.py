"""The loader: an order without a table, cut among ranks, loaded ahead, and resumed anywhere without loss or repetition."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import islice
from math import factorial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import output_of, script
from torch.utils.data import DataLoader

import d2lps
from d2lps.feeding import Loader, Shuffle, Stream
from d2lps.parallel import Plan, Transformer, train
from d2lps.parallel.training.resume import resume, save_run
from d2lps.parallel.training.train import Trainer

# ---- the order ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 10**6))
def test_an_order_has_each_sample_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(Shuffle(length, seed)(np.arange(length), epoch).tolist()) == list(range(length))


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(length: int) -> None:
    """Chi-squared over all. With an odd base, whose orders are all even, it would be four times as much for 5."""
    orders = factorial(length)
    found = Counter(tuple(Shuffle(length, seed)(range(length)).tolist()) for seed in range(20 * orders))
    squares = sum((found[order] - 20) ** 2 / 20 for order in found) + 20 * (orders - len(found))
    assert squares < orders - 1 + 5 * (2 * (orders - 1)) ** 0.5


def test_of_many_samples_any_place_holds_any() -> None:
    found = Counter(place // 100 for seed in range(300) for place in Shuffle(1000, seed)([0, 500, 999]).tolist())
    assert sorted(found) == list(range(10)) and all(50 < count < 140 for count in found.values())


def test_a_trillion_samples_need_no_table_and_no_memory() -> None:
    order, places = Shuffle(10**12, 5), np.arange(10**12 - 50_000, 10**12)
    found = order(places)
    assert len(set(found.tolist())) == 50_000 and found.max() < 10**12 and found.max() > 0.99e12 and found.min() < 0.01e12
    assert order(places[17]) == found[17]
    assert not (order(places, epoch=1) == found).any()


def test_orders_refuse_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="length=0"):
        Shuffle(0)
    with pytest.raises(ValueError, match=r"2\*\*62"):
        Shuffle(2**62 + 1)
    with pytest.raises(ValueError, match="places from 3 to 10: an epoch's are 0 to 9"):
        Shuffle(10)([3, 10])
    with pytest.raises(ValueError, match="not whole numbers"):
        Shuffle(10)([0.7])


# ---- nothing lost, nothing twice ----------------------------------------------------------------------------------------


class Numbers:
    """Sample i is i; how many are there, and which have been read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        self.read.append(i)
        return i


def handed_out(loaders: list[Loader], most: int) -> list[list[int]]:
    """The next batches of all ranks, put together; every rank stops after as many, with its prefetched ones not consumed."""
    batches = zip(*(islice(loader, most) for loader in loaders), strict=True)
    return [[i for part in parts if part is not None for i in part.tolist()] for parts in batches]


def interrupted(dice: random.Random, epochs: int, most: int) -> tuple[int, int]:
    """Epochs of one dataset with stops at random, each time going on with other ranks, workers and batches.

    How many stops there were, and how many samples had been loaded and were thrown away.
    """
    length, seed, state, stops, wasted = dice.randint(1, most), dice.randrange(99), None, 0, 0
    expected = [Shuffle(length, seed)(range(length), epoch).tolist() for epoch in range(epochs)]
    line: list[int] = []
    while state is None or state["epoch"] < epochs:
        ranks, batch, data = dice.randint(1, 8), dice.randint(1, 40), Numbers(length)
        how = {"seed": seed, "ahead": dice.randint(0, 3), "workers": dice.randint(1, 3)}
        loaders = [Loader(data, batch, rank, ranks, **how) for rank in range(ranks)]
        for loader in loaders if state else []:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches = handed_out(loaders, dice.randint(0, 4))
        states = [loader.state_dict() for loader in loaders]
        assert states == states[:1] * ranks
        state, stops, wasted = states[0], stops + 1, wasted + len(data.read) - sum(map(len, batches))
        line += [i for step in batches for i in step]
    assert line == [i for epoch in expected for i in epoch]  # none lost, none twice, and in order
    return stops, wasted


def test_a_thousand_interruptions_and_changes_of_ranks_lose_and_repeat_nothing() -> None:
    dice, stops, wasted = random.Random(2026), 0, 0
    while stops < 1000:
        found = interrupted(dice, epochs=2, most=300)
        stops, wasted = stops + found[0], wasted + found[1]
    assert stops >= 1000 and wasted > 1000  # so there was something to lose


@given(st.integers(1, 200), st.integers(1, 50), st.sampled_from(["short", "pad", "drop"]), st.integers(1, 8))
def test_the_end_of_an_epoch_is_as_it_is_said(length: int, batch: int, last: str, ranks: int) -> None:
    if last == "drop" and batch > length:
        with pytest.raises(ValueError, match="there would be none"):
            Loader(range(length), batch, last=last)
        return
    loaders = [Loader(range(length), batch, rank, ranks, last=last, ahead=1) for rank in range(ranks)]
    steps = [[loader.samples(0, first) for loader in loaders] for first in range(0, loaders[0].steps * batch, batch)]
    order, whole = Shuffle(length)(range(length)).tolist(), {"short": length, "pad": -(-length // batch) * batch}
    assert [i for step in steps for part in step for i in part] == (order * batch)[: whole.get(last, length // batch * batch)]
    for step in steps:
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_a_dropped_rest_ends_the_epoch() -> None:
    loader = Loader(range(10), 4, last="drop", shuffled=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]] and loader.epoch == 1
    loader.load_state_dict(loader.state_dict() | {"position": 8})
    assert list(loader) == [] and loader.epoch == 2


def test_who_has_no_sample_of_a_short_batch_is_told_so() -> None:
    assert [list(Loader(range(5), 4, rank, 2, shuffled=False))[-1] for rank in range(2)] == [torch.tensor([4]), None]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_hands_out_the_same(workers: int) -> None:
    """The same batches as PyTorch's loader of the same order, before an interruption and after it, where it is there."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    order = Shuffle(50, 3)(range(50)).tolist()
    theirs, ours = stateful(order, batch_size=8, num_workers=workers), Loader(range(50), 8, seed=3)
    before = [(a.tolist(), b.tolist()) for a, b in zip(islice(theirs, 3), ours, strict=False)]
    states = theirs.state_dict(), ours.state_dict()
    theirs, ours = stateful(order, batch_size=8, num_workers=workers), Loader(range(50), 8, seed=3)
    theirs.load_state_dict(states[0])
    ours.load_state_dict(states[1])
    after = [(a.tolist(), b.tolist()) for a, b in zip(theirs, ours, strict=True)]
    assert len(before) == 3 and len(after) == 4 and all(a == b for a, b in before + after)


def test_without_an_order_it_is_the_dataloader_of_torch() -> None:
    data = [(torch.full((3,), float(i)), i) for i in range(10)]
    for ours, theirs in zip(Loader(data, 4, shuffled=False), DataLoader(data, 4), strict=True):
        assert isinstance(ours, tuple) and torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


# ---- ahead of time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "workers"), [(0, 1), (1, 1), (3, 2), (5, 2)])
def test_no_more_is_loaded_ahead_than_was_said(ahead: int, workers: int) -> None:
    data = Numbers(100)
    loader = Loader(data, 5, ahead=ahead, workers=workers)
    for step, _ in enumerate(loader, 1):
        wanted = min(100, 5 * (step + ahead))
        until = time.monotonic() + 10
        while len(data.read) < wanted and time.monotonic() < until:
            time.sleep(0.001)
        assert len(data.read) == wanted


class Slow(Numbers):
    """Later samples are quicker to load."""

    def __getitem__(self, i: int) -> int:
        time.sleep(0.002 if i % 8 == 0 else 0)
        return super().__getitem__(i)


def test_batches_come_in_order_whoever_is_ready_first() -> None:
    got = [i for batch in Loader(Slow(64), 4, shuffled=False, workers=4, ahead=8) for i in batch.tolist()]
    assert got == list(range(64))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_nothing_is_left_running() -> None:
    for _ in Loader(Slow(64), 4, workers=3):
        assert threads()
        break
    assert not threads()
    running = iter(Loader(Slow(64), 4, workers=3))
    next(running)
    running.close()
    assert not threads()


class Bad(Numbers):
    def __getitem__(self, i: int) -> int:
        if i == 17:
            raise OSError("disk on fire")
        return i


@pytest.mark.parametrize("processes", [False, True])
def test_a_sample_that_cannot_be_loaded_is_named_and_the_place_is_kept(processes: bool) -> None:
    loader = Loader(Bad(40), 4, shuffled=False, ahead=8, processes=processes)
    got = []
    with pytest.raises(RuntimeError, match="sample 17 of epoch 0: OSError: disk on fire"):
        got.extend(batch.tolist() for batch in loader)
    assert [i for batch in got for i in batch] == list(range(16)) and loader.position == 16 and not threads()


def doubled(value: int, dice: torch.Generator) -> tuple[int, int]:
    return 2 * value, int(torch.randint(10**9, (), generator=dice))


def test_samples_that_make_no_batch_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"samples \[.*\] of epoch 0 are no batch"):
        next(iter(Loader([torch.zeros(n) for n in range(3)], 3)))


def test_processes_load_the_same_as_threads_and_dice_belong_to_samples() -> None:
    runs = [
        [tuple(part.tolist() for part in batch) for batch in Loader(range(20), 4, transform=doubled, seed=9, **how)]
        for how in ({}, {"workers": 3}, {"processes": True, "workers": 2})
    ]
    assert runs[0] == runs[1] == runs[2]
    loader = Loader(range(20), 4, transform=doubled, seed=9)
    epochs = [[i for batch in loader for i in batch[1].tolist()] for _ in range(2)]
    assert len(set(epochs[0] + epochs[1])) == 40  # no two samples, and no two epochs, throw the same


class Dying(Numbers):
    def __getitem__(self, i: int) -> int:
        if i == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return i


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    with pytest.raises(Exception, match="terminated abruptly"):
        list(Loader(Dying(20), 4, shuffled=False, processes=True))


UNGUARDED = """
from typing import NamedTuple
import d2lps.feeding

print("as any script, without a guard")

class Pair(NamedTuple):
    number: int
    square: int

class Squares:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return Pair(i, i * i)

for batch in d2lps.feeding.Loader(Squares(), 2, shuffled=False, workers=2, processes=True):
    print(isinstance(batch, Pair), batch.square.tolist())
"""


def test_processes_do_not_run_the_script_again_and_know_its_classes(tmp_path: Path) -> None:
    said = output_of(script(tmp_path / "squares.py", UNGUARDED))
    assert said.splitlines() == ["as any script, without a guard", "True [0, 1]", "True [4, 9]"]


KILLED = """
import json, os, sys, time
from d2lps.feeding import Loader

class Slow:
    def __len__(self): return 200
    def __getitem__(self, i):
        time.sleep(0.001)
        return i

place = sys.argv[1]
loader = Loader(Slow(), 7, int(sys.argv[2]), int(sys.argv[3]), seed=4, ahead=3)
if os.path.exists(place):
    loader.load_state_dict(json.load(open(place))["state"])
line = json.load(open(place))["line"] if os.path.exists(place) else []
while loader.epoch == 0:
    for batch in loader:
        line += batch.tolist() if batch is not None else []
        with open(place + ".new", "w") as file:
            json.dump({"state": loader.state_dict(), "line": line}, file)
        os.replace(place + ".new", place)
"""


def test_a_process_killed_while_it_loads_ahead_goes_on_where_it_was(tmp_path) -> None:
    """For real, SIGKILL in the middle: what its file says was done is done, the rest comes, each sample once."""
    place, dice, kills = tmp_path / "place", random.Random(1), 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(place), "0", "1"])
        began = place.stat().st_mtime_ns if place.exists() else 0
        while process.poll() is None and (not place.exists() or place.stat().st_mtime_ns == began):
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.06))
        if kills < 2 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
            process.wait()
            continue
        assert process.wait(60) == 0
        break
    assert kills > 0 and json.loads(place.read_text())["line"] == Shuffle(200, 4)(range(200)).tolist()


# ---- wrong calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"rank": 2, "ranks": 2}, "rank=2 is none of 2 ranks"), ({"batch": 0}, "batch=0"), ({"ahead": -1}, "ahead=-1"),
        ({"ahead": 1.5}, "ahead=1.5"), ({"rank": 0.5}, "rank=0.5"), ({"seed": "a"}, "seed='a'"),
        ({"last": "wrap"}, "last='wrap'"), ({"workers": 0}, "workers=0"), ({"ranks": 0}, "ranks=0"),
    ],
)  # fmt: skip
def test_wrong_calls_say_what(how: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Loader(range(10), **({"batch": 4} | how))


def test_a_state_of_another_order_is_refused() -> None:
    state = Loader(range(10), 4, seed=1).state_dict()
    for other, word in ((Loader(range(11), 4, seed=1), "length is 10, and 11"), (Loader(range(10), 4), "seed is 1, and 0"),
                        (Loader(range(10), 4, seed=1, shuffled=False), "shuffled is True")):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            other.load_state_dict(state)
        assert other.position == 0
    with pytest.raises(ValueError, match="position 10: no place"):
        Loader(range(10), 4, seed=1).load_state_dict(state | {"position": 10})
    with pytest.raises(ValueError, match="position None: no place"):
        Loader(range(10), 4, seed=1).load_state_dict({name: value for name, value in state.items() if name != "position"})


def test_a_state_changed_under_a_loop_is_noticed() -> None:
    loader = Loader(range(20), 4)
    with pytest.raises(RuntimeError, match="changed by others"):
        for _ in loader:
            loader.load_state_dict(loader.state_dict() | {"position": 0})


# ---- under training -----------------------------------------------------------------------------------------------------


class Letters:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(9) * (i + 1)) % 16
        return tokens[:-1], tokens[1:]


def test_a_stream_is_data_for_training_and_a_checkpoint_knows_its_place(tmp_path) -> None:
    small, data = Transformer(1, hidden=8, heads=2, vocab=16, sequence=8), Stream(Letters(), seed=2)

    def whole(comm) -> list[float]:
        return train(comm, small, Plan(), data, 6, 8, torch.optim.SGD).losses

    def part(comm, steps: int) -> list[float]:
        trainer = Trainer(comm, small, Plan(dp=comm.size), data, 8, torch.optim.SGD)
        checkpoints = d2lps.parallel.Checkpoints(comm, tmp_path)
        if steps == 6:
            resume(trainer, tmp_path)
        while trainer.done < steps:
            trainer.step()
        save_run(trainer, checkpoints).wait()
        return trainer.losses

    expected = d2lps.simulate(whole, d2lps.topology.star(1, 1e9))[0]
    first = d2lps.simulate(part, d2lps.topology.star(4, 1e9), 3)[0]
    then = d2lps.simulate(part, d2lps.topology.star(2, 1e9), 6)[0]
    assert first == pytest.approx(expected[:3], abs=1e-4) and then == pytest.approx(expected, abs=1e-4)


def test_a_stream_is_the_loaders_order_cut_anyhow() -> None:
    stream, loader = Stream(range(13), seed=6), Loader(range(13), 5, seed=6, last="short")
    line = [i for _ in range(2) for batch in loader for i in batch.tolist()]
    assert [i for n in range(0, 26, 2) for i in stream.batch(n, 2).tolist()] == line == stream.batch(0, 26).tolist()
    with pytest.raises(ValueError, match="first=-1"):
        stream.batch(-1, 2)
