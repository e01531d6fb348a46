"""The benchmarks measure what they say: each rival in programs of its own, in turn. How fast anything is, is not tested."""

import json
import math
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import nothing_left, output_of, script, until  # noqa: F401 - one is a fixture

import d2lps
from d2lps_book.bench import all_reduce, kvstore, simulator, turns

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


# ---- what is measured is what a user gets ---------------------------------------------------------------------------------

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKED = "THP_MEM_ALLOC_ENABLE"


def setting() -> str:
    """Which processes the kernel gives huge pages: "always", "madvise" (who asks), "never"."""
    found = re.search(r"\[(\w+)\]", HUGE.read_text()) if HUGE.exists() else None
    return found[1] if found else "never"


asking = pytest.mark.skipif(setting() == "never", reason="the kernel gives nobody huge pages")


def on_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether most of the memory in which a tensor lies is in huge pages."""
    inside, size = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"(\w+)-(\w+) ", line):
            inside = int(span[1], 16) <= tensor.data_ptr() + tensor.nbytes // 2 < int(span[2], 16)
        elif inside and line.startswith("Rss:"):
            size = int(line.split()[1])
        elif inside and line.startswith("AnonHugePages:"):
            return 2 * int(line.split()[1]) > size > 0
    raise LookupError(f"{tensor.data_ptr():x} is in no mapping")


def looks(rank: object, *sizes: int) -> list[bool]:
    """Whether tensors of so many bytes are on huge pages in a rank, or a worker."""
    return [on_huge_pages(torch.empty(nbytes // 4).fill_(1)) for nbytes in sizes]


def looking(door: str, path: str) -> None:
    """A program of the benchmarks whose ranks look."""
    Path(path).write_text(json.dumps(list(d2lps.run(looks, 2, 160_000_000))))
    turns.answer(door, lambda way, case: (lambda: None, lambda: None))


PLAIN = """
    import torch, d2lps
    from test_bench import looks

    if __name__ == "__main__":
        print([*d2lps.run(looks, 2, 160_000_000), *d2lps.kvstore.run(looks, 1, 1, 160_000_000, 2_000_000)])
"""


@asking
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("told", "huge"), [(None, True), ("1", True), ("0", setting() == "always")])
def test_a_plain_script_and_the_benchmarks_have_tensors_on_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, huge: bool
) -> None:
    monkeypatch.delenv(ASKED, raising=False)
    if told is not None:
        monkeypatch.setenv(ASKED, told)
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parent, here.parent / "book", here)))
    monkeypatch.setenv("PYTHONPATH", path)
    plain = json.loads(output_of(script(tmp_path / "plain.py", PLAIN), PYTHONPATH=path).lower())
    rival = turns.Rival("ours", looking, 1, (str(tmp_path / "found"),))
    with rival.present(str(tmp_path / "door")):
        rival.time("", {})
    assert json.loads((tmp_path / "found").read_text()) == plain[:2] == [[huge], [huge]]
    assert plain[2] == [huge, huge]  # a worker's of 160 MB, and its part of 2 MB: smaller than a huge page


@asking
def test_the_environment_of_now_says_whether_ranks_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads the variable once, at the first tensor: there must be none in the process from which ranks are forked."""

    def imports(comm: d2lps.Communicator) -> None:
        import torch._dynamo  # from then on the fork server has it, too
        import torch.distributed.fsdp  # noqa: F401

    d2lps.run(imports, 1)
    for told, huge in ((None, True), ("0", setting() == "always"), ("1", True)):
        monkeypatch.delenv(ASKED, raising=False)
        if told is not None:
            monkeypatch.setenv(ASKED, told)
        assert d2lps.run(looks, 1, 160_000_000) == [[huge]]


@asking
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("told", "huge"), [(None, True), ("0", setting() == "always")])
def test_a_servers_values_are_on_huge_pages_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, huge: bool
) -> None:
    """Keys of 1 MB, each smaller than such a page, lie side by side in the heap."""
    monkeypatch.delenv(ASKED, raising=False)
    if told is not None:
        monkeypatch.setenv(ASKED, told)
    keys, there, seen = 32, tmp_path / "there", tmp_path / "seen"

    def worker(kv: d2lps.kvstore.KVWorker) -> None:
        for key in range(keys):
            kv.init(key, torch.ones(200_000))
        there.touch()
        assert until(seen.exists, 60)

    def look(cluster: d2lps.kvstore.Cluster) -> None:
        assert until(there.exists, 60)
        rollup = Path(f"/proc/{cluster.servers[0].pid}/smaps_rollup").read_text()
        seen.write_text(str(re.search(r"AnonHugePages: +(\d+) kB", rollup)[1]))  # type: ignore[index]

    d2lps.kvstore.run(worker, 1, 1, saboteur=look)
    assert (int(seen.read_text()) * 1024 > keys * 800_000 / 2) == huge


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
