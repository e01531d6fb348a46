"""Pipelines: schedules as pictures and by formula, executed beside one process and torch's own, stages that are balanced anew."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn

import d2lps
from d2lps import Communicator
from d2lps.parallel.pipeline.balance import cut, move, rebalance, slowness
from d2lps.parallel.pipeline.execute import StandIn, execute
from d2lps.parallel.pipeline.schedules import (
    Action,
    gpipe,
    interleaved,
    one_f_one_b,
    picture,
    placed,
    replay,
    traffic,
    zero_bubble,
)
from d2lps.topology import Device, spine_leaf, star

SCHEDULES = [
    gpipe(1, 2), gpipe(3, 5), gpipe(4, 2), one_f_one_b(1, 3), one_f_one_b(2, 1), one_f_one_b(4, 8), one_f_one_b(8, 3),
    interleaved(1, 2, 3), interleaved(2, 4, 2), interleaved(3, 6, 2), interleaved(4, 8, 2),
    zero_bubble(1, 2), zero_bubble(3, 4), zero_bubble(4, 8), zero_bubble(8, 3),
]  # fmt: skip


# ---- schedules ----------------------------------------------------------------------------------------------------


def test_pictures() -> None:
    assert picture(gpipe(3, 4)).splitlines() == [
        "rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3",
        "rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .",
        "rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .",
    ]
    assert picture(one_f_one_b(3, 4)).splitlines() == [
        "rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        "rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]
    assert picture(zero_bubble(3, 4)).splitlines() == [
        "rank 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "rank 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "rank 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert picture(interleaved(2, 4, 2)).splitlines() == [
        "rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3",
        "rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .",
    ]


def test_interleaved_goes_round_in_groups_of_as_many_as_there_are_ranks() -> None:
    with pytest.raises(ValueError, match="micro_batches=6 is no multiple of ranks=4"):
        interleaved(4, 6, 2)
    assert interleaved(3, 6, 1) == one_f_one_b(3, 6)


@given(st.integers(1, 9), st.integers(1, 12))
def test_bubbles_and_memory_are_the_formulas(p: int, m: int) -> None:
    assert replay(gpipe(p, m)).bubble == pytest.approx((p - 1) / m)
    assert replay(gpipe(p, m)).peak == (m,) * p
    one = replay(one_f_one_b(p, m))
    assert one.bubble == pytest.approx((p - 1) / m)
    assert one.peak == tuple(min(p - rank, m) for rank in range(p))
    zero = replay(zero_bubble(p, m))
    assert zero.peak == (min(p, m),) * p
    if m >= p:
        assert zero.bubble == pytest.approx((p - 1) / (3 * m))
    else:
        assert zero.bubble < one.bubble or p == 1


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_by_formula(p: int, groups: int, v: int) -> None:
    m = p * groups
    done = replay(interleaved(p, m, v), 1 / v, 2 / v)
    assert done.bubble == pytest.approx((p - 1) / (v * m))
    if v > 1 and groups > 1:
        assert done.peak[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_unequal_stages_and_messages_by_hand() -> None:
    schedule = gpipe(2, 2)
    slow = replay(schedule, [1, 3], [2, 6])  # 1, 3 + 3, 6 + 6, 2
    assert slow.time == 21 and slow.busy == (6, 18) and slow.bubble == pytest.approx(1 / 6)
    assert replay(schedule, 1, 2, message=0.5).time == 10  # 1 .5 1 1 2 2 .5 2: the second message is hidden both times
    assert replay(schedule, 1, 2, message=0.5, ahead=False).time == 11  # and now it isn't: 1 .5 1 .5 1 2 2 .5 2, ...
    assert replay(schedule, 1, 2, message=[0.5]).time == 10


def test_one_f_one_b_hides_messages_worse_than_gpipe_if_receives_are_posted_ahead() -> None:
    message = 2 * 2048 * 12288 / 22e9  # 50 MB at 22 GB/s, beside 10 and 20 ms
    for schedule, blocking, ahead in ((gpipe, 0.235, 0.084), (one_f_one_b, 0.234, 0.216)):
        both = [replay(schedule(8, 96), 0.01, 0.02, message=message, ahead=early).bubble for early in (False, True)]
        assert both == pytest.approx([blocking, ahead], abs=5e-4)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([[("F", 0, 0), ("B", 0, 0), ("F", 1, 0)]], "2 stages need one B each of each of 1 micro-batches: see 1B0"),
        ([[("F", 0, 0), ("B", 0, 0), ("F", 0, 0)]], "rank 0 has 0F0 twice"),
        ([[("F", 0, 0)], [("B", 0, 0)]], "stage 0 is on rank 0 and on rank 1"),
        ([[("B", 0, 0), ("F", 0, 0)]], "rank 0 waits with 0B0 for 0F0"),
        (
            [[("F", 0, 0), ("B", 0, 0)], [("B", 1, 0), ("F", 1, 0)]],
            "rank 0 waits with 0B0 for 1B0; rank 1 waits with 1B0 for 1F0",
        ),
    ],
)
def test_what_is_no_schedule(rows: list[list[tuple[str, int, int]]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replay([[Action(*action) for action in row] for row in rows])


# ---- executed -----------------------------------------------------------------------------------------------------


def network(layers: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(layers)]).double()


def batch(m: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    own = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, m, 3, 6, generator=own, dtype=torch.double)
    return list(inputs), list(targets)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def pipeline(comm: Communicator, schedule: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Two layers a stage; only the ranks that need them have inputs and targets."""
    home, m = placed(schedule)
    net, (inputs, targets) = network(2 * len(home)), batch(m)
    mine = {stage: net[2 * stage : 2 * stage + 2] for stage, rank in home.items() if rank == comm.rank}
    total = execute(
        comm, mine, schedule, inputs if 0 in mine else None, targets if len(home) - 1 in mine else None,
        loss if len(home) - 1 in mine else None,
    )  # fmt: skip
    return total, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def alone(schedule: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    home, m = placed(schedule)
    net, (inputs, targets) = network(2 * len(home)), batch(m)
    total = torch.stack([loss(net(x), y) for x, y in zip(inputs, targets, strict=True)]).sum()
    total.backward()
    return total.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def same(run: Any, schedule: Any) -> None:
    (total, expected), home = alone(schedule), placed(schedule)[0]
    found: dict[str, torch.Tensor] = {}
    for rank, (told, gradients) in enumerate(run):
        assert (told is not None) == (rank == home[len(home) - 1])
        if told is not None:
            torch.testing.assert_close(told, total, rtol=1e-12, atol=0)
        assert not found.keys() & gradients.keys()
        found |= gradients
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-10 * gradient.abs().max()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda rows: f"{len(rows)} ranks")
def test_gradients_are_those_of_one_process(schedule: Any) -> None:
    same(d2lps.simulate(pipeline, star(len(schedule), 1e9, 1e-6), schedule), schedule)


@pytest.mark.parametrize("schedule", [interleaved(2, 4, 2), zero_bubble(4, 5)], ids=lambda rows: f"{len(rows)} ranks")
def test_on_processes(schedule: Any) -> None:
    same(d2lps.run(pipeline, len(schedule), schedule), schedule)


@st.composite
def any_schedule(draw: Any) -> list[list[Action]]:
    """Stages on whatever ranks, actions in whatever order that can be."""
    ranks, stages, m = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    home = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    split = draw(st.booleans())
    left = {Action(kind, stage, k) for kind in "FBW"[: 2 + split] for stage in range(stages) for k in range(m)}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        ready = [
            action for action in sorted(left)
            if not {Action("F", action.stage, action.micro_batch)} & (left - {action})
            and (action.kind != "F" or Action("F", action.stage - 1, action.micro_batch) not in left)
            and (action.kind != "B" or Action("B", action.stage + 1, action.micro_batch) not in left)
            and (action.kind != "W" or Action("B", action.stage, action.micro_batch) not in left)
        ]  # fmt: skip
        action = draw(st.sampled_from(ready))
        left.remove(action)
        rows[home[action.stage]].append(action)
    return rows


@settings(max_examples=25, deadline=None)
@given(any_schedule())
def test_any_schedule_that_ends_is_carried_out(rows: list[list[Action]]) -> None:
    same(d2lps.simulate(pipeline, star(len(rows), 1e9, 1e-6), rows, trace=False), rows)


@given(any_schedule())
def test_both_ends_agree_on_an_order_in_which_no_message_depends_on_a_later_one(rows: list[list[Action]]) -> None:
    """As if all messages of two ranks went through one after another, each only when both ends have come to it."""
    schedule = tuple(map(tuple, rows))
    for order in traffic(schedule).values():
        for rank in {sender for _, sender in order}:
            mine = [action for action, sender in order if sender == rank]
            assert mine == [action for action in rows[rank] if action in set(mine)]  # in the order of its program


def most_held(run: d2lps.Run, rank: int) -> int:
    """How many micro-batches' activations are in the accounts at a time."""
    spans = run.trace.spans
    held = (spans["rank"] == rank) & (spans["kind"] == list(run.trace.kinds).index("memory"))
    starts, ends = spans["start"][held], spans["end"][held]
    return max(int(((starts <= time) & (time < ends)).sum()) for time in starts)


def timed(comm: Communicator, schedule: Any, forward: float = 1.0, backward: float = 2.0, size: int = 1) -> None:
    home, m = placed(schedule)
    mine = {stage: StandIn(comm, forward, backward) for stage, rank in home.items() if rank == comm.rank}
    x = torch.zeros(size, device=comm.device, requires_grad=True)
    execute(comm, mine, schedule, [x] * m, [None] * m, lambda output, _: output.sum())


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 4), one_f_one_b(4, 6), zero_bubble(3, 4), interleaved(2, 4, 2)], ids=lambda s: f"{len(s)}"
)
def test_the_simulator_takes_as_long_and_holds_as_much_as_the_replay(schedule: Any) -> None:
    run, told = d2lps.simulate(timed, star(len(schedule), 1e15), schedule), replay(schedule)
    assert run.time == pytest.approx(told.time, rel=1e-9)
    assert tuple(most_held(run, rank) for rank in range(len(schedule))) == told.peak


def test_what_does_not_fit_is_said_before_anything_is_sent() -> None:
    def work(comm: Communicator, schedule: Any, stages: tuple[int, ...], count: int, end: Any = loss) -> None:
        execute(
            comm, {stage: nn.Linear(6, 6) for stage in stages}, schedule, [torch.zeros(6)] * count, [torch.zeros(6)] * count, end
        )

    for arguments, told in (
        ((one_f_one_b(2, 3), (0,), 3), "a schedule for 2 ranks, and there are 1"),
        ((gpipe(1, 3), (0, 1), 3), r"rank 0 has the stages \[0, 1\], and the schedule gives it \[0\]"),
        ((gpipe(1, 3), (0,), 2), "rank 0 has stage 0, and 2 inputs for 3 micro-batches"),
        ((gpipe(1, 3), (0,), 3, None), "rank 0 has the last stage, 0, and no loss"),
    ):
        with pytest.raises(ValueError, match=told):
            d2lps.simulate(work, star(1, 1e9), *arguments)


def test_micro_batches_must_be_alike() -> None:
    def work(comm: Communicator) -> None:
        inputs = [torch.zeros(3, 6), torch.zeros(2, 6)]
        execute(comm, {comm.rank: nn.Linear(6, 6)}, gpipe(2, 2), inputs, inputs, loss)

    with pytest.raises(
        ValueError,
        match=r"stage 0, micro-batch 1: it makes torch.float32 \[2, 6\], and the first micro-batch made torch.float32 \[3, 6\]",
    ):
        d2lps.simulate(work, star(2, 1e9))


class Made(nn.Module):
    """A stage that makes something else of its second micro-batch."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.make, self.passes = nn.Linear(6, 6).double(), make, 0

    def forward(self, x: torch.Tensor) -> Any:
        y, self.passes = self.layer(x), self.passes + 1
        return self.make(self, x, y) if self.passes == 2 else y


REFUSED: dict[str, tuple[Any, str]] = {
    "a tuple": (lambda stage, x, y: (y, y), r"a tuple, \(tensor.*and a stage makes one tensor out of one"),
    "nothing": (lambda stage, x, y: None, "None, and a stage makes one tensor"),
    "ints": (lambda stage, x, y: y.argmax(-1), r"int64\[3\], and what goes on has gradients: float32, float64"),
    "bools": (lambda stage, x, y: y > 0, r"bool\[3, 6\], and what goes on has gradients"),
    "complex numbers": (lambda stage, x, y: y + 1j, r"complex128\[3, 6\], and what goes on has gradients"),
    "dimensions": (lambda stage, x, y: y.view(3, 1, 1, 1, 1, 1, 1, 1, 6), "and what goes on has at most 8 dimensions"),
    "detached": (lambda stage, x, y: y.detach(), r"float64\[3, 6\], which does not depend on what it was given"),
    "a constant": (lambda stage, x, y: torch.ones_like(y), "which does not depend on what it was given: no gradient can go back"),
    "weights alone": (lambda stage, x, y: stage.layer(torch.ones_like(x)), "which does not depend on what it was given"),
}


CASES = [(what, schedule, "simulated") for what in REFUSED for schedule in (gpipe, zero_bubble, one_f_one_b)]


@pytest.mark.parametrize(("what", "schedule", "world"), [*CASES, ("a tuple", one_f_one_b, "processes")])
def test_what_a_stage_makes_that_cannot_go_on_is_refused_with_stage_micro_batch_and_value(
    what: str, schedule: Any, world: str
) -> None:
    make, told = REFUSED[what]

    def work(comm: Communicator) -> None:
        stage = Made(make) if comm.rank == 1 else nn.Linear(6, 6).double()
        execute(comm, {comm.rank: stage}, schedule(3, 2), *batch(2), loss)

    with pytest.raises(ValueError, match=rf"^rank 1, stage 1, micro-batch 1: Made makes .*{told}"):
        d2lps.run(work, 3) if world == "processes" else d2lps.simulate(work, star(3, 1e9))


@pytest.mark.parametrize(("loss", "told"), [
    (lambda y, target: (y - target).square(), r"the loss makes float64\[3, 6\], and it is to be one number"),
    (lambda y, target: y.sum().item(), "the loss makes a float, .*, and a stage makes one tensor out of one"),
    (lambda y, target: torch.tensor(y.sum().item()), r"the loss makes float32\[\], which does not depend on what it was given"),
    (lambda y, target: (y - target).abs().argmax(), r"the loss makes int64\[\], and what goes on has gradients"),
])  # fmt: skip
def test_a_loss_that_is_none_is_refused(loss: Any, told: str) -> None:
    def work(comm: Communicator) -> None:
        execute(comm, {comm.rank: nn.Linear(6, 6).double()}, one_f_one_b(2, 2), *batch(2), loss)

    with pytest.raises(ValueError, match=f"^rank 1, stage 1, micro-batch 0: {told}"):
        d2lps.simulate(work, star(2, 1e9))


@pytest.mark.parametrize("world", ["processes", "simulated"])
def test_a_stages_own_error_has_a_note_of_where_it_was(world: str) -> None:
    def fail(stage: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        raise KeyError("no such head")

    def work(comm: Communicator) -> None:
        stage = Made(fail) if comm.rank == 1 else nn.Linear(6, 6).double()
        execute(comm, {comm.rank: stage}, one_f_one_b(2, 2), *batch(2), loss)

    with pytest.raises(KeyError, match="no such head") as caught:
        d2lps.simulate(work, star(2, 1e9)) if world == "simulated" else d2lps.run(work, 2)
    assert "in the forward pass of rank 1, stage 1, micro-batch 1" in caught.value.__notes__


def test_a_first_stage_that_is_frozen_and_given_numbers_of_tokens_is_none_of_these() -> None:
    def work(comm: Communicator) -> Any:
        torch.manual_seed(0)
        stages = nn.Embedding(5, 6).requires_grad_(False), nn.Linear(6, 2)
        tokens = list(torch.arange(6).view(2, 3) % 5)
        execute(comm, {comm.rank: stages[comm.rank]}, gpipe(2, 2), tokens, tokens, lambda y, _: y.sum())
        return stages[1].weight.grad if comm.rank else None

    torch.manual_seed(0)
    embed, linear = nn.Embedding(5, 6), nn.Linear(6, 2)
    linear(embed(torch.arange(6) % 5)).sum().backward()
    assert torch.allclose(d2lps.simulate(work, star(2, 1e9))[1], linear.weight.grad)  # type: ignore[arg-type]


def test_what_is_changed_before_the_backward_pass_is_an_error_as_torchs() -> None:
    def work(comm: Communicator) -> None:
        stage = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Dropout(0.5, inplace=True)).double()
        execute(comm, {0: stage}, gpipe(1, 2), *batch(2), loss)

    with pytest.raises(RuntimeError, match=r"float64 \[3, 6\], is at version 1; expected version 0"):
        d2lps.simulate(work, star(1, 1e9))


def test_a_batch_that_was_too_large_leaves_nothing_in_the_account() -> None:
    def work(comm: Communicator) -> list[float]:
        stage, held = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double(), []
        for rows in (8, 2):
            inputs = list(torch.ones(2, rows, 6).double())
            with suppress(d2lps.OutOfMemory):
                execute(comm, {0: stage}, gpipe(1, 2), inputs, inputs, loss)
                held.append(float(rows))
            held.append(comm.memory.held.total())
        return held

    assert d2lps.simulate(work, star(1, 1e9, 0, Device(1e12, 2000, 1e12)))[0] == [0, 2, 0]


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 4), zero_bubble(2, 4)], ids=["1F1B", "zero bubble"])
def test_a_first_stage_that_is_frozen(schedule: Any) -> None:
    """And one tensor with all micro-batches, in place of a list."""
    inputs, targets = map(torch.stack, batch(4))

    def work(comm: Communicator) -> list[bool]:
        stage = network(2)[comm.rank : comm.rank + 1].requires_grad_(comm.rank == 1)
        execute(comm, {comm.rank: stage}, schedule, inputs, targets, loss)
        return [p.grad is not None for p in stage.parameters()]

    assert d2lps.simulate(work, star(2, 1e9)) == [[False] * 2, [True] * 2]


# ---- balanced -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_no_cut_is_better(costs: list[int], stages: int, data: Any) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match=f"stages={stages}, but there are only {len(costs)} layers"):
            cut(costs, stages)
        return
    slow = data.draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=stages, max_size=stages))

    def worst(parts: list[range]) -> int:
        return max(factor * sum(costs[layer] for layer in part) for factor, part in zip(slow, parts, strict=True))

    found = cut(costs, stages, slow)
    assert [layer for part in found for layer in part] == list(range(len(costs))) and all(found)
    places = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1))
    assert worst(found) == min(worst([range(*ends) for ends in pairwise(place)]) for place in places)


def test_it_moves_as_few_bytes_as_it_can_and_says_when_that_pays() -> None:
    schedule, old = one_f_one_b(4, 8), cut([3] * 8, 4)
    change = rebalance([3] * 8, old, [1, 1, 2, 1], [100] * 8, 4, schedule)
    assert len(change.moves) == 1 and change.moves[0][1] == 2
    assert (change.before, change.after, change.seconds, change.pays_after) == (110, 90, 25, 2)
    calm = rebalance([3] * 8, old, [1, 1, 1, 1], [100] * 8, 4, schedule)
    assert calm.moves == [] and calm.pays_after == float("inf") and calm.cut == old


def layer(number: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(32, 32), nn.Tanh())


def trained(comm: Communicator, steps: int, watch: bool) -> tuple[list[float], list[range], list[float]]:
    """Eight equal layers on four ranks; the losses, the cut at the end, and what each step took."""
    schedule, parts, normal, m = one_f_one_b(4, 8), cut([1] * 8, 4), 0.0, 8
    layers = {number: layer(number) for number in parts[comm.rank]}
    adam = torch.optim.Adam([p for one in layers.values() for p in one.parameters()], lr=0.01)
    inputs = list(torch.randn(m, 16, 32, generator=torch.Generator().manual_seed(5)))
    losses, times = [], []
    for step in range(steps):
        busy, start = Counter[int](), comm.now()
        stage = nn.Sequential(*(layers[number] for number in parts[comm.rank]))
        total = execute(comm, {comm.rank: stage}, schedule, inputs, inputs, loss, busy)
        adam.step()
        adam.zero_grad()
        times.append(comm.now() - start)
        losses.append(0.0 if total is None else total.item())
        if watch:
            each = slowness(comm, busy[comm.rank], len(parts[comm.rank]) * m)
            normal = normal or min(each)
            change = rebalance([normal] * 8, parts, [seconds / normal for seconds in each], [3 * 4 * 33 * 32] * 8, 1e9, schedule)
            if change.pays_after < steps - step and change.after < 0.9 * change.before:
                move(comm, layers, parts, change.cut, layer, adam)
                parts = change.cut
    return losses, parts, times


def test_layers_leave_a_stage_that_slows_and_the_training_is_the_same_to_the_bit() -> None:
    chips = spine_leaf(1, 4, bandwidth=1e9, device=Device(1e9, 1e9, 1e15))
    late = d2lps.Slow("gpu2", 2, at=0.012)
    alone, watched = (d2lps.simulate(trained, chips, 12, watch, faults=[late]) for watch in (False, True))
    assert alone[3][0] == watched[3][0] and alone[3][0][0] > alone[3][0][-1] > 0
    assert [len(part) for part in alone[0][1]] == [2, 2, 2, 2] and len(watched[0][1][2]) == 1
    quick, slow, mended = watched[0][2][1], alone[0][2][-1], watched[0][2][-1]
    assert slow / quick > 1.5 > 1.25 > mended / quick > 1  # the slow stage has one layer now, and another has three


def test_layers_do_not_move_without_all_that_their_optimizer_knows() -> None:
    def work(comm: Communicator) -> int:
        old, new = [range(2), range(2, 4)], [range(1), range(1, 4)]
        layers = {number: layer(number) for number in old[comm.rank]}
        sgd = torch.optim.SGD([p for one in layers.values() for p in one.parameters()], lr=0.01)
        sgd.state[next(layers[old[comm.rank][-1]].parameters())]["count"] = 3
        with pytest.raises(ValueError, match="SGD keeps count=3"):
            move(comm, layers, old, new, layer, sgd)
        groups = [{"params": list(one.parameters())} for one in layers.values()]
        with pytest.raises(ValueError, match="the optimizer has 2 groups of parameters: layers move within one"):
            move(comm, layers, old, new, layer, torch.optim.SGD(groups, lr=0.01))
        return len(layers)

    assert d2lps.simulate(work, star(2, 1e9))[:] == [2, 2]


# ---- torch's own --------------------------------------------------------------------------------------------------


def torchs(comm: Communicator) -> list[dict[str, torch.Tensor]]:
    """The gradients of this rank's stages under torch.distributed.pipelining, on the book's own backend, by schedule."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as S

    group, found = d2lps.backend.group(comm), []
    targets = torch.zeros(16, 6).double()
    for kind, chunks in ((S.Schedule1F1B, 1), (S.ScheduleInterleaved1F1B, 2), (S.ScheduleInterleavedZeroBubble, 2)):
        net, count = network(4), 2 * chunks
        mine = range(comm.rank, count, 2)
        cuts = {stage: net[stage * 4 // count : (stage + 1) * 4 // count] for stage in mine}
        stages = [PipelineStage(module, stage, count, torch.device("cpu"), group=group) for stage, module in cuts.items()]
        schedule = kind(stages if chunks > 1 else stages[0], 4, loss_fn=loss)
        inputs = [torch.stack(batch(16)[0])[:, 0]] if comm.rank == 0 else []
        schedule.step(*inputs, **({"target": targets} if comm.rank == 1 else {}))
        found.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    dist.destroy_process_group()
    return found


def ours(comm: Communicator, schedule: Any, count: int) -> dict[str, torch.Tensor]:
    net = network(4)
    mine = {stage: net[stage * 4 // count : (stage + 1) * 4 // count] for stage in range(comm.rank, count, 2)}
    inputs = torch.stack(batch(16)[0])[:, 0].chunk(4)
    execute(comm, mine, schedule, inputs, torch.zeros(16, 6).double().chunk(4), lambda y, t: loss(y, t) / 4)
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def test_gradients_are_those_of_torchs_schedules() -> None:
    theirs = d2lps.run(torchs, 2)
    for number, (schedule, count) in enumerate(((one_f_one_b(2, 4), 2), (interleaved(2, 4, 2), 4), (zero_bubble(2, 4), 2))):
        for rank, gradients in enumerate(d2lps.simulate(ours, star(2, 1e9), schedule, count)):
            expected = theirs[rank][number] if number < 2 else theirs[0][number] | theirs[1][number]
            largest = max(gradient.abs().max() for gradient in expected.values())
            assert number == 2 or gradients.keys() == expected.keys()
            assert max((gradients[name] - expected[name]).abs().max() for name in gradients) <= 1e-10 * largest
