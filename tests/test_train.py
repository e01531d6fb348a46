"""Training under any Plan, beside one process with plain torch: losses, gradient norms, wrong plans."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import d2lps
from d2lps import Communicator
from d2lps.parallel import Plan, Transformer, text, train
from d2lps.parallel.training.plan import PRECISIONS
from d2lps.parallel.training.text import NOTHING, decode
from d2lps.parallel.transformer import Place, placed
from d2lps.topology import Device, star

FLAT = Transformer(layers=2, hidden=16, heads=4, vocab=96, sequence=16, ffn=24, kv_heads=2, gated=True, tied=True, dropout=0.1)
DEEP = replace(FLAT, layers=4)
MIXED = replace(FLAT, gated=False, experts=4, top_k=2, capacity=float("inf"))  # none is dropped: which, depends on cp
STEPS, BATCH, MAX_NORM = 2, 8, 0.5  # gradients here have norms of 0.6 and more: all are clipped
adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)


class Uneven:
    """Sequences of which 1 to 16 tokens count: a rank, or a micro-batch, may have three times as many as another, or none."""

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        tokens, targets = text(sequence=16).batch(first, count)
        counting = 1 + torch.arange(first, first + count) * 7 % 16
        return tokens, targets.masked_fill(torch.arange(16) >= counting[:, None], NOTHING)


@cache
def one_process(sizes: Transformer, precision: str = "fp64") -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain torch: one process, the whole batch at once."""
    model, place = sizes.module(seed=0, dtype=PRECISIONS[precision]), Place()
    placed(model, place)
    optimizer = adam(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        place.step = step
        tokens, targets = Uneven().batch(step * BATCH, BATCH)
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=NOTHING)
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    assert min(norms) > MAX_NORM
    return losses, norms


def under(comm: Communicator, sizes: Transformer, plan: Plan) -> tuple[list[float], list[float]]:
    done = train(comm, sizes, plan, Uneven(), steps=STEPS, batch=BATCH, optimizer=adam, max_norm=MAX_NORM)
    return done.losses, done.norms


def simulated(function: Callable[..., Any], plan: Plan, *args: Any, device: Device | None = None) -> d2lps.Run:
    return d2lps.simulate(function, star(plan.ranks, 5e6, 1e-6, device), *args, trace=False)


def sizes_for(plan: Plan) -> Transformer:
    return MIXED if plan.ep > 1 else DEEP if plan.pp * plan.interleave > 2 else FLAT


def agrees(run: d2lps.Run, plan: Plan, losses: float, norms: float) -> None:
    """Each rank's losses and norms are those of one process, of which they are away by so large a part at most."""
    alone = one_process(sizes_for(plan), "fp32" if plan.precision == "bf16" else plan.precision)
    for rank, (ours, lengths) in enumerate(run):
        assert ours == pytest.approx(alone[0], rel=losses), f"rank {rank}: losses"
        assert lengths == pytest.approx(alone[1], rel=norms), f"rank {rank}: norms"


exact = partial(Plan, precision="fp64")
PLANS = [  # two micro-batches or more each, to accumulate
    exact(dp=4),
    exact(dp=4, overlap=False),
    exact(dp=4, zero=1, recompute="selective"),
    exact(tp=2, pp=2, micro_batch=4, recompute="activation", sequence_parallel=True),
    exact(dp=2, tp=2, micro_batch=2, zero=2, sequence_parallel=True),
    exact(dp=4, zero=3, recompute="full"),
    exact(dp=4, zero=3, zero_group=2, overlap=False),
    exact(dp=2, tp=2, pp=2, micro_batch=2, zero=3, overlap=False, recompute="full", sequence_parallel=True),
    exact(pp=2, dp=2, micro_batch=2, zero=2, overlap=False, schedule="zero_bubble"),
    exact(tp=4, micro_batch=4, recompute="full"),
    exact(cp=4, micro_batch=4, zero=2),
    exact(tp=2, cp=2, micro_batch=4, zero=1, sequence_parallel=True, recompute="full"),
    exact(pp=4, micro_batch=2, schedule="gpipe", recompute="full"),
    exact(pp=4, micro_batch=2, schedule="zero_bubble"),
    exact(pp=2, dp=2, micro_batch=2, zero=1),
    exact(pp=2, dp=2, micro_batch=2, zero=2),
    exact(pp=2, dp=2, micro_batch=2, zero=3, recompute="selective"),
    exact(pp=2, tp=2, micro_batch=4, schedule="interleaved", interleave=2, sequence_parallel=True, overlap=False),
    exact(pp=2, cp=2, micro_batch=4, schedule="zero_bubble", recompute="selective"),
    exact(dp=2, tp=2, pp=2, micro_batch=2, zero=1, sequence_parallel=True, recompute="full"),
    exact(dp=2, tp=2, cp=2, micro_batch=2, zero=3),
    exact(dp=2, tp=2, pp=2, micro_batch=2, zero=2, schedule="interleaved", interleave=2),
    exact(tp=2, pp=2, cp=2, micro_batch=4, zero=2, sequence_parallel=True, schedule="zero_bubble"),
    exact(dp=4, pp=2, zero=3, zero_group=2, schedule="gpipe"),
    exact(dp=2, ep=2, micro_batch=2),
    exact(dp=4, ep=4, zero=1, recompute="full"),
    exact(dp=4, ep=2, zero=3),
    exact(dp=4, ep=2, zero=3, recompute="activation"),
    exact(dp=2, cp=2, ep=4, micro_batch=2, zero=2),
    exact(dp=2, pp=2, ep=2, micro_batch=2, zero=2),
    exact(dp=2, tp=2, pp=2, ep=2, micro_batch=2, zero=1, sequence_parallel=True),
    exact(dp=2, tp=2, cp=2, ep=2, micro_batch=2, zero=2, schedule="gpipe"),
]


def shown(plan: Plan) -> str:
    return str(plan).replace(" precision=fp64", "")


@pytest.mark.parametrize("plan", PLANS, ids=shown)
def test_as_one_process(plan: Plan) -> None:
    agrees(simulated(under, plan, sizes_for(plan), plan), plan, 1e-12, 1e-12)


REAL = [
    Plan(dp=2, tp=2, micro_batch=2, zero=3, sequence_parallel=True, recompute="selective", precision="fp32"),
    Plan(dp=2, pp=2, micro_batch=2, zero=2, schedule="zero_bubble", precision="fp32"),
    Plan(dp=2, cp=2, ep=4, micro_batch=2, zero=1, recompute="full", precision="fp32"),
    Plan(dp=2, tp=2, pp=2, schedule="interleaved", interleave=2, precision="fp64"),
]


@pytest.mark.parametrize("plan", REAL, ids=str)
def test_on_processes(plan: Plan) -> None:
    run = d2lps.run(under, plan.ranks, sizes_for(plan), plan)
    agrees(run, plan, *{"fp32": (1e-6, 1e-6), "fp64": (1e-12, 1e-12)}[plan.precision])


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=4),
        Plan(dp=2, tp=2, zero=3, sequence_parallel=True),
        Plan(pp=2, cp=2, micro_batch=4, zero=1, recompute="full"),
        Plan(dp=4, ep=4, zero=2),
    ],
    ids=str,
)
def test_bf16_stays_close_to_fp32(plan: Plan) -> None:
    """Seen here: losses within 6e-4, norms within 7e-3; numbers have 8 bits, a relative step of 4e-3."""
    agrees(simulated(under, plan, sizes_for(plan), plan), plan, 2e-3, 3e-2)


# ---- what the fields save -------------------------------------------------------------------------------------------------


def held(comm: Communicator, sizes: Transformer, plan: Plan) -> tuple[dict[str, int], dict[str, int], float]:
    before = comm.memory.held.copy()
    train(comm, sizes, plan, Uneven(), steps=2, batch=BATCH, optimizer=adam)
    return dict(comm.memory.peak), dict(comm.memory.held - before), comm.now()


def test_recomputation_holds_less() -> None:
    plans = [exact(dp=2, recompute=what) for what in ("none", "selective", "activation", "full")]
    none, selective, activation, full = (simulated(held, plan, DEEP, plan)[0][0]["activations"] for plan in plans)
    assert full < 0.5 * selective < 0.5 * none and full < 0.5 * activation < 0.5 * none


def test_zero_holds_less_from_stage_to_stage() -> None:
    sizes = replace(DEEP, tied=False)
    peak, rest, _ = zip(
        *(simulated(held, plan, sizes, plan)[0] for plan in (exact(dp=4, zero=stage) for stage in range(4))), strict=True
    )
    assert len({at_most["activations"] for at_most in peak}) == 1, "weights that autograd saves are none"
    assert peak[2]["gradients"] < 0.7 * peak[1]["gradients"], "between micro-batches, whole gradients are gone"
    optimizer, weights = ([held[what] for held in rest] for what in ("optimizer", "weights"))
    assert optimizer[1:] == [pytest.approx(optimizer[0] / 4, rel=0.01)] * 3
    assert weights[3] == pytest.approx(weights[0] / 4, rel=0.01) and weights[:3] == [weights[0]] * 3


@pytest.mark.parametrize("plan", [exact(dp=4), exact(dp=4, zero=1), exact(dp=4, zero=2), exact(dp=4, zero=3)], ids=shown)
def test_overlap_takes_less_time(plan: Plan) -> None:
    slow = Device(flops=3e7, memory=1e9, memory_bandwidth=1e12, efficiency=1.0, launch=0.0)
    sizes = replace(DEEP, tied=False, dropout=0.0)
    beside, after = (simulated(held, one, sizes, one, device=slow).time for one in (plan, replace(plan, overlap=False)))
    assert beside < 0.95 * after


@pytest.mark.parametrize(
    ("zero", "overlap", "times"),
    [(0, False, 1), (0, True, 4), (1, False, 1), (1, True, 4), (2, False, 8), (2, True, 8), (3, False, 8), (3, True, 8)],
)
def test_when_gradients_travel(zero: int, overlap: bool, times: int) -> None:
    """Of an embedding, two blocks and a head, in two micro-batches: all at once, by unit, or by unit and micro-batch."""
    plan, sizes = exact(dp=2, micro_batch=2, zero=zero, overlap=overlap), replace(FLAT, tied=False)
    trace = d2lps.simulate(under, star(2, 5e6, 1e-6), sizes, plan, trace=True).trace
    sent = [trace.steps[step] for step in trace.messages["step"][trace.messages["src"] == 0]]
    shape = "grads[P_dp]" if zero else "grads[P]"  # a ring's all-reduce begins with a reduce-scatter as well
    travels = [name for name in sent if f"grads[P]{{dp}} → {shape}: reduce-scatter" in name]
    assert len(travels) == STEPS * times and (times == 1) != any(name.startswith("block1") for name in travels)


# ---- what can't be --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"dp": 0}, "dp=0 is not a whole number from 1 up"),
        ({"micro_batch": 1.5}, "micro_batch=1.5 is not a whole number"),
        ({"zero": 4}, "zero=4 is none of the stages"),
        ({"zero": True}, "zero=True is none of the stages"),
        ({"zero_group": 0, "zero": 1}, "zero_group=0"),
        ({"schedule": "zb"}, "schedule='zb' is unknown"),
        ({"recompute": "all"}, "recompute='all' is unknown"),
        ({"precision": "fp8"}, "precision='fp8' is unknown"),
    ],
)
def test_fields_that_are_none(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Plan(**fields)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(dp=3), "dp=3 x tp=1 x pp=1 x cp=1 makes 3 ranks, and there are 4"),
        (Plan(dp=4, micro_batch=3), "batch=8 is no multiple of dp=4 x micro_batch=3"),
        (Plan(dp=4, ep=3), "ep=3 must divide dp x cp = 4 x 1"),
        (Plan(dp=4, ep=2), "ep=2 shares out experts, and the model has none (experts=1)"),
        (Plan(pp=4), "layers=2 are too few for 4 stages (pp=4 x interleave=1)"),
        (Plan(pp=2, dp=2, schedule="interleaved", interleave=2), "layers=2 are too few for 4 stages (pp=2 x interleave=2)"),
        (Plan(dp=4, interleave=2), "interleave=2, schedule='one_f_one_b'"),
        (Plan(dp=4, schedule="interleaved"), "interleave=1, schedule='interleaved'"),
        (Plan(dp=4, sequence_parallel=True), "sequence_parallel=True shares out along tp, and tp=1"),
        (Plan(dp=4, zero_group=2), "zero_group=2 says where zero shards, and zero=0"),
        (Plan(dp=4, zero=1, zero_group=3), "zero_group=3 must divide dp x cp = 4 x 1"),
        (Plan(dp=4, ep=2, zero=1, zero_group=2), "zero_group=2 is not carried out with ep=2"),
    ],
    ids=str,
)
def test_plans_that_do_not_fit(plan: Plan, told: str) -> None:
    sizes = MIXED if "carried out" in told else FLAT
    with pytest.raises(ValueError, match=re.escape(told)):
        d2lps.simulate(under, star(4, 1e9, 1e-6), sizes, plan)


@pytest.mark.parametrize(
    ("sizes", "plan", "batch", "told"),
    [
        ({"heads": 6, "hidden": 24, "kv_heads": None}, Plan(tp=4), 8, "heads=6 can't be shared out evenly to tp=4"),
        ({"heads": 12, "hidden": 24, "kv_heads": 6}, Plan(tp=4), 8, "kv_heads=6 can't be shared out evenly to tp=4"),
        ({"vocab": 97}, Plan(tp=2), 8, "vocab=97 can't be shared out evenly to tp=2"),
        ({"ffn": 25}, Plan(tp=2), 8, "ffn=25 can't be shared out evenly to tp=2"),
        ({"sequence": 10}, Plan(cp=2), 8, "sequence=10 can't be shared out evenly to 2 cp=4"),
        (
            {"sequence": 12},
            Plan(cp=2, tp=4, sequence_parallel=True),
            8,
            "sequence=12 can't be shared out evenly to tp x cp = 4 x 2",
        ),
        ({"experts": 4}, Plan(cp=2), 8, "capacity=1.25 with cp=2: each part of a sequence would be sorted into slots by itself"),
        ({"experts": 6}, Plan(dp=4, ep=4), 8, "experts=6 can't be shared out evenly to ep=4"),
        ({}, Plan(pp=2, dp=4, micro_batch=2), 12, "batch=12 is no multiple of dp=4 x micro_batch=2"),
        ({"layers": 8}, Plan(pp=4, schedule="interleaved", interleave=2), 6, "micro_batches=6 is no multiple of ranks=4"),
    ],
)
def test_models_and_batches_that_do_not_fit(sizes: dict[str, Any], plan: Plan, batch: int, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        plan.check(replace(FLAT, **sizes), batch)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_norm_to_which_nothing_can_be_clipped(max_norm: float) -> None:
    with pytest.raises(ValueError, match=f"max_norm={max_norm}: a gradient is clipped to a norm above 0"):
        simulated(lambda comm: train(comm, FLAT, Plan(), Uneven(), 1, BATCH, adam, max_norm), Plan())


def test_fewer_micro_batches_than_stages_where_the_schedule_can() -> None:
    plan = exact(pp=4, micro_batch=4)
    assert plan.micro_batches(BATCH) == 2
    agrees(simulated(under, plan, DEEP, plan), plan, 1e-12, 1e-12)


class Strange(Uneven):
    """Data that is not what was asked for, or of which nothing counts."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.change = change

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self.change(*super().batch(first, count))


def test_data_are_something_that_gives_batches() -> None:
    with pytest.raises(TypeError, match=r"^data must have batch\(first, count\), as text\(\) and .*: list has not"):
        d2lps.simulate(lambda comm: train(comm, FLAT, Plan(), [], 1, 4, torch.optim.SGD), star(1, 1e9))


@pytest.mark.parametrize("steps", [-1, 2.5])
def test_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"^steps={steps} is not a whole number from 0 up"):
        d2lps.simulate(lambda comm: train(comm, FLAT, Plan(), text(), steps, 4, adam), star(1, 1e9))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tokens, targets: (tokens[1:], targets[1:]), "tokens of shape [3, 16], and [4, 16] was asked for"),
        (lambda tokens, targets: (tokens, targets[:, 1:]), "targets of shape [4, 15], and [4, 16] was asked for"),
        (lambda tokens, targets: (tokens[:0], targets[:0]), "tokens of shape [0, 16], and [4, 16] was asked for"),
        (lambda tokens, targets: (tokens.float(), targets), "tokens of torch.float32, and numbers of tokens are torch.int64"),
        (lambda tokens, targets: (tokens.tolist(), targets.tolist()), "gave tuple, and two tensors were asked for"),
        (lambda tokens, targets: None, "gave NoneType, and two tensors were asked for"),
        (lambda tokens, targets: (tokens + 96, targets), "are not all among the model's vocab=96"),
        (lambda tokens, targets: (tokens, targets.masked_fill(targets == NOTHING, -1)), "targets from -1 to"),
    ],
)
def test_data_that_is_not_what_was_asked_for(change: Any, told: str) -> None:
    plan = exact(dp=2, tp=2)
    with pytest.raises(ValueError, match=re.escape(told)):
        simulated(lambda comm: train(comm, FLAT, plan, Strange(change), 1, BATCH, adam).losses, plan)


class Gone(Uneven):
    """Data that a rank loses in its second step."""

    def __init__(self, comm: Communicator, error: type[Exception]) -> None:
        self.error = error if comm.rank == 1 else None

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        if first >= BATCH and self.error:
            raise self.error("the disk is gone")
        return super().batch(first, count)


@pytest.mark.parametrize("plan", [exact(dp=2, zero=3), exact(tp=2), exact(pp=2), exact(dp=2, ep=2)], ids=shown)
def test_data_that_raise_on_one_rank(plan: Plan) -> None:
    def work(comm: Communicator, error: type[Exception]) -> None:
        train(comm, sizes_for(plan), plan, Gone(comm, error), 2, BATCH, adam)

    with pytest.raises(OSError, match="the disk is gone") as raised:
        d2lps.run(work, 2, OSError)
    assert "rank 1 of 2" in "".join(raised.value.__notes__)
    with pytest.raises(StopIteration, match="the disk is gone"):  # as of an iterator that has come to its end
        simulated(work, plan, StopIteration)


@pytest.mark.parametrize(
    "plan", [exact(), exact(dp=2, zero=3), exact(tp=2), exact(pp=2), exact(cp=2), exact(dp=2, ep=2)], ids=shown
)
def test_a_loss_that_is_no_number_is_told_and_ends_nothing(plan: Plan) -> None:
    """As with plain torch; a callback may end it."""
    optimizer = partial(torch.optim.SGD, lr=float("inf"))

    def work(comm: Communicator, callback: Any = None) -> list[float]:
        return train(comm, sizes_for(plan), plan, Uneven(), 3, BATCH, optimizer, MAX_NORM, callback=callback).losses

    def careful(step: int, loss: float, norm: float) -> None:
        if loss != loss:
            raise FloatingPointError(f"step {step}: the loss is {loss}")

    for losses in simulated(work, plan):
        assert losses == pytest.approx([one_process(sizes_for(plan))[0][0], *[float("nan")] * 2], nan_ok=True)
    with pytest.raises(FloatingPointError, match="step 1: the loss is nan"):
        simulated(work, plan, careful)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.LBFGS, "LBFGS computes the loss several times a step (step(closure)), which is not carried out"),
        (torch.optim.Adafactor, "Adafactor looks at each weight as a whole, and is given flat shards"),
        (lambda shards: torch.optim.SGD([nn.Parameter(torch.ones(3))]), "the SGD steps on other parameters than the 1 shards"),
        (lambda shards: None, "optimizer gave NoneType, and not a torch.optim.Optimizer"),
    ],
)
def test_optimizers_that_shards_are_not_for(optimizer: Any, told: str) -> None:
    plan = exact(dp=2, zero=1, overlap=False)
    with pytest.raises(ValueError, match=re.escape(told)):
        simulated(lambda comm: train(comm, FLAT, plan, Uneven(), 1, BATCH, optimizer), plan)


def test_momentum_is_sharded_as_well() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)

    def losses(plan: Plan) -> list[float]:
        return simulated(lambda comm: train(comm, FLAT, plan, Uneven(), 4, BATCH, sgd, MAX_NORM).losses, plan)[0]

    assert losses(exact(dp=2, tp=2, zero=2)) == pytest.approx(losses(exact(micro_batch=8)), rel=1e-12)


def test_a_batch_of_which_nothing_counts_changes_nothing() -> None:
    nothing, plan = Strange(lambda tokens, targets: (tokens, torch.full_like(targets, NOTHING))), exact(dp=2, tp=2, zero=3)
    sgd = partial(torch.optim.SGD, lr=1.0)
    (losses, norms, same), *_ = simulated(
        lambda comm: (
            (done := train(comm, FLAT, plan, nothing, 1, BATCH, sgd, MAX_NORM)).losses, done.norms,
            all(map(torch.equal, done.model().parameters(), FLAT.module(dtype=torch.float64).parameters())),
        ),
        plan,
    )  # fmt: skip
    assert (losses, norms, same) == ([0.0], [0.0], True)


def test_ranks_that_were_told_different_plans() -> None:
    with pytest.raises(d2lps.Mismatch, match=r"Plan\(dp=2.*Plan\(dp=1, tp=2"):
        d2lps.simulate(lambda comm: under(comm, FLAT, [Plan(dp=2), Plan(tp=2)][comm.rank]), star(2, 1e9, 1e-6), trace=False)


# ---- what has been trained ------------------------------------------------------------------------------------------------


def trained(comm: Communicator, plan: Plan) -> list[Tensor]:
    model = train(comm, sizes_for(plan), plan, Uneven(), STEPS, BATCH, adam, MAX_NORM).model()
    assert (model.head.linear.weight is model.embed.tokens.weight) == sizes_for(plan).tied
    return [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("plan", [exact(dp=2, tp=2, zero=3), exact(dp=2, pp=2, ep=2, micro_batch=2, zero=1)], ids=shown)
def test_the_whole_model_is_put_together_on_every_rank(plan: Plan) -> None:
    one = exact(micro_batch=8)
    (alone,) = simulated(lambda comm: train(comm, sizes_for(plan), one, Uneven(), STEPS, BATCH, adam, MAX_NORM).model(), one)
    for weights in simulated(trained, plan, plan):
        torch.testing.assert_close(weights, [weight.detach() for weight in alone.parameters()], rtol=1e-9, atol=1e-11)


def test_what_is_returned_is_a_module_that_writes_text() -> None:
    model = d2lps.run(lambda comm: train(comm, FLAT, Plan(tp=2), text(16), 1, BATCH, adam).model(), 2)[0]
    tokens = text(16).batch(0, 1)[0]
    for _ in range(3):
        tokens = torch.cat([tokens[:, 1:], model(tokens)[:, -1:].argmax(-1)], 1)
    assert len(decode(tokens[0])) == 16


# ---- dropout --------------------------------------------------------------------------------------------------------------


def test_random_numbers_of_a_place() -> None:
    like = torch.zeros(32, 64, 16)
    numbers = [Place(seed, step).uniform(layer, like) for seed, step, layer in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    for one in numbers:
        assert one.mean() == pytest.approx(0.5, abs=0.01) and one.std() == pytest.approx(12**-0.5, rel=0.01)
        for along in range(3):
            means = (one < 0.25).double().mean([dim for dim in range(3) if dim != along])
            assert means == pytest.approx(torch.full_like(means, 0.25).numpy(), abs=0.08)
    alike = torch.corrcoef(torch.stack([one.flatten() for one in numbers])) - torch.eye(4)
    assert alike.abs().max() < 0.02
    part = Place(rows=torch.tensor([3, 5]), positions=torch.tensor([0, 7, 8])).uniform(0, torch.zeros(2, 3, 16))
    assert torch.equal(part, numbers[0][[3, 5]][:, [0, 7, 8]])
    with pytest.raises(ValueError, match="2 rows of 3 positions"):
        Place(rows=torch.tensor([3, 5]), positions=torch.tensor([0, 7, 8])).uniform(0, torch.zeros(2, 4, 16))


def test_a_callback_sees_every_step() -> None:
    def work(comm: Communicator) -> Any:
        seen: list[Any] = []
        done = train(comm, FLAT, Plan(), Uneven(), 2, 4, adam, callback=lambda *step: seen.append(step))
        return seen, done.done, list(zip(range(2), done.losses, done.norms, strict=True))

    seen, done, given = simulated(work, Plan())[0]
    assert seen == given and done == 2


@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=2, zero=3), Plan(tp=2, pp=2, micro_batch=4)], ids=str)
def test_no_weight_outlives_its_simulation(plan: Plan) -> None:
    """Python's collector sees no circle that goes through torch's hooks of finished gradients: there must be none."""

    def living() -> int:
        gc.collect()
        return sum(type(thing) is nn.Parameter for thing in gc.get_objects())

    before = living()
    d2lps.simulate(lambda comm: train(comm, DEEP, plan, Uneven(), STEPS, BATCH, adam).losses, star(plan.ranks, 1e9), trace=False)
    assert living() == before
