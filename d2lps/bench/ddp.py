"""A step of DDP among processes of this machine: on our backend beside gloo, in the same processes and in turn."""

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d2lps import backend
from d2lps.bench.figures import record
from d2lps.comm import Communicator
from d2lps.launch import run

RANKS = (2, 4)
WIDTHS = {"small": 128, "large": 1024}  # four layers: 264 KB and 16.8 MB of gradients
BATCH, GLOO = 16, "gloo"
OURS = {"ours, shared memory": ("auto", None), "ours, ring": ("auto", "ring"), "ours, over gloo's sockets": ("gloo", None)}


def table(rounds: int = 11) -> str:
    """Milliseconds of one step (forward, backward with the all-reduce in it, SGD), and the ratio to gloo."""
    rows = []
    for ranks in RANKS:
        for name, width in WIDTHS.items():
            times = _combined(run(_measure, ranks, width, rounds, backend="gloo", timeout=600.0).results)
            rows += [_row(way, ranks, name, width, seconds, times[GLOO]) for way, seconds in times.items()]
    record("ddp", rows)
    lines = [f"{'a step of DDP':28}{'ranks':>6}{'gradients':>12}{'ms':>10}{'from':>10}{'to':>10}  x gloo"]
    lines += [
        f"{r['way']:28}{r['ranks']:>6}{r['bytes']:>12,}{r['median']:>10.2f}{r['least']:>10.2f}{r['most']:>10.2f}{r['to_gloo']:>8.2f}"
        for r in rows
    ]
    lines.append(f"medians of {rounds} rounds, in which all ways take turns; four layers, a batch of {BATCH} on each rank")
    return "\n".join(lines)


def _row(way: str, ranks: int, name: str, width: int, seconds: list[float], gloo: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    spread = {"median": median * 1e3, "least": min(seconds) * 1e3, "most": max(seconds) * 1e3}
    nbytes = 4 * 4 * (width * width + width)
    return {"way": way, "ranks": ranks, "model": name, "bytes": nbytes, **spread, "to_gloo": statistics.median(gloo) / median}


def _combined(by_rank: list[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """From the first rank's start to the last one's end, by way and round; the first round is not counted."""
    times: dict[str, list[float]] = {}
    for way in by_rank[0]:
        spans = zip(*(ranks[way] for ranks in by_rank), strict=True)
        times[way] = [max(end for _, end in each) - min(start for start, _ in each) for each in spans][1:]
    return times


def _measure(comm: Communicator, width: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    groups: dict[str, Any] = {GLOO: dist.new_group(backend="gloo")}
    for way, (transport, _) in OURS.items():
        backend.use(transport=transport)
        groups[way] = backend.group(comm)
    steps = {way: _step(width, group) for way, group in groups.items()}
    repeats = 20 if width < 1000 else 2
    spans: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    for _ in range(rounds + 1):
        for way, step in steps.items():
            backend.use(all_reduce=OURS[way][1] if way in OURS else None)
            comm.barrier()
            start = time.monotonic()
            for _ in range(repeats):
                step()
            end = time.monotonic()
            spans[way].append((start / repeats, end / repeats))
    return spans


def _step(width: int, group: Any) -> Any:
    """One step of training of a model of its own."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step
