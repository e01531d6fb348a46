"""What a trace knows of parallel training: the axis of a message, what it is about, and the activations that are held."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import d2lps
from d2lps import Communicator
from d2lps.collectives import all_reduce
from d2lps.comm.errors import OutOfMemory
from d2lps.parallel import Mesh, Transformer, activations
from d2lps.topology import star
from d2lps.topology.device import Device
from d2lps.trace import About
from d2lps.trace.recorder import axis_of

CARD = Device(1e12, 1e6, 1e12)
BOTH = [
    lambda work, ranks: d2lps.simulate(work, star(ranks, 1e9, 0, CARD), trace=True),
    lambda work, ranks: d2lps.run(work, ranks, trace=True),
]


def along_two_axes(comm: Communicator) -> tuple[str, ...]:
    mesh = Mesh(comm, dp=2, tp=2)
    with mesh.tp.about("x", "B T D", "B T D", partial=True):
        all_reduce(mesh.tp, torch.ones(8))
    mesh.dp.start(all_reduce, torch.ones(4)).wait()
    half = mesh.dp.split(0)
    assert half is not None
    all_reduce(half, torch.ones(2))
    return comm.axis, mesh.tp.axis, mesh.dp.axis, mesh.data.axis, half.axis


@pytest.mark.parametrize("world", BOTH)
def test_a_message_knows_its_axis_and_what_it_is_about(world: Any) -> None:
    run = world(along_two_axes, 4)
    assert run[3] == ("ranks", "tp", "dp", "dp", "dp")
    trace = run.trace
    m = trace.messages
    axes = [trace.axes[group] for group in m["group"]]
    assert sorted(axes) == ["dp"] * 16 + ["tp"] * 8  # rings of two: 4 messages each, in 2 + 2 + 2 groups
    ways = {(src, dst) for src, dst, axis in zip(m["src"], m["dst"], axes, strict=True) if axis == "tp"}
    assert ways == {(0, 1), (1, 0), (2, 3), (3, 2)}
    said = [f"x[B, T, D]{{tp}} → x[B, T, D]: {step} 1/1" for step in ("all-gather", "reduce-scatter")]
    assert sorted({trace.steps[step] for step in m["step"][np.array(axes) == "tp"]}) == said
    assert {trace.about[step] for step in m["step"][np.array(axes) == "tp"]} == {About("x", "tp", "B T D", "B T D", partial=True)}
    assert {trace.about[step] for step in m["step"][np.array(axes) == "dp"]} == {None}
    assert {trace.steps[step] for step in m["step"][np.array(axes) == "dp"]} == {"all-gather 1/1", "reduce-scatter 1/1"}


def test_the_axis_of_a_group_is_that_of_the_innermost_that_has_one() -> None:
    names = ("world", "world/2.0", "world/tp2.0", "world/dp1.1/start3", "world/dp1.1/2.0", "world/dp1.1/tp12.0")
    assert [axis_of(name) for name in names] == ["", "", "tp", "dp", "dp", "tp"]


def test_an_axis_is_a_word() -> None:
    with pytest.raises(ValueError, match="axis='t/p' is not a word"):
        d2lps.simulate(lambda comm: comm.split(0, axis="t/p"), star(2, 1e9, 0))


class Double(nn.Module):
    """Saves its input once, for the gradient of the weight, and its own square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((10,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).exp()


def held_by_two(comm: Communicator) -> list[int]:
    model = nn.Sequential(Double(), Double())
    held, seen = activations(comm, model), []
    with comm.compute("forward 0 stage 0"):
        outs = [model(torch.zeros(10)) for _ in range(2)]
    seen.append(held.nbytes)
    for out in outs:
        with comm.compute("backward 0 stage 0"):
            out.sum().backward()
        seen.append(held.nbytes)
    return seen


@pytest.mark.parametrize("world", BOTH)
def test_activations_grow_in_the_forward_pass_and_shrink_in_the_backward_pass(world: Any) -> None:
    run = world(held_by_two, 2)
    assert run[1] == [240, 120, 0]  # of each pass: the input, and two results of exp, of which the first is the next one's input
    spans = run.trace.spans
    rows = np.flatnonzero((spans["kind"] == run.trace.kinds.index("memory")) & (spans["rank"] == 0))
    told = sorted((spans["start"][k], spans["end"][k], run.trace.labels[spans["label"][k]], spans["nbytes"][k]) for k in rows)
    assert [(label, nbytes) for *_, label, nbytes in told] == [("activations 0", 80), ("activations 1", 40)] * 2
    assert told[0][1] > told[1][1] > told[1][0] > told[0][0]  # what came last goes first


@pytest.mark.parametrize("counted", [activations, None])
def test_what_is_changed_before_the_backward_pass_is_an_error_as_without_counting(counted: Any) -> None:
    """The derivative of the sigmoid is that of its result, of which dropout has made another."""

    def work(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Dropout(0.5, inplace=True), nn.Linear(4, 1))
        if counted is not None:
            counted(comm, model)
        model(torch.ones(2, 4)).sum().backward()

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1; expected version 0"):
        d2lps.simulate(work, star(1, 1e9, 0))


class Picky(Double):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.dim() > 1:
            raise ValueError("one row at a time")
        return y


@pytest.mark.parametrize("kind", [Double, Picky])
def test_after_a_forward_pass_that_failed_the_account_is_as_before(kind: type[nn.Module]) -> None:
    """Too much for the second child, or more than it takes."""

    def work(comm: Communicator) -> tuple[int, int, int]:
        model = nn.Sequential(Double(), kind())
        held = activations(comm, model)
        with suppress(OutOfMemory, ValueError):
            model(torch.zeros(5, 10))
            raise AssertionError("it should have failed")
        torch.ones(100, requires_grad=True).exp()  # of no child
        out = model(torch.zeros(10))
        told = held.nbytes, comm.memory.held.total()
        out.sum().backward()
        return *told, comm.memory.held.total()

    assert d2lps.simulate(work, star(1, 1e9, 0, Device(1e12, 500, 1e12)))[0] == (120, 120, 0)


def test_counting_changes_no_gradient_and_what_is_too_much_is_refused() -> None:
    sizes = Transformer(layers=2, hidden=8, heads=2, vocab=16, sequence=4, tied=True)
    tokens = torch.arange(8).view(2, 4)

    def gradients(comm: Communicator, count: bool) -> list[torch.Tensor | None]:
        model = sizes.module(dtype=torch.float64)
        if count:
            activations(comm, model)
        model(tokens).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    without, with_it = (d2lps.simulate(gradients, star(1, 1e9, 0, CARD), count)[0] for count in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(without, with_it, strict=True))
    with pytest.raises(OutOfMemory, match=r"'activations block1' needs .* activations block0"):
        d2lps.simulate(gradients, star(1, 1e9, 0, Device(1e12, 12_000, 1e12)), True)
