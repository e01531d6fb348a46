"""Mixed precision: torch's own scaler, optimizers and sums are the oracle, in both worlds."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import d2lps
from d2lps import Communicator
from d2lps.parallel import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.topology import star

HALVES = torch.float16, torch.bfloat16
WORLDS = {"processes": lambda fn, p, *args: d2lps.run(fn, p, *args, trace=True),
          "simulated": lambda fn, p, *args: d2lps.simulate(fn, star(p, 1e9, 1e-6), *args)}  # fmt: skip


# ---- the scaler ---------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3), st.sampled_from([0.25, 0.5]))
def test_the_staircase_is_torchs(overflows, interval, backoff):
    weight = torch.zeros(1, requires_grad=True)
    descent = torch.optim.SGD([weight], 1.0)
    theirs = torch.amp.GradScaler("cpu", 65536.0, backoff_factor=backoff, growth_interval=interval)
    ours = LossScaler(backoff_factor=backoff, growth_interval=interval)
    for overflow in overflows:
        theirs.scale((weight * (torch.inf if overflow else 1.0)).sum()).backward()
        theirs.step(descent)
        theirs.update()
        descent.zero_grad()
        assert ours.update(overflow) == ours.scale == theirs.get_scale()


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": float("nan")}, {"growth_factor": 1.0}, {"backoff_factor": 1.5},
                                   {"backoff_factor": 0.0}, {"growth_interval": 0}])  # fmt: skip
def test_a_staircase_without_steps_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        LossScaler(**wrong)


# ---- the wide sum -------------------------------------------------------------------------------------------------------


def numbers(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def summed(comm, size, dtype):
    wide_all_reduce(comm, tensor := numbers(comm.rank, size, dtype))
    return tensor


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_wide_sum_is_rounded_once(p, dtype):
    for size in (0, 1, 7, 64):
        run = d2lps.simulate(summed, star(p, 1e9, 1e-6), size, dtype)
        exact = sum(numbers(rank, size, dtype).double() for rank in range(p))
        for total in run:
            assert torch.equal(total, exact.to(dtype))  # FP32 holds these sums exactly, or nearly enough
        assert run.trace.bytes_sent().sum() == (p - 1) * size * 2 * 2


@pytest.mark.parametrize("world", WORLDS)
def test_a_wide_sum_does_not_stand_still(world):
    def count(comm):
        d2lps.collectives.all_reduce(comm, narrow := torch.full((2, 4), 1.0 if comm.rank else 256.0).bfloat16())
        wide_all_reduce(comm, wide := torch.full((2, 4), 1.0 if comm.rank else 256.0).bfloat16())
        return narrow.flatten()[0].item(), wide.unique().tolist()

    assert WORLDS[world](count, 4) == [(256.0, [260.0])] * 4  # 259 lies between 258 and 260


def test_a_wide_sum_of_narrow_sums_overflows_only_at_the_end():
    def large(comm):
        wide_all_reduce(comm, tensor := torch.tensor([60000.0, 60000.0 * (1 - 2 * (comm.rank % 2))]).half())
        return tensor.tolist()

    assert d2lps.simulate(large, star(4, 1e9, 1e-6)) == [[torch.inf, 0.0]] * 4


# ---- training -----------------------------------------------------------------------------------------------------------


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step, rank=0, p=1, size=24):
    dice = torch.Generator().manual_seed(step)
    return torch.randn(size, 6, generator=dice)[rank::p], torch.randint(3, (size,), generator=dice)[rank::p]


def loss_of(model, x, y):
    return cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)


def adam(masters):
    return torch.optim.Adam(masters, 0.01)


def trained(comm, steps, options):
    trainer = MixedPrecision(comm, model := small(comm.rank), adam, **options)
    stepped = []
    for step in range(steps):
        trainer.backward(loss_of(model, *batch(step, comm.rank, comm.size)))
        stepped.append(trainer.step())
    weights, masters = (torch.cat([w.detach().flatten() for w in ws]) for ws in (model.parameters(), trainer.masters))
    return weights, masters, stepped, trainer.scaler.scale


def by_hand(steps, p, dtype, scaler=None):
    """The same with torch alone, in one process: torch's scaler, sums in float64, rounded to the dtype."""
    masters = [weight.detach().clone().requires_grad_() for weight in small().parameters()]
    descent, model = adam(masters), small().to(dtype)
    for step in range(steps):
        for rank in range(p):
            loss = loss_of(model, *batch(step, rank, p))
            grads = torch.autograd.grad(loss * (scaler.get_scale() if scaler else 1.0), list(model.parameters()))
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.float() / p + (0 if rank == 0 else master.grad)
        if scaler:
            scaler.scale(torch.zeros(()))  # it wants to have been used
            scaler.step(descent)
            scaler.update()
        else:
            descent.step()
        for weight, master in zip(model.parameters(), masters, strict=True):
            weight.data.copy_(master.data)
    return torch.cat([master.detach().flatten() for master in masters])


@pytest.mark.parametrize(
    ("world", "dtype"), [("processes", torch.bfloat16), *(("simulated", dtype) for dtype in (torch.float32, *HALVES))]
)
def test_one_rank_is_torchs_own_optimizer_on_masters(world, dtype):
    weights, masters, *_ = WORLDS[world](trained, 1, 5, {"param_dtype": dtype})[0]
    assert torch.allclose(masters, by_hand(5, 1, dtype), rtol=0, atol=1e-7)
    assert weights.dtype == dtype and torch.equal(weights, masters.to(dtype))


def test_one_rank_is_torchs_own_scaler():
    scaler = torch.amp.GradScaler("cpu", 2.0**22, growth_interval=3)
    _, masters, stepped, scale = d2lps.simulate(
        trained, star(1, 1e9, 1e-6), 12, {"param_dtype": torch.float16, "scaler": LossScaler(2.0**22, growth_interval=3)}
    )[0]
    assert torch.allclose(masters, by_hand(12, 1, torch.float16, scaler), rtol=0, atol=1e-7)
    assert scale == scaler.get_scale() and {True, False} == set(stepped)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_replicas_agree_to_the_bit_and_nearly_with_one_process(p):
    run = d2lps.simulate(trained, star(p, 1e9, 1e-6), 2, {})
    for weights, masters, *_ in run:
        assert torch.equal(weights, run[0][0]) and torch.equal(masters, run[0][1])
    assert (run[0][1] - by_hand(2, p, torch.bfloat16)).abs().max() < 0.01  # a step of Adam is 0.01, whatever the gradient


@pytest.mark.parametrize(
    ("world", "reduce_dtype", "nbytes"),
    [("simulated", None, 2), ("simulated", torch.float32, 4), ("processes", torch.float32, 4)],
)
def test_bytes_on_the_wire_are_the_reduce_dtypes(world, reduce_dtype, nbytes):
    n = sum(weight.numel() for weight in small().parameters())
    flags = len(list(small().parameters()))  # whether there is a gradient of each
    trace = WORLDS[world](trained, 3, 2, {"reduce_dtype": reduce_dtype}).trace
    assert trace.bytes_sent().sum() == (3 - 1) * n * 4 + 2 * 2 * (3 - 1) * (n + flags) * nbytes  # a broadcast, two steps


def sick(comm, who, value):
    """One rank's loss overflows in step 1, or is nan: what each has then, step by step."""
    trainer = MixedPrecision(comm, model := small(), adam, torch.float16, scaler=LossScaler(1024.0))
    seen = []
    for step in range(3):
        loss = loss_of(model, *batch(step, comm.rank, comm.size))
        trainer.backward(loss * (value if (step, comm.rank) == (1, who) else 1.0))
        seen.append((trainer.step(), trainer.scaler.scale, float(sum(master.double().sum() for master in trainer.masters))))
    return seen


@pytest.mark.parametrize(("world", "value"), [("processes", torch.inf), *(("simulated", v) for v in (torch.inf, torch.nan, 1e6))])
def test_an_overflow_on_one_rank_is_skipped_by_all(world, value):
    for who in (0, 2)[: 1 if world == "processes" else 2]:
        run = WORLDS[world](sick, 3, who, value)
        assert all(seen == run[0] for seen in run)
        (first, high, before), (second, low, after), (third, _, last) = run[0]
        assert (first, second, third) == (True, False, True) and (high, low) == (1024.0, 512.0) and before == after != last


def test_micro_batches_add_up_in_float32():
    """A thousand and more gradients of 1, which a bfloat16 counts to 256."""

    def count(comm, main_grads):
        model = nn.Linear(1, 1, bias=False)
        trainer = MixedPrecision(comm, model, lambda masters: torch.optim.SGD(masters, 1.0), main_grads=main_grads)
        before = trainer.masters[0].item()
        for _ in range(300):
            trainer.backward(model(torch.ones(1, 1).bfloat16()).sum())
        trainer.step()
        assert model.weight.grad is None and trainer.masters[0].grad is None
        return round(before - trainer.masters[0].item())

    assert [d2lps.simulate(count, star(1, 1e9, 1e-6), main)[0] for main in (False, True)] == [256, 300]


def test_clipping_is_torchs_and_after_the_scale_is_out():
    def clipped(comm):
        model = small()
        trainer = MixedPrecision(comm, model, lambda masters: torch.optim.SGD(masters, 1.0), torch.float32,
                                 scaler=LossScaler(4096.0), max_norm=0.1)  # fmt: skip
        before = [master.clone() for master in trainer.masters]
        trainer.backward(loss_of(model, *batch(0)))
        trainer.step()
        return [old - new for old, new in zip(before, trainer.masters, strict=True)]

    model = small()
    loss_of(model, *batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for mine, weight in zip(d2lps.simulate(clipped, star(1, 1e9, 1e-6))[0], model.parameters(), strict=True):
        assert torch.allclose(mine, weight.grad, atol=1e-6)


def test_a_frozen_weight_and_one_without_a_gradient():
    def odd(comm):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
        model[0].requires_grad_(False)
        trainer = MixedPrecision(comm, model, lambda masters: torch.optim.SGD(masters, 1.0))
        kept = copy.deepcopy(model[2].weight)
        x = model[1](model[0](torch.ones(1, 2).bfloat16()))
        trainer.backward(x.sum())  # model[2] has no part in it
        return trainer.step(), len(trainer.masters), model[0].weight.dtype, torch.equal(kept, model[2].weight)

    assert d2lps.simulate(odd, star(2, 1e9, 1e-6)) == [(True, 4, torch.bfloat16, True)] * 2


@pytest.mark.parametrize("main_grads", [False, True])
def test_a_weight_without_a_gradient_stays_though_it_had_one_before(main_grads):
    """As torch's AdamW leaves it, whose momentum and decay would go on with zeros; where one rank has a gradient, it is all's."""

    def work(comm):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        trainer = MixedPrecision(comm, model, lambda masters: torch.optim.AdamW(masters, 0.1), main_grads=main_grads)
        seen, x = [], torch.ones(1, 2).bfloat16()
        for both in (True, False, comm.rank == 1):
            trainer.backward((model[1](model[0](x)) if both else model[0](x)).sum())
            trainer.step()
            seen.append(trainer.masters[2].clone())
        return torch.equal(seen[0], seen[1]), torch.equal(seen[1], seen[2]), seen[2].tolist()

    first, second = d2lps.simulate(work, star(2, 1e9, 1e-6))
    assert first[:2] == (True, False) and first == second


def test_what_cannot_be_is_refused_before_anything_is_changed():
    def wrong(comm):
        model, half = small(), small().half()
        with pytest.raises(ValueError, match="int8"):
            MixedPrecision(comm, model, adam, torch.bfloat16, torch.int8)
        with pytest.raises(TypeError, match=r"0\.weight.*float16"):
            MixedPrecision(comm, half, adam)
        for max_norm in (-1.0, 0.0, float("nan")):  # a negative one would turn the gradient round
            with pytest.raises(ValueError, match=f"max_norm={max_norm}"):
                MixedPrecision(comm, model, adam, max_norm=max_norm)
        return model[0].weight.dtype

    assert d2lps.simulate(wrong, star(1, 1e9, 1e-6)) == [torch.float32]


def test_weights_loaded_over_copies_of_masters_are_not_lost_without_a_word():
    def work(comm):
        model = small()
        trainer = MixedPrecision(comm, model, adam)
        trainer.step()
        model.load_state_dict(model.state_dict())
        trainer.step()

    with pytest.raises(RuntimeError, match="somebody has written into the model's weights, which the step would undo"):
        d2lps.simulate(work, star(2, 1e9))


# ---- who trains, and a scale that can't get smaller -------------------------------------------------------------------


def test_what_begins_to_train_gets_masters() -> None:
    def work(comm: Communicator) -> list[torch.dtype]:
        trainer = MixedPrecision(comm, model := nn.Sequential(nn.Linear(3, 3)), partial(torch.optim.SGD, lr=0.1))
        torch.manual_seed(0)
        model.append(nn.Linear(3, 3))  # of FP32
        trainer.backward(model(torch.ones(1, 3).bfloat16()).sum())
        trainer.step()
        return [tensor.dtype for tensor in (model[1].weight, trainer.masters[2])]

    assert d2lps.run(work, 2) == [[torch.bfloat16, torch.float32]] * 2


def test_a_scale_that_cannot_recover_is_an_error_on_all_ranks() -> None:
    def work(comm: Communicator) -> tuple[int, float]:
        model, steps = nn.Linear(2, 1), 0
        trainer = MixedPrecision(comm, model, partial(torch.optim.SGD, lr=0.1), torch.float16, scaler=LossScaler())
        with pytest.raises(OverflowError, match=r"has overflowed though the loss scale is down to 5\.96046e-08"):
            while True:
                trainer.backward(model(torch.ones(1, 2).half()).sum() * (math.inf if comm.rank else 1.0))
                trainer.step()
                steps += 1
        return steps, trainer.scaler.scale

    assert d2lps.run(work, 2) == [(40, 2.0**-24)] * 2  # from 2**16
