"""A step of DDP among processes of this machine: on our backend beside gloo, each as a PyTorch program of its own, in turn."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d2lps import backend
from d2lps_book.bench.turns import Operation, Rival, Row, answer, compare, text

RANKS = (2, 4)
WIDTHS = {128: 20, 1024: 2}  # four layers: 264 KB and 16.8 MB of gradients; steps at a time
BATCH, GLOO = 16, "gloo"
COLUMNS = {"ranks": "{ranks}", "gradients": "{bytes:,}", "ms": "{median:.2f}", "from": "{least:.2f}", "to": "{most:.2f}"}
COLUMNS |= {"x gloo": "{ratio:.2f}"}
# By way: what our backend is told to use.
OURS = {"ours, shared memory": ("auto", None), "ours, ring": ("auto", "ring"), "ours, over gloo's sockets": ("gloo", None)}


def measure(rounds: int = 11) -> list[Row]:
    """A row for each way, number of ranks and model (see `turns.row`), in milliseconds; the peer is gloo."""
    rows = []
    for ranks in RANKS:
        rivals = {way: Rival(way, _rank, ranks, (way, str(ranks)), spawn=ranks) for way in (*OURS, GLOO)}
        models = [{"width": width, "bytes": 4 * 4 * (width * width + width), "repeats": steps} for width, steps in WIDTHS.items()]
        rows += compare(rivals, GLOO, [{"ranks": ranks, **model} for model in models], rounds, 1e-3)
    return rows


def table(rounds: int = 11) -> tuple[str, list[Row]]:
    """Milliseconds of one step (forward, backward with the all-reduce in it, SGD), and the ratio to gloo."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in turn; four layers, {BATCH} examples a rank"
    return text("a step of DDP", COLUMNS, rows, note), rows


def _rank(rank: int, door: str, way: str, ranks: str) -> None:
    """A process as in PyTorch's tutorial on DDP, and with one thread, as torchrun has it."""
    torch.set_num_threads(1)
    if way in OURS:
        transport, algorithm = OURS[way]
        backend.use(transport=transport, all_reduce=algorithm)
    name = GLOO if way == GLOO else "d2lps"
    dist.init_process_group(name, init_method=f"file://{door}.store", rank=rank, world_size=int(ranks))
    step = cache(_step)
    answer(door, lambda way, case: (step(case["width"]), dist.barrier))
    dist.destroy_process_group()


def _step(width: int) -> Operation:
    """One step of training of a model of its own."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer, x, y = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(BATCH, width), torch.randn(BATCH, width)

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return train
