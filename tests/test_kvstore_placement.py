"""Where keys and rows live, and what moves when servers come and go."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps.kvstore.core.hashing import HashRing, point
from d2lps.kvstore.core.placement import Move, Placement, join_parts, key_of

F32 = torch.float32


def test_points_are_the_same_in_every_process() -> None:
    assert point("w") == 0x9E6B28A282509220
    assert [HashRing(range(4)).owner(f"layer {i}") for i in range(6)] == [
        HashRing([3, 1, 0, 2]).owner(f"layer {i}") for i in range(6)
    ]


def test_consistent_hashing_moves_few_keys_and_only_to_the_newcomer() -> None:
    keys = [f"key {i}" for i in range(4000)]
    before, after = ([HashRing(range(servers)).owner(key) for key in keys] for servers in (7, 8))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {7}
    assert 0.7 * 4000 / 8 < len(moved) < 1.3 * 4000 / 8


def test_servers_have_about_equal_shares() -> None:
    ring = HashRing(range(8))
    owners = [ring.owner(f"key {i}") for i in range(8000)]
    assert all(0.7 * 1000 < owners.count(server) < 1.3 * 1000 for server in range(8))


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(2, 50), columns=st.integers(1, 5), servers=st.integers(1, 9))
def test_blocks_cover_all_rows_once_and_evenly(rows: int, columns: int, servers: int) -> None:
    placement = Placement(range(servers), split=8)
    parts = placement.place("w", (rows, columns), F32)
    value = torch.arange(rows * columns).reshape(rows, columns)
    assert torch.equal(torch.cat([part.of(value) for part in parts]), value)
    assert torch.equal(join_parts({part.name: part.of(value) for part in reversed(parts)})["w"], value)
    lengths = [len(part.of(value)) for part in parts]
    assert max(lengths) - min(lengths) <= 1 and len({part.server for part in parts}) == len(parts) == min(rows, servers)
    assert sum(placement.nbytes().values()) == rows * columns * 4 == sum(part.nbytes for part in parts)


def test_small_scalar_and_single_rows_stay_whole() -> None:
    placement = Placement(range(3), split=8)
    for key, shape in (("scalar", ()), ("row", (1, 100)), ("small", (1,)), ("none", (0,))):
        assert [part.last for part in placement.place(key, shape, F32)] == [None]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.sampled_from("w[]:05\n\0")) | st.text(st.characters()), unique=True, max_size=8))
def test_any_string_is_a_key(keys: list[str]) -> None:
    """Whatever it looks like, in parts or whole, its name is its own, and leads back to it."""
    values, parts = {key: torch.rand(number % 3 + 1, 2) for number, key in enumerate(keys)}, {}
    placement = Placement(range(2), split=16)
    for key, value in values.items():
        for part in placement.place(key, value.shape, F32):
            assert part.name not in parts and key_of(part.name) == (key, part.first, part.last)
            parts[part.name] = part.of(value)
    whole = join_parts(parts)
    assert whole.keys() == values.keys() and all(torch.equal(whole[key], values[key]) for key in keys)


def test_by_load_each_key_goes_where_least_lies() -> None:
    placement = Placement(range(3), by="load")
    for number, size in enumerate([90, 50, 40, 30, 20, 20, 10]):
        placement.place(f"key {number}", (size,), F32)
    assert sorted(placement.nbytes().values()) == [4 * 80, 4 * 90, 4 * 90]


@pytest.mark.parametrize("by", ["hash", "load"])
def test_servers_come_and_go_with_few_moves(by: str) -> None:
    placement, keys = Placement(range(4), by=by), 600
    for number in range(keys):
        placement.place(f"key {number}", (10,), F32)
    before = {key: parts[0].server for key, parts in placement.parts.items()}
    moves = placement.add(9)
    assert 0.6 * keys / 5 <= len(moves) <= 1.4 * keys / 5
    assert all(move.dst == 9 and move.nbytes == 40 and move.src == before[move.key] for move in moves)
    assert placement.nbytes()[9] == 40 * len(moves)
    away = placement.remove(2)
    assert {move.src for move in away} == {2} and 2 not in placement.nbytes()
    assert sum(placement.nbytes().values()) == 40 * keys
    with pytest.raises(ValueError, match="last one"):
        Placement([0]).remove(0)


@pytest.mark.parametrize("by", ["hash", "load"])
@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(st.integers(1, 40), max_size=8), changes=st.lists(st.integers(0, 5), max_size=6))
def test_after_all_moves_every_row_is_where_it_belongs(by: str, shapes: list[int], changes: list[int]) -> None:
    placement = Placement([0, 1], split=64, by=by)
    where: dict[str, list[int]] = {}  # key -> the server of each row
    for number, rows in enumerate(shapes):
        parts = placement.place(f"k{number}", (rows,), F32)
        where[f"k{number}"] = [part.server for part in parts for _ in range((part.last or rows) - part.first)]
    for server in changes:
        if server not in placement.servers:
            moves = placement.add(server)
        elif len(placement.servers) > 1:
            moves = placement.remove(server)
        else:
            continue
        for move in moves:
            carry_out(move, where[move.key])
        for key, rows in where.items():
            assert rows == [part.server for part in placement.parts[key] for _ in range((part.last or len(rows)) - part.first)]


def carry_out(move: Move, rows: list[int]) -> None:
    last = len(rows) if move.last is None else move.last
    assert set(rows[move.first : last]) == {move.src} and move.nbytes == 4 * (last - move.first)
    rows[move.first : last] = itertools.repeat(move.dst, last - move.first)


def test_bad_placements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one server"):
        Placement([])
    with pytest.raises(ValueError, match="by='size'"):
        Placement([0], by="size")
    for split in (-1, 0, "a", 1.5, True):
        with pytest.raises(ValueError, match=f"split={split!r} is not a number of bytes"):
            Placement([0], split=split)  # type: ignore[arg-type]
