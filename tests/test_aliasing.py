"""Memory that two tensors of a call share: refused before anything is sent, or in place and right."""

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from oracles import ALGORITHMS

import d2lps
from d2lps import Communicator, collectives
from d2lps.comm.aliasing import check_apart, check_writable
from d2lps.simulator import simulate
from d2lps.topology import star

# ---- which tensors share an element ---------------------------------------------------------------------------------------

BASE = torch.arange(400)  # what an element holds is its place
NAMES = ("into {}", "out {}")


def drawn(chance: random.Random) -> list[torch.Tensor]:
    """Blocks of a matrix, or whatever strides lead to."""
    matrix, tensors = BASE[: 8 * (columns := chance.randint(2, 8))].view(8, columns), []
    blocks = chance.random() < 0.5
    for _ in range(chance.randint(2, 4)):
        if blocks:
            row, column = chance.randint(0, 6), chance.randint(0, columns - 1)
            tensors.append(matrix[row : chance.randint(row + 1, 8), column : chance.randint(column + 1, columns)])
        else:
            shape = [chance.randint(0, 4) for _ in range(chance.randint(0, 3))]
            tensors.append(BASE.as_strided(shape, [chance.randint(0, 9) for _ in shape], chance.randint(0, 60)))
    return tensors


def told(check: Callable[..., None], *args: Any) -> str:
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return ""


def test_exactly_those_that_share_an_element_are_refused() -> None:
    chance, met = random.Random(0), [0, 0]
    for _ in range(4000):
        tensors = drawn(chance)
        count = chance.randint(1, len(tensors))
        places = [tensor.flatten().tolist() for tensor in tensors]
        spread = [len(set(found)) < len(found) for found in places]
        assert [bool(told(check_writable, tensor)) for tensor in tensors] == spread
        if any(spread[:count]):
            continue
        pairs = [(one, other) for one, other in combinations(range(len(tensors)), 2) if one < count]
        wanted = any(set(places[one]) & set(places[other]) for one, other in pairs)
        meta = torch.empty(400, dtype=torch.int64, device="meta")
        copies = [meta.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
        for these in (tensors, copies):
            assert bool(told(check_apart, these[:count], these[count:], NAMES)) == wanted, (tensors, count)
        met[wanted] += 1
    assert min(met) > 500


def test_a_pair_is_named() -> None:
    x, y = torch.zeros(6), torch.zeros(2, 3)
    assert told(check_apart, [y, x[:3]], [x[3:], x[2:4]], NAMES) == (
        "into 1, float32[3], and out 1, float32[2], share memory: what arrives would overwrite what is to be sent"
    )
    assert told(check_apart, [x, y, y.t()], [], NAMES) == (
        "into 1, float32[2, 3], and into 2, float32[3, 2], share memory: both are received into"
    )
    assert told(check_apart, [y, y.expand(2, 2, 3)], [], NAMES).startswith("into 1 of shape [2, 2, 3] was expanded")
    assert not told(check_apart, [x[:0], x, x[2:2]], [y, y, y], NAMES)


def test_a_thousand_columns_are_looked_at_in_turn_and_not_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpy.shares_memory", None)
    assert not told(check_apart, torch.zeros(3, 1000).unbind(1), torch.zeros(1000, 5).t().chunk(5), NAMES)


def test_what_is_of_two_storages_may_be_one_memory() -> None:
    array = torch.zeros(4).numpy()
    assert told(check_apart, [torch.from_numpy(array)], [torch.from_numpy(array)[3:]], NAMES)


# ---- in every world -------------------------------------------------------------------------------------------------------


def filled(comm: Communicator, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(comm.rank), device=comm.device)


def around(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def one_tensor(comm: Communicator) -> None:
    right, left = around(comm)
    comm.sendrecv(x := filled(comm, 4), right, x, left)


def a_window(comm: Communicator) -> None:
    right, left = around(comm)
    x = filled(comm, 4)
    comm.exchange([(x[1:], right)], [(x[:-1], left)])


def one_room(comm: Communicator) -> None:
    right, left = around(comm)
    x, room = filled(comm, 2), filled(comm, 3, 4)
    comm.exchange(iter([(x, right), (x, left)]), zip([room[0], room[:, 1]], [left, right], strict=True))


def unfolded(comm: Communicator) -> None:
    right, left = around(comm)
    comm.exchange([(filled(comm, 6), right)], [(filled(comm, 4).unfold(0, 2, 1), left)])


def rooms(comm: Communicator) -> list[torch.Tensor]:
    return [filled(comm, 2) for _ in range(comm.size)]


def alone(tensor: torch.Tensor, comm: Communicator) -> list[torch.Tensor]:
    """As many times as there are ranks."""
    return [tensor] * comm.size


# What ranks are answered with; those for which the call would be right do not make it.
MISTAKES: dict[str, Callable[[Communicator], None]] = {
    "into, float32[4], and tensor, float32[4], share memory: what arrives would overwrite what is to be sent": one_tensor,
    "receives[0], float32[3], and sends[0], float32[3], share memory: what arrives would overwrite": a_window,
    "receives[0], float32[4], and receives[1], float32[3], share memory: both are received into": one_room,
    " of shape [3, 2] was expanded: several elements share one place in memory": unfolded,
    "tensor_list[0], float32[2], and tensor_list[1], float32[2], share memory: both": lambda comm: (
        collectives.all_gather(comm, alone(filled(comm, 2), comm), filled(comm, 2))
    ),
    "tensor_list[0], float32[2], and tensor, float32[2], share memory: what": lambda comm: (
        collectives.all_gather(comm, [*(x := filled(comm, 6)).split(2)], x[1:3], "bruck")
    ),
    "tensor_list[1] of shape [2] was expanded": lambda comm: (
        collectives.all_gather(comm, [x := filled(comm, 2), filled(comm, 1).expand(2), x.clone()], x.clone())
    ),
    "gather_list[0], float32[2], and gather_list[2], float32[2], share memory: both": lambda comm: (
        collectives.gather(comm, filled(comm, 2), [x := filled(comm, 2), x.clone(), x]) if comm.rank == 0 else None
    ),
    "tensor, float32[2], and scatter_list[1], float32[2], share memory: what": lambda comm: (
        collectives.scatter(comm, (x := rooms(comm))[1], x) if comm.rank == 0 else None
    ),
    "output, float32[2], and input_list[0], float32[2], share memory: what": lambda comm: (
        collectives.reduce_scatter(comm, (x := filled(comm, 6))[1:3], x.split(2))
    ),
    "output_list[0], float32[2], and input_list[0], float32[2], share memory: what": lambda comm: (
        collectives.all_to_all(comm, x := rooms(comm), x) if comm.rank == 2 else None  # its last one would be right
    ),
    "output_list[1], float32[2], and input_list[2], float32[2], share memory: what": lambda comm: (
        collectives.all_to_all(comm, x := rooms(comm), [filled(comm, 2), filled(comm, 2), x[1]], "direct")
    ),
    "output_list[0], float32[2], and output_list[1], float32[2], share memory: both": lambda comm: (
        collectives.all_to_all(comm, alone(filled(comm, 2), comm), rooms(comm))
    ),
    "output, float32[6], and input, float32[2], share memory: what": lambda comm: (
        collectives.all_gather_into_tensor(comm, x := filled(comm, 6), x[1:3])
    ),
    "output, float32[2], and input, float32[6], share memory: what": lambda comm: (
        collectives.reduce_scatter_tensor(comm, (x := filled(comm, 6))[1:3], x)
    ),
}


def try_all(comm: Communicator, mistakes: dict[str, Callable[[Communicator], None]]) -> list[str]:
    answers = [told(mistake, comm) for mistake in mistakes.values()]
    collectives.all_reduce(comm, x := filled(comm, 4))  # it can still be used
    assert x.is_meta or x.tolist() == [3.0] * 4
    return answers


WORLDS: dict[str, Callable[..., d2lps.Run]] = {
    "simulated": lambda work, ranks, *args: simulate(work, star(ranks, 1e9), *args),
    "meta": lambda work, ranks, *args: simulate(work, star(ranks, 1e9), *args, device="meta"),
    "untraced": lambda work, ranks, *args: simulate(work, star(ranks, 1e9), *args, device="meta", trace=False),
    "shm": lambda work, ranks, *args: d2lps.run(work, ranks, *args, trace=True, timeout=20),
    "gloo": lambda work, ranks, *args: d2lps.run(work, ranks, *args, backend="gloo", trace=True, timeout=20),
}


@pytest.mark.parametrize("world", WORLDS)
def test_both_tensors_are_named_before_anything_is_sent(world: str) -> None:
    run = WORLDS[world](try_all, 3, MISTAKES)
    for message, answers in zip(MISTAKES, zip(*run, strict=True), strict=True):
        assert any(answers) and all(message in answer for answer in answers if answer), (message, answers)
    assert world == "untraced" or (len(run.trace) == 3 * 4 and run.trace.unmatched == 0)  # the sum's messages alone


def in_groups(comm: Communicator) -> list[str]:
    """Of some ranks, and of what was started; a function of one's own that says what it is, too."""
    group, found = comm.split(comm.rank % 2), []
    comm.start(lambda beside: found.append(told(one_tensor, beside))).wait()

    def mine() -> None:
        with comm.inside("mine"):
            one_tensor(comm)

    return [told(one_tensor, group), *found, told(mine)]


@pytest.mark.parametrize("world", ["simulated", "untraced", "shm"])
def test_in_every_group(world: str) -> None:
    assert all(answer.startswith("into, float32[4], and tensor") for answers in WORLDS[world](in_groups, 4) for answer in answers)


# ---- what is right --------------------------------------------------------------------------------------------------------


def in_place(comm: Communicator) -> dict[str, bool]:
    """Every call that may be made so, by every algorithm, and whether it gives what it should."""
    ranks, mine, right = range(comm.size), float(comm.rank), {}
    pairs = [float(rank) for rank in ranks for _ in "xy"]
    for name in ALGORITHMS["all_gather"]:
        for own in ranks:
            collectives.all_gather(comm, x := rooms(comm), x[own], name)
            collectives.all_gather_into_tensor(comm, y := filled(comm, 2 * comm.size), y[2 * own :][:2], name)
            right[f"all_gather {name} {own}"] = torch.cat(x).tolist() == y.tolist() == pairs
    for name in ALGORITHMS["gather"]:
        for dst in ranks:
            collectives.gather(comm, (x := rooms(comm))[0], x if comm.rank == dst else None, dst, name)
            right[f"gather {name} {dst}"] = comm.rank != dst or [each[1].item() for each in x] == [*ranks]
    for name in ALGORITHMS["scatter"]:
        parts = [torch.full((2,), 10.0 * rank) for rank in ranks]
        collectives.scatter(comm, parts[0], parts if comm.rank == 0 else None, 0, name)
        right[f"scatter {name}"] = parts[0].tolist() == [10 * mine] * 2
    for name in ALGORITHMS["reduce_scatter"]:
        for own in ranks:
            x, y = [filled(comm, 2) for _ in ranks], filled(comm, 2 * comm.size)
            collectives.reduce_scatter(comm, x[own], x, algorithm=name)
            collectives.reduce_scatter_tensor(comm, y[2 * own :][:2], y, algorithm=name)
            rest = torch.cat([*x[:own], *x[own + 1 :], y[: 2 * own], y[2 * own + 2 :]])  # left as they were
            sums = x[own].tolist() == y[2 * own :][:2].tolist() == [sum(ranks)] * 2
            right[f"reduce_scatter {name} {own}"] = sums and bool((rest == mine).all())
    for name in ALGORITHMS["all_to_all"]:
        x = torch.arange(2.0 * comm.size) + 10 * mine
        own = x.split(2)[comm.rank]
        outputs = [own if rank == comm.rank else filled(comm, 2) for rank in ranks]
        collectives.all_to_all(comm, outputs, x.split(2), name)
        right[f"all_to_all {name}"] = [each[0].item() for each in outputs] == [10 * rank + 2 * mine for rank in ranks]
    return {call: well for call, well in right.items() if not well}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("world", ["simulated", "shm"])
def test_what_lies_where_it_is_to_go_is_right(world: str, ranks: int) -> None:
    assert WORLDS[world](in_place, ranks) == [{}] * ranks


def side_by_side(comm: Communicator) -> list[Any]:
    """Tensors that lie in one another's stretch of memory and share no element; and one that is sent to all."""
    right, left = around(comm)
    table = torch.stack([torch.arange(4.0) + 10 * comm.rank, torch.zeros(4)], 1)
    comm.sendrecv(table[:, 0], right, table[:, 1], left)
    turned = torch.complex(filled(comm, 2), torch.zeros(2))
    comm.sendrecv(turned.real, right, turned.imag, left)
    x, received = filled(comm, 2), torch.zeros(2, comm.size)
    collectives.all_gather(comm, received.unbind(1), x)
    given, taken = (torch.full((3, 2 * comm.size), float(comm.rank)) for _ in range(2))
    collectives.all_to_all(comm, taken.chunk(comm.size, 1), given.chunk(comm.size, 1))
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.exchange([(x, rank) for rank in others], [(received[:, rank], rank) for rank in others])
    collectives.all_to_all(comm, many := rooms(comm), alone(x, comm))
    return [table[:, 1].tolist(), turned.imag.tolist(), received.tolist(), taken[0, ::2].tolist(), torch.cat(many)[::2].tolist()]


@pytest.mark.parametrize("world", ["simulated", "shm", "gloo"])
def test_what_lies_side_by_side_is_right(world: str) -> None:
    ranks = [0.0, 1.0, 2.0]
    for rank, found in enumerate(WORLDS[world](side_by_side, 3)):
        left = (rank - 1) % 3
        assert found == [[10.0 * left + k for k in range(4)], [left] * 2, [ranks, ranks], ranks, ranks]


@pytest.mark.parametrize("trace", [True, False])
def test_chunks_that_stand_for_one_another_are_not_taken_for_one(trace: bool) -> None:
    """Without a trace all chunks of a length are one meta tensor; a ring of one's own sends and receives them."""

    def ring(comm: Communicator) -> None:
        (right, left), chunks = around(comm), comm.chunks(torch.empty(4000, device=comm.device), comm.size)
        for step in range(comm.size - 1):
            comm.sendrecv(chunks[comm.rank - step], right, chunks[comm.rank - step - 1], left)
            comm.exchange([(chunks[0][:7], right), (chunks[1], left)], [(chunks[2], right), (chunks[3][:7], left)])

    assert simulate(ring, star(4, 1e9), device="meta", trace=trace).time > 0


def test_what_was_seen_apart_once_says_nothing_of_another_tensor_of_its_length() -> None:
    def work(comm: d2lps.Communicator) -> None:
        whole, peer = torch.empty(8, device=comm.device), 1 - comm.rank
        mine, theirs, across = whole[:4], whole[4:], whole[2:6]
        for _ in range(3):
            comm.sendrecv(mine, peer, theirs, peer)
            with pytest.raises(ValueError, match=r"into, float32\[4\], and tensor, float32\[4\], share memory"):
                comm.sendrecv(mine, peer, across, peer)

    for trace in (True, False):
        simulate(work, star(2, 1e9), device="meta", trace=trace)
