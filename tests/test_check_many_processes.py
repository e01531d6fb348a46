"""The checks of *Many processes*: each refuses, in words, what readers hand in."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from solutions import refused, solution

from d2lps import Communicator, Trace, collectives
from d2lps_book.check import many_processes as check

Function = Callable[..., Any]


def laps(comm: Communicator, mine: float, second: int) -> float:
    """A lap that adds, from rank 0 back to rank 0, and `second` hops of another."""
    right, left, token = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, torch.tensor([mine])
    if comm.rank == 0:
        comm.send(token, right)
        comm.recv(token, left)
    else:
        comm.recv(token, left)
        token += mine
        comm.send(token, right)
    if 0 < comm.rank <= second:
        comm.recv(token, left)
    if comm.rank < second:
        comm.send(token, right)
    return token.item()


def laps_of_forgotten_sends(comm: Communicator, mine: float) -> float:
    right, left, token = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, torch.tensor([mine])
    if comm.rank > 0:
        comm.recv(token, left)
        token += mine
    comm.isend(token, right)
    if comm.rank < comm.size - 1:
        comm.recv(token, left)
    if comm.rank < comm.size - 2:
        comm.isend(token, right)
    return token.item()


def by_all_reduce(comm: Communicator, mine: float) -> float:
    collectives.all_reduce(comm, token := torch.tensor([mine]))
    return token.item()


def by_a_root(comm: Communicator, mine: float) -> float:
    token, other = torch.tensor([mine]), torch.zeros(1)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            comm.recv(other, rank)
            token += other
        elif comm.rank == rank:
            comm.send(token, 0)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            comm.send(token, rank)
        elif comm.rank == rank:
            comm.recv(token, 0)
    return token.item()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda comm, mine: comm.size * (comm.size + 1) / 2, "with 2 ranks, which bring"),
        (lambda comm, mine: laps(comm, mine, 0), "rank 1 returns"),
        (lambda comm, mine: laps(comm, mine, comm.size - 1), "in 3 rounds, and 2 are enough"),
        (by_all_reduce, "all_reduce is the library's"),
        (by_a_root, "in a ring it talks to its right neighbor only"),
        (laps_of_forgotten_sends, "with 2 ranks 2 sends nobody waits for"),
        (lambda comm, mine: comm.barrier(), "rank 0 returns None, not"),
    ],
)
def test_everybody_knows(function: Function, words: str) -> None:
    refused(check.everybody_knows(function), words)


def test_two_points() -> None:
    right = [51.6e-6, 0.398e-9, 129.5e3, 0.52, 4.04e-3]
    assert check.two_points(*right)
    refused(check.two_points(51.6, *right[1:]), "alpha, in seconds: not 51.6, which is a million times too large")
    refused(check.two_points(52e-6, 0.45e-9, *right[2:]), "beta, in seconds per byte: not 4.5e-10")
    refused(check.two_points(50e-6, *right[1:]), "alpha, in seconds: not 5e-05")
    refused(check.two_points(*right[:3], 4.04e-3, 0.52), "How often is alpha paid")
    refused(check.two_points(*right[:4], ...), "not all is filled in")


def test_ways() -> None:
    assert check.ways("deadlock", (6, 5), (2, 3), (1, 1))
    refused(check.ways((6, 5), (6, 5), (2, 3), (1, 1)), "way 1: who is the first that can send")
    refused(check.ways("deadlock", "deadlock", (2, 3), (1, 1)), "way 2 is no deadlock")
    refused(check.ways("deadlock", (6, 5), (2, 2), (1, 1)), "way 3, 5 ranks: not 2 rounds")
    refused(check.ways("deadlock", 6, 2, 1), "way 2: say", "or a pair")
    refused(check.ways("deadlock", (6, 5), "Deadlock", (1, 1)), "way 3 is no deadlock")
    refused(check.ways("deadlock", (6, 5), (2, "deadlock"), (1, 1)), "way 3 is no deadlock among 5 ranks either")
    refused(check.ways("deadlock", (6, 5), (2, 3), (2, 2)), "way 4, 6 ranks: not 2 rounds")


Parcels = list[torch.Tensor]


def by_number(comm: Communicator, parcels: Parcels) -> None:
    for number, parcel in enumerate(parcels):
        parcel.fill_(number)


def in_one_box(comm: Communicator, parcels: Parcels) -> None:
    box = torch.stack(parcels)
    if comm.rank == 0:
        comm.send(box, 1)
    else:
        comm.recv(box, 0)
        for parcel, row in zip(parcels, box, strict=True):
            parcel.copy_(row)


def started(comm: Communicator, parcels: Parcels) -> list[Any]:
    return [comm.isend(parcel, 1) if comm.rank == 0 else comm.irecv(parcel, 0) for parcel in parcels]


def never_waits(comm: Communicator, parcels: Parcels) -> None:
    started(comm, parcels)


def waits_at_one_end(comm: Communicator, parcels: Parcels) -> None:
    for work in started(comm, parcels)[: len(parcels) * comm.rank]:
        work.wait()


def waits_for_the_last(comm: Communicator, parcels: Parcels) -> None:
    started(comm, parcels)[-1].wait()


def last_first(comm: Communicator, parcels: Parcels) -> None:
    for parcel in parcels if comm.rank == 0 else parcels[::-1]:
        (comm.send if comm.rank == 0 else comm.recv)(parcel, 1 - comm.rank)


def waits_after_each(comm: Communicator, parcels: Parcels) -> None:
    for parcel in parcels:
        started(comm, [parcel])[0].wait()


def all_started(comm: Communicator, parcels: Parcels) -> None:
    for work in started(comm, parcels):
        work.wait()


@pytest.mark.parametrize("exercise", [check.in_a_row, check.in_flight])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_number, "of 1 parcels, number 0 arrives with wrong contents"),
        (in_one_box, "1 messages for 7 parcels"),
        (never_waits, "never arrives"),
        (waits_at_one_end, "rank 0 does not wait for its sends"),
        (last_first, "number 0 arrives with wrong contents"),
    ],
)
def test_delivery(exercise: Function, function: Function, words: str) -> None:
    refused(exercise(function), words)


def test_how_many_rounds() -> None:
    refused(check.in_a_row(all_started), "7 parcels in 1 rounds: here each is to wait")
    refused(check.in_flight(waits_after_each), "7 parcels in 7 rounds: start all of them")
    refused(check.in_flight(waits_for_the_last), "12 sends and receives", "nobody waits for them")


def last_message_only(trace: Trace) -> Any:
    table = np.zeros((trace.ranks, trace.ranks))
    table[trace.messages["src"], trace.messages["dst"]] = trace.messages["nbytes"]
    return table


def counted(trace: Trace) -> Any:
    table = np.zeros((trace.ranks, trace.ranks))
    np.add.at(table, (trace.messages["src"], trace.messages["dst"]), 1)
    return table


def columns_and_rows(trace: Trace) -> Any:
    return np.asarray(solution("ex-processes-trace")["byte_table"](trace)).T


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (last_message_only, "messages with"),
        (counted, "and the table has"),
        (columns_and_rows, "and the table has"),
        (lambda trace: np.zeros((4, 4)), "for 2 ranks the table has shape (4, 4)"),
    ],
)
def test_byte_table(function: Function, words: str) -> None:
    refused(check.byte_table(function), words)
