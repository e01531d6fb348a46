"""Every way to share a batch, in one training loop, against one process: who trains, what is dropped or fails, buffers."""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import d2lps
from d2lps import Communicator
from d2lps.parallel import DataParallel, MixedPrecision, Zero
from d2lps.topology import star

STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "data parallel": (DataParallel, {}),
    "in pieces": (DataParallel, {"order": "priority", "piece": 240}),
    "steps as needed": (DataParallel, {"order": "priority"}),
    "masters": (MixedPrecision, {}),
    "masters, main_grads": (MixedPrecision, {"main_grads": True}),
    **{f"zero {stage}": (Zero, {"stage": stage}) for stage in (1, 2, 3)},
    **{f"zero {stage}, overlap": (Zero, {"stage": stage, "overlap": True}) for stage in (2, 3)},
    "zero 3, group": (Zero, {"stage": 3, "group": 1}),
}
ADAM = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
X = torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(params=STRATEGIES)
def name(request: pytest.FixtureRequest) -> str:
    """A strategy's."""
    return str(request.param)


def simulated(function: Any, ranks: int, *args: Any, **options: Any) -> d2lps.Run:
    return d2lps.simulate(function, star(ranks, 1e9, 1e-6), *args, **options)


def close(found: Any, expected: Any) -> None:
    """To the last digits; masters are of FP32."""
    rough = expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4 if rough else 1e-10, atol=1e-5 if rough else 1e-12)


def fail(gradient: Tensor) -> None:
    raise MemoryError


class Chain(nn.Sequential):
    """Linear layers whose sizes nothing divides; the backward pass may fail in its midst."""

    fails = False

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(*[nn.Sequential(nn.Linear(m, n), nn.Tanh()) for m, n in ((5, 7), (7, 3), (3, 6))])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self):
            x = part(x)
            if self.fails and number == 1:
                x.register_hook(fail)
        return x


class Tied(nn.Module):
    """Its parameters are registered in another order than they are used in; one is used twice, and one module is."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 4)
        self.twice = nn.Linear(6, 6)
        self.first = nn.Linear(4, 6)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) * self.scale
        return self.out(torch.tanh(self.last(x)))


class Loop:
    """The calls of a training loop, whatever shares the batch; without a name, of one process and torch alone."""

    def __init__(self, comm: Communicator, model: nn.Module, name: str = "", make: Any = ADAM, **more: Any) -> None:
        kind, options = STRATEGIES.get(name, (None, {}))
        self.kind, self.name, self.model = kind, name, model.float() if kind is MixedPrecision else model
        self.way: Any = model
        if kind is DataParallel:
            lazy = {"optimizer": make} if name == "steps as needed" else {}
            self.way = DataParallel(comm, model, **{"bucket_cap": 200, **options, **lazy, **more})
        elif kind:
            options = {"param_dtype": torch.float32, **options} if kind is MixedPrecision else options
            self.way = kind(comm, model, make, **options, **more)
        self.optimizer = self.way.optimizer if kind in (Zero, MixedPrecision) else make([*model.parameters()])
        self.dtype = next(model.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        return (self.way if self.kind is DataParallel else self.model)(x.to(self.dtype))

    def backward(self, x: Tensor, times: float = 1.0) -> None:
        loss = self.forward(x).square().mean() * times
        self.way.backward(loss) if self.kind is MixedPrecision else loss.backward()

    def step(self) -> None:
        if self.kind in (Zero, MixedPrecision):
            self.way.step()
        elif self.name == "steps as needed":
            self.way.synchronize()
        else:
            params = self.optimizer.param_groups[0]["params"]
            params += [p for p in self.model.parameters() if not any(p is known for known in params)]
            self.optimizer.step()
            self.model.zero_grad()

    def weights(self) -> Tensor:
        with self.way.gathered() if self.kind is Zero else nullcontext():
            return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


# ---- who trains ---------------------------------------------------------------------------------------------------------


def change(model: Any, step: int, name: str) -> None:
    """Before this step a layer is unfrozen, another frozen and trained again, one is added, a weight exchanged for another."""
    if step in (0, 2):
        model[0].requires_grad_(step == 2)
    if step in (3, 5) and name != "zero 1":  # which has all in one unit, and moves all of it
        model[1].requires_grad_(step == 5)
    if step == 4:
        torch.manual_seed(9)
        model.append(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(model[0][0].weight.dtype))
    if step == 6 and STRATEGIES[name][0] is DataParallel:
        model[2][0].weight = nn.Parameter(model[2][0].weight.detach() * 0.5)


def changing(comm: Communicator, name: str, alone: bool) -> Tensor:
    model = Chain(seed=comm.rank)  # other weights on each rank, until rank 0's are everyone's
    if STRATEGIES[name][0] is MixedPrecision:
        model.float()
    change(model, 0, name)
    loop = Loop(comm, model, "" if alone else name)
    for step in range(8):
        change(model, step, name)
        if name != "steps as needed":
            loop.optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)  # a schedule, which newcomers follow
        passes = 1 if name == "steps as needed" else 2
        for part in X.chunk(comm.size)[comm.rank].chunk(passes):
            loop.backward(part, 1 / passes)
        loop.step()
    return loop.weights()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_who_trains_is_asked_anew(ranks: int, name: str) -> None:
    expected = simulated(changing, 1, name, True)[0]
    for found in simulated(changing, ranks, name, False):
        close(found, expected)


@pytest.mark.parametrize("name", ["steps as needed", "masters", "zero 3"])
def test_so_it_is_on_processes(name: str) -> None:
    expected = simulated(changing, 1, name, True)[0]
    for found in d2lps.run(changing, 2, name, False):
        close(found, expected)


def accumulating(comm: Communicator, name: str, alone: bool, **more: Any) -> Tensor:
    """Three passes a step, of which only the last is heard of by others. The second step is the first of settled buckets."""
    torch.manual_seed(comm.rank)
    model = Tied().double()
    loop = Loop(comm, model.float() if STRATEGIES[name][0] is MixedPrecision else model, "" if alone else name, **more)
    for _ in range(3):
        *early, last = X[:, :4].chunk(comm.size)[comm.rank].chunk(3)
        with nullcontext() if alone or loop.kind is MixedPrecision else loop.way.no_sync():
            for part in early:
                loop.backward(part, 1 / 3)
        loop.backward(last, 1 / 3)
        loop.step()
    return loop.weights()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tied_weights_and_accumulated_gradients(ranks: int, name: str) -> None:
    expected = simulated(accumulating, 1, name, True)[0]
    for options in ({}, {"bucket_cap": None}) if name == "data parallel" else ({},):
        for found in simulated(partial(accumulating, **options), ranks, name, False):
            close(found, expected)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("name", ["in pieces", "steps as needed"])
def test_so_they_are_on_processes(name: str, backend: str) -> None:
    expected = simulated(accumulating, 1, name, True)[0]
    for found in d2lps.run(accumulating, 4, name, False, backend=backend):
        close(found, expected)


def test_what_begins_to_train_must_be_equal(name: str) -> None:
    def work(comm: Communicator) -> None:
        loop = Loop(comm, model := Chain(), name)
        torch.manual_seed(comm.rank)
        model.append(nn.Linear(6, 6).to(loop.dtype))
        loop.backward(X)
        loop.step()

    with pytest.raises(d2lps.Mismatch, match=r"3.weight: rank 0 and rank 1 have different ones.*must be equal on all ranks"):
        simulated(work, 2)


def test_a_model_without_gradients_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Tanh has no parameters that need gradients"):
        simulated(lambda comm: Loop(comm, nn.Tanh(), name), 2)


# ---- what is dropped, fails, or is left out -----------------------------------------------------------------------------------

DROPS: dict[str, Any] = {
    "model": lambda loop: loop.model.zero_grad(),
    "model, to zeros": lambda loop: loop.model.zero_grad(set_to_none=False),
    "optimizer": lambda loop: loop.optimizer.zero_grad(),
    "its own": lambda loop: loop.way.zero_grad(),
    "drop": lambda loop: loop.way.drop(),
}


def bad_batch(loop: Loop, model: Chain, fails: bool) -> None:
    with loop.way.no_sync() if loop.kind is not MixedPrecision else nullcontext():
        loop.backward(7 * X)
    model.fails = fails
    with pytest.raises(MemoryError) if fails else nullcontext():  # some of the gradients are on their way by then
        loop.backward(9 * X)
    model.fails = False
    if loop.kind is Zero and fails:
        with pytest.raises(RuntimeError, match=r"a backward pass has failed, .* drop\(\)"):
            loop.step()
    elif loop.kind is Zero:
        loop.way.reduce()
    copy.deepcopy(model).zero_grad()  # another model's


def dropping(comm: Communicator, name: str, how: str, fails: bool) -> Tensor:
    loop = Loop(comm, model := Chain(), name)
    for step in range(3):
        if step == 1 and how:
            bad_batch(loop, model, fails)
            DROPS[how](loop)
        loop.backward(X[step:].tensor_split(comm.size)[comm.rank])
        loop.step()
    return loop.weights()


CASES = [(name, how, False) for name in STRATEGIES for how in DROPS if name != "steps as needed" or how == "drop"]
CASES += [(name, how, True) for name in STRATEGIES for how in ("drop", "model")[: 1 if name == "steps as needed" else 2]]


@pytest.mark.parametrize(("name", "how", "fails"), CASES)
def test_a_batch_that_is_dropped_or_has_failed_leaves_nothing(name: str, how: str, fails: bool) -> None:
    for found, expected in zip(simulated(dropping, 2, name, how, fails), simulated(dropping, 2, name, "", False), strict=True):
        close(found, expected)


@pytest.mark.parametrize("name", ["data parallel", "steps as needed", "zero 3, overlap"])
def test_so_it_is_of_processes_and_of_the_last_batch(name: str) -> None:
    def ending(comm: Communicator) -> None:
        bad_batch(Loop(comm, model := Chain(), name), model, True)

    for found, expected in zip(d2lps.run(dropping, 2, name, "drop", True), simulated(dropping, 2, name, "", False), strict=True):
        close(found, expected)
    for run in (d2lps.run, simulated):
        assert list(run(ending, 2)) == [None] * 2


@pytest.mark.parametrize("name", [name for name, (kind, _) in STRATEGIES.items() if kind is not MixedPrecision])
def test_what_a_backward_pass_leaves_out_is_named_and_the_next_pass_is_as_any(name: str) -> None:
    def work(comm: Communicator) -> tuple[str, Tensor]:
        loop = Loop(comm, model := Chain(), name)
        with pytest.raises(RuntimeError) as caught:
            model[1](model[0](X)).sum().backward()
            loop.step()
        loop.way.drop()
        loop.backward(X.chunk(comm.size)[comm.rank])
        loop.step()
        return str(caught.value), loop.weights()

    def alone(comm: Communicator) -> Tensor:
        loop = Loop(comm, Chain())
        loop.backward(X)
        loop.step()
        return loop.weights()

    for rank, (told, weights) in enumerate(simulated(work, 2)):
        assert told.startswith(f"rank {rank}: a backward pass has left out 2.0.weight, 2.0.bias: the loss must depend on them")
        close(weights, simulated(alone, 1)[0])


def test_a_sparse_gradient_is_refused(name: str) -> None:
    def work(comm: Communicator) -> None:
        loop = Loop(comm, nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), name, torch.optim.SGD)
        loop.dtype = torch.long  # of what goes in
        loop.backward(torch.tensor([1, 2]))
        loop.step()

    who = r"float32\[5, 3\]" if name.startswith("masters") else r"0\.weight"
    with pytest.raises(ValueError, match=f"{who} has a sparse gradient, and what is summed is dense: .* sparse=False"):
        simulated(work, 2)


# ---- buffers, and copies ------------------------------------------------------------------------------------------------------


def normed(rank: int) -> nn.Module:
    """What it has seen, FP32 does not have."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    model.register_buffer("seen", torch.tensor(2**40 + rank))
    model.register_buffer("unsaved", torch.tensor(7.0 + rank), persistent=False)
    return model


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_and_frozen_weights_are_rank_0s_unless_told_otherwise(name: str, shared: bool) -> None:
    def work(comm: Communicator, name: str, **more: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
        loop = Loop(comm, model := normed(comm.rank), name, partial(torch.optim.SGD, lr=0.0), **more)
        begun = [buffer.clone() for buffer in model.buffers()]
        for step in range(2):
            loop.backward(X[step:] * (1 + comm.rank))
            loop.step()
        with loop.way.gathered() if loop.kind is Zero else nullcontext():
            return begun, [buffer.clone() for buffer in model.buffers()], model[0].bias.clone()

    begun, buffers, frozen = simulated(work, 1, "")[0]
    for rank, found in enumerate(simulated(partial(work, broadcast_buffers=shared), 2, name)):
        assert all(map(torch.equal, found[0], begun)) and torch.equal(found[2], frozen)
        same = [torch.allclose(one, other) for one, other in zip(found[1], buffers, strict=True)]
        assert same == ([True] * 5 if shared or rank == 0 else [True, True, False, False, True])


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "zero 3" not in name])
def test_a_model_can_still_be_copied_and_sent(name: str) -> None:
    def work(comm: Communicator) -> None:
        loop = Loop(comm, model := Chain(), name)
        loop.backward(X)
        loop.step()
        weights = loop.weights()
        loop.backward(X)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied.zero_grad()
            copied(X.to(loop.dtype)).sum().backward()
            assert all(p.grad is not None for p in copied.parameters())
            copied.zero_grad()
            assert all(p.grad is None for p in copied.parameters())
            if name != "steps as needed":  # whose next step may have been taken by now
                assert torch.equal(nn.utils.parameters_to_vector(copied.parameters()), weights)
        loop.step()
        assert not torch.equal(loop.weights(), weights) and math.isfinite(loop.weights().sum())

    simulated(work, 2)
