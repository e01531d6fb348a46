"""d2lps_book.check: right functions pass, and of a wrong one the first wrong thing is said, in words that are true."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles import ALGORITHMS
from solutions import refused

from d2lps import Communicator, collectives
from d2lps.topology import hgx_h100, ring, star
from d2lps_book import check
from d2lps_book.check.exercise import Wrong
from d2lps_book.check.tools import near, number, parts
from d2lps_book.check.values import BASE, MOST, common_element, countable, counts

Function = Callable[..., Any]
EXERCISES = ("all_reduce", "reduce", "broadcast", "scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")


def library(exercise: str, algorithm: str) -> Function:
    """The library's own collective, with the arguments of the exercise."""
    function = getattr(collectives, exercise)
    return lambda comm, *arguments: function(comm, *arguments, algorithm=algorithm)


OURS = [(exercise, algorithm) for exercise in EXERCISES for algorithm in ALGORITHMS[exercise] if algorithm != "native"]


@pytest.mark.parametrize(("exercise", "algorithm"), OURS)
def test_the_librarys_own_pass(exercise: str, algorithm: str) -> None:
    verdict = getattr(check, exercise)(library(exercise, algorithm))
    assert verdict, verdict
    assert verdict.text.startswith("24 cases, 1 to 8 ranks. With 8 ranks and tensors of n = 0.8 MB: ")


def test_a_verdict_is_true_or_false_and_shows_itself() -> None:
    good, bad = check.all_reduce(library("all_reduce", "ring")), check.all_reduce(lambda comm, tensor: None)
    assert bool(good) and not bool(bad)
    assert repr(good).startswith("passed: ") and repr(bad).startswith("not yet: ")
    steps = "14 steps, the busiest rank sends 1.75 n (no algorithm gets below 1.75 n)"
    assert steps in repr(good)
    assert f"{(14 * 1e-6 + 1.75 * 0.8e6 / 1e9) * 1e3:.3f} ms at 1 GB/s" in repr(good)


# ---- wrong in many ways ---------------------------------------------------------------------------------------------------


def everyone_to_everyone(comm: Communicator, tensor: torch.Tensor, use: Function = lambda inbox, rank: inbox[rank]) -> None:
    """All-reduce by whole tensors; `use` says what is added for a rank, of an inbox that has a row for what each has sent."""
    inbox = tensor.new_empty((comm.size, len(tensor)))
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for work in [comm.irecv(inbox[rank], rank) for rank in others] + [comm.isend(tensor, rank) for rank in others]:
        work.wait()
    for rank in others:
        comm.combine(tensor, use(inbox, rank))


def turned(comm: Communicator, tensor: torch.Tensor, places: int = 1) -> None:
    """Every element is added up, and put where another one belongs."""
    everyone_to_everyone(comm, tensor)
    tensor.copy_(tensor.roll(places))


def ring_that_forgets_to_add(comm: Communicator, tensor: torch.Tensor) -> None:
    """Round the ring go copies: what comes is kept instead of added."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for step in range(comm.size - 1):
        comm.step(f"step {step}")
        comm.sendrecv(tensor.clone(), right, tensor, left)


def chain(comm: Communicator, tensor: torch.Tensor) -> None:
    """A tree of one branch, in which rank 2 passes on what it has before rank 3's part is added."""
    room = torch.empty_like(tensor)
    for hop, rank in enumerate(reversed(range(1, comm.size))):
        comm.step(f"hop {hop}")
        if comm.rank == rank:
            comm.send(tensor, rank - 1)
        elif comm.rank == rank - 1:
            comm.recv(room, rank)
            if rank != 3:
                comm.combine(tensor, room)
    collectives.broadcast(comm, tensor, 0)


def puts_tensors_of_its_own_into_the_list(comm: Communicator, tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
    """They may be parts of another tensor, as the caller's: what is put in their place never gets there."""
    tensor_list[:] = [torch.empty_like(part) for part in tensor_list]
    collectives.all_gather(comm, tensor_list, tensor)


ONE, TWO, THREE = (f"with {ranks} and 8 elements, rank " for ranks in ("1 rank", "2 ranks", "3 ranks"))
WRONG: dict[str, list[tuple[Function, str]]] = {
    "all_reduce": [
        (lambda comm, tensor: everyone_to_everyone(comm, tensor[:-1]),
         f"{TWO}0, element 7: rank 1 is missing (no message brought rank 0 this element)"),
        (lambda comm, tensor: (everyone_to_everyone(comm, tensor), tensor.add_((comm.rank == 2) * countable(1, len(tensor)))),
         f"{THREE}2, elements 0 to 7: rank 1 counted 2 times"),
        (turned, f"{ONE}0, element 0: the sum of all ranks, but of element 7"),
        (lambda comm, tensor: turned(comm, tensor, len(tensor) // comm.size),
         f"{TWO}0, elements 0 to 3: the sum of all ranks, but of elements 4 to 7"),
        (lambda comm, tensor: everyone_to_everyone(comm, tensor, lambda inbox, rank: inbox[rank].flip(0)),
         f"{TWO}0, elements 0 to 7: every rank is in the sum, but not with the same element"),
        (ring_that_forgets_to_add,
         f"{TWO}0, elements 0 to 7: rank 0 is missing (rank 1 sent it in step 'step 0' before adding rank 0's)"),
        (lambda comm, tensor: tensor.fill_(-5),
         f"{ONE}0, elements 0 to 7: -5 is no sum of the ranks' values; was the tensor written before its message was complete?"),
        (lambda comm, tensor: everyone_to_everyone(comm, tensor, lambda inbox, rank: torch.zeros_like(tensor)),
         f"{TWO}0, elements 0 to 7: rank 1 is missing (rank 1's message brought it, but it was not added)"),
        (lambda comm, tensor: everyone_to_everyone(comm, tensor, lambda inbox, _: inbox[max({*range(comm.size)} - {comm.rank})]),
         f"{THREE}0, elements 0 to 7: rank 1 is missing; rank 2 counted 2 times (rank 1's message brought it, but it was not "
         "added)"),
        (lambda comm, tensor: comm.size > 1 and (comm.recv(tensor[:-1], 0) if comm.rank else comm.send(tensor, 1)),
         "with 2 ranks and 8 elements, Mismatch: message from rank 0 to rank 1, tag 0: the sender sends int64[8], the receiver "
         "expects int64[7] (raised by rank 1 of 2, at 0 s of virtual time)"),
        (lambda comm, tensor: {}["nobody knows"] if comm.rank == 1 else comm.barrier(),
         "with 2 ranks and 8 elements, KeyError: 'nobody knows' (raised by rank 1 of 2, at 0 s of virtual time)"),
        (lambda comm, tensor: everyone_to_everyone(comm, tensor) or (comm.size > 1 > comm.rank and comm.isend(tensor, 1)),
         "with 2 ranks and 8 elements, 1 messages were sent and never received, or awaited and never sent"),
        (chain, "with 4 ranks and 8 elements, rank 0, elements 0 to 7: rank 3 is missing (rank 1 sent it in step 'hop 2' before "
         "adding rank 3's)"),
        (lambda comm, tensor: tensor.resize_(len(tensor) // 2),
         f"{ONE}0's tensor has become 4 elements of torch.int64; write into it instead"),
        (lambda comm, tensor: setattr(tensor, "data", tensor.double()),
         f"{ONE}0's tensor has become 8 elements of torch.float64; write into it instead"),
    ],
    "reduce": [
        (lambda comm, tensor, dst: collectives.all_reduce(comm, tensor),
         f"{TWO}0's tensor was changed; only that of rank 1 should be"),
        (lambda comm, tensor, dst: collectives.reduce(comm, tensor, 0),
         f"{TWO}0's tensor was changed; only that of rank 1 should be"),
        (lambda comm, tensor, dst: comm.send(tensor, dst) if comm.rank != dst else
         [comm.recv(tensor, rank) for rank in range(comm.size) if rank != dst],
         f"{TWO}1, elements 0 to 7: rank 1 is missing (was a message received in its place, where it should have been added to "
         "it?)"),
    ],
    "broadcast": [
        (lambda comm, tensor, src: collectives.all_reduce(comm, tensor),
         f"{TWO}0, tensor, elements 0 to 7: holds a sum, of ranks 0, 1; should be element 0 of rank 1"),
        (lambda comm, tensor, src: collectives.broadcast(comm, tensor, 0),
         f"{TWO}0, tensor, elements 0 to 7: holds element 0 of rank 0; should be element 0 of rank 1"),
        (lambda comm, tensor, src: comm.recv(tensor, src) if comm.rank != src else
         [comm.isend(tensor, rank) for rank in range(comm.size) if rank != src],
         "with 2 ranks and 8 elements, 1 send nobody waits for, of ranks [1]: who then changes the tensor may change what is "
         "still on its way"),
    ],
    "scatter": [
        (lambda comm, tensor, parts, src: parts and tensor.copy_(parts[0]),
         f"{TWO}0, tensor, elements 0 to 7: never written; should be element 0 of rank 1"),
        (lambda comm, tensor, parts, src: collectives.scatter(comm, tensor, parts and parts[1:] + parts[:1], src),
         f"{TWO}0, tensor, elements 0 to 7: holds element 0 of part 1 of rank 1; should be element 0 of rank 1"),
        (lambda comm, tensor, parts, src: collectives.scatter(comm, tensor, parts if comm.rank == 0 else None, 0),
         "with 2 ranks and 8 elements, TypeError: scatter_list must be a list of 2 tensors, one for each rank, not NoneType "
         "(raised by rank 0 of 2, at 0 s of virtual time)"),
    ],
    "gather": [
        (lambda comm, tensor, room, dst: collectives.gather(comm, tensor, room and room[::-1], dst),
         f"{TWO}1, gather_list[0], elements 0 to 7: holds element 0 of rank 1; should be element 0 of rank 0"),
        (lambda comm, tensor, room, dst: collectives.gather(comm, tensor, room if comm.rank == 0 else None, 0),
         "with 2 ranks and 8 elements, TypeError: gather_list must be a list of 2 tensors, one for each rank, not NoneType "
         "(raised by rank 0 of 2, at 0 s of virtual time)"),
    ],
    "all_gather": [
        (lambda comm, room, tensor: room[comm.rank].copy_(tensor),
         f"{TWO}0, tensor_list[1], elements 0 to 7: never written; should be element 0 of rank 1"),
        (puts_tensors_of_its_own_into_the_list,
         f"{ONE}0, tensor_list[0], elements 0 to 7: never written; should be element 0 of rank 0"),
        (lambda comm, room, tensor: room.clear(),
         f"{ONE}0, tensor_list[0], elements 0 to 7: never written; should be element 0 of rank 0"),
    ],
    "reduce_scatter": [
        (lambda comm, output, parts: [collectives.all_reduce(comm, part) for part in parts] and output.copy_(parts[comm.rank]),
         f"{TWO}0's input_list[0] was changed; only the output should be"),
        (lambda comm, output, parts: collectives.reduce_scatter(comm, output, parts[1:] + parts[:1]),
         f"{TWO}0, elements 0 to 7: the sum of all ranks, but of elements 0 to 7 of part 1"),
        (lambda comm, output, parts: collectives.reduce_scatter(comm, output, [parts[comm.rank]] * comm.size),
         f"{TWO}0, elements 0 to 7: every rank is in the sum, but not with the same element; this one is to be made of "
         "everybody's part 0"),
        (lambda comm, output, parts: comm.barrier(), f"{ONE}0, elements 0 to 7: never written"),
    ],
    "all_to_all": [
        (lambda comm, room, parts: collectives.all_to_all(comm, room, parts) or [part.zero_() for part in parts],
         f"{ONE}0's input_list[0] was changed; only the output_list should be"),
        (lambda comm, room, parts: [one.copy_(part) for one, part in zip(room, parts, strict=True)],
         f"{TWO}0, output_list[1], elements 0 to 7: holds element 0 of part 1 of rank 0; should be element 0 of rank 1"),
    ],
}  # fmt: skip
ROWS = [(exercise, function, said) for exercise, rows in WRONG.items() for function, said in rows]


@pytest.mark.parametrize(("exercise", "function", "said"), ROWS)
def test_the_first_wrong_thing_is_said(exercise: str, function: Function, said: str) -> None:
    verdict = getattr(check, exercise)(function)
    assert not verdict and verdict.text == said, verdict


def test_a_deadlock_is_said_with_who_waits_for_whom() -> None:
    said = "with 2 ranks and 8 elements, deadlock: rank 0 -> rank 1 -> rank 0, each waits for the next"
    refused(check.all_reduce(lambda comm, tensor: comm.size > 1 and comm.send(tensor, (comm.rank + 1) % comm.size)), said)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_who_does_nothing_does_not_pass(exercise: str) -> None:
    assert getattr(check, exercise)(lambda comm, *arguments: None).text == "<lambda> is still empty"
    assert not getattr(check, exercise)(lambda comm, *arguments: comm.barrier())


@pytest.mark.parametrize("exercise", EXERCISES)
def test_a_function_is_needed(exercise: str) -> None:
    with pytest.raises(TypeError, match=f"check.{exercise} needs your function, not 7"):
        getattr(check, exercise)(7)


# ---- how well -------------------------------------------------------------------------------------------------------------


def test_who_sends_pieces_of_a_fixed_size_is_timed_with_few_of_them() -> None:
    def in_pieces(comm: Communicator, tensor: torch.Tensor) -> None:
        for piece in tensor.split(5):
            collectives.all_reduce(comm, piece)

    verdict = check.all_reduce(in_pieces)
    assert verdict and "With 8 ranks and tensors of n = 0.008 MB: 2800 steps" in verdict.text


def test_a_contest_is_against_the_ring() -> None:
    same = check.contest(library("all_reduce", "ring"), ring(4, 1e9), nbytes=8_000_000)
    assert repr(same) == "passed: 4 ranks of ring(4), 8 MB: 12.000 ms, ring 12.000 ms, 1.00 times as fast"
    one = check.contest(library("all_reduce", "halving_doubling"), star(8, 1e9, 0.5e-3), nbytes=8)
    assert one and one.text.endswith(f"{14 / 6:.2f} times as fast")
    assert check.contest(library("all_reduce", "blockwise"), hgx_h100())
    assert not check.contest(turned, hgx_h100())


def test_sums_must_be_right_on_the_machine_of_the_contest() -> None:
    """Among up to 8 ranks, which is all that the check has, there is only one machine: nothing is missing yet."""

    def within_machines(comm: Communicator, tensor: torch.Tensor) -> None:
        machine = comm.split(comm.rank // 8)
        assert machine is not None
        collectives.all_reduce(machine, tensor)

    assert check.all_reduce(within_machines)
    verdict = check.contest(within_machines, star(16, 1e9))
    assert not verdict and verdict.text.startswith("with 16 ranks of star(16), rank 0, element 0: ")


def test_one_rank_needs_no_time() -> None:
    verdict = check.contest(library("all_reduce", "ring"), star(1, 1e9))
    assert verdict.text == "1 rank of star(1), 160 MB: 0.000 ms, ring 0.000 ms"


# ---- the values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, MOST])
def test_a_sum_says_who_and_from_where(ranks: int) -> None:
    for part in range(ranks):
        total = sum((countable(rank, 8, part) * (rank + 1) for rank in range(ranks)), start=torch.zeros(8, dtype=torch.int64))
        for element, value in enumerate(total.tolist()):
            assert counts(value, ranks) == [rank + 1 for rank in range(ranks)]
            assert common_element(value, ranks, 8) == (part, element)
    assert counts(-1, ranks) is None and (ranks == MOST or counts(BASE**ranks, ranks) is None)


def test_all_places_differ() -> None:
    marks = {int(value) for part in range(MOST) for value in countable(0, 8, part)}
    assert len(marks) == 8 * MOST
    moved = [(rank, part, element) for rank in range(MOST) for part in range(MOST) for element in range(8)]
    for rank, part, element in moved:
        value = int(countable(rank, 8, part)[element])
        assert counts(value, MOST) == [int(other == rank) for other in range(MOST)]
        assert common_element(value, MOST, 8) == (part, element)


# ---- answers that are numbers ---------------------------------------------------------------------------------------------


def test_a_number_may_be_numpys_or_a_tensor() -> None:
    for seven in (7, 7.0, np.int64(7), np.float32(7), np.array(7), torch.tensor(7), torch.tensor([7.0])):
        near("days", seven, 7, "count them")
        parts("a week", (seven, 168), ("days", 7, ""), ("hours", 168, ""))
        with pytest.raises(Wrong, match=r"days: not .*7.*\. count them"):
            near("days", seven, 8, "count them")
    with pytest.raises(Wrong, match=r"^days: not 7\.5\. count them"):
        near("days", np.float64(7.5), 8, "count them")
    with pytest.raises(Wrong, match=r"^not all is filled in"):
        parts("a week", (7, ...), ("days", 7, ""), ("hours", 168, ""))
    for other in (True, "1", None, 1j, np.ones(2), torch.ones(2), float("nan")):
        with pytest.raises(Wrong, match="ones: not "):
            near("ones", other, 1, "")
        with pytest.raises(Wrong, match="is no number; it is asked in days"):
            number(other, 1, "days", "")


@pytest.mark.parametrize(
    ("given", "wanted", "words"),
    [(0.00117, 1.174, "a thousand times too small: in which unit is it asked?"),
     (208e9, 208, "a billion times too large: in which unit is it asked?"),
     (340, 335.1, "not 340, unless you have rounded it: give one digit more. count them"),
     (335, 340, "not 335. count them"), (0.2, 1.174, "not 0.2. count them"), (3, 0, "not 3. count them")],
)  # fmt: skip
def test_a_number_in_another_unit_or_rounded_is_called_so(given: float, wanted: float, words: str) -> None:
    with pytest.raises(Wrong, match=f"a week: .*{re.escape(words)}$"):
        near("a week", given, wanted, "count them")
