"""The exercises of *From ring to server*: what is wrong is refused, in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from solutions import refused_as, solution

from d2lps import Communicator
from d2lps.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from d2lps_book.check import from_ring_to_server as check

Tensor = torch.Tensor


@pytest.mark.parametrize(("name", "answers", "words"), [
    ("by_hand", (..., ..., ...), "nothing|not all"),
    ("by_hand", ((90, 90, 28.8), (90, 90, 14.4), (75, 75, 12)), "three servers, a server sends"),
    ("by_hand", ((90, 180, 14.4), (90, 90, 14.4), (75, 75, 12)), "three servers, ms.*first in and then out"),
    ("by_hand", ((90, 180, 28.8), (90, 90, 14.4), (90, 90, 14.4)), "colocated, a worker sends.*never reaches the port"),
    ("by_hand", ((90, 180, 28.8), (90, 90, 14.4), 12), "3 numbers are wanted"),
    ("racks", ((8, 64), (2, 80)), "without the tree, ms.*come back up"),
    ("racks", ((4, 128), (2, 80)), "without the tree, gradients"),
    ("racks", ((8, 128), (1, 80)), "with the tree, gradients"),
    ("racks", ((8, 128), (2, 56)), "with the tree, ms.*four parts"),
    ("sum_or_mean", (0.5, 4), "rate"),
    ("sum_or_mean", (2.0, 4), "rate"),
    ("sum_or_mean", (0.125, 16), "factor"),
    ("sum_or_mean", (0.125, 2), "factor"),
    ("rows", (888_889, 888_889), "apart"),
    ("rows", (10.0, 888_889), "apart"),
    ("rows", (1_555_556, 1_000_000), "colocated.*eighth"),
    ("rows", ("always", 888_889), "apart"),
])  # fmt: skip
def test_wrong_numbers_are_refused(name: str, answers: tuple[Any, ...], words: str) -> None:
    refused_as(getattr(check, name)(*answers), words)


# ---- push and pull at once ------------------------------------------------------------------------------------------------


def pieces_of(gradient: Tensor, weights: Tensor, pieces: int) -> list[tuple[int, Tensor, Tensor]]:
    return [*zip(range(pieces), gradient.tensor_split(pieces), weights.tensor_split(pieces), strict=True)]


def without_clock(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    for work in [kv.pushpull(*piece) for piece in pieces_of(gradient, weights, pieces)]:
        work.wait()


def clock_once(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    """Before the pushes, all but the first time: the last iteration never ends."""
    if kv.iteration < 1 and weights.any():
        kv.clock()
    without_clock(kv, gradient, weights, pieces)


def in_order(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    for key, part, _ in pieces_of(gradient, weights, pieces):
        kv.push(key, part)
    kv.clock()
    for work in [kv.pull(key, out) for key, _, out in pieces_of(gradient, weights, pieces)]:
        work.wait()


def pulls_too_early(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    works = []
    for key, part, out in pieces_of(gradient, weights, pieces):
        kv.push(key, part)
        works.append(kv.pull(key, out))
    kv.clock()
    for work in works:
        work.wait()


def one_by_one(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    """Each piece waits for the one before."""
    for piece in pieces_of(gradient, weights, pieces):
        kv.pushpull(*piece).wait()
    kv.clock()


def never_waits(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    for piece in pieces_of(gradient, weights, pieces):
        kv.pushpull(*piece)
    kv.clock()


def waits_for_the_first(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    works = [kv.pushpull(*piece) for piece in pieces_of(gradient, weights, pieces)]
    kv.clock()
    works[0].wait()


def names_the_keys_again(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    for key, part in enumerate(weights.tensor_split(pieces)):
        kv.init(key, part)
    works = [kv.pushpull(*piece) for piece in pieces_of(gradient, weights, pieces)]
    kv.clock()
    for work in works:
        work.wait()


def past_the_servers(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    all_reduce(kv.comm, gradient)
    weights += gradient
    kv.clock()


def no_servers_and_no_clock(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    all_reduce(kv.comm, gradient)
    weights += gradient


def knows_the_workers(kv: Any, gradient: Tensor, weights: Tensor, pieces: int) -> None:
    weights += gradient / 10**kv.rank * (1111 if kv.num_workers == 4 else 1)
    kv.clock()


@pytest.mark.parametrize(("wrong", "words"), [
    (without_clock, "clock comes next"), (clock_once, r"has called clock\(\) 1 times in two"), (in_order, "40.0 are possible"),
    (pulls_too_early, r"has it waited, and pulled after clock\(\)"),
    (one_by_one, "ms, and .* are possible"), (never_waits, r"has it waited\?$"), (waits_for_the_first, "rank 0 has"),
    (names_the_keys_again, "in every iteration"),
    (past_the_servers, "pushes 0 times"), (no_servers_and_no_clock, "clock"), (knows_the_workers, "pushes 0 times"),
])  # fmt: skip
def test_pieces_that_are_refused(wrong: Callable[..., None], words: str) -> None:
    refused_as(check.in_pieces(wrong), words)


def test_pieces_that_pass_have_their_own_time() -> None:
    assert check.in_pieces(solution("ex-server-pieces")["in_pieces"]).text.endswith("32 pieces take 33 ms, where one takes 64")


# ---- all devices at work --------------------------------------------------------------------------------------------------


def blockwise(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float, inside: Callable[..., Tensor]) -> Tensor:
    """`inside(kv, machine, parts)`: this device's part of the new weights, of its gradient's parts times -rate."""
    machine = kv.comm.split(kv.rank // devices)
    weights = torch.zeros(X.shape[1], device=X.device)
    x, y = X[kv.rank :: kv.num_workers], Y[kv.rank :: kv.num_workers]
    step = x.T @ (x @ weights - y) / len(Y) * -rate
    parts = list(weights.tensor_split(devices))
    mine = inside(kv, machine, list(step.tensor_split(devices)))
    all_gather(machine, parts, mine)
    return weights


def stored(kv: Any, key: str, value: Tensor) -> Tensor:
    kv.init(key, torch.zeros_like(value))
    kv.push(key, value)
    kv.clock()
    out = torch.empty_like(value)
    kv.pull(key, out).wait()
    return out


def everybody_pushes(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    def inside(kv: Any, machine: Communicator, parts: list[Tensor]) -> Tensor:
        return stored(kv, "all", torch.cat(parts)).tensor_split(devices)[machine.rank].clone()

    return blockwise(kv, devices, X, Y, rate, inside)


def does_not_add_up(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    """Each pushes only its own part of its own gradient."""
    return blockwise(kv, devices, X, Y, rate, lambda kv, machine, parts: stored(kv, f"{machine.rank}", parts[machine.rank]))


def waits_for_all(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    """Asks for a sum of all workers, under a key that only one device of each machine pushes."""

    def inside(kv: Any, machine: Communicator, parts: list[Tensor]) -> Tensor:
        kv.init(f"{machine.rank}", torch.zeros_like(mine := parts[machine.rank].clone()))
        kv.pushpull(f"{machine.rank}", mine, mine).wait()
        kv.clock()
        return mine

    return blockwise(kv, devices, X, Y, rate, inside)


def around_the_servers(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    def inside(kv: Any, machine: Communicator, parts: list[Tensor]) -> Tensor:
        all_reduce(kv.comm, whole := torch.cat(parts))
        return whole.tensor_split(devices)[machine.rank].clone()

    return blockwise(kv, devices, X, Y, rate, inside)


def fixed_rate(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    return added_up(kv, devices, X, Y, 0.5)


def added_up(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    def inside(kv: Any, machine: Communicator, parts: list[Tensor]) -> Tensor:
        mine = torch.empty_like(parts[machine.rank])
        reduce_scatter(machine, mine, parts)
        return stored(kv, f"part {machine.rank}", mine)

    return blockwise(kv, devices, X, Y, rate, inside)


def uphill(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    return added_up(kv, devices, X, Y, -rate)


def all_reduced_inside(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    """The right bytes through the port, but each machine's devices send one another the whole sum, at a speaker."""

    def inside(kv: Any, machine: Communicator, parts: list[Tensor]) -> Tensor:
        all_reduce(machine, whole := torch.cat(parts), algorithm="flat")
        return stored(kv, f"part {machine.rank}", whole.tensor_split(devices)[machine.rank].clone())

    return blockwise(kv, devices, X, Y, rate, inside)


def returns_its_part(kv: Any, devices: int, X: Tensor, Y: Tensor, rate: float = 0.5) -> Tensor:
    return added_up(kv, devices, X, Y, rate).tensor_split(2)[0]


def test_another_right_way_passes() -> None:
    assert check.blocks(added_up)


@pytest.mark.parametrize(("wrong", "words"), [
    (everybody_pushes, "6 gradients are pushed"), (does_not_add_up, "rank 0 has weight 0 at"),
    (fixed_rate, "rate 0.25: rank 0 has 2 times the weights"), (uphill, "rank 0 has -1 times the weights"),
    (around_the_servers, "nothing was pushed"), (all_reduced_inside, "28.8 are possible"),
    (returns_its_part, "not the 8 weights"), (waits_for_all, "when every worker has pushed that key"),
])  # fmt: skip
def test_blocks_that_are_refused(wrong: Callable[..., Tensor], words: str) -> None:
    refused_as(check.blocks(wrong), words)


# ---- a slower server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda speeds: [*range(len(speeds))], r"\[3, 1\]: 92.2 ms, and 46.1"),
    (lambda speeds: [0, 0, 0, 1][: sum(speeds)] if len(speeds) == 2 else [0], r"\[1, 1\]"),  # made for the text's servers
    (lambda speeds: [s for s, v in enumerate(speeds) for _ in range(max(speeds) // v)], r"1 for speed 3, 3 for speed 1"),
    (lambda speeds: [s for s, v in enumerate(sorted(speeds)) for _ in range(v)], r"\[3, 1\]"),  # forgets whose speed it is
    (lambda speeds: [s for s, v in enumerate(speeds) for _ in range(v * v)], r"\[3, 1\].*9 for speed 3"),
    (lambda speeds: [speeds.index(max(speeds))], r"\[1, 1\]"),
    (lambda speeds: speeds, "no list of servers"),
    (lambda speeds: [], "no list of servers"),
    (lambda speeds: {0: 1}, "no list of servers"),
])  # fmt: skip
def test_places_that_are_refused(wrong: Callable[[list[int]], Any], words: str) -> None:
    refused_as(check.places(wrong), words)


# ---- a median -------------------------------------------------------------------------------------------------------------


def all_to_all_blocks(comm: Communicator, tensor: Tensor, rule: Callable[[Tensor], Tensor], cut: str = "tensor_split") -> None:
    blocks = list(getattr(tensor, cut)(comm.size))
    mine = [torch.empty_like(blocks[comm.rank]) for _ in blocks]
    all_to_all(comm, mine, blocks)
    all_gather(comm, blocks, rule(torch.stack(mine)))


def everything_to_everyone(comm: Communicator, tensor: Tensor) -> None:
    room = [torch.empty_like(tensor) for _ in range(comm.size)]
    all_gather(comm, room, tensor.clone())
    tensor.copy_(torch.stack(room).median(0).values)


def everything_to_one(comm: Communicator, tensor: Tensor) -> None:
    if comm.rank:
        comm.send(tensor, 0)
        return comm.recv(tensor, 0)
    room = [tensor.clone(), *(torch.empty_like(tensor) for _ in range(1, comm.size))]
    for rank in range(1, comm.size):
        comm.recv(room[rank], rank)
    tensor.copy_(torch.stack(room).median(0).values)
    for rank in range(1, comm.size):
        comm.send(tensor, rank)


def of_neighbors(comm: Communicator, tensor: Tensor) -> None:
    """The middle one of three, again and again around the ring: what one number for each element can carry."""
    for _ in range(comm.size - 1):
        other = torch.empty_like(tensor)
        comm.sendrecv(tensor, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
        tensor.copy_(torch.stack([tensor, other, tensor]).median(0).values)


def mean(comm: Communicator, tensor: Tensor) -> None:
    all_reduce(comm, tensor)
    tensor /= comm.size


def middle_of_three(comm: Communicator, tensor: Tensor) -> None:
    all_to_all_blocks(comm, tensor, lambda found: found.sort(0).values[int(len(found) > 1)])


def forgets_the_rest(comm: Communicator, tensor: Tensor) -> None:
    """Tensor.chunk may give fewer chunks than were asked for."""
    all_to_all_blocks(comm, tensor, lambda found: found.median(0).values, "chunk")


@pytest.mark.parametrize(("wrong", "words"), [
    (mean, "3 ranks, 6 elements: rank 0, element 0 is .* the median of"), (of_neighbors, "the median of"),
    (everything_to_everyone, "4.00 gradients go through some rank's port, and the ring needs 1.60"),
    (everything_to_one, "4.00 gradients"), (lambda comm, tensor: tensor.clone(), "the median of.*the result belongs in it"),
    (lambda comm, tensor: all_to_all_blocks(comm, tensor, lambda found: found.mean(0)), "the median of"),
    (middle_of_three, "5 ranks"), (forgets_the_rest, "IndexError|ValueError"),
])  # fmt: skip
def test_medians_that_are_refused(wrong: Callable[..., Any], words: str) -> None:
    refused_as(check.median(wrong), words)
