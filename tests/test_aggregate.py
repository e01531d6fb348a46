"""Adding up gradients on one machine: the 60, 80 and 15 ms of Dive into Deep Learning, and the sums themselves."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import d2lps
from d2lps import aggregate
from d2lps.simulator import simulate
from d2lps.topology import pcie_tree

Aggregate = Callable[[d2lps.Communicator, torch.Tensor], None]

WAYS: dict[str, Aggregate] = {
    "on_device": aggregate.on_device,
    "on_the_last_device": lambda comm, tensor: aggregate.on_device(comm, tensor, root=comm.size - 1),
    "on_host": lambda comm, tensor: aggregate.on_host(comm, tensor, host=comm.size - 1),
    "blockwise": aggregate.blockwise,
}


@pytest.mark.parametrize(
    ("way", "milliseconds"), [("on_device", 60), ("on_the_last_device", 60), ("on_host", 80), ("blockwise", 15)]
)
def test_the_times_of_dive_into_deep_learning(way: str, milliseconds: float) -> None:
    machine, add_up = pcie_tree(4, 16e9, 0), WAYS[way]
    placed = machine.devices + (machine.hosts if way == "on_host" else [])

    def work(comm: d2lps.Communicator) -> None:
        add_up(comm, torch.empty(40_000_000, device=comm.device))

    run = simulate(work, machine, ranks=placed, device="meta")
    assert run.time * 1e3 == pytest.approx(milliseconds, rel=1e-6)
    assert run.trace.rounds == 2
    busiest = {"on_host": 4 * 160e6, "blockwise": 2 * 120e6}.get(way, 3 * 160e6)
    assert run.trace.bytes_sent().max() == run.trace.bytes_received().max() == busiest


def gradient(rank: int, n: int) -> torch.Tensor:
    return torch.randint(-50, 50, (n,), generator=torch.Generator().manual_seed(rank)).float()


def add(comm: d2lps.Communicator, way: str, shapes: list[tuple[int, ...]]) -> list[list[float]]:
    sums = []
    for shape in shapes:
        tensor = torch.full(shape[::-1], 1e9).T  # not contiguous where it has two dimensions
        if way != "on_host" or comm.rank < comm.size - 1:
            tensor.copy_(gradient(comm.rank, tensor.numel()).view(shape))
        WAYS[way](comm, tensor)
        sums.append(tensor.flatten().tolist())
    return sums


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_ends_with_the_sum(way: str, ranks: int) -> None:
    shapes = [(0,), (1,), (3,), (7, 11), (1001,)]
    owners = ranks - (way == "on_host")
    if not owners:
        pytest.skip("a host alone has nothing to add")
    numbers = [int(np.prod(shape)) for shape in shapes]
    wanted = [np.sum([gradient(rank, n).numpy() for rank in range(owners)], axis=0).tolist() for n in numbers]
    machine = pcie_tree(max(1, ranks - 1))
    placed = (machine.devices + machine.hosts)[:ranks]
    assert simulate(add, machine, way, shapes, ranks=placed) == [wanted] * ranks
    if ranks in (2, 5):
        assert d2lps.run(add, ranks, way, shapes) == [wanted] * ranks


def test_the_order_of_the_sum_is_the_order_of_the_ranks() -> None:
    big = 2.0**24  # 1 more is lost in float32

    def work(comm: d2lps.Communicator) -> float:
        aggregate.on_host(comm, tensor := torch.tensor([[big, 1.0, 1.0, -big][comm.rank % 4]]), host=4)
        return tensor.item()

    assert simulate(work, pcie_tree(5)) == [0.0] * 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm: aggregate.on_device(comm, torch.ones(2), root=3), "root=3 is not a rank of this group of 3 (0 to 2)"),
        (lambda comm: aggregate.on_host(comm, torch.ones(2), host=-1), "host=-1 is not a rank of this group of 3 (0 to 2)"),
        (lambda comm: aggregate.on_device(comm, [1.0]), "tensor must be a torch.Tensor, not list: [1.0]"),
        (lambda comm: aggregate.blockwise(comm, [1.0]), "tensor must be a torch.Tensor, not list: [1.0]"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[d2lps.Communicator], None], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as told:
        simulate(call, pcie_tree(3))
    assert str(told.value) == message


def test_debug_mode_tells_who_has_another_root() -> None:
    with pytest.raises(d2lps.Mismatch, match=r"rank 0 calls on_device\(tensor=float32\[2\], root=0\)"):
        simulate(lambda comm: aggregate.on_device(comm, torch.ones(2), root=comm.rank), pcie_tree(2), debug=True)
