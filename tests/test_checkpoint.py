"""Checkpoints of many ranks: what is loaded is what was saved, to the bit, however either is cut and wherever a writer stops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import d2lps
from d2lps.parallel import Mesh, Piece
from d2lps.parallel.checkpoint import load, save, share_out
from d2lps.parallel.pieces import copy_common, flaw, overlap
from d2lps.parallel.saved import look
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


@pytest.mark.parametrize("saved", PLANS, ids=str)
def test_what_one_plan_saves_any_other_loads(saved, tmp_path):
    d2lps.simulate(saving, star(ranks_of(saved), 1e9, 1e-6), tmp_path, saved)
    for plan in PLANS:
        run = d2lps.simulate(loading, star(ranks_of(plan), 1e9, 1e-6), tmp_path, plan)
        assert all(extra == {"plan": saved} and right for extra, right, _ in run)
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
