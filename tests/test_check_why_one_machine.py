"""The checks of *Why one machine is not enough*: each refuses, in words, what readers hand in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from solutions import refused, solution

from d2lps import Communicator, ReduceOp
from d2lps.collectives import all_reduce
from d2lps_book.check import why_one_machine as check

Function = Callable[..., Any]


def test_flop() -> None:
    assert check.flop(1546, 65_536)
    refused(check.flop(1536, 65_536), "Which of a layer's are added")
    refused(check.flop(1546, 10_240), "which layer's input is no other layer's output")
    refused(check.flop(1546, 32_768), "Two operations for each weight")


def test_llama() -> None:
    assert check.llama(81, 41, 2.43, 972)
    refused(check.llama(80, 41, 2.43, 972), "16 bytes a parameter")
    refused(check.llama(81, 81, 2.43, 972), "What is kept")
    refused(check.llama(81, 41, 3.24, 1296), "Which of the 16 bytes")
    refused(check.llama(81, 41, 2.43, 16.2), "seconds to one disk: not 16.2. The bytes that went to the file system")


def test_tokens() -> None:
    assert check.tokens(10_549)
    refused(check.tokens(26_373), "gradients have 4 bytes")
    refused(check.tokens(10_549 / 2), "set them equal")
    refused(check.tokens(175e9), "t: not 175000000000.0. Write both")


def test_van() -> None:
    assert check.van(0.89e15, 2.5) and check.van(0.9e15, 2.5)
    refused(check.van(0.864e15, 2.5), "the van has a beta, too")
    refused(check.van(10e15, 2.5), "When are alpha + n beta of both equal")
    refused(check.van(0.89e15, 9000), "then seconds to hours")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda parameters, each, memory=80e9: int(parameters * each / memory), "do not hold it"),
        (lambda parameters, each, memory=80e9: int(parameters * each // memory) + 1, "36 devices are more than it needs"),
        (lambda parameters, each, memory=80e9: round(parameters * each / memory), "do not hold it"),
        (lambda parameters, each, memory=80e9: -(-parameters * 16 // 80e9), "on devices of 24 GB: 14.0 devices do not hold it"),
        (lambda parameters, each, memory=80e9: 35, "35 devices are more"),
    ],
)
def test_devices(function: Function, words: str) -> None:
    refused(check.devices(function), words)


def in_blocks(sizes: list[int], ranks: int) -> list[list[int]]:
    each = -(-len(sizes) // ranks)
    return [list(range(rank * each, min((rank + 1) * each, len(sizes)))) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda sizes, ranks: [list(range(len(sizes)))] * ranks, "shard 0 is read by ranks [0, 1, 2, 3]"),
        (lambda sizes, ranks: [list(range(len(sizes)))[rank::ranks] for rank in range(ranks)], "rank 0 has 27"),
        (lambda sizes, ranks: [[7], *[[]] * (ranks - 1)], "rank 0 has a shard 7, and there are shards 0 to 6"),
        (lambda sizes, ranks: [[-1], *[[]] * (ranks - 1)], "rank 0 has a shard -1"),
        (lambda sizes, ranks: [[]] * ranks, "shard 0 is read by nobody"),
        (lambda sizes, ranks: [list(range(len(sizes)))], "1 lists, not one for each rank"),
        (in_blocks, "and mean and one shard together are"),
    ],
)
def test_deal(function: Function, words: str) -> None:
    refused(check.deal(function), words)


def whole_stripes(offset: int, length: int, stripe: int, targets: int) -> list[tuple[int, int, int]]:
    """Never the part of a stripe."""
    numbers = range(offset // stripe, -(-(offset + length) // stripe))
    return [(number % targets, number // targets * stripe, stripe) for number in numbers]


def cut(offset: int, length: int, stripe: int, targets: int, at_borders: bool = True) -> list[tuple[int, int, int]]:
    """(target, where in the file, length) of each piece; else each as long as a stripe, wherever it begins."""
    found, end = [], offset + length
    while offset < end:
        size = min(stripe - offset % stripe if at_borders else stripe, end - offset)
        found.append((offset // stripe % targets, offset, size))
        offset += size
    return found


def over_borders(offset: int, length: int, stripe: int, targets: int) -> list[tuple[int, int, int]]:
    pieces = cut(offset, length, stripe, targets, at_borders=False)
    return [(target, place // stripe // targets * stripe + place % stripe, size) for target, place, size in pieces]


def byte_by_byte(offset: int, length: int, stripe: int, targets: int) -> list[tuple[int, int, int]]:
    pieces: Function = solution("ex-why-stripes")["pieces"]
    return [piece for byte in range(offset, offset + length) for piece in pieces(byte, 1, stripe, targets)]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda offset, length, stripe, targets: [(0, offset, length)], "a piece of 1000 bytes; one has from 1 to a stripe's 4"),
        (whole_stripes, "1 bytes from 0: the piece (0, 0, 4) begins with byte 0 of the file and goes on beyond the read, which"),
        (over_borders, "of the file and goes on beyond the stripe, which ends with byte"),
        (cut, "the piece (1, 4, 4) begins with byte 16 of the file, and byte 4 is next; start counts on the target"),
        (byte_by_byte, "the piece (0, 0, 1) begins with byte 0 of the file and brings only a part of what is wanted"),
        (lambda *read: [*solution("ex-why-stripes")["pieces"](*read), (0, 0, 1)], "comes when all that was asked for is"),
        (lambda offset, length, stripe, targets: [], "the pieces have 0 bytes in all"),
        (lambda *read: sorted(solution("ex-why-stripes")["pieces"](*read)), "begins with byte 12 of the file, and byte 4 is"),
        (lambda *read: [(9, 0, 1)], "there is no place 0 on target 9"),
        (lambda *read: solution("ex-why-stripes")["pieces"](*read)[:3], "bytes in all"),
    ],
)
def test_pieces(function: Function, words: str) -> None:
    refused(check.pieces(function), words)


def reduced(op: ReduceOp.RedOpType) -> Function:
    def steps(comm: Communicator, mine: int) -> int:
        all_reduce(comm, total := torch.tensor([mine]), op)
        return int(total.item())

    return steps


def neighbors_only(comm: Communicator, mine: int) -> int:
    other = torch.tensor([mine])
    if comm.size > 1:
        comm.sendrecv(torch.tensor([mine]), (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
    return min(mine, int(other.item()))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda comm, mine: mine, "steps; who runs out first"),
        (reduced(ReduceOp.MAX), "steps; who runs out first"),
        (reduced(ReduceOp.SUM), "steps; who runs out first"),
        (neighbors_only, "steps; who runs out first"),
        (lambda comm, mine: 4, "would take 4 steps"),
    ],
)
def test_steps_together(function: Function, words: str) -> None:
    refused(check.steps_together(function), words)
