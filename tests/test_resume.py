"""Runs that go on from a checkpoint: to the bit under the plan that has saved it, with the same state under any other."""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from launching import start_fork_server, started, until
from test_checkpoint import whole_state

import d2lps
from d2lps.disk import CheckpointMissing
from d2lps.parallel import Checkpoints, Plan, Trainer, Transformer, keep_going, text
from d2lps.parallel.saving.checkpoint import save
from d2lps.parallel.saving.saved import look
from d2lps.parallel.training.resume import resume, save_run
from d2lps.topology import star

FLAT = Transformer(layers=2, hidden=16, heads=4, vocab=96, sequence=16, ffn=24, kv_heads=2, gated=True, tied=True, dropout=0.1)
DEEP = replace(FLAT, layers=4)
MIXED = replace(DEEP, gated=False, experts=4, top_k=2, capacity=float("inf"))
BATCH, SAVED, STEPS = 8, 2, 4
adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)
exact = partial(Plan, precision="fp64")


def trainer_of(comm, sizes, plan, **other):
    return Trainer(comm, sizes, plan, text(sequence=16), **{"batch": BATCH, "optimizer": adam, "max_norm": 0.5} | other)


def uninterrupted(comm, sizes, plan, folder):
    trainer = trainer_of(comm, sizes, plan)
    for step in range(STEPS):
        trainer.step()
        if step + 1 == SAVED:
            checkpoints = Checkpoints(comm, folder)
            save_run(trainer, checkpoints)
    return trainer.losses, trainer.norms


def resumed(comm, sizes, plan, folder, again):
    """Go on, after saving what has been loaded once more."""
    trainer = trainer_of(comm, sizes, plan, optimizer=partial(torch.optim.AdamW, lr=1.0, eps=1e-5))  # which is not what counts
    resume(trainer, folder)
    save_run(trainer, Checkpoints(comm, again)).wait()
    while trainer.done < STEPS:
        trainer.step()
    return trainer.losses, trainer.norms


def simulated(fn, plan, *args):
    return d2lps.simulate(fn, star(plan.ranks, 1e9, 1e-6), *args, trace=False)


DENSE = [
    exact(), exact(dp=2, tp=2, micro_batch=2, zero=3, sequence_parallel=True), exact(tp=4, micro_batch=4, recompute="full"),
    exact(pp=2, tp=2, micro_batch=4, schedule="interleaved", interleave=2), exact(dp=4, zero=2, zero_group=2, overlap=False),
    exact(cp=2, pp=2, micro_batch=4, zero=3, schedule="zero_bubble"),
]  # fmt: skip
EXPERTS = [exact(dp=4, ep=2, zero=3), exact(dp=2, tp=2, pp=2, ep=2, micro_batch=2)]
CASES = [(DEEP, k, DENSE) for k in range(len(DENSE))] + [(MIXED, k, EXPERTS) for k in range(len(EXPERTS))]


@pytest.mark.parametrize(("sizes", "k", "plans"), CASES, ids=[f"{plans[k]} experts={sizes.experts}" for sizes, k, plans in CASES])
def test_resumed_is_uninterrupted(sizes, k, plans, tmp_path):
    plan, other = plans[k], plans[(k + 1) % len(plans)]
    whole = simulated(uninterrupted, plan, sizes, plan, tmp_path)
    assert simulated(resumed, plan, sizes, plan, tmp_path, tmp_path / "same")[:] == whole[:], "to the bit"
    for losses, norms in simulated(resumed, other, sizes, other, tmp_path, tmp_path / "other"):
        assert losses == pytest.approx(whole[0][0], rel=1e-11) and norms == pytest.approx(whole[0][1], rel=1e-11)
    saved, same, again = (whole_state(folder) for folder in (tmp_path, tmp_path / "same", tmp_path / "other"))
    assert len(saved) == 4 * len(dict(sizes.module().named_parameters())), "weights, two moments, a count of steps"
    assert saved.keys() == same.keys() == again.keys()
    assert all(torch.equal(whole, same[name]) and torch.equal(whole, again[name]) for name, whole in saved.items())
    stored = sum(path.stat().st_size for path in look(tmp_path).folder.glob("*.safetensors"))
    assert stored < 1.3 * sum(whole.nbytes for whole in saved.values()), "replicas are written once"


def test_bf16_goes_on_from_its_fp32_masters(tmp_path):
    plan = Plan(dp=2, tp=2, micro_batch=2, zero=2)
    whole = d2lps.run(uninterrupted, 4, FLAT, plan, tmp_path)
    assert d2lps.run(resumed, 4, FLAT, plan, tmp_path, tmp_path / "again")[:] == whole[:]
    assert {tensor.dtype for tensor in whole_state(tmp_path).values()} == {torch.float32}


def test_another_run_is_refused_before_anything_changes(tmp_path):
    simulated(uninterrupted, exact(), FLAT, exact(), tmp_path)

    def refused(comm, sizes, told, plan=exact(dp=2), **other):  # noqa: B008 - a plan is frozen
        trainer = trainer_of(comm, sizes, plan, **other)
        before = [zero.shards[0].clone() for zero in trainer.zeros]
        with pytest.raises(ValueError, match=told):
            resume(trainer, tmp_path)
        assert trainer.done == 0
        assert all(torch.equal(zero.shards[0], old) for zero, old in zip(trainer.zeros, before, strict=True))

    plan = exact(dp=2)
    simulated(refused, plan, DEEP, "model was .*'layers': 2.* and is .*'layers': 4")
    simulated(partial(refused, batch=4), plan, FLAT, "batch was 8, and is 4 here")
    simulated(partial(refused, optimizer=partial(torch.optim.SGD, lr=0.1)), plan, FLAT, "optimizer was AdamW, and is SGD here")
    simulated(partial(refused, seed=1), plan, FLAT, "seed was 0, and is 1 here")
    narrow = partial(refused, plan=replace(plan, precision="fp32"))
    simulated(narrow, plan, FLAT, r"is float64\[96, 16\] in it, and float32\[96, 16\]")
    for extra in (None, {"seen": 384}):  # a checkpoint, but not of a run
        simulated(lambda comm, extra: save(comm, tmp_path, 9, {}, extra), plan, extra)
        simulated(refused, plan, FLAT, "step-9.* is not what save_run saves: it does not say model, optimizer, batch, seed")


# ---- rates ----------------------------------------------------------------------------------------------------------------

lr = torch.optim.lr_scheduler
SCHEDULES = {
    "lambda": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 0.5**step),
    "steps": lambda optimizer: lr.StepLR(optimizer, 1, 0.8),
    "milestones": lambda optimizer: lr.MultiStepLR(optimizer, [1, 3], 0.1),
    "cosine": lambda optimizer: lr.CosineAnnealingLR(optimizer, 6),
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, 0.1, total_steps=8),
    "warm-up": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer, 0.1, total_iters=3), lr.ExponentialLR(optimizer, 0.9)], [3]),
    "restarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 2),
}  # fmt: skip


def scheduled(comm, folder, schedule, again, tensor=False):
    """The rates, and what the steps give."""
    rate = torch.tensor(1e-2) if tensor else 1e-2
    trainer = trainer_of(comm, FLAT, exact(dp=2, zero=1), optimizer=partial(torch.optim.AdamW, lr=rate, betas=(0.8, 0.95)))
    optimizer, rates = trainer.zeros[0].optimizer, []
    steps = schedule(optimizer)
    if again:
        resume(trainer, folder, states={"schedule": steps})
    while trainer.done < STEPS + 2:
        trainer.step()
        steps.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if trainer.done == SAVED and not again:
            save_run(trainer, Checkpoints(comm, folder), {"schedule": steps}).wait()
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor
    return rates, trainer.losses


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_made_before_resume_goes_on(kind, tmp_path):
    whole, again = (simulated(scheduled, exact(dp=2), tmp_path, SCHEDULES[kind], later) for later in (False, True))
    assert [(rates[SAVED:], losses) for rates, losses in whole] == again[:]


def test_a_rate_that_is_a_tensor_stays_one(tmp_path):
    args = tmp_path, SCHEDULES["steps"]
    [rates, losses] = d2lps.run(scheduled, 2, *args, False, True)[0]
    assert d2lps.run(scheduled, 2, *args, True, True)[1] == (rates[SAVED:], losses)


def test_a_schedule_whose_state_is_not_given_is_refused_and_one_made_afterwards_is_not(tmp_path):
    def refused(comm):
        trainer = trainer_of(comm, FLAT, exact(dp=2))
        SCHEDULES["lambda"](trainer.zeros[0].optimizer)
        with pytest.raises(ValueError, match=r"zeros\[0\].optimizer has a learning-rate schedule .*last_epoch=trainer.done - 1"):
            resume(trainer, tmp_path)
        return trainer.done

    def afterwards(comm):
        trainer = trainer_of(comm, FLAT, exact(dp=2, zero=1))
        resume(trainer, tmp_path)
        steps = lr.LambdaLR(trainer.zeros[0].optimizer, lambda step: 0.5**step, last_epoch=trainer.done - 1)
        rates = []
        while trainer.done < STEPS + 2:
            trainer.step()
            steps.step()
            rates.append(trainer.zeros[0].optimizer.param_groups[0]["lr"])
        return rates

    whole = simulated(scheduled, exact(dp=2), tmp_path, SCHEDULES["lambda"], False)
    assert simulated(refused, exact(dp=2))[:] == [0, 0]
    assert simulated(afterwards, exact(dp=2))[0] == whole[0][0][SAVED:]


def test_optimizers_of_one_run_with_other_rates_are_refused(tmp_path):
    def work(comm):
        trainer = trainer_of(comm, MIXED, plan)
        trainer.zeros[1].optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(ValueError, match=r"zeros\[1\].optimizer has the options .*0.5.*a run saves one set"):
            save_run(trainer, Checkpoints(comm, tmp_path))

    plan = exact(dp=2, ep=2)
    simulated(work, plan)
    assert not list(tmp_path.iterdir())


TWO = partial(Plan, precision="fp32", micro_batch=2)
STRATEGIES = {
    "data parallel": TWO(dp=2), "ZeRO 1": TWO(dp=2, zero=1), "ZeRO 2": TWO(dp=2, zero=2), "ZeRO 3": TWO(dp=2, zero=3),
    "tensors": TWO(tp=2), "tensors and sequence": TWO(tp=2, sequence_parallel=True), "1F1B": TWO(pp=2),
    "interleaved": TWO(pp=2, schedule="interleaved", interleave=2), "context": TWO(cp=2), "experts": TWO(dp=2, ep=2),
}  # fmt: skip


def killed(comm, sizes, plan, folder):
    trainer = trainer_of(comm, sizes, plan)
    while trainer.done < SAVED:
        trainer.step()
    save_run(trainer, Checkpoints(comm, folder)).wait()
    if comm.rank == 1:
        next(trainer.module.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    trainer.step()


def whole_and_gone_on(comm, sizes, plan, folder):
    whole, other = trainer_of(comm, sizes, plan), trainer_of(comm, sizes, plan)
    begun = resume(other, folder).step
    for trainer in (whole, other):
        while trainer.done < STEPS:
            trainer.step()
    return begun, (whole.losses, whole.norms), (other.losses, other.norms)


@pytest.mark.parametrize("plan", STRATEGIES.values(), ids=STRATEGIES)
def test_a_rank_killed_in_its_backward_pass_is_named_and_the_run_goes_on(plan, tmp_path):
    sizes = replace(DEEP if plan.interleave > 1 else FLAT, **{"gated": False, "experts": 4, "top_k": 2} if plan.ep > 1 else {})
    start_fork_server()
    known = set(started())
    with pytest.raises(d2lps.RankDied, match=r"^rank 1 of 2 was killed by SIGKILL"):
        d2lps.run(killed, 2, sizes, plan, tmp_path)
    assert until(lambda: set(started()) <= known, 3)
    for begun, whole, gone_on in d2lps.run(whole_and_gone_on, 2, sizes, plan, tmp_path):
        assert begun == SAVED and gone_on == whole, "to the bit"


def test_a_killed_run_goes_on_under_keep_going(tmp_path):
    plan = Plan(pp=2, dp=2, micro_batch=2, zero=1, precision="fp32")

    def train(comm, folder, dies):
        trainer, checkpoints = trainer_of(comm, FLAT, plan), Checkpoints(comm, folder)
        try:
            begun = resume(trainer, folder).step
        except CheckpointMissing:
            begun = 0
        while trainer.done < STEPS:
            if trainer.done == 3 and comm.rank == 2 and begun == 0 and dies:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step()
            save_run(trainer, checkpoints)
        return begun, trainer.losses

    whole = d2lps.run(train, 4, tmp_path / "whole", False)
    again = keep_going(train, 4, tmp_path / "again", True)
    assert again[0][0] in (2, 3) and [losses for _, losses in again] == [losses for _, losses in whole]
    with pytest.raises(d2lps.RankDied):
        keep_going(lambda comm: os.kill(os.getpid(), signal.SIGKILL), 1, times=1)
