"""The benchmarks measure what they say: each rival in programs of its own, in turn. How fast anything is, is not tested."""

import math
import os
import sys
from functools import partial

import pytest
from launching import nothing_left  # noqa: F401 - a fixture

from d2lps.bench import all_reduce, kvstore, simulator, turns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def failing(door: str, how: str) -> None:
    """A program that fails, before or after it has come to the door."""
    if how == "fails at once":
        raise SystemExit("on purpose")
    turns.answer(door, lambda way, case: sys.exit("on purpose"))


def test_a_row_and_a_table() -> None:
    rows = [turns.row("gloo", [2.0, 4.0, 9.0], [8.0], 1e-3, bytes=4)]
    assert rows == [{"way": "gloo", "median": 4000.0, "least": 2000.0, "most": 9000.0, "ratio": 2.0, "bytes": 4}]
    table = turns.text("ranks", {"B": "{bytes}", "ms": "{median:,.0f}"}, rows, "", "left out: MPI")
    assert table.splitlines() == ["ranks  B     ms", "gloo   4  4,000", "left out: MPI"]


def test_every_way_has_its_turn_in_every_round() -> None:
    order = []

    def act(way: str) -> float:
        order.append(way)
        return len(order)

    times = turns.in_turn({way: partial(act, way) for way in "ab"}, rounds=2)
    assert order == ["a", "b"] * 3
    assert times == {"a": [3, 5], "b": [4, 6]}  # the first round was for practice


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left")
def test_all_reduce_is_measured_on_every_way_there_is() -> None:
    rows = all_reduce.measure(rounds=1, sizes=(8, 100_000))
    ways = {row["way"] for row in rows}
    assert {*all_reduce.OURS, all_reduce.GLOO} <= ways and len(rows) == 2 * len(ways)
    assert ("OpenMPI" in ways) != ("OpenMPI" in all_reduce.left_out())
    for row in rows:
        assert 0 < row["least"] == row["median"] == row["most"]
        assert math.isnan(row["busbw"]) == (row["way"] == all_reduce.COPY)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left")
def test_push_and_pull_are_measured_beside_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "SIZES", {1_000: 20})
    rows = kvstore.measure(rounds=1, ways=("ours, memory",))
    assert [(row["way"], row["bytes"]) for row in rows] == [("ours, memory", 1_000), (kvstore.RPC, 1_000)]


def test_simulated_times_are_those_by_hand_in_every_simulator() -> None:
    for row in simulator.beside(ranks=4, rounds=1):
        # SimGrid's program has a start, too, of some microseconds
        assert row["virtual"] == pytest.approx(simulator.exact(4), rel=1e-9 if row["way"] != simulator.SIMGRID else 0.02)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["fails at once", "fails later"])
def test_a_rival_that_fails_is_named_and_not_waited_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    monkeypatch.setattr(turns, "PATIENCE", 1e6)
    with pytest.raises(RuntimeError, match=f"{how}: "):
        turns.compare({how: turns.Rival(how, failing, 1, (how,))}, how, [{}], 1)
