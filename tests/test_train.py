"""Training under any Plan, beside one process with plain torch: losses, gradient norms, wrong plans, killed ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import d2lps
from d2lps import Communicator
from d2lps.parallel import Plan, Transformer, text, train
from d2lps.parallel.data import NOTHING
from d2lps.parallel.dropout import Place, placed
from d2lps.parallel.plan import PRECISIONS
from d2lps.topology import star

FLAT = Transformer(layers=2, hidden=16, heads=4, vocab=96, sequence=16, ffn=24, kv_heads=2, gated=True, tied=True, dropout=0.1)
DEEP = replace(FLAT, layers=4)
MIXED = replace(FLAT, gated=False, experts=4, top_k=2, capacity=float("inf"))  # none is dropped: which, depends on cp
STEPS, BATCH, MAX_NORM = 2, 8, 0.5  # gradients here have norms of 0.6 and more: all are clipped
adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)
data = partial(text, sequence=16, whole_lines=True)  # sequences have different numbers of tokens that count


@cache
def one_process(sizes: Transformer, precision: str = "fp64") -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain torch: one process, the whole batch at once."""
    model, place, letters = sizes.module(seed=0, dtype=PRECISIONS[precision]), Place(), data()
    placed(model, place)
    optimizer = adam(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        place.step = step
        tokens, targets = letters.batch(step * BATCH, BATCH)
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
    done = train(comm, sizes, plan, data(), steps=STEPS, batch=BATCH, optimizer=adam, max_norm=MAX_NORM)
    return done.losses, done.norms


def check(run: d2lps.Run, sizes: Transformer, plan: Plan, tolerance: float) -> None:
    losses, norms = one_process(sizes, "fp32" if plan.precision == "bf16" else plan.precision)
    for rank, (ours, lengths) in enumerate(run):
        assert ours == pytest.approx(losses, rel=tolerance), f"rank {rank}: losses"
        assert lengths == pytest.approx(norms, rel=tolerance), f"rank {rank}: norms"


exact = partial(Plan, precision="fp64")
PLANS = [  # two micro-batches or more each, to accumulate
    exact(dp=4),
    exact(dp=4, overlap=False),
    exact(dp=4, zero=1, recompute="selective"),
    exact(dp=2, tp=2, micro_batch=2, zero=2, sequence_parallel=True),
    exact(dp=4, zero=3, recompute="full"),
    exact(dp=4, zero=3, zero_group=2, overlap=False),
    exact(tp=4, micro_batch=4, recompute="full"),
    exact(cp=4, micro_batch=4, zero=2),
    exact(tp=2, cp=2, micro_batch=4, zero=1, sequence_parallel=True, recompute="full"),
    exact(pp=4, micro_batch=2, schedule="gpipe", recompute="full"),
    exact(pp=4, micro_batch=2, schedule="zero_bubble"),
    exact(pp=2, dp=2, micro_batch=2, zero=1),
    exact(pp=2, dp=2, micro_batch=2, zero=2),
    exact(pp=2, dp=2, micro_batch=2, zero=3, recompute="selective"),
    exact(pp=2, tp=2, micro_batch=4, schedule="interleaved", interleave=2, sequence_parallel=True, recompute="selective"),
    exact(pp=2, cp=2, micro_batch=4, schedule="zero_bubble", recompute="selective"),
    exact(dp=2, tp=2, pp=2, micro_batch=2, zero=1, sequence_parallel=True, recompute="full"),
    exact(dp=2, tp=2, cp=2, micro_batch=2, zero=3),
    exact(dp=2, tp=2, pp=2, micro_batch=2, zero=2, schedule="interleaved", interleave=2),
    exact(tp=2, pp=2, cp=2, micro_batch=4, zero=2, sequence_parallel=True, schedule="zero_bubble"),
    exact(dp=4, pp=2, zero=3, zero_group=2, schedule="gpipe"),
]
MIXED_PLANS = [
    exact(dp=2, ep=2, micro_batch=2),
    exact(dp=4, ep=4, zero=1, recompute="full"),
    exact(dp=4, ep=2, zero=3),
    exact(dp=2, cp=2, ep=4, micro_batch=2, zero=2),
    exact(dp=2, pp=2, ep=2, micro_batch=2, zero=2),
    exact(dp=2, tp=2, pp=2, ep=2, micro_batch=2, zero=1, sequence_parallel=True),
    exact(dp=2, tp=2, cp=2, ep=2, micro_batch=2, zero=2, schedule="gpipe"),
]


def named(plan: Plan) -> str:
    return str(plan).replace(" precision=fp64", "")


@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_as_one_process(plan: Plan) -> None:
    sizes = DEEP if plan.pp * plan.interleave > 2 else FLAT
    check(d2lps.simulate(under, star(plan.ranks, 1e9, 1e-6), sizes, plan), sizes, plan, 1e-10)


@pytest.mark.parametrize("plan", MIXED_PLANS, ids=named)
def test_experts_as_one_process(plan: Plan) -> None:
    check(d2lps.simulate(under, star(plan.ranks, 1e9, 1e-6), MIXED, plan), MIXED, plan, 1e-10)
