"""Watching: each accident is found and named, and a healthy job names nobody."""

from __future__ import annotations

import io
import json
import os
import signal
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import d2lps
from d2lps import Communicator, Cut, Narrow, RankHung, Slow, topology
from d2lps.collectives import all_reduce, broadcast
from d2lps.comm import Mismatch
from d2lps.watch import FlightRecorder, Log, Suspicion, absent, checked_all_reduce, damaged, false_alarms, flights, merged
from d2lps.watch import stragglers as find
from d2lps.watch.stragglers import others

DEVICE = d2lps.Device(flops=1e9, memory=1e9, memory_bandwidth=1e12)


def star(ranks: int) -> d2lps.Topology:
    return topology.star(ranks, bandwidth=1e9, latency=1e-6, device=DEVICE)


# ---- stragglers ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_others_are_compared_with_their_upper_median(seconds: list[float]) -> None:
    rest = [sorted(seconds[:k] + seconds[k + 1 :]) for k in range(len(seconds))]
    assert others(np.array(seconds)).tolist() == [row[len(row) // 2] for row in rest]


@pytest.mark.parametrize("noise", ["normal", "lognormal", "pareto"])
def test_chance_alone_is_named_no_more_often_than_promised(noise: str) -> None:
    dice = np.random.default_rng(0)
    rows = {"normal": dice.normal(1, 0.1, (8000, 8)), "lognormal": dice.lognormal(0, 0.5, (8000, 8)),
            "pareto": 1 + dice.pareto(1.5, (8000, 8))}[noise]  # fmt: skip
    eager, patient = Suspicion(8, tolerance=0, patience=12), Suspicion(8, tolerance=0)
    alarms = [(len(eager.look(row)), len(patient.look(row))) for row in rows]
    found, patiently = np.sum(alarms, axis=0)
    assert 0 < found <= false_alarms(8, 8000, 12)
    assert patiently == 0 and false_alarms(8, 8000) < 1e-3


def test_a_column_is_named_once_and_again_after_it_was_well() -> None:
    suspicion = Suspicion(3, patience=5)
    slow, well = [1.0, 3.0, 1.0], [1.0, 1.0, 1.0]
    found = [suspicion.look(row) for row in [well] * 4 + [slow] * 20 + [well] * 20 + [slow] * 5]
    assert [(row, told) for row, told in enumerate(found) if told] == [(8, [(1, 3.0, 4)]), (48, [(1, 3.0, 44)])]


def test_what_cannot_be_compared_is_refused() -> None:
    for wrong in ({"columns": 1}, {"columns": 2, "patience": 0}, {"columns": 2, "tolerance": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            Suspicion(**wrong)
    for row in ([1.0], [1.0, float("nan")], [1.0, -1.0]):
        with pytest.raises(ValueError, match="a row is 2 times in seconds"):
            Suspicion(2).look(row)


def train(comm: Communicator, steps: int, seed: int = 0) -> None:
    gradient = torch.empty(1000 * comm.size, device=comm.device)
    dice = torch.Generator().manual_seed(seed * 100 + comm.rank)
    for luck in (1 + 0.4 * torch.rand(steps, generator=dice)).tolist():
        with comm.compute("step", flops=1e5 * luck):
            pass
        all_reduce(comm, gradient)


def told(cluster: d2lps.Topology, faults: list[Any], steps: int = 60, seed: int = 0) -> list[str]:
    return [str(one) for one in find(d2lps.simulate(train, cluster, steps, seed, faults=faults, device="meta").trace)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_slow_computing_and_slow_cables_are_told_apart(ranks: int) -> None:
    rank_hurt, cable_hurt = Slow(f"gpu{ranks - 1}", 3), Narrow(("gpu0", "switch"), 4)
    rank, cable = f"rank {ranks - 1}'s 'step'", "the cable gpu0 - switch"
    cables = [cable] if ranks > 3 else []  # of two or three ways round a ring, two use it: no majority is left to compare with
    for faults, named in (([], []), ([rank_hurt], [rank]), ([cable_hurt], cables), ([rank_hurt, cable_hurt], [rank, *cables])):
        assert [one.split(" takes ")[0] for one in told(star(ranks), faults)] == named
    if ranks > 3:  # 4,000 B in 4 us and 2 us of latency, or in 16 us and 2
        assert told(star(ranks), [cable_hurt]) == [f"{cable} takes 3.0 times as long as its like, since step 0"]


def test_since_when() -> None:
    (found,) = find(d2lps.simulate(train, star(4), 100, faults=[Slow("gpu1", 2, at=0.005)], device="meta").trace)
    assert (found.ranks, round(found.factor, 1)) == ((1,), 2.0)
    assert 20 <= found.since <= 45  # a step takes some 0.15 ms


def test_a_cable_between_switches_is_named_by_the_ways_that_use_it() -> None:
    cluster = topology.spine_leaf(4, 2, spines=1, bandwidth=1e9, latency=1e-6, device=DEVICE)
    uplink = next(link for link in cluster.links if all("gpu" not in str(end) for end in link))
    found = told(cluster, [Narrow(uplink, 4)])
    assert len(found) == 1 and all(str(end) in found[0] for end in uplink), found


@given(st.integers(0, 10**6))
@settings(max_examples=2, deadline=None)
def test_a_thousand_healthy_steps_name_nobody(seed: int) -> None:
    """Computing by chance up to 40% longer; and now and then, for some steps, a device or cable is four times as slow."""
    dice, hiccups = np.random.default_rng(seed), list[Any]()
    for at in dice.uniform(0, 0.15, 40):
        who, whose, until = f"gpu{dice.integers(4)}", f"gpu{dice.integers(4)}", at + 0.001
        hiccups += [Slow(who, 4, at, until), Narrow((whose, "switch"), 4, at, until)]
    assert told(star(4), hiccups, steps=1000, seed=seed) == []


def work_hard(comm: Communicator) -> None:
    x = torch.eye(64)
    for _ in range(24):
        with comm.compute("matrices"):
            for _ in range(500 if comm.rank == 2 else 10):
                x = x @ x
        all_reduce(comm, torch.ones(10))


def test_real_processes() -> None:
    trace = d2lps.run(work_hard, 4, trace=True).trace
    found = find(trace, patience=15)
    assert (2,) in [one.ranks for one in found]
    assert max(found, key=lambda one: one.factor).ranks == (2,)
    assert not [one for one in found if "way" in one.what]
    assert {len(one.ranks) for one in find(trace, patience=15, kind=lambda src, dst: 0)} <= {1, 2}


# ---- hangs --------------------------------------------------------------------------------------------------------------


def hangs(comm: Communicator, folder: str, way: str) -> None:
    with FlightRecorder(comm, folder, size=4):
        for step in range(6):
            if (comm.rank, step) == (comm.size - 1, 4):
                if way == "is stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if way == "loops":
                    while True:
                        pass
                if way == "calls another":
                    broadcast(comm, torch.ones(1))
                if way == "skips one":
                    continue
            all_reduce(comm, torch.ones(10))


@pytest.mark.parametrize(("way", "number", "last", "real", "ranks"), [
    ("is stopped", 5, "it has left all_reduce 4", True, 4), ("loops", 5, "it has left all_reduce 4", True, 2),
    ("calls another", 5, "it is in broadcast 5", False, 4), ("calls another", 5, "it is in broadcast 5", False, 8),
    ("skips one", 6, "it has left all_reduce 5", False, 2), ("skips one", 6, "it has left all_reduce 5", False, 8),
])  # fmt: skip
def test_who_is_missing_is_named_with_its_line(tmp_path: Path, way: str, number: int, last: str, real: bool, ranks: int) -> None:
    with pytest.raises(RankHung):
        if real:
            d2lps.run(hangs, ranks, str(tmp_path), way, timeout=1)
        else:
            d2lps.simulate(hangs, star(ranks), str(tmp_path), way)
    (found,) = absent(flights(tmp_path))
    assert found.rank == ranks - 1 and found.to_blame and found.waiting == list(range(ranks - 1))
    assert found.waited.number == number and found.waited.function == "hangs" and last in str(found)
    assert all(file.stat().st_size <= 4 * 4096 for file in tmp_path.iterdir())


def test_where_all_have_come_nobody_is_absent(tmp_path: Path) -> None:
    with pytest.raises(RankHung, match="on its way"):
        d2lps.simulate(hangs, star(4), str(tmp_path), "", faults=[Cut(("gpu1", "switch"), at=1e-5)])
    assert absent(flights(tmp_path)) == [] and any(not mine[-1].left for mine in flights(tmp_path).values())
    d2lps.simulate(hangs, star(4), str(tmp_path), "")
    assert absent(flights(tmp_path)) == []


def chain(comm: Communicator, folder: str) -> None:
    """Rank 3 never comes to its pair; rank 2 waits for it there, and ranks 0 and 1 for rank 2."""
    with FlightRecorder(comm, folder):
        pair = comm.split(comm.rank // 2)
        assert pair is not None
        all_reduce(comm, torch.ones(1))
        if comm.rank == 3:
            comm.recv(torch.ones(1), 0)
        if comm.rank == 2:
            all_reduce(pair, torch.ones(1))
        all_reduce(comm, torch.ones(1))


def test_who_waits_in_another_group_is_not_to_blame(tmp_path: Path) -> None:
    with pytest.raises(RankHung):
        d2lps.simulate(chain, star(4), str(tmp_path))
    found = absent(flights(tmp_path))
    assert [one.rank for one in found if one.to_blame] == [3, 3]
    assert [one.rank for one in found if not one.to_blame] == [2]
    assert any("where 2 waits" in str(one) for one in found)


def test_a_recorder_leaves_when_it_is_closed(tmp_path: Path) -> None:
    def work(comm: Communicator) -> int:
        with FlightRecorder(comm, tmp_path / "flights"):
            all_reduce(comm, torch.ones(1))
        all_reduce(comm, torch.ones(1))
        return len(comm.watchers)

    assert d2lps.simulate(work, star(2)) == [0, 0]
    assert [len(mine) for mine in flights(tmp_path / "flights").values()] == [1, 1]
    assert absent({}) == []
    with pytest.raises(ValueError, match="size=0"):
        d2lps.simulate(lambda comm: FlightRecorder(comm, tmp_path, size=0), star(1))



# ---- corruption ---------------------------------------------------------------------------------------------------------


def both_sums(comm: Communicator, size: int, seed: int) -> bool:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed * 10 + comm.rank)).exp()
    checked_all_reduce(comm, mine := tensor.clone(), step=seed)
    all_reduce(comm, tensor)
    return torch.equal(mine, tensor)


@pytest.mark.parametrize(("ranks", "size"), [*product((1, 2, 3, 5, 8), (0, 1, 7, 1000))])
def test_a_checked_sum_is_the_rings(ranks: int, size: int) -> None:
    assert d2lps.simulate(both_sums, star(ranks), size, 0) == [True] * ranks


def test_so_it_is_on_processes() -> None:
    assert d2lps.run(both_sums, 3, 1000, 0) == [True] * 3


@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), st.floats(0.1, 4))
@settings(max_examples=25, deadline=None)
def test_rounding_is_no_corruption(seed: int, dtype: torch.dtype, spread: float) -> None:
    def work(comm: Communicator) -> None:
        dice = torch.Generator().manual_seed(seed + comm.rank)
        sizes = torch.randn(200, generator=dice).mul(spread).exp().clamp(max=1e4)
        checked_all_reduce(comm, (torch.randn(200, generator=dice) * sizes).clamp(-1e4, 1e4).to(dtype))

    d2lps.simulate(work, star(5), trace=False)


def hurt(comm: Communicator, who: int, nth: int, way: str) -> None:
    """Rank `who`'s nth sum goes wrong by a bit, or the nth message to it."""
    plain, times = getattr(comm, way), [0]

    def wrong(*args: Any) -> None:
        plain(*args)
        times[0] += 1
        if times[0] == nth:
            target = args[0] if way == "combine" else args[2]
            target.view(torch.int32)[0] ^= 1 << 22

    if comm.rank == who:
        setattr(comm, way, wrong)
    checked_all_reduce(comm, 1 + torch.rand(comm.size * 3, generator=comm.generator))


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("way", ["combine", "sendrecv"])
def test_who_has_added_wrongly_or_which_way_is_named(ranks: int, way: str) -> None:
    hops = ranks - 1 if way == "combine" else 2 * (ranks - 1)
    for who, nth in [(hop % ranks, hop) for hop in range(1, hops + 1)]:
        # a sum that is wrong arrives at the next rank one hop later; before the checks there is an all-gather of p - 1 messages
        hop, here = (nth + 1, (who + 1) % ranks) if way == "combine" else (nth, who)
        with pytest.raises(Mismatch) as caught:
            d2lps.simulate(hurt, star(ranks), who, nth + (ranks - 1) * (way == "sendrecv"), way, trace=False)
        chunk, before = (here - hop) % ranks, (here - 1) % ranks
        assert str(caught.value).startswith(f"chunk {chunk} is wrong as it comes to rank {here}: ")
        assert (f"rank {before} has added wrongly" in str(caught.value)) == (1 < hop <= ranks)


@pytest.mark.parametrize("tensor", [torch.ones(6, dtype=torch.long), torch.ones(2, 3), torch.ones(6, device="meta")])
def test_what_has_no_checksum_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a flat tensor of floats is summed, not torch"):
        d2lps.simulate(checked_all_reduce, star(3), tensor)


def test_no_number_is_told_before_anything_is_summed() -> None:
    def work(comm: Communicator) -> None:
        checked_all_reduce(comm, torch.full((9,), float("inf") if comm.rank == 1 else 1.0))

    with pytest.raises(Mismatch, match="chunk 0 of rank 1 holds what is no number, before any sum"):
        d2lps.simulate(work, star(3))


def test_a_sum_that_is_too_large_for_its_dtype_may_be_nobodys_fault() -> None:
    def work(comm: Communicator, size: float) -> None:
        checked_all_reduce(comm, torch.full((9,), size, dtype=torch.float16))

    d2lps.simulate(work, star(3), 2e4)
    with pytest.raises(Mismatch, match=r"chunk 0 is wrong .*; or its sum is beyond 65504, torch\.float16's largest"):
        d2lps.simulate(work, star(3), 3e4)


def witnessed(comm: Communicator, way: str, turn: int) -> list[int]:
    def gradient(rank: int) -> torch.Tensor:
        return torch.arange(4.0) * (rank + 1) + 1e-6 * (way == "always" and comm.rank == 2)

    mine = gradient(comm.rank)
    if way == "once" and comm.rank == 1:
        mine[3] *= -1
    return damaged(comm, mine, gradient, turn)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_witnesses_name_the_damaged_rank_in_every_turn(ranks: int) -> None:
    for turn in range(ranks):
        assert d2lps.simulate(witnessed, star(ranks), "", turn, trace=False) == [[]] * ranks
        if ranks > 1:
            named = [1] if ranks > 2 else [0, 1]  # of two, one cannot say which
            assert d2lps.simulate(witnessed, star(ranks), "once", turn, trace=False) == [named] * ranks
        if ranks > 2:
            assert d2lps.simulate(witnessed, star(ranks), "always", turn, trace=False) == [[2]] * ranks


# ---- logs ---------------------------------------------------------------------------------------------------------------


def speak(comm: Communicator, wrong: list[float], sleeps: list[float], folder: str = "") -> str:
    out = open(f"{folder}/{comm.rank}", "w") if folder else io.StringIO()
    log = Log(comm, out, clock=lambda: comm.now() + wrong[comm.rank])
    for meeting in range(4):
        comm.sleep(sleeps[(comm.rank + meeting) % len(sleeps)])
        log(f"before {meeting}", step=meeting)
        all_reduce(comm, torch.ones(1))
        log(f"after {meeting}")
    out.close() if folder else None
    return "" if folder else out.getvalue()  # type: ignore[union-attr]


def in_causal_order(lines: list[dict[str, Any]], ranks: int) -> bool:
    story = [f"{when} {k}" for k in range(4) for when in ("before", "after")]
    own = all([line["said"] for line in lines if line["rank"] == rank] == story for rank in range(ranks))
    places = {text: [n for n, line in enumerate(lines) if line["said"] == text] for text in story}
    return own and all(max(places[f"before {k}"]) < min(places[f"after {k}"]) for k in range(4))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=5), st.lists(st.floats(0, 1), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_no_effect_stands_before_its_cause_whatever_the_clocks_say(wrong: list[float], sleeps: list[float]) -> None:
    logs = d2lps.simulate(speak, star(len(wrong)), wrong, sleeps, trace=False)
    assert in_causal_order(list(merged(*(log.splitlines() for log in logs))), len(wrong))


def test_logs_of_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        d2lps.run(speak, 3, [5.0, 0.0, -5.0], [0.0], folder)
        files = [open(f"{folder}/{rank}") for rank in range(3)]
        lines = list(merged(*files))
        for file in files:
            file.close()
    assert in_causal_order(lines, 3) and lines[0].keys() == {"rank", "clock", "time", "said", "step"}


def test_a_clock_that_is_set_back_and_lines_that_are_none() -> None:
    def work(comm: Communicator) -> list[float]:
        times = iter([5.0, 3.0, 6.0])
        log = Log(comm, out := io.StringIO(), clock=lambda: next(times))
        for _ in range(3):
            log("x")
        with pytest.raises(ValueError, match=r"\['rank'\]"):
            Log(comm, out)("x", rank=3)
        return [json.loads(line)["time"] for line in out.getvalue().splitlines()]

    assert d2lps.simulate(work, star(1)) == [[5.0, 5.0, 6.0]]
    for text in ("Traceback", "[1]", "{}", '{"clock": 1}'):
        with pytest.raises(ValueError, match="no line of a log"):
            list(merged([text]))
