"""DDP, FSDP2 and DTensor on our backend: the same weights as on gloo, and as one who adds up the gradients by hand gets."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles import TORCH, digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import d2lps
import d2lps.backend
from d2lps import Communicator

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="shared memory")
STEPS, BATCH = 4, 16


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 10))


def batches(rank: int, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's own; the same in every test."""
    generator = torch.Generator().manual_seed(rank)
    draw = functools.partial(torch.randn, BATCH, 64, generator=generator)
    return [(draw(), torch.randint(10, (BATCH,), generator=generator)) for _ in range(steps)]


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    found = [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in found])


def by_hand(ranks: int) -> torch.Tensor:
    """One process in place of them all: each rank's gradient, times 1/p as DDP has it, added in the order of the ranks."""
    model, data = net(), [batches(rank) for rank in range(ranks)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        gradients = []
        for rank in range(ranks):
            optimizer.zero_grad()
            x, y = data[rank][step]
            nn.functional.cross_entropy(model(x), y).backward()
            gradients.append([parameter.grad.clone() * (1 / ranks) for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = functools.reduce(torch.add, parts)
        optimizer.step()
    return weights(model)


def run(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """On the ranks of a run, in which ours is torch's default group; gloo is made beside it where it is wanted."""

    def inside(comm: Communicator) -> Any:
        torch.set_num_threads(1)
        d2lps.backend.group(comm)
        try:
            return function(comm, *args)
        finally:
            dist.destroy_process_group()

    return d2lps.run(inside, ranks, timeout=60).results


# ---- DDP --------------------------------------------------------------------------------------------------------------


def trained(group: Any = None, **options: Any) -> torch.Tensor:
    model = DistributedDataParallel(net(), process_group=group, **options)
    train(model, batches(dist.get_rank()))
    return weights(model)


@LINUX
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ddp_on_shared_memory_is_the_sum_in_the_order_of_the_ranks_to_the_bit(ranks: int) -> None:
    torch.set_num_threads(1)
    expected = by_hand(ranks)
    for found in run(lambda comm: trained(), ranks):
        assert torch.equal(found, expected)


def test_of_two_ranks_every_order_is_the_same_and_so_gloo_gives_the_same_bits() -> None:
    def both(comm: Communicator) -> list[torch.Tensor]:
        results = [trained(dist.new_group(backend="gloo"))]
        for name in ("native", "ring", "tree", "auto"):
            d2lps.backend.use(all_reduce=name)
            results.append(trained())
        return results

    for results in run(both, 2):
        for found in results[1:]:
            assert torch.equal(found, results[0])


def test_of_more_ranks_gloos_order_is_another_and_the_last_digits_differ() -> None:
    def both(comm: Communicator) -> list[torch.Tensor]:
        results = [trained(dist.new_group(backend="gloo"))]
        for transport in ("auto", "gloo"):
            d2lps.backend.use(transport=transport)
            results.append(trained(dist.new_group(), bucket_cap_mb=0.005))
            results.append(trained(dist.new_group(), gradient_as_bucket_view=True, static_graph=True))
        return results

    for results in run(both, 3):
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-6)  # float32 keeps 7 digits


def my_ring(comm: Communicator, tensor: torch.Tensor) -> None:
    """As a reader writes it: once round to add up, once round to pass on."""
    chunks = list(tensor.tensor_split(comm.size))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        incoming = torch.empty_like(chunks[(comm.rank - step - 1) % comm.size])
        comm.sendrecv(chunks[(comm.rank - step) % comm.size], right, incoming, left)
        chunks[(comm.rank - step - 1) % comm.size] += incoming
    for step in range(comm.size - 1):
        comm.sendrecv(chunks[(comm.rank + 1 - step) % comm.size], right, chunks[(comm.rank - step) % comm.size], left)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_readers_ring_drives_ddp_on_digits(transport: str) -> None:
    def learn(comm: Communicator) -> tuple[float, int]:
        calls = 0

        def counted(comm: Communicator, tensor: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            my_ring(comm, tensor)

        d2lps.backend.use(all_reduce=counted, transport=transport)
        group = dist.new_group()
        images, labels = digits()
        mine = torch.arange(comm.rank, 1200, comm.size)
        model = DistributedDataParallel(net(), process_group=group)
        for _ in range(6):
            train(model, list(zip(images[mine].split(BATCH), labels[mine].split(BATCH), strict=True)), rate=0.1)
        return (model(images[1200:]).argmax(1) == labels[1200:]).float().mean().item(), calls

    results = run(learn, 3)
    assert results[0] == results[1] == results[2]
    accuracy, calls = results[0]
    assert accuracy > 0.8  # of ten classes; the last third of the images was drawn by other hands
    assert calls >= 6 * 25


def test_beside_a_default_group_of_gloo() -> None:
    def inside(comm: Communicator) -> tuple[str, torch.Tensor, torch.Tensor]:
        torch.set_num_threads(1)
        group = d2lps.backend.group(comm)
        return dist.get_backend(), trained(group), trained()

    for name, ours, gloo in d2lps.run(inside, 2, backend="gloo").results:
        assert name == "gloo"
        assert torch.equal(ours, gloo)


def test_an_error_in_the_thread_ends_backward() -> None:
    def broken(comm: Communicator, tensor: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    def work(comm: Communicator) -> None:
        d2lps.backend.use(all_reduce=broken)
        with pytest.raises(RuntimeError, match="ArithmeticError: on purpose"):
            trained()

    run(work, 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_power_sgd_with_several_buckets(wrapped: bool) -> None:
    """Each bucket's callbacks all-reduce twice more, which on gloo meet wrongly, or end the process. Of full rank it is exact."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def work(comm: Communicator) -> tuple[torch.Tensor, int]:
        model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
        state = PowerSGDState(None, matrix_approximation_rank=64, start_powerSGD_iter=2, min_compression_rate=0.1)
        state.orthogonalization_epsilon = 1e-8
        model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook) if wrapped else powerSGD_hook)
        train(model, batches(comm.rank))
        return weights(model), len(state.error_dict)

    expected = by_hand(3)
    for found, buckets in run(work, 3):
        assert buckets > 1
        if wrapped:
            assert torch.isfinite(found).all()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class Words(nn.Module):
    """A sum of vectors that are looked up, of which each batch touches few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.top = nn.EmbeddingBag(1000, 8, mode="sum", sparse=True), nn.Linear(8, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.top(self.table(words))


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_sparse_gradients_are_summed_as_on_gloo(transport: str) -> None:
    def work(comm: Communicator) -> list[Any]:
        d2lps.backend.use(transport=transport)
        results: list[Any] = []
        for group in (dist.new_group(), dist.new_group(backend="gloo")):
            model = DistributedDataParallel(Words(), process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in batches(comm.rank):
                optimizer.zero_grad()
                words = (x[:, : 4 + comm.rank].abs() * 300).long().clamp(max=999)  # ranks look up different numbers of words
                nn.functional.cross_entropy(model(words), y).backward()
                optimizer.step()
            results.append(weights(model))
        nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (6,))
        few = nothing if comm.rank == 0 else torch.sparse_coo_tensor([[1, 4, 4]], [1.0, 2.0, 3.0 + comm.rank], (6,))
        dist.all_reduce(few)
        return [*results, few.to_dense().tolist()]

    for ours, gloo, few in run(work, 3):
        torch.testing.assert_close(ours, gloo, rtol=1e-5, atol=1e-6)
        assert few == [0.0, 2.0, 0.0, 0.0, 13.0, 0.0]


def test_sparse_tensors_that_do_not_fit_are_named() -> None:
    def work(comm: Communicator) -> list[str]:
        said = []
        for shape, op in (((3 + comm.rank,), dist.ReduceOp.SUM), ((3,), dist.ReduceOp.MAX)):
            try:
                dist.all_reduce(torch.ones(shape).to_sparse(), op, dist.new_group())
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    for shapes, op in run(work, 2):
        assert "all_reduce of a sparse [3] of torch.float32" in shapes and "all_reduce of a sparse [4]" in shapes
        assert op.startswith("NotImplementedError: d2lps: all_reduce of a sparse tensor with op=")


def test_a_compiled_ddp_trains_as_the_model_does() -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        results = []
        for compile in (lambda model: model, functools.partial(torch.compile, backend="aot_eager")):
            model = DistributedDataParallel(net())
            train(compile(model), batches(comm.rank))
            results.append(weights(model))
        return results

    for plain, compiled in run(work, 2):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)


# ---- FSDP2 and DTensor ------------------------------------------------------------------------------------------------


def sharded(mesh: Any) -> torch.Tensor:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, batches(dist.get_rank()))
    return weights(model)


@pytest.mark.skipif(TORCH < (2, 7), reason="the FSDP2 of torch 2.6 asks a CPU for CUDA's events")
@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp2_gives_what_it_gives_on_gloo(ranks: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    def both(comm: Communicator) -> list[torch.Tensor]:
        groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
        return [sharded(DeviceMesh.from_group(group, "cpu")) for group in groups]

    for ours, gloo in run(both, ranks):
        if ranks == 2:
            assert torch.equal(ours, gloo)
        torch.testing.assert_close(ours, gloo, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours, by_hand(ranks), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(TORCH < (2, 7), reason="the FSDP2 of torch 2.6 asks a CPU for CUDA's events")
def test_hybrid_sharding_on_a_mesh() -> None:
    """Two replicas of two shards each: reduce-scatter in the one group, all-reduce in the other."""
    from torch.distributed.device_mesh import init_device_mesh

    expected = by_hand(4)
    for found in run(lambda comm: sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))), 4):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_tensor_parallel_model_is_the_model() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (comm.size,))
        model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        train(model, batches(0))
        square = distribute_tensor(torch.arange(36.0).view(6, 6), mesh, [Shard(0)])
        product = (square @ square.T.redistribute(mesh, [Replicate()])).redistribute(mesh, [Shard(1)])
        return weights(model), product.full_tensor(), square.sum(0).redistribute(mesh, [Replicate()]).to_local()

    alone = net()
    train(alone, batches(0))
    square = torch.arange(36.0).view(6, 6)
    for found, product, total in run(work, 2):
        torch.testing.assert_close(found, weights(alone), rtol=1e-4, atol=1e-5)
        assert torch.equal(product, square @ square.T)
        assert torch.equal(total, square.sum(0))
    assert Partial  # the sum above was one
