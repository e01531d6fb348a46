"""Unmodified PyTorch programs under torchrun, with init_process_group("d2lps") in place of "gloo": as one process trains.

Their ranks come to the last collective, and end, at different moments, and half of them never destroy their groups: nobody
notices. D2LPS_REPEAT=30 runs each 30 times, by itself; else they are one program, one part after the other.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import running, script
from oracles import TORCH

RANKS = 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
REPEAT = int(os.environ.get("D2LPS_REPEAT", 1))
TRANSPORTS = ["auto", "gloo"] if REPEAT > 1 else ["auto"]  # each on its own

# What every rank trains, and one process in place of all.
MODEL = """
import torch
from torch import nn

torch.set_num_threads(1)
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
Y = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def net(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])

def train(model, x, y, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
    return weights(model)

def weights(model):
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in found])
"""

BEGIN = """
import sys, time
import torch.distributed as dist
import d2lps

dist.init_process_group("d2lps")
rank = dist.get_rank()
mine, theirs = X.chunk(4)[rank], Y.chunk(4)[rank]
found = {}
"""

END = """
if rank == 3:
    time.sleep(1)  # the others are gone by then, or wait for this one
dist.broadcast(last := torch.full((5,), float(rank)), 0)
found["last"] = last
torch.save({name: each + 0 for name, each in found.items()}, f"{sys.argv[1]}/found.{rank}")  # what is still on its way too
if rank % 2 == 0:
    dist.destroy_process_group()
"""

PROGRAMS = {
    "ddp": """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

found["plain"] = train(DDP(net()), mine, theirs)
for hook in (allreduce_hook, fp16_compress_hook):
    model = DDP(net(), bucket_cap_mb=0.02)
    model.register_comm_hook(None, hook)
    found[hook.__name__] = train(model, mine, theirs)

model = DDP(net(), bucket_cap_mb=0.02)
model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
found["builtin fp16"] = train(model, mine, theirs)

# of full rank, so that nothing is lost; in several buckets, each of which calls two all-reduces from a callback
model = DDP(net(), bucket_cap_mb=0.02)
model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=32, start_powerSGD_iter=2, min_compression_rate=0.1),
                         powerSGD_hook)
found["power"] = train(model, mine, theirs, steps=5)

model = DDP(net())
with model.no_sync():
    (model(mine) - theirs).pow(2).mean().backward()
found["no_sync"] = train(model, mine, theirs)
""",
    "fsdp2": """
from torch.distributed.fsdp import fully_shard

model = net()
for block in model:
    fully_shard(block)
fully_shard(model)
found["sharded"] = train(model, mine, theirs)
found["kept"] = torch.tensor(sum(p.to_local().numel() for p in model.parameters()))
""",
    "tensor_parallel": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

mesh = init_device_mesh("cpu", (4,))
columns_and_rows = {"up": ColwiseParallel(), "down": RowwiseParallel()}
model = net()
for block in model:
    parallelize_module(block, mesh, columns_and_rows)
found["parallel"] = train(model, X, Y)

block = parallelize_module(net()[0], mesh, {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
})
found["sequence"] = block.down(torch.tanh(block.up(block.norm(mine)))).detach()
""",
    "pipeline": """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

block = net()[rank]
stage = PipelineStage(block, rank, 4, torch.device("cpu"))
schedule = Schedule1F1B(stage, 8, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(block.parameters(), lr=0.05, momentum=0.9)
for _ in range(3):
    optimizer.zero_grad()
    schedule.step(*([X] if rank == 0 else []), **({"target": Y} if rank == 3 else {}))
    optimizer.step()
found["stage"] = weights(block)
""",
}


# Before these, torch itself was not able to. 2.6's FSDP2 asks a CPU for CUDA's events. Its pipelines hang over gloo, and leave
# gradients undivided by the number of micro-batches; those of 2.9 send the shapes of tensors in an order in which none is taken.
FROM = {"fsdp2": (2, 7), "pipeline": (2, 10)}
ABLE = [name for name in PROGRAMS if FROM.get(name, TORCH) <= TORCH]
JOBS = [(name,) for name in ABLE] if REPEAT > 1 else [tuple(ABLE)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The names of the model above, in this process."""
    threads, names = torch.get_num_threads(), {}
    exec(MODEL, names)
    yield names
    torch.set_num_threads(threads)


def expected(name: str, rank: int, alone: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What one process finds that has all of the data, or the part of it that is a rank's."""
    net, train, x, y = (alone[each] for each in ("net", "train", "X", "Y"))
    trained = train(net(), x, y)
    if name == "ddp":
        twice = net()
        (twice(x) - y).pow(2).mean().backward()
        hooks = dict.fromkeys(["plain", "allreduce_hook", "fp16_compress_hook", "builtin fp16", "no_sync"], trained)
        return hooks | {"power": train(net(), x, y, steps=5)}
    if name == "fsdp2":
        return {"sharded": trained, "kept": torch.tensor(trained.numel() // RANKS)}
    if name == "tensor_parallel":
        block = net()[0]
        rows = block.down(torch.tanh(block.up(block.norm(x)))).detach()
        return {"parallel": trained, "sequence": rows.chunk(RANKS)[rank]}
    return {"stage": trained.chunk(RANKS)[rank]}


def precision(what: str) -> float:
    """float32 keeps 7 digits, float16 3; gradients are a small part of the weights."""
    return 2e-4 if "fp16" in what else 1e-5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("attempt", range(REPEAT))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("parts", JOBS, ids="+".join)
def test_a_program_trains_as_one_process_does(
    parts: tuple[str, ...], transport: str, attempt: int, tmp_path: Path, alone: dict[str, Any]
) -> None:
    program = MODEL + BEGIN + "".join(PROGRAMS[part] for part in parts) + END
    command = script(tmp_path / "program.py", program)[1:]
    with running([*TORCHRUN, *command, str(tmp_path)], D2LPS_TRANSPORT=transport, OMP_NUM_THREADS="1") as job:
        text, _ = job.communicate(timeout=280)
    assert job.returncode == 0, text
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"found.{rank}")
        assert torch.equal(found.pop("last"), torch.zeros(5))
        wanted = {what: values for part in parts for what, values in expected(part, rank, alone).items()}
        assert found.keys() == wanted.keys()
        for what, values in wanted.items():
            far = (found[what] - values).abs().max().item()
            assert far < precision(what), f"{what} on rank {rank} is {far} off"
            assert math.isfinite(far)
