"""What a rank says of itself while it trains: the numbers are those of the trace, and nothing is left when it ends."""

# ruff: noqa: F401, F811 - a fixture that looks for processes, ports and files which are left behind

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launching import nothing_left
from prometheus_client.parser import text_string_to_metric_families

import d2lps
from d2lps.parallel import Plan, Transformer, text, train
from d2lps.watch import Metrics

SMALL = Transformer(2, hidden=16, heads=2, vocab=96, sequence=16)
adam = partial(torch.optim.AdamW, lr=1e-3)

Samples = dict[tuple[str, ...], float]


def samples(url: str) -> Samples:
    """All that a rank says, by name and values of labels (axis, direction), but for when its counters began."""
    with urllib.request.urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples if not s.name.endswith("_created")}


def training(comm: Any, plan: Plan, steps: int) -> tuple[Samples, float]:
    with Metrics(comm, tokens=8 * 16) as metrics:
        losses = train(comm, SMALL, plan, text(16), steps, 8, adam, callback=metrics).losses
        return samples(metrics.url), losses[-1]


def sent_along(trace: d2lps.Trace, rank: int, end: str) -> dict[str, int]:
    """Bytes that the trace has of a rank, by axis."""
    messages, found = trace.messages, dict[str, int]()
    for group, name in enumerate(trace.axes):
        mine = (messages["group"] == group) & (messages[end] == rank)
        found[name or "ranks"] = found.get(name or "ranks", 0) + int(messages["nbytes"][mine].sum())
    return {axis: nbytes for axis, nbytes in found.items() if nbytes}


@pytest.mark.parametrize("plan", [Plan(dp=2, tp=2, zero=1), Plan(dp=2, pp=2)])
def test_bytes_by_axis_are_those_of_the_trace(plan: Plan) -> None:
    run = d2lps.run(training, 4, plan, 3, trace=True)
    for rank, (said, loss) in enumerate(run):
        for direction, end in (("sent", "src"), ("received", "dst")):
            traced = sent_along(run.trace, rank, end)
            assert traced == {key[1]: said[key] for key in said if key[0] == "d2lps_bytes_total" and key[2] == direction}
        assert said["d2lps_step_seconds_count",] == 2  # the first step has no step before it
        assert said["d2lps_tokens_total",] == 2 * 8 * 16 / 4
        assert said["d2lps_loss",] == loss
        assert 0 < said["d2lps_waiting_seconds_total",] < said["d2lps_step_seconds_sum",]


def ring(comm: Any, elements: int, steps: int) -> Samples:
    with Metrics(comm) as metrics:
        for step in range(steps):
            d2lps.collectives.all_reduce(comm, torch.ones(elements), algorithm="ring")
            metrics(step)
        return samples(metrics.url)


@pytest.mark.parametrize(("ranks", "backend"), [(1, "auto"), (2, "gloo"), (3, "auto"), (5, "auto"), (8, "auto")])
def test_any_loop_and_its_bytes(ranks: int, backend: str) -> None:
    said = d2lps.run(ring, ranks, 840, 4, backend=backend)
    for rank in said:
        expected = 4 * 4 * 2 * (ranks - 1) * 840 // ranks  # 4 steps, 4 bytes an element, 2 (p - 1) of p parts
        assert rank.get(("d2lps_bytes_total", "ranks", "sent"), 0) == expected
        assert ("d2lps_gradient_norm",) not in rank  # nobody has told it: 0 would be a lie, and then a jump from 0
        assert rank["d2lps_step_seconds_count",] == 3


def uneven(comm: Any, rounds: int) -> tuple[float, float]:
    """Rank 1 multiplies eight matrices where the others multiply none; then all meet."""
    with Metrics(comm) as metrics:
        for step in range(rounds):
            for _ in range(8 * (comm.rank == 1)):
                torch.ones(300, 300) @ torch.ones(300, 300)
            comm.barrier()
            metrics(step)
        said = samples(metrics.url)
        return said["d2lps_waiting_seconds_total",], said["d2lps_step_seconds_sum",]


def test_the_rank_that_keeps_the_others_waiting_waits_least() -> None:
    waited = [waiting / step for waiting, step in d2lps.run(uneven, 3, 30)]
    assert np.argmin(waited) == 1


def in_an_older_group(comm: Any) -> float:
    group = comm.split(comm.rank % 2)
    with Metrics(comm) as metrics:
        d2lps.collectives.all_reduce(group, torch.ones(100), algorithm="ring")
        metrics(0)
        return sum(value for key, value in samples(metrics.url).items() if key[0] == "d2lps_bytes_total" and key[2] == "sent")


def test_groups_that_were_split_off_before_are_counted() -> None:
    assert d2lps.run(in_an_older_group, 4) == [400] * 4


def beside(comm: Any) -> Samples:
    with Metrics(comm) as metrics:
        for step in range(2):
            work = comm.start(lambda lane: lane.sendrecv(torch.ones(100), 1 - lane.rank, torch.ones(100), 1 - lane.rank))
            work.wait()
            metrics(step)
        return samples(metrics.url)


def test_what_goes_on_beside_is_counted_and_only_the_wait_for_it_is_a_wait() -> None:
    run = d2lps.run(beside, 2, trace=True)
    waits = run.trace.waits
    for rank, said in enumerate(run):
        assert said["d2lps_bytes_total", "ranks", "sent"] == 2 * 400
        own = (waits["rank"] == rank) & (waits["lane"] == 0)
        assert said["d2lps_waiting_seconds_total",] <= (waits["end"] - waits["start"])[own].sum() + 1e-3


# ---- where it can be found ---------------------------------------------------------------------------------------------


def listed(comm: Any, folder: str, how: str) -> list[Any]:
    with Metrics(comm, folder) as metrics:
        metrics(0)
        comm.barrier()
        found = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(comm.size)]
        assert samples("http://" + found[comm.rank][0]["targets"][0] + "/metrics")
        comm.barrier()
        if comm.rank == 1 and how == "fails":
            raise KeyError("on purpose")
        if comm.rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def test_every_rank_has_an_entry_until_it_ends(tmp_path: Path, nothing_left: None) -> None:
    folder = tmp_path / "new" / "targets"
    found = d2lps.run(listed, 3, str(folder), "ends")[0]
    assert [entry[0]["labels"]["rank"] for entry in found] == ["0", "1", "2"]
    ports = {entry[0]["targets"][0] for entry in found}
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    assert not list(folder.iterdir())
    for port in ports:
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(port.split(":")[1])), timeout=1)


@pytest.mark.parametrize(("how", "error"), [("fails", KeyError), ("killed", d2lps.RankDied)])
def test_who_fails_or_is_killed_leaves_its_entry(tmp_path: Path, how: str, error: type[Exception], nothing_left: None) -> None:
    with pytest.raises(error):
        d2lps.run(listed, 2, str(tmp_path), how)
    assert (tmp_path / "rank-1.json").exists()


def alone(act: Callable[[Any], Any]) -> Any:
    return d2lps.run(act, 1)[0]


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            alone(lambda comm: Metrics(comm, str(tmp_path), port=port).__enter__())
    assert not list(tmp_path.iterdir())


def test_a_simulation_is_told_to_ask_its_trace() -> None:
    with pytest.raises(ValueError, match="trace=True"):
        d2lps.simulate(lambda comm: Metrics(comm), d2lps.topology.star(2, 1e9, 1e-6))


def test_after_the_block_nothing_is_counted() -> None:
    def job(comm: Any) -> bool:
        with Metrics(comm):
            pass
        return comm.watchers == []

    assert alone(job)
