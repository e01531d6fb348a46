"""Real engines read what the book configures: promtool, Prometheus, node_exporter and TensorBoard, where they are installed."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from engines import MONITORING, Prometheus, Replay, answers, engine, exporting, get, missing, monitoring, prometheus, simulated
from launching import until
from prometheus_client.parser import text_string_to_metric_families

import d2lps
from d2lps import kvstore
from d2lps.parallel import Plan, Trainer, Transformer, text
from d2lps.topology import dgx_a100_pod
from d2lps.watch import Metrics

needs_prometheus = pytest.mark.skipif(bool(missing("prometheus", "promtool")), reason=missing("prometheus", "promtool"))
RULES = yaml.safe_load((MONITORING / "rules.yml").read_text())
ALERTS = [rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
BOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", [])]
COUNTERS = [line.split(",")[0] for line in (MONITORING / "counters.csv").read_text().splitlines() if line and line[0] != "#"]


# ---- what can be said without running anything --------------------------------------------------------------------------


def promtool(*words: str, folder: Path = MONITORING) -> str:
    run = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True)
    return "" if run.returncode == 0 else run.stdout + run.stderr


@needs_prometheus
def test_promtool_finds_nothing_wrong() -> None:
    assert not promtool("check", "config", "prometheus.yml")
    assert not promtool("check", "rules", "rules.yml")
    assert not promtool("test", "rules", "rules_test.yml")


@needs_prometheus
@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_tested_for_firing_and_for_silence(alert: str, tmp_path: Path) -> None:
    for always in ("vector(1)", "vector(1) > 2"):
        rules = yaml.safe_load((MONITORING / "rules.yml").read_text())
        next(rule for group in rules["groups"] for rule in group["rules"] if rule.get("alert") == alert)["expr"] = always
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
        shutil.copy(MONITORING / "rules_test.yml", tmp_path)
        assert f"alertname: {alert}," in promtool("test", "rules", "rules_test.yml", folder=tmp_path)


def test_what_is_read_of_a_gpu_is_what_somebody_looks_at() -> None:
    asked = " ".join([(MONITORING / "rules.yml").read_text(), *(expression for _, expression in QUERIES)])
    assert set(COUNTERS) == set(re.findall(r"DCGM_\w+", asked))


def test_the_chapter_shows_the_rule_as_it_is() -> None:
    cells = json.loads((MONITORING.parent / "watching_and_debugging.ipynb").read_text())["cells"]
    (shown,) = [found[1] for cell in cells if (found := re.search(r"```yaml\n(.*?)```", "".join(cell["source"]), re.DOTALL))]
    rules = {rule.get("alert"): rule for group in RULES["groups"] for rule in group["rules"]}
    for rule in yaml.safe_load(shown):
        assert rule.items() <= rules[rule["alert"]].items()


def test_panels_do_not_overlap_and_their_numbers_are_their_own() -> None:
    cells = [
        (x, y) for panel in BOARD["panels"] for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]  # fmt: skip
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


# ---- a Prometheus that watches a job ------------------------------------------------------------------------------------


class Slow:
    """Data that one rank computes at length."""

    def __init__(self, rank: int) -> None:
        self.data, self.slow = text(16), rank == 2

    def batch(self, first: int, count: int) -> Any:
        for _ in range(150 * self.slow):
            torch.ones(300, 300) @ torch.ones(300, 300)
        return self.data.batch(first, count)


def job(comm: Any, folder: str) -> int:
    """Steps until somebody writes a file; how many there were."""
    adam, small = partial(torch.optim.AdamW, lr=1e-3), Transformer(2, hidden=16, heads=2, vocab=96, sequence=16)
    over = torch.zeros(1)
    with Metrics(comm, f"{folder}/targets", tokens=8 * 16) as metrics:
        trainer = Trainer(comm, small, Plan(dp=4), Slow(comm.rank), 8, adam)
        while not over.item():
            metrics(trainer.done, *trainer.step())
            over.fill_(Path(folder, "over").exists())
            d2lps.collectives.broadcast(comm, over, src=0)
    return trainer.done


def look(engine: Prometheus, folder: Path) -> SimpleNamespace:
    """Wait for the alert; then ask all that the dashboard asks, and let the job end."""
    try:
        firing = until(lambda: [each for each in engine.alerts("Straggler") if each["state"] == "firing"], 120)
        found = {query: engine.query(query.replace("$__rate_interval", "5s")) for _, query in QUERIES}
        work = engine.query("rank:d2lps_working_seconds:mean1m")
        return SimpleNamespace(firing=firing, answers=found, work=work, targets=engine.query("up"))
    finally:
        (folder / "over").touch()


def pushing(kv: Any) -> None:
    kv.init("w", torch.zeros(100))
    for _ in range(5):
        kv.push("w", torch.ones(100))
        kv.clock()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One job, four ranks, the third of which computes more than the others; a store's servers; two machines of a simulation."""
    if why := missing("prometheus"):
        pytest.skip(why)
    folder = monitoring(tmp_path_factory.mktemp("monitoring"))
    monitor, replay = kvstore.Monitor(), Replay(simulated(dgx_a100_pod(2)))
    kvstore.run(pushing, 2, 2, monitor=monitor)
    with ExitStack() as stack:
        stack.enter_context(exporting(monitor, folder / "targets" / "server-all.json"))
        stack.enter_context(exporting(replay, folder / "targets" / "machine-all.json"))
        asked = Prometheus(stack.enter_context(prometheus(folder)))
        looks = stack.enter_context(ThreadPoolExecutor()).submit(look, asked, folder)
        steps = d2lps.run(job, 4, str(folder))[0]
        seen = looks.result()
        seen.gone = until(lambda: not asked.query('up{job="training"}'), 20)
        yield SimpleNamespace(**vars(seen), steps=steps, replay=replay, address=asked.address)
    assert not answers(asked.address)


def test_the_straggler_is_named(watched: SimpleNamespace) -> None:
    assert [alert["labels"]["rank"] for alert in watched.firing] == ["2"]
    assert watched.firing[0]["annotations"]["summary"].startswith("Rank 2 on ")


def test_the_straggler_works_longest(watched: SimpleNamespace) -> None:
    seconds = {sample["metric"]["rank"]: float(sample["value"][1]) for sample in watched.work}
    assert len(seconds) == 4 and max(seconds, key=seconds.__getitem__) == "2"


def test_ranks_come_and_go_by_themselves(watched: SimpleNamespace) -> None:
    assert sorted(sample["metric"].get("rank", "") for sample in watched.targets) == ["", "", "0", "1", "2", "3"]
    assert all(sample["value"][1] == "1" for sample in watched.targets)
    assert watched.gone  # no entry, no target, and so no alert that nobody answers


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_each_query_of_the_dashboard_has_an_answer(watched: SimpleNamespace, title: str, query: str) -> None:
    assert watched.answers[query], f"{title}: no data"


def test_the_dashboards_numbers_are_the_simulations(watched: SimpleNamespace) -> None:
    """A port's share of its rate is what the trace says, as near as one second after another can tell."""
    sent = watched.answers["port:node_infiniband_sent:ratio1m"]
    shown = {(sample["metric"]["node"], sample["metric"]["device"]): float(sample["value"][1]) for sample in sent}
    assert shown == {
        ("node0", "mlx5_7"): pytest.approx(watched.replay.share(("node0/gpu7", "network")), rel=0.1),
        ("node1", "mlx5_7"): pytest.approx(watched.replay.share(("node1/gpu7", "network")), rel=0.1),
    }
    use = {float(sample["value"][1]) for sample in watched.answers["DCGM_FI_DEV_GPU_UTIL"]}
    assert len(watched.answers["DCGM_FI_DEV_GPU_UTIL"]) == 16 and 0 < min(use) <= max(use) < 100


# ---- node_exporter: the names of a port's counters are its own -----------------------------------------------------------


def scraped(url: str) -> Iterator[Any]:
    with urllib.request.urlopen(url) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


def port_of(folder: Path, sent: int, rate: str) -> None:
    """A port as Linux shows it; its counters count words of 4 bytes."""
    port = folder / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    for name, said in {"fw_ver": "20.31.1014", "board_id": "MT_0000000223", "hca_type": "MT4123"}.items():
        (port.parents[1] / name).write_text(said + "\n")
    for name, said in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": rate}.items():
        (port / name).write_text(said + "\n")
    counters = {"port_xmit_data": sent // 4, "port_rcv_data": 25, "link_downed": 1, "port_rcv_errors": 2, "port_xmit_wait": 3}
    for name, value in counters.items():
        (port / "counters" / name).write_text(f"{value}\n")


@pytest.mark.skipif(bool(missing("prometheus-node-exporter")), reason=missing("prometheus-node-exporter"))
def test_node_exporter_has_the_ports_counters_by_these_names(tmp_path: Path) -> None:
    port_of(tmp_path, 4_000_000, "200 Gb/sec (4X HDR)")
    options = [f"--path.sysfs={tmp_path}", "--collector.disable-defaults", "--collector.infiniband"]
    with engine(tmp_path, "/metrics", "prometheus-node-exporter", "--web.listen-address={address}", *options) as address:
        found = {sample.name: sample.value for sample in scraped(f"{address}/metrics")}
    assert found["node_infiniband_port_data_transmitted_bytes_total"] == 4_000_000
    assert found["node_infiniband_rate_bytes_per_second"] == 25e9
    asked = " ".join([(MONITORING / "rules.yml").read_text(), *(expression for _, expression in QUERIES)])
    assert set(re.findall(r"node_infiniband_(?!sent)\w+", asked)) <= found.keys()


# ---- TensorBoard --------------------------------------------------------------------------------------------------------


needs_tensorboard = pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="TensorBoard is not installed")


def written(comm: Any, folder: str) -> list[float]:
    """A rank that writes its losses and its profile where TensorBoard looks."""
    from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler
    from torch.utils.tensorboard import SummaryWriter

    adam, small = partial(torch.optim.AdamW, lr=1e-3), Transformer(2, hidden=16, heads=2, vocab=96, sequence=16)
    trainer = Trainer(comm, small, Plan(dp=2), text(16), 8, adam)
    handler = tensorboard_trace_handler(f"{folder}/profile", f"rank{comm.rank}")
    with SummaryWriter(f"{folder}/rank{comm.rank}") as writer, profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler):
        for step in range(3):
            writer.add_scalar("loss", trainer.step()[0], step)
    return trainer.losses


@needs_tensorboard
def test_tensorboard_shows_the_losses_of_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where TensorBoard keeps a list of those that run
    run = d2lps.run(written, 2, str(tmp_path / "runs"))
    command = [sys.executable, "-m", "tensorboard.main", "--logdir=runs", "--host={host}", "--port={port}", "--load_fast=false"]
    with engine(tmp_path, "/data/plugins_listing", *command) as address:
        tags = until(lambda: get(f"{address}/data/plugin/scalars/tags"), 30)
        assert {name: list(said) for name, said in tags.items()} == {"rank0": ["loss"], "rank1": ["loss"]}
        for rank, losses in enumerate(run):
            shown = get(f"{address}/data/plugin/scalars/scalars?run=rank{rank}&tag=loss")
            assert [(step, value) for _, step, value in shown] == [(n, pytest.approx(loss)) for n, loss in enumerate(losses)]
        plugins = get(f"{address}/data/plugins_listing")
        if importlib.util.find_spec("torch_tb_profiler") is None:
            pytest.skip("the losses are right; torch-tb-profiler, which shows profiles, is not installed")
        assert plugins["pytorch_profiler"]["enabled"]
        runs = until(lambda: get(f"{address}/data/plugin/pytorch_profiler/runs")["runs"], 30)
        assert runs == ["profile"]
        assert get(f"{address}/data/plugin/pytorch_profiler/workers?run=profile&view=Trace") == ["rank0", "rank1"]
