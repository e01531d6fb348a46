"""What runs on a GPU, on one of which several ranks may live: there messages are staged through the host's memory.

Everything is compared with one process on the CPU. Without a GPU all of it is skipped; by hand: pytest tests/test_gpu.py
"""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import d2lps
from d2lps.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from d2lps.parallel import DataParallel, Plan, Transformer, Zero, module_pieces, text, train
from d2lps.parallel.saving.checkpoint import gathered, load, save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
ALGORITHMS = ["flat", "tree", "double_tree", "ring", "two_rings", "blockwise", "halving_doubling", "hierarchical", "native"]
STEPS = 4


@pytest.fixture(autouse=True)
def told_of_staging() -> Iterator[None]:
    """More ranks than GPUs are a warning, which is right here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NCCL needs one each|.*NCCL needs one each")
        yield


def test_one_rank_has_nccl_and_says_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    def work(comm: d2lps.Communicator) -> Any:
        comm.barrier()
        all_reduce(comm, tensor := torch.arange(3.0, device=comm.device), algorithm="native")
        return comm.device.type, tensor.tolist()

    assert d2lps.run(work, 1) == [("cuda", [0.0, 1.0, 2.0])]
    assert "Guessing device" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_all_algorithms_add_up(ranks: int, dtype: torch.dtype) -> None:
    def work(comm: d2lps.Communicator) -> Any:
        sums = []
        for algorithm in ALGORITHMS:
            tensor = (torch.arange(1001, device=comm.device) % 7 + comm.rank).to(dtype)
            all_reduce(comm, tensor, algorithm=algorithm)
            sums.append((tensor.device.type, tensor.cpu()))
        return sums

    want = sum((torch.arange(1001) % 7 + rank) for rank in range(ranks)).to(dtype)  # type: ignore[union-attr]
    for sums in d2lps.run(work, ranks):
        assert all(device == "cuda" and torch.equal(got, want) for device, got in sums)


def test_what_is_not_contiguous_and_memory_that_meets() -> None:
    def work(comm: d2lps.Communicator) -> Any:
        def new(value: float) -> Tensor:
            return torch.full((4,), float(value), device=comm.device)

        right, left, ranks = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, range(comm.size)
        column = torch.zeros(4, 2, device=comm.device)[:, 1]
        comm.sendrecv(new(comm.rank), right, column, left)
        all_gather(comm, rooms := [new(0) for _ in ranks], new(comm.rank))
        reduce_scatter(comm, output := new(0), [new(k + comm.rank) for k in ranks])
        all_to_all(comm, swapped := [new(0) for _ in ranks], [new(10 * comm.rank + k) for k in ranks])
        with pytest.raises(ValueError):
            comm.sendrecv(column, right, column, left)
        return [column[0].item(), output[0].item(), [t[0].item() for t in rooms], [t[0].item() for t in swapped]]

    for rank, got in enumerate(d2lps.run(work, 3)):
        assert got == [(rank - 1) % 3, 3 * rank + 3, [0, 1, 2], [rank, 10 + rank, 20 + rank]]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss(model: Any, step: int, rank: int, device: Any) -> Tensor:
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    result: Tensor = (model(inputs.to(device)) ** 2).mean()
    return result


def by_one_process(ranks: int) -> dict[str, Tensor]:
    model, sgd = net(), partial(torch.optim.SGD, lr=0.1)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(model, step, rank, "cpu") for rank in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("kind", ["DDP", "DataParallel", 1, 2, 3])
def test_training_is_that_of_one_process(kind: str | int) -> None:
    def work(comm: d2lps.Communicator) -> Any:
        model = whole = net().to(comm.device)
        if isinstance(kind, int):
            zero = Zero(comm, whole, partial(torch.optim.SGD, lr=0.1), kind)
            for step in range(STEPS):
                loss(whole, step, comm.rank, comm.device).backward()
                zero.step()
            found = gathered(comm, zero.pieces())
            return {name: found[name].cpu() for name, _ in net().named_parameters()}
        model = DataParallel(comm, whole) if kind == "DataParallel" else wrapped(comm, whole)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step, comm.rank, comm.device).backward()
            optimizer.step()
        return {name: tensor.detach().cpu() for name, tensor in whole.named_parameters()}

    def wrapped(comm: d2lps.Communicator, whole: nn.Module) -> nn.Module:
        return DistributedDataParallel(whole, process_group=d2lps.backend.group(comm))

    want = by_one_process(2)
    for got in d2lps.run(work, 2):
        assert got.keys() == want.keys()
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name])


PLANS = [Plan(dp=2, zero=2), Plan(tp=2), Plan(pp=2), Plan(cp=2), Plan(dp=2, zero=3, precision="bf16")]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_trains_as_one_rank_does(plan: Plan) -> None:
    small = Transformer(layers=2, hidden=32, heads=4, vocab=96, sequence=64)

    def losses(comm: d2lps.Communicator, plan: Plan) -> list[float]:
        return train(comm, small, plan, text(64), steps=3, batch=4, optimizer=partial(torch.optim.AdamW, lr=3e-3)).losses

    want = d2lps.simulate(losses, d2lps.topology.star(1, 1e9), Plan())[0]
    assert d2lps.run(losses, 2, plan)[0] == pytest.approx(want, rel=3e-3)


def test_a_checkpoint_of_a_gpu(tmp_path: Path) -> None:
    def work(comm: d2lps.Communicator) -> bool:
        save(comm, tmp_path, 1, module_pieces(model := net().to(comm.device)))
        for parameter in (other := net().to(comm.device)).parameters():
            parameter.data.zero_()
        load(comm, tmp_path, module_pieces(other))
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    assert d2lps.run(work, 2) == [True, True]


def test_the_store_takes_and_gives_tensors_of_a_gpu() -> None:
    def worker(kv: d2lps.kvstore.KVWorker) -> Any:
        kv.init("w", weights := torch.zeros(5, device="cuda"))
        for _ in range(10):
            kv.pushpull("w", torch.ones(5, device="cuda"), weights).wait()
            kv.clock()
        return weights.device.type, weights.tolist()

    assert d2lps.kvstore.run(worker, 2, 1) == [("cuda", [20.0] * 5)] * 2
