"""Checkpoints of many ranks: what is loaded is what was saved, to the bit, however either is cut and wherever a writer stops."""

import os
import random
import re
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import d2lps
from d2lps.comm import Event
from d2lps.compress import ErrorFeedback, one_bit
from d2lps.disk import CheckpointDamaged, CheckpointMissing
from d2lps.parallel import (
    Checkpoints,
    DiLoCo,
    LocalSGD,
    LossScaler,
    Mesh,
    NoiseScale,
    Piece,
    Replicas,
    Zero,
    module_pieces,
    optimizer_pieces,
)
from d2lps.parallel.data.noise import estimate
from d2lps.parallel.saving import saved
from d2lps.parallel.saving.agreement import share_out
from d2lps.parallel.saving.checkpoint import gathered, load, save
from d2lps.parallel.saving.pieces import copy_common, flaw, overlap
from d2lps.parallel.saving.saved import fill, look
from d2lps.topology import star

WORLDS = {"processes": d2lps.run, "simulated": lambda fn, p, *args: d2lps.simulate(fn, star(p, 1e9, 1e-6), *args)}


# ---- pieces -------------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw, shape):
    box = tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    size = torch.Size([end - begin for begin, end in box]).numel()
    return box, *sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))


@st.composite
def shapes_and_cuts(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    return shape, draw(cuts(shape)), draw(cuts(shape))


@settings(max_examples=300, deadline=None)
@given(shapes_and_cuts())
def test_two_cuts_have_in_common_what_they_have_in_common(given_):
    shape, one, other = given_
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    here, there = (whole[tuple(slice(*ends) for ends in box)].reshape(-1)[a:b].clone() for box, a, b in (one, other))
    into = Piece(torch.full_like(here, -1), shape, *one)
    count = copy_common(into, Piece(there, shape, *other))
    common = torch.isin(here, there)
    assert torch.equal(into.tensor, torch.where(common, here, -1)) and count == common.sum()
    assert overlap(one, other) or not count


@pytest.mark.parametrize(("cut", "told"), [
    ((((0, 2),), 0, 2), "do not lie in a tensor of shape"), ((((0, 2), (1, 5)), 0, 8), "do not lie in a tensor of shape"),
    ((((0, 2), (2, 4)), 0, 5), "0:5 of the box"), ((((0, 2), (2, 4)), 0, 3), r"float32\[4\] can't be elements 0:3"),
])  # fmt: skip
def test_a_piece_that_does_not_fit_is_refused(cut, told):
    with pytest.raises(ValueError, match=told):
        Piece(torch.zeros(4), (2, 4), *cut)


HALVES = [(((0, 2), (0, 2)), 0, 4), (((0, 2), (2, 4)), 0, 4)]


@pytest.mark.parametrize(("pieces", "told"), [
    (HALVES, ""), ([*HALVES[:1], (HALVES[1][0], 0, 1), (HALVES[1][0], 1, 4)], ""),
    (HALVES[:1], "4 of 8 elements"), (HALVES[:1] * 2, "overlap"), ([*HALVES, HALVES[0]], "12 of 8 elements"),
    ([(HALVES[0][0], 0, 2), (HALVES[0][0], 1, 3), HALVES[1]], "overlap"),
    ([HALVES[0], (((0, 2), (0, 4)), 0, 4)], "overlap"),
])  # fmt: skip
def test_pieces_make_up_a_whole_or_not(pieces, told):
    assert flaw((2, 4), pieces) == told or (told and told in flaw((2, 4), pieces))


# ---- who writes what ----------------------------------------------------------------------------------------------------


def test_what_many_hold_is_written_once_and_shared_out():
    table = [[f"w{k}", "float32", [size], [[0, size]], 0, size] for k, size in enumerate((8, 4, 3, 1, 0))]
    writers = {name: [rank for rank, *_ in whole["pieces"]] for name, whole in share_out([table] * 2).items()}
    assert writers == {"w0": [0], "w1": [1], "w2": [1], "w3": [1], "w4": []}


@pytest.mark.parametrize(("second", "told"), [
    (["w", "float32", [5], [[0, 5]], 0, 5], r"'w' is float32\[4\], and float32\[5\] on rank 1"),
    (["w", "float16", [4], [[0, 4]], 0, 4], r"'w' is float32\[4\], and float16\[4\] on rank 1"),
    (["w", "float32", [4], [[0, 4]], 3, 4], r"'w', float32\[4\]: 3 of 4 elements are there"),
])  # fmt: skip
def test_pieces_of_unlike_wholes_are_refused(second, told):
    with pytest.raises(ValueError, match=told):
        share_out([[["w", "float32", [4], [[0, 4]], 0, 2]], [second]])


# ---- saved under one plan, loaded under another ---------------------------------------------------------------------------

SHAPES = {"embed.weight": (12, 4), "block.up": (4, 24), "block.down": (24, 4), "block.bias": (4,), "scale": (), "none": (0, 3)}
DIMS = {"embed.weight": 0, "block.up": 1, "block.down": 0}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def wholes():
    numbers = torch.Generator().manual_seed(7)
    made = {name: torch.randint(-99, 99, shape, generator=numbers) for name, shape in SHAPES.items()}
    return {name: whole.to(DTYPES[k % 4]) for k, (name, whole) in enumerate(made.items())}


def pieces_of(mesh, zero):
    """As a rank of this mesh holds them: experts' or tp's boxes, and flat ranges of these, of unequal lengths, over `data`."""
    stages = sorted(SHAPES)
    mine = stages[mesh.pp.rank :: mesh.pp.size] if mesh.pp.size > 1 else stages
    found = {}
    for name in mine:
        whole = wholes()[name]
        box = [[0, n] for n in whole.shape]
        if name in DIMS and mesh.tp.size > 1:
            part = whole.shape[DIMS[name]] // mesh.tp.size
            box[DIMS[name]] = [part * mesh.tp.rank, part * (mesh.tp.rank + 1)]
        flat = whole[tuple(slice(*ends) for ends in box)].reshape(-1)
        ends = [flat.numel() * (k * (k + 1)) // (mesh.data.size * (mesh.data.size + 1)) for k in range(mesh.data.size + 1)]
        start, stop = (ends[mesh.data.rank], ends[mesh.data.rank + 1]) if zero else (0, flat.numel())
        if start < stop or not flat.numel():
            found[name] = Piece(flat[start:stop].clone(), tuple(whole.shape), tuple(map(tuple, box)), start, stop)
    return found


PLANS = [{}, {"dp": 2}, {"dp": 3, "zero": True}, {"tp": 2}, {"tp": 4}, {"tp": 2, "dp": 2, "zero": True}, {"pp": 3},
         {"pp": 2, "tp": 2, "dp": 2}, {"pp": 2, "tp": 2, "dp": 2, "zero": True}, {"dp": 8, "zero": True}]  # fmt: skip


def ranks_of(plan):
    return plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1)


def made(comm, plan):
    return pieces_of(Mesh(comm, **{axis: n for axis, n in plan.items() if axis != "zero"}), plan.get("zero"))


def saving(comm, folder, plan, step=1):
    save(comm, folder, step, made(comm, plan), {"plan": plan})


def loading(comm, folder, plan):
    pieces = made(comm, plan)
    right = {name: piece.tensor.clone() for name, piece in pieces.items()}
    for piece in pieces.values():
        piece.tensor.zero_()
    manifest = load(comm, folder, pieces)
    return manifest.extra, all(torch.equal(piece.tensor, right[name]) for name, piece in pieces.items()), len(pieces)


@pytest.mark.parametrize("first", PLANS, ids=str)
def test_what_one_plan_saves_any_other_loads(first, tmp_path):
    d2lps.simulate(saving, star(ranks_of(first), 1e9, 1e-6), tmp_path, first)
    for plan in PLANS:
        run = d2lps.simulate(loading, star(ranks_of(plan), 1e9, 1e-6), tmp_path, plan)
        assert all(extra == {"plan": first} and right for extra, right, _ in run)
        assert sum(count for *_, count in run) >= len(SHAPES)
    stored = sum(load_file(path)[name].nbytes for path in tmp_path.rglob("*.safetensors") for name in load_file(path))
    assert stored == sum(whole.nbytes for whole in wholes().values()), "replicas are written once"


def test_on_processes_too_and_a_whole_is_a_file_that_any_program_reads(tmp_path):
    plan = {"tp": 2, "dp": 2, "zero": True}
    d2lps.run(saving, 4, tmp_path, plan)
    assert d2lps.run(loading, 4, tmp_path, {"pp": 2, "dp": 2})[:] == [({"plan": plan}, True, 3)] * 4
    d2lps.run(saving, 1, tmp_path, {}, 2)
    [path] = look(tmp_path).folder.glob("*.safetensors")
    assert all(torch.equal(tensor, wholes()[name]) for name, tensor in load_file(path).items())


# ---- what a run is, beside its weights ----------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def whole_state(folder, step=None):
    """All of a checkpoint, by one rank."""
    wholes = {name: torch.zeros(about["shape"], dtype=getattr(torch, about["dtype"]))
              for name, about in look(folder, step).tensors.items()}  # fmt: skip
    pieces = {name: Piece(whole, tuple(whole.shape)) for name, whole in wholes.items()}
    fill(look(folder, step), pieces)
    return wholes


def half_frozen():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.Linear(4, 2))
    net[2].requires_grad_(False)
    return net


def stepped(zero, net, seed):
    """The weights after a step; on all ranks with the same batch, so that their number makes no difference."""
    net(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    zero.step()
    with zero.gathered():
        return nn.utils.parameters_to_vector(net.parameters()).detach()


def state_of(zero, net):
    with zero.gathered():
        assert module_pieces(net).keys() == net.state_dict().keys(), "all that there is"
        return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def zero_saving(comm, folder, stage, group):
    torch.manual_seed(comm.rank)
    zero = Zero(comm, net := half_frozen(), adam, stage, group)
    for seed in range(3):
        stepped(zero, net, seed)
    save(comm, folder, 3, zero.pieces())
    return state_of(zero, net), stepped(zero, net, 3)


def zero_loading(comm, folder, stage, group):
    torch.manual_seed(comm.rank)
    zero = Zero(comm, net := half_frozen(), adam, stage, group)
    assert load(comm, folder, zero.pieces).step == 3
    zero.refresh()
    save(comm, folder, 4, zero.pieces())
    return state_of(zero, net), stepped(zero, net, 3)


ZEROS = [(1, 1, None), (2, 2, None), (3, 4, None), (3, 4, 2), (1, 4, 1), (2, 3, None)]  # stage, ranks, group


@pytest.mark.parametrize("first", ZEROS, ids=str)
def test_all_of_a_model_and_its_optimizer_go_from_any_stage_and_ranks_to_any(first, tmp_path):
    world, (stage, ranks, group) = WORLDS["processes" if first == (2, 3, None) else "simulated"], first
    [(state, after), *_] = world(zero_saving, ranks, tmp_path, stage, group)
    for stage, ranks, group in ZEROS:
        for found, weights in world(zero_loading, ranks, tmp_path, stage, group):
            assert torch.allclose(weights, after, atol=1e-6)
            assert all(torch.equal(state[name], tensor) and tensor.isfinite().all() for name, tensor in found.items())
        before, again = whole_state(tmp_path, 3), whole_state(tmp_path, 4)
        assert before.keys() == again.keys() and len(before) == 6 * 4 + 2 + 3, "trained with Adam, frozen, and buffers"
        assert all(torch.equal(whole, again[name]) for name, whole in before.items())
        shutil.rmtree(look(tmp_path, 4).folder)


def test_a_plain_module_loads_what_zero_has_saved(tmp_path):
    def work(comm):
        state, _ = zero_saving(comm, tmp_path, 3, None)
        load(comm, tmp_path, module_pieces(net := half_frozen()))
        return all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())

    assert list(d2lps.simulate(work, star(2, 1e9))) == [True] * 2


class Scaled(nn.Module):
    """Scalars, whose state looks like a count of steps; layer: and a weight that is none."""

    def __init__(self, layer):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(4, 4) if layer else nn.Identity()

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scalars_state_is_no_count_of_steps(ranks, layer, kind, tmp_path):
    def step(zero, net):
        net(torch.arange(8.0).view(2, 4)).square().mean().backward()
        zero.step()
        with zero.gathered():
            return net.scale.item(), net.shift.item()

    def work(comm):
        torch.manual_seed(0)
        zero = Zero(comm, net := Scaled(layer), kind, 3)
        step(zero, net)
        save(comm, tmp_path, 1, zero.pieces())
        expected = step(zero, net)
        zero = Zero(comm, net := Scaled(layer), kind, 3)
        load(comm, tmp_path, zero.pieces)
        zero.refresh()
        assert step(zero, net) == expected

    d2lps.simulate(work, star(ranks, 1e9, 1e-6))


# ---- copies that should be alike, and parameters that are elsewhere -------------------------------------------------------


def beside(comm, odd):
    """A module whose batch norm has seen other batches on the odd ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    net(torch.full((5, 4), 1.0) + torch.arange(5.0).view(5, 1) * (comm.rank + 1 if comm.rank in odd else 1))
    return net


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("ranks", "odd", "told"), [
    (2, {1}, "1.running_mean: rank 0 and rank 1 have different ones: no majority"),
    (3, {2}, "1.running_mean: rank 2 differs from ranks 0, 1"),
    (5, {1, 3}, "1.running_mean: ranks 1, 3 differ from ranks 0, 2, 4"),
])  # fmt: skip
def test_copies_that_are_not_alike_are_named_on_all_ranks_and_nothing_is_written(world, ranks, odd, told, tmp_path):
    def work(comm):
        net, heard = beside(comm, odd), []
        for act in (lambda pieces: save(comm, tmp_path, 1, pieces), lambda pieces: gathered(comm, pieces)):
            with pytest.raises(ValueError, match=r"and 1 more: 1\.running_var; .*may_differ") as caught:
                act(module_pieces(net))
            heard.append(str(caught.value))
        assert float(f"{net[1].running_mean.double().norm():.9g}") in map(float, re.findall(r"([\d.]+) on rank", heard[0]))
        return heard

    heard = WORLDS[world](work, ranks)
    assert len({words for both in heard for words in both}) == 1 and heard[0][0].startswith(told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("may_differ", [["*.running_*"], "1.running_???*", ["1.running_mean", "1.running_var"]], ids=str)
def test_of_what_may_differ_the_lowest_ranks_is_saved(may_differ, tmp_path):
    def work(comm):
        net = beside(comm, set(range(comm.size)))
        save(comm, tmp_path, 1, module_pieces(net), may_differ=may_differ)
        return net.state_dict()

    first = d2lps.simulate(work, star(4, 1e9, 1e-6))[0]
    assert all(torch.equal(whole, first[name]) for name, whole in whole_state(tmp_path, 1).items())


def test_each_save_looks_again_and_goes_on_after_a_refusal(tmp_path):
    def work(comm):
        weight, checkpoints = torch.zeros(1001), Checkpoints(comm, tmp_path)
        pieces = {"w": Piece(weight[1:], (1000,))}  # which does not begin at a whole word
        checkpoints.save(1, pieces).wait()
        weight[700] += comm.rank == 1
        with pytest.raises(ValueError, match="w: rank 1 differs from ranks 0, 2"):
            checkpoints.save(2, pieces)
        weight.fill_(3)
        checkpoints.save(3, pieces).wait()

    d2lps.simulate(work, star(3, 1e9, 1e-6))
    assert is_whole(tmp_path) == 3


@pytest.mark.parametrize("world", WORLDS)
def test_a_parameter_that_zero_3_has_taken_away_is_refused_by_name(world, tmp_path):
    def work(comm):
        zero = Zero(comm, net := nn.Sequential(model(), nn.Linear(3, 1)), adam, 3)
        told = "0.0.weight is not on this rank now"
        for act in (lambda: save(comm, tmp_path, 1, module_pieces(net)), lambda: module_pieces(net) | zero.pieces(),
                    net.state_dict, nn.Sequential(net).state_dict, Replicas(comm, net).check):  # fmt: skip
            with pytest.raises(ValueError, match=told):
                act()
        with pytest.raises(ValueError, match=r"1\.weight is not on this rank now"):
            net[1].state_dict(prefix="1.")
        with zero.gathered():
            Replicas(comm, net).check()
            save(comm, tmp_path, 1, module_pieces(net))
            expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        assert all(torch.equal(whole, expected[name]) for name, whole in whole_state(tmp_path, 1).items())

    WORLDS[world](work, 2)


# ---- whatever has a state_dict --------------------------------------------------------------------------------------------


class Dice:
    """Random numbers, each rank's own, as a state."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)

    def state_dict(self):
        return self.generator.get_state()

    def load_state_dict(self, state):
        self.generator.set_state(state)


class Worker:
    """A rank that trains by itself and talks rarely: all that it is, by name."""

    def __init__(self, comm, kind):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.dice = Dice(comm.rank)
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.inner, 20)
        self.comm, self.feedback = comm, ErrorFeedback(one_bit())
        self.outer = {
            "local": lambda: LocalSGD(comm, self.net.parameters(), every=3),
            "diloco": lambda: DiLoCo(comm, self.net.parameters(), every=4, codec=self.feedback),
            "streaming": lambda: DiLoCo(comm, self.net.parameters(), every=4, fragments=2, delay=1, keep=0.25),
        }[kind]()
        self.states = {"net": self.net, "inner": self.inner, "schedule": self.schedule, "outer": self.outer, "dice": self.dice}

    def step(self):
        self.inner.zero_grad()
        self.net(torch.randn(4, 5, generator=self.dice.generator)).square().sum().backward()
        self.inner.step()
        self.schedule.step()
        self.outer.step()
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).tolist()


@pytest.mark.parametrize(("world", "at"), [("simulated", 3), ("simulated", 5), ("simulated", 8), ("processes", 5)])
@pytest.mark.parametrize(("kind", "ranks"), [("local", 2), ("diloco", 3), ("streaming", 2)])
def test_who_talks_rarely_goes_on_from_the_midst_of_a_round(kind, ranks, at, world, tmp_path):
    def work(comm, again):
        worker = Worker(comm, kind)
        if again:
            assert load(comm, tmp_path, {}, states=worker.states).step == at
        else:
            for _ in range(at):
                worker.step()
            save(comm, tmp_path, at, {}, states=worker.states)
        return [worker.step() for _ in range(at, 14)]

    assert WORLDS[world](work, ranks, False)[:] == WORLDS[world](work, ranks, True)[:]
    if kind == "diloco":
        shared = [name for name in look(tmp_path).tensors if name.startswith("outer/shared")]
        assert shared == ["outer/shared"], "what all have alike is written once"


def test_what_is_each_ranks_own_is_for_as_many_ranks_and_what_is_alike_for_any(tmp_path):
    def work(comm, own):
        feedback, scaler = ErrorFeedback(one_bit()), LossScaler(2.0**7, growth_interval=5, good=3)
        feedback.encode("w", torch.arange(8.0) * (1 + own * comm.rank))
        noise = NoiseScale(comm, nn.Linear(1, 1).parameters(), 4)
        noise.add(3.0, 2.0)
        states = {"feedback": feedback, "scaler": scaler, "noise": noise}
        save(comm, tmp_path, 1, {"w": Piece(torch.zeros(3), (3,))}, states=states)
        return feedback.left["w"].tolist()

    def again(comm, **more):
        feedback, scaler = ErrorFeedback(one_bit()), LossScaler()
        load(comm, tmp_path, {}, states={"feedback": feedback, "scaler": scaler, **more})
        return feedback.left["w"].tolist(), feedback.turns["w"], scaler

    def noises(comm):
        noise = NoiseScale(comm, nn.Linear(1, 1).parameters(), 4)
        again(comm, noise=noise)
        return noise.steps, noise.gradient, noise.noise

    for own, counts in ((False, (1, 2, 3)), (True, (2,))):
        left = list(d2lps.simulate(work, star(2, 1e9), own))
        for ranks in counts:
            expected = [(each, 1, LossScaler(2.0**7, growth_interval=5, good=3)) for each in (left if own else left[:1] * ranks)]
            assert list(d2lps.simulate(again, star(ranks, 1e9))) == expected
    with pytest.raises(ValueError, match="the state 'feedback' is of 2 ranks, each has its own, and there are 3"):
        d2lps.simulate(again, star(3, 1e9))
    with pytest.raises(ValueError, match=r"has no state 'schedule': it has \['feedback', 'scaler', 'noise'\]"):
        d2lps.simulate(lambda comm: again(comm, schedule=LossScaler()), star(2, 1e9))

    assert d2lps.simulate(noises, star(2, 1e9))[0] == (1, *map(pytest.approx, estimate(3.0, 2.0, 4, 2)))


class Odd:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_state_comes_back_as_it_was(tmp_path):
    state = {"a": [1, 2.5, "x", None, True], 7: (1, torch.arange(3)), "n": {"m": Counter({"q": 2, 3: 4})},
             ("k", 1): torch.tensor(2.0), "inf": float("inf"),
             "none": torch.zeros(0, 2), "half": torch.ones(2, 2).half().t()}  # fmt: skip

    def work(comm):
        save(comm, tmp_path, 1, {}, states={"odd": Odd(state)})
        load(comm, tmp_path, {}, states={"odd": (odd := Odd(None))})
        return odd.state

    for found in d2lps.simulate(work, star(2, 1e9)):
        assert repr(found) == repr(state) and type(found["n"]["m"]) is Counter

    def bad(comm):
        save(comm, tmp_path, 2, {}, states={"odd": Odd({"a": [print] if comm.rank else [1]})})

    with pytest.raises(ValueError, match="rank 1: odd/a/0 is <built-in function print>: saved are tensors, numbers"):
        d2lps.simulate(bad, star(2, 1e9))
    assert look(tmp_path).step == 1


# ---- in the background --------------------------------------------------------------------------------------------------


def numbers(comm, value, size=1000):
    """A tensor that the ranks share out, every number of it the same."""
    ends = [size * k // comm.size for k in range(comm.size + 1)]
    start, stop = ends[comm.rank : comm.rank + 2]
    return {"w": Piece(torch.full((stop - start,), float(value)), (size,), None, start, stop)}


def is_whole(folder, step=None):
    """The step of a checkpoint all of whose numbers are its step's."""
    manifest = look(folder, step)
    fill(manifest, {"w": (piece := Piece(torch.zeros(1000), (1000,)))})
    assert (piece.tensor == manifest.step).all()
    return manifest.step


def test_what_is_changed_after_a_save_is_not_in_it_and_a_second_save_waits(tmp_path):
    def work(comm):
        checkpoints, order = Checkpoints(comm, tmp_path), []
        held, real = Event(), saved.write
        saved.write = lambda *args: (comm_wait(held), order.append("written"), real(*args))[2]
        pieces = numbers(comm, 1)
        work = checkpoints.save(1, pieces, extra := {"done": 1})
        pieces["w"].tensor.fill_(2.0)
        extra["done"] = 2
        order.append(f"done: {work.is_done()}")
        held.set()
        checkpoints.save(2, pieces)
        order.append("saved")
        checkpoints.wait()
        saved.write = real
        return order[:3], checkpoints.stall > 0, checkpoints.written

    def comm_wait(event):
        event.exception()

    assert d2lps.run(work, 2)[:] == [(["done: False", "written", "saved"], True, 2000)] * 2
    assert [is_whole(tmp_path, step) for step in (1, 2)] == [1, 2] and look(tmp_path, 1).extra == {"done": 1}


@pytest.mark.parametrize("world", WORLDS)
def test_where_one_rank_cannot_write_all_hear_of_it_and_go_on(world, tmp_path):
    def work(comm):
        checkpoints, real = Checkpoints(comm, tmp_path), saved.save_file

        def full(tensors, path):
            if path.name == "rank-1.safetensors" and "step-2." in str(path):
                path.write_bytes(b"half")
                raise OSError(28, "No space left on device")
            real(tensors, path)

        saved.save_file = full
        checkpoints.save(1, numbers(comm, 1))
        checkpoints.save(2, numbers(comm, 2))
        try:
            checkpoints.save(3, numbers(comm, 3))
        except OSError as error:
            told = str(error)
        finally:
            comm.barrier()
            saved.save_file = real
        before = look(tmp_path).step
        checkpoints.save(4, numbers(comm, 4)).wait()
        return told, before

    for told, before in WORLDS[world](work, 3):
        assert told.startswith("rank 1: cannot write") and "No space left" in told and before == 1
    assert is_whole(tmp_path) == 4 and not list(tmp_path.glob("step-2.*"))


def test_only_the_last_ones_stay_and_one_that_went_back_is_the_newest(tmp_path):
    for step in (5, 100, 20):
        d2lps.simulate(lambda comm, step: save(comm, tmp_path, step, numbers(comm, step)), star(2, 1e9, 1e-6), step)
    assert is_whole(tmp_path) == 20 and is_whole(tmp_path, 100) == 100 and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(CheckpointMissing, match=r"no checkpoint of step 5 in .*: it has steps \[100, 20\]"):
        look(tmp_path, 5)
    for keep in (0, 1.5):
        with pytest.raises(ValueError, match=f"keep={keep}"):
            Checkpoints(None, tmp_path, keep=keep)


def test_what_else_lies_in_the_folder_stays_and_is_in_nobodys_way(tmp_path):
    def saves(step):
        d2lps.simulate(lambda comm: save(comm, tmp_path, step, numbers(comm, step)), star(2, 1e9, 1e-6))

    saves(1)
    shutil.copytree(tmp_path / "step-1.0", tmp_path / "step-1.0.copy")
    (tmp_path / "step-1.notes").mkdir()
    (tmp_path / "step-1.notes" / "read me").write_text("the good one")
    (tmp_path / "step-1.txt").write_text("likewise")
    saves(2)
    assert is_whole(tmp_path) == 2 and is_whole(tmp_path, 1) == 1
    assert (tmp_path / "step-1.notes" / "read me").exists() and (tmp_path / "step-1.txt").exists()


@pytest.mark.parametrize("step", [1.5, True, "12", None, -1])
def test_a_step_that_could_not_be_found_again_is_refused(step, tmp_path):
    with pytest.raises(ValueError, match=f"step={step!r} is not a whole number from 0 up"):
        d2lps.simulate(lambda comm: save(comm, tmp_path, step, {}), star(2, 1e9, 1e-6))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("step", "extra"), [(lambda rank: rank, None), (lambda rank: 1, "rank")])
def test_ranks_must_mean_the_same_moment(step, extra, tmp_path):
    with pytest.raises(d2lps.Mismatch, match="save"):
        d2lps.simulate(lambda comm: save(comm, tmp_path, step(comm.rank), {}, extra and comm.rank), star(2, 1e9, 1e-6))
    assert not list(tmp_path.iterdir())


# ---- wherever a writer stops --------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


def stop_at(count, die):
    """Let what touches the disk count, and `die` at the count-th time: before it is done, or when half of it is."""
    done = [0]

    def wrapped(call, half=None):
        def counted(*args, **options):
            done[0] += 1
            if done[0] == count:
                if half:
                    half(*args)
                die()
            return call(*args, **options)

        return counted

    places = [(os, name) for name in ("mkdir", "fsync", "rename", "unlink", "rmdir")]
    real = [(owner, name, getattr(owner, name)) for owner, name in (*places, (saved, "save_file"), (Path, "write_text"))]
    halves = {"save_file": lambda _, path: path.write_bytes(b"half"), "write_text": lambda path, _: path.write_bytes(b"half")}
    for owner, name, call in real:
        setattr(owner, name, wrapped(call, halves.get(name)))
    return done, lambda: [setattr(*put_back) for put_back in real]


def test_wherever_all_stop_the_last_one_is_whole(tmp_path):
    def die():
        raise Stopped

    def saves(folder, step):
        d2lps.simulate(lambda comm: save(comm, folder, step, numbers(comm, step)), star(3, 1e9, 1e-6))

    count, renamed = 0, 0
    while True:
        count, folder = count + 1, tmp_path / str(count)
        saves(folder, 1)
        saves(folder, 2)
        done, put_back = stop_at(count, die)
        try:
            saves(folder, 3)
        except Stopped:
            pass
        finally:
            put_back()
        if done[0] < count:
            break
        newest = is_whole(folder)
        renamed += newest == 3
        assert is_whole(folder, newest - 1) == newest - 1 or newest == 3, "the one before goes when there is another"
        saves(folder, 4)
        assert is_whole(folder) == 4 and len(list(folder.iterdir())) == 2, "what was never finished is swept away"
    assert count > 15 and 3 < renamed < count - 5


def test_ranks_that_are_killed_while_they_save_leave_the_last_one_whole(tmp_path):
    def work(comm, life):
        dice = random.Random(life)
        victim, at = dice.randrange(comm.size), [dice.randrange(1, 30) for _ in range(comm.size)]
        if life > 1 or comm.rank == victim:  # in the first two lives one dies, then all
            stop_at(at[comm.rank], lambda: os.kill(os.getpid(), signal.SIGKILL))
        checkpoints, begin = Checkpoints(comm, tmp_path), is_whole(tmp_path) if life else 0
        for step in range(begin + 1, begin + 8):
            checkpoints.save(step, numbers(comm, step))

    newest = []
    for life in range(5):
        with suppress(d2lps.RankDied):
            d2lps.run(work, 3, life)
        newest.append(is_whole(tmp_path))
    assert newest == sorted(newest) and newest[-1] > newest[0] > 0, newest


# ---- what is refused ----------------------------------------------------------------------------------------------------


def test_what_is_not_there_or_another_is_refused_with_its_name_before_anything_changes(tmp_path):
    def work(comm):
        save(comm, tmp_path, 1, {"w": Piece(torch.ones(4, 2), (4, 2)), "b": Piece(torch.ones(3), (3,))})
        pieces = {"b": Piece(torch.zeros(3), (3,)), "w": Piece(torch.zeros(4, 2), (4, 2))}
        for name, wrong, told in [
            ("w", Piece(torch.zeros(2, 4), (2, 4)), "'w' is float32[4, 2] in it, and float32[2, 4] here"),
            ("w", Piece(torch.zeros(4, 2).half(), (4, 2)), "'w' is float32[4, 2] in it, and float16[4, 2] here"),
            ("w", Piece(torch.zeros(2, 4).t(), (4, 2)), "'w' does not lie in one run"), ("v", pieces["w"], "'v' is not in it"),
        ]:  # fmt: skip
            with pytest.raises(ValueError) as caught:
                load(comm, tmp_path, pieces | ({name: wrong} if comm.rank else {}))
            assert f"rank 1: {tmp_path}" in str(caught.value) and told in str(caught.value)
        with pytest.raises(CheckpointMissing, match="rank 0: no checkpoint in"):
            load(comm, tmp_path / "elsewhere", pieces)
        return pieces["b"].tensor.sum().item()

    assert d2lps.simulate(work, star(2, 1e9, 1e-6))[:] == [0.0, 0.0]


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = 1


@pytest.mark.parametrize("kind", ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Counting", "NAdam",
                                  "RAdam", "RMSprop", "Rprop", "SGD"])  # fmt: skip
def test_an_optimizer_that_keeps_more_than_tensors_is_refused(kind):
    layer = nn.Linear(3, 2)
    optimizer = {"Counting": Counting}.get(kind, getattr(torch.optim, kind, None))(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = {p: {name: piece} for (name, piece), p in zip(module_pieces(layer).items(), layer.parameters(), strict=True)}
    if kind == "Counting":
        with pytest.raises(ValueError, match="Counting keeps count=1, and only tensors can be saved or moved"):
            optimizer_pieces(optimizer, held)
    else:
        known = [value for state in optimizer.state.values() for value in state.values() if value is not None]
        assert len(optimizer_pieces(optimizer, held)) == len(known)


def test_damage_is_found_and_named(tmp_path):
    def work(comm, into=None):
        if into is None:
            return save(comm, tmp_path, 1, numbers(comm, 1))
        with pytest.raises(CheckpointDamaged, match=into):
            load(comm, tmp_path, numbers(comm, 0))

    d2lps.simulate(work, star(2, 1e9, 1e-6))
    folder = look(tmp_path).folder
    for name in ("rank-0.safetensors", "rank-1.safetensors", "manifest.json"):
        path, told = folder / name, name.replace(".", r"\.")
        right = path.read_bytes()
        for wrong in (right[:-70], right[:-9] + b"x" + right[-8:], right[: len(right) // 2], b"", None):
            path.unlink() if wrong is None else path.write_bytes(wrong)
            if wrong is None and name == "manifest.json":
                continue  # then it is no checkpoint
            d2lps.simulate(work, star(3, 1e9, 1e-6), told)
        path.write_bytes(right)
    assert is_whole(tmp_path) == 1


# ---- beside torch's -----------------------------------------------------------------------------------------------------


def test_what_torchs_distributed_checkpoint_saves_and_loads_is_the_same(tmp_path):
    """DCP is the oracle: a tensor sharded by rows over two ranks, and a replicated one, saved by both and loaded by both."""

    def work(comm):
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (comm.size,))
        whole = torch.randn(7, 3, generator=torch.Generator().manual_seed(3))
        theirs = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": distribute_tensor(whole[0], mesh, [Replicate()])}
        first = comm.rank * 4  # torch.chunk's 4 and 3 rows
        local = theirs["w"].to_local()
        ours = {"w": Piece(local.clone(), (7, 3), ((first, first + len(local)), (0, 3))), "b": Piece(whole[0].clone(), (3,))}
        save(comm, tmp_path / "ours", 1, ours)
        dcp.save(theirs, checkpoint_id=tmp_path / "theirs")
        columns = {"w": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(1)]), "b": torch.zeros(3)}
        dcp.load(columns, checkpoint_id=tmp_path / "theirs")
        first = comm.rank * 2
        local = columns["w"].to_local()
        again = {"w": Piece(torch.zeros_like(local).contiguous(), (7, 3), ((0, 7), (first, first + local.shape[1]))),
                 "b": Piece(torch.zeros(3), (3,))}  # fmt: skip
        load(comm, tmp_path / "ours", again)
        dist.barrier()
        return torch.equal(again["w"].tensor, local) and torch.equal(again["b"].tensor, columns["b"])

    assert d2lps.run(work, 2, backend="gloo")[:] == [True, True]
    theirs = sum(path.stat().st_size for path in (tmp_path / "theirs").glob("*.distcp"))
    ours = sum(path.stat().st_size for path in (tmp_path / "ours").rglob("*.safetensors"))
    assert 4 * 24 < ours < theirs, "replicas are written once by both; each of DCP's tensors is a zip file of its own"
