"""ZeRO's three stages and clipping: against one process, torch's FSDP2 and ZeroRedundancyOptimizer, and formulas."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_strategies import Chain, X, simulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import d2lps
from d2lps import Communicator
from d2lps.parallel import MixedPrecision, Transformer, Zero, clip_by_global_norm
from d2lps.topology import star

TIED = Transformer(layers=2, hidden=8, heads=2, vocab=11, sequence=8, tied=True)
TOKENS = torch.randint(0, 11, (24, 9), generator=torch.Generator().manual_seed(3))
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
STEPS = 2


@pytest.fixture(params=[1, 2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    """One of ZeRO's."""
    return int(request.param)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@cache
def alone(max_norm: float = 1e9) -> tuple[list[float], list[Tensor]]:
    """One process: the norms of its gradients, and its weights at the end."""
    model, norms = TIED.module(0, torch.float64), []
    optimizer = SGD(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, TOKENS).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return norms, [p.detach() for p in model.parameters()]


def together(comm: Communicator, stage: int, max_norm: float = 1e9, parts: int = 1, sync: bool = True, **options: Any) -> Any:
    model = TIED.module(comm.rank, torch.float64)  # other weights on each rank, until rank 0's are everyone's
    zero, norms = Zero(comm, model, SGD, stage, **options), []
    for _ in range(STEPS):
        for mine in TOKENS.chunk(comm.size)[comm.rank].chunk(parts):
            if sync:
                (loss_of(model, mine) / parts).backward()
            else:
                with zero.no_sync():
                    (loss_of(model, mine) / parts).backward()
        zero.reduce()
        norms.append(clip_by_global_norm(zero.shards, max_norm).item())
        zero.step()
    with zero.gathered():
        return norms, [p.detach().clone() for p in model.parameters()]


def agrees(run: d2lps.Run, expected: tuple[list[float], list[Tensor]]) -> None:
    for norms, weights in run:
        assert norms == pytest.approx(expected[0], rel=1e-10)
        for mine, one in zip(weights, expected[1], strict=True):
            torch.testing.assert_close(mine, one, rtol=0, atol=1e-10 * one.abs().max().item())


def test_on_processes(stage: int) -> None:
    agrees(d2lps.run(partial(together, overlap=True, group=2), 4, stage, 0.5), alone(0.5))


@pytest.mark.parametrize(("group", "sync"), [(1, True), (2, True), (2, False), (4, False)])
def test_groups_and_accumulation(stage: int, group: int, sync: bool) -> None:
    agrees(simulated(partial(together, group=group, parts=3, sync=sync), 4, stage, 0.5), alone(0.5))


# ---- torch's own --------------------------------------------------------------------------------------------------------


def descend(comm: Communicator, model: nn.Module, step: Callable[[], Any]) -> None:
    for _ in range(STEPS):
        model(X.chunk(comm.size)[comm.rank]).square().mean().backward()
        step()


def ours(comm: Communicator, stage: int, group: int | None = None) -> Tensor:
    model = Chain()
    zero = Zero(comm, model, SGD, stage, group)
    descend(comm, model, zero.step)
    with zero.gathered():
        return nn.utils.parameters_to_vector(model.parameters()).detach()


def torchs_own(comm: Communicator) -> dict[str, Any]:
    """FSDP2 on a line and on a mesh of ranks, and DDP with ZeroRedundancyOptimizer; on gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", store=d2lps.backend.processgroup.store_of(comm), rank=comm.rank, world_size=comm.size)

    def stepped(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        return lambda: (optimizer.step(), optimizer.zero_grad())  # type: ignore[func-returns-value]

    found: dict[str, Any] = {}
    for name, shape, names in (("fsdp2", (4,), ("shard",)), ("mesh", (2, 2), ("replicate", "shard"))):
        model, mesh = Chain(), init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        descend(comm, model, stepped(SGD(model.parameters())))
        found[name] = torch.cat([p.full_tensor().flatten() for p in model.parameters()]).detach()
        with CommDebugMode() as counted:
            model(X).sum().backward()
        found[f"{name} calls"] = {str(call).rpartition(".")[2]: n for call, n in counted.get_comm_counts().items() if n}
    wrapped = DistributedDataParallel(Chain())
    descend(comm, wrapped, stepped(ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)))
    found["optimizer"] = nn.utils.parameters_to_vector(wrapped.parameters()).detach()
    dist.destroy_process_group()
    return found


def calls(run: d2lps.Run, ranks: int) -> Counter[str]:
    """How many collectives the ranks have been through together, by the first messages of rank 0."""
    messages, steps = run.trace.messages, run.trace.steps
    told = [steps[number] for number in messages["step"][messages["src"] == 0]]
    return Counter(word.rpartition(": ")[2].split()[0] for word in map(str, told) if word.endswith(f" 1/{ranks - 1}"))


def test_it_trains_as_torchs_own() -> None:
    theirs = d2lps.run(torchs_own, 4)[0]
    for stage, group, name in ((1, None, "optimizer"), (2, None, "fsdp2"), (3, None, "fsdp2"), (3, 2, "mesh")):
        for mine in simulated(ours, 4, stage, group):
            torch.testing.assert_close(mine, theirs[name], rtol=0, atol=1e-10)
    counted = calls(simulated(ours, 4, 3), 4)
    # Ours begins with broadcasts, which go by no ring, and ends with a look at all weights: one more all-gather for each unit.
    assert counted["all-gather"] - 3 == STEPS * theirs["fsdp2 calls"]["_allgather_base_"] == STEPS * 2 * 3
    assert counted["reduce-scatter"] == STEPS * theirs["fsdp2 calls"]["_reduce_scatter_base_"] == STEPS * 3
    assert theirs["mesh calls"]["allreduce_"] == 3


def test_bytes_are_those_of_the_formulas() -> None:
    layers = Transformer(layers=3, hidden=8, heads=2, vocab=16, sequence=8)
    whole = sum(p.nbytes for p in layers.module().parameters())

    def work(comm: Communicator, stage: int) -> None:
        model = layers.module()
        zero = Zero(comm, model, SGD, stage)
        comm.step("now")
        comm.barrier()
        loss_of(model, TOKENS[:4]).backward()
        zero.step()

    for stage, factor in ((1, 2), (2, 2), (3, 3)):
        run = simulated(work, 4, stage)
        messages, steps = run.trace.messages, [str(step) for step in run.trace.steps]
        ring = [("all-gather" in steps[s] or "reduce-scatter" in steps[s]) for s in messages["step"]]
        sent = messages["nbytes"][(messages["src"] == 1) & ring].sum()
        assert sent == pytest.approx(factor * 3 / 4 * whole, rel=0.01)  # but for the padding


# ---- what models do -----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A block that is used twice, one whose parameters are frozen in part, a list of blocks, a parameter of its own."""

    def __init__(self, recompute: str = "") -> None:
        torch.manual_seed(5)
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2))
        for layer in self.layers:
            layer[2].weight.requires_grad_(False)
        self.recompute = recompute
        self.double()

    def block(self, part: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=self.recompute == "reentrant") if self.recompute else part(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x * self.scale))
        for layer in self.layers:
            x = x + self.block(layer, x)
        return x


@pytest.mark.parametrize("recompute", ["", "reentrant", "early", "late"])
@pytest.mark.parametrize("overlap", [False, True])
def test_odd_models(recompute: str, overlap: bool) -> None:
    def work(comm: Communicator, stage: int) -> Tensor:
        model = Odd(recompute)
        zero = Zero(comm, model, SGD, stage, overlap=overlap)
        descend(comm, model, zero.step)
        with zero.gathered():
            return nn.utils.parameters_to_vector(model.parameters()).detach()

    def by_itself(comm: Communicator) -> Tensor:
        model = Odd()
        optimizer = SGD([p for p in model.parameters() if p.requires_grad])
        descend(comm, model, lambda: (optimizer.step(), optimizer.zero_grad()))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    expected = simulated(by_itself, 1)[0]
    for stage in (2, 3):
        with set_checkpoint_early_stop(recompute == "early"):  # else a recomputation goes on to the forward hook
            found = simulated(work, 3, stage)  # all of it: ranks that wait for one another share that setting
        for mine in found:
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def test_between_passes_weights_are_gone() -> None:
    def work(comm: Communicator) -> list[list[int]]:
        model = Chain()
        zero, seen = Zero(comm, model, SGD, 3), []

        def look(*_: Any) -> None:
            there = [next(part.parameters()) for part in model]
            assert all(weight.isnan().any() == (weight.untyped_storage().nbytes() == 8) for weight in there), "gone, or one NaN"
            seen.append([int(weight.untyped_storage().nbytes() > 8) for weight in there])

        for part in model:
            part[1].register_forward_hook(look)
            part[1].register_full_backward_hook(look)
        loss = model(X[:4].requires_grad_()).square().mean()
        look()
        loss.backward()
        zero.step()
        look()
        return seen

    one, two, three, none = [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]
    assert simulated(work, 2)[0] == [one, two, three, none, three, two, one, none]


def test_masters_are_those_of_mixed_precision() -> None:
    def work(comm: Communicator, stage: int) -> Tensor:
        model = Chain().float()
        mine = X.chunk(comm.size)[comm.rank].bfloat16()
        half = {"param_dtype": torch.bfloat16}
        trainer: Any = Zero(comm, model, SGD, stage, **half) if stage else MixedPrecision(comm, model, SGD, **half)
        for _ in range(STEPS):
            loss = model(mine).float().square().mean()
            trainer.backward(loss) if not stage else loss.backward()
            trainer.step()
        if not stage:
            return nn.utils.parameters_to_vector(trainer.masters).detach()
        whole = [torch.empty_like(unit.shard).repeat(comm.size) for unit in trainer.units]
        for flat, unit in zip(whole, trainer.units, strict=True):
            d2lps.collectives.all_gather_into_tensor(comm, flat, unit.shard.detach())
        return torch.cat([flat[: sum(unit.sizes)] for flat, unit in zip(whole, trainer.units, strict=True)])

    expected = simulated(work, 2, 0)[0]
    for stage in (1, 2, 3):
        assert torch.equal(simulated(work, 2, stage)[0], expected)  # two ranks: one sum, which no order changes


# ---- memory and traffic -------------------------------------------------------------------------------------------------


def test_the_memory_of_the_paper() -> None:
    """7.5 billion parameters on 64 ranks, mixed Adam: figure 1 of Rajbhandari et al. 2020, counted by the account."""

    def work(comm: Communicator, stage: int) -> dict[str, float]:
        model = nn.Sequential(*(nn.Linear(25_000, 25_000, bias=False, device="meta") for _ in range(12)))
        group = 1 if not stage else None
        adam = partial(torch.optim.Adam, lr=1e-3)
        zero = Zero(comm, model, adam, stage or 1, group, param_dtype=torch.bfloat16)
        for _ in range(2):
            model(torch.empty(1, 25_000, device="meta", dtype=torch.bfloat16)).sum().backward()
            held = dict(comm.memory.held)
            zero.step()
        return {label: nbytes / 1e9 for label, nbytes in held.items()} | {"peak": comm.memory.peak.total() / 1e9}

    psi, n = 7.5, 4  # of 64 the formulas say 31.4, 16.6, 1.9; four ranks take a sixteenth of the time
    for stage, told in ((0, 16 * psi), (1, (4 + 12 / n) * psi), (2, (2 + 14 / n) * psi), (3, 16 / n * psi)):
        counted = simulated(work, n, stage, trace=False)[0]
        assert sum(counted[label] for label in ("weights", "gradients", "optimizer")) == pytest.approx(told, rel=1e-6)
        unit = psi / 12 * 2  # in bfloat16
        if stage == 3:  # one unit's weights and whole gradient at a time, and the step's gradients in FP32, in place of 16 bits
            assert counted["peak"] == pytest.approx(max(told + 2 * unit, told + 2 / n * psi), rel=1e-6)


def test_accumulation_sends_once() -> None:
    for sync, stage, expected in ((True, 2, 6), (False, 2, 1), (True, 1, 1), (False, 3, 1)):
        counted = calls(simulated(partial(together, parts=6, sync=sync), 4, stage), 4)
        units = 1 if stage == 1 else 5  # of stage 1 one for all; embed, two blocks, head, and what embed and head share
        assert counted["reduce-scatter"] == STEPS * (expected * units + 1)  # the norm is an all-reduce: that begins with one


class Attending(nn.Sequential):
    """torch's own block: its attention uses a linear layer's weight without calling that layer."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 8))
        self.double()


class Scaled(nn.Module):
    """Looks at its layer's weight outside of that layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (1 + self.layer.weight.detach().norm())


def losses_of(comm: Communicator, make: Callable[[], nn.Module], options: dict[str, Any] | None) -> list[float]:
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model, losses = make(), []
    optimizer: Any = SGD(model.parameters()) if options is None else Zero(comm, model, SGD, **options)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if options is None:
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_torchs_own_block(stage: int) -> None:
    alone = simulated(losses_of, 1, Attending, None)[0]
    for losses in simulated(losses_of, 2, Attending, {"stage": stage}):
        assert losses == pytest.approx(alone, rel=1e-10)


def test_who_looks_at_weights_that_are_not_there_sees_no_numbers() -> None:
    """And not those of an empty tensor, whose norm is 0."""
    for losses in simulated(losses_of, 2, Scaled, {"stage": 3}):
        assert all(map(math.isnan, losses))


# ---- who trains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "told"), [
    ("a part", r"rank \d: 1.0.bias has been frozen, and others of its flat tensor have not"),
    ("unseen", r"rank \d: 0.0.weight, 0.0.bias has begun to train without a forward pass of the whole module"),
])  # fmt: skip
def test_who_cannot_begin_to_train_is_named(stage: int, what: str, told: str) -> None:
    def work(comm: Communicator) -> None:
        model: Any = Chain()
        model[0].requires_grad_(False)
        zero, forward = Zero(comm, model, SGD, stage), model
        if what == "a part":
            model[1][0].bias.requires_grad_(False)
        else:
            model[0].requires_grad_(True)
            forward = lambda x: model[2](model[1](model[0](x)))  # noqa: E731
        forward(X).sum().backward()
        zero.step()

    with pytest.raises(RuntimeError, match=told):
        simulated(work, 2)


@pytest.mark.parametrize("sync", [True, False])
def test_clipping_before_the_reduction_is_an_error(stage: int, sync: bool) -> None:
    def work(comm: Communicator) -> float:
        model = nn.Linear(4, 1, bias=False)
        zero = Zero(comm, model, partial(torch.optim.SGD, lr=1.0), stage)
        before = nn.utils.parameters_to_vector(zero.shards).detach().clone()
        zero.synchronize = sync
        model(torch.full((1, 4), 100.0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"call zero.reduce\(\) before you clip"):
            clip_by_global_norm(zero.shards, 1.0)
        zero.reduce()
        assert clip_by_global_norm(zero.shards, 1.0).item() == pytest.approx(200.0)
        with pytest.raises(ValueError, match=r"groups has that of ranks \[0, 1\], over") if comm.size > 1 else nullcontext():
            clip_by_global_norm(zero.shards, 1.0, [comm])  # its shards' own, which would count twice
        zero.step()
        assert clip_by_global_norm(zero.shards, 1.0).item() == 0.0  # of no gradients
        moved = (nn.utils.parameters_to_vector(zero.shards).detach() - before).square()
        d2lps.collectives.all_reduce(comm, moved := moved.sum())
        return moved.sqrt().item()

    for ranks in (1, 2):
        assert list(simulated(work, ranks)) == pytest.approx([1.0] * ranks, rel=1e-5)


# ---- loss scales and buffers ----------------------------------------------------------------------------------------------


def scaled(comm: Communicator, stage: int) -> tuple[list[float], Tensor]:
    """A torch.amp.GradScaler, and an overflow in the second step: on one rank, in a bias that one rank has."""
    model = Chain().float()
    optimizer: Any = Zero(comm, model, SGD, stage) if stage else SGD(model.parameters())
    scaler, scales, factors = torch.amp.GradScaler("cpu", growth_interval=2), [], [1.0]
    model[2][0].bias.register_hook(lambda gradient: gradient * factors[-1])
    for step in range(6):
        factors.append(math.inf if step == 1 and comm.rank == 0 else 1.0)
        optimizer.zero_grad()
        scaler.scale(model(X.float().chunk(comm.size)[comm.rank]).square().mean()).backward()
        scaler.unscale_(optimizer)
        if stage:
            clip_by_global_norm(optimizer.shards, 0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    with optimizer.gathered() if stage else torch.no_grad():
        return scales, nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_grad_scaler_skips_on_all_ranks_or_none(ranks: int, stage: int) -> None:
    scales, expected = simulated(scaled, 1, 0)[0]
    assert min(scales) < 2.0**16 < max(scales)
    for found, weights in simulated(scaled, ranks, stage):
        assert found == scales
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_the_optimizers_step_alone_is_refused(stage: int) -> None:
    def work(comm: Communicator) -> None:
        model = Chain()
        zero = Zero(comm, model, SGD, stage)
        model(X).square().mean().backward()
        zero.reduce()
        zero.optimizer.step()

    with pytest.raises(RuntimeError, match=r"call zero.step\(\), or a GradScaler's step\(zero\)"):
        simulated(work, 2)


# ---- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stage": 4}, "stage=4 is none of 1"),
        ({"stage": 3, "group": 3}, "group=3 must divide the 4 ranks"),
        ({"stage": 3, "group": 0}, "group=0 is not a whole number from 1 up"),
        ({"stage": 2, "parameters": []}, "Chain has no parameters that need gradients"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        simulated(lambda comm: Zero(comm, Chain(), SGD, **options), 4)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(d2lps.Mismatch, match=r"\[3, 2\]"):
        simulated(lambda comm: Zero(comm, nn.Linear(2, 2 + comm.rank), SGD, 1), 2)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"0\.weight is torch\.float32 on cpu, 1\.weight torch\.float64 on cpu"):
        simulated(lambda comm: Zero(comm, mixed, SGD, 1), 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_loaded_over_copies_of_masters_are_not_lost_without_a_word(stage: int) -> None:
    def work(comm: Communicator, dtype: torch.dtype | None) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        zero = Zero(comm, model, partial(torch.optim.SGD, lr=0.0), stage, param_dtype=dtype)
        model.load_state_dict({"weight": torch.tensor([[7.0, 8.0]])})
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        zero.step()
        return model.weight.flatten().tolist()

    assert simulated(work, 2, None) == [[7.0, 8.0]] * 2  # where the shards are the weights, they are what was loaded
    with pytest.raises(RuntimeError, match="somebody has written into weight, which the step would undo"):
        simulated(work, 2, torch.bfloat16)


@pytest.mark.parametrize("stepping", [False, True])
def test_weights_written_while_they_are_gathered_are_not_lost_without_a_word(stepping: bool) -> None:
    def work(comm: Communicator) -> None:
        model = Chain()
        zero = Zero(comm, model, SGD, 3)
        for _ in range(2):
            with zero.gathered():
                model.state_dict()
            model(X).square().mean().backward()
            zero.step()
        with suppress(RuntimeError) if stepping else nullcontext(), zero.gathered(), torch.no_grad():
            model[1][0].bias.mul_(0.5)
        model(X).square().mean().backward()
        zero.step()

    with pytest.raises(RuntimeError, match=r"rank \d: somebody has written into 1.0.bias, which the step would undo"):
        simulated(work, 2)


class Lists(nn.Module):
    """Weights in lists and dicts, which have no forward pass of their own; a child hands on what it is told to."""

    def __init__(self, handed_on: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        torch.manual_seed(1)
        size = X.shape[-1]
        self.each = nn.ModuleList([nn.ParameterList([torch.randn(size, size, dtype=X.dtype)]) for _ in range(2)])
        self.child = Named(size, handed_on)
        self.same = nn.Sequential(self.child)  # a layer that two modules share

    def forward(self, x: Tensor) -> Tensor:
        out = self.child(x @ self.each[0][0])
        return getattr(out, "value", out) @ self.each[1][0]


class Named(nn.Module):
    def __init__(self, size: int, handed_on: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.handed_on = handed_on
        self.named = nn.ParameterDict({"a": torch.randn(size, size, dtype=X.dtype)})

    def forward(self, x: Tensor) -> Any:
        return self.handed_on(x @ self.named["a"])


def with_lists(comm: Communicator, stage: int, **options: Any) -> Tensor:
    model = Lists()
    zero = Zero(comm, model, SGD, stage, **options)
    descend(comm, model, zero.step)
    with zero.gathered():
        with zero.gathered():
            model(X).square().mean().backward()  # who looks may compute, too,
        zero.step()  # and step
        return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_weights_in_lists_are_their_modules(options: dict[str, bool]) -> None:
    torch.testing.assert_close(simulated(partial(with_lists, **options), 2, 3)[0], simulated(with_lists, 2, 1)[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_what_nobody_can_see_coming_is_an_error(overlap: bool) -> None:
    """A child that returns an object of its own: its backward pass begins unannounced, with weights that are not there."""

    def work(comm: Communicator) -> None:
        model = Lists(lambda out: SimpleNamespace(value=out))
        descend(comm, model, Zero(comm, model, SGD, 3, overlap=overlap).step)

    with pytest.raises(RuntimeError, match=r"child\.named\.a: a backward pass has come to it unannounced; its module must be"):
        simulated(work, 2)


@pytest.mark.parametrize(("synchronize", "overlap", "world"), [
    (True, True, "simulated"), (True, False, "simulated"), (False, True, "simulated"), (False, False, "simulated"),
    (False, True, "processes"),
])  # fmt: skip
def test_passes_are_added_up_in_the_dtype_of_the_masters(stage, synchronize, overlap, world):
    """300 gradients of 1: a sum in BF16 stays at 256, where it no longer sees a 1. One pass costs no more than it did."""

    def work(comm, main):
        def passes(count):
            for _ in range(count):
                net(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()

        net = nn.Sequential(nn.Linear(1, 1))
        zero = Zero(comm, net, partial(torch.optim.SGD, lr=0.0), stage, None, torch.bfloat16, overlap, main_grads=main)
        passes(1)
        kept = [unit.gradient.dtype for unit in zero.units if unit.gradient is not None]
        zero.drop()
        with nullcontext() if synchronize else zero.no_sync():
            passes(299)
        passes(1)
        zero.reduce()
        found = torch.cat([shard.grad for shard in zero.shards])
        zero.step()
        return kept, found.tolist(), found.dtype

    run = d2lps.run if world == "processes" else lambda fn, ranks, *args: d2lps.simulate(fn, star(ranks, 1e9), *args)
    for main, total in ((True, 300.0), (False, 256.0)):
        one, other = run(work, 2, main)
        assert one == ([torch.bfloat16] if stage == 1 else [], [total], torch.float32) and other[1] == [total]
