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


# ---- all-reduce, wrong in many ways ---------------------------------------------------------------------------------------


def everyone_to_everyone(comm: Communicator, tensor: torch.Tensor, use: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """All-reduce by whole tensors; `use` says what is added of what has come from a rank."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    rooms = {rank: torch.empty_like(tensor) for rank in others}
    work = [comm.irecv(rooms[rank], rank) for rank in others] + [comm.isend(tensor, rank) for rank in others]
    for message in work:
        message.wait()
    for rank in others:
        comm.combine(tensor, use(rooms[rank], rank))


def right(comm: Communicator, tensor: torch.Tensor) -> None:
    everyone_to_everyone(comm, tensor, lambda room, rank: room)


def backwards(comm: Communicator, tensor: torch.Tensor) -> None:
    everyone_to_everyone(comm, tensor, lambda room, rank: room.flip(0))


def forgets_the_last(comm: Communicator, tensor: torch.Tensor) -> None:
    right(comm, tensor[:-1])


def adds_the_next_one_twice(comm: Communicator, tensor: torch.Tensor) -> None:
    right(comm, tensor)
    if comm.size > 2 and comm.rank == 2:
        tensor += countable(1, len(tensor))


def turned(comm: Communicator, tensor: torch.Tensor) -> None:
    """Every block is added up, and put where another one belongs."""
    right(comm, tensor)
    tensor.copy_(tensor.roll(1))


def ring_that_forgets_to_add(comm: Communicator, tensor: torch.Tensor) -> None:
    """Round the ring go copies: what comes is kept instead of added."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for step in range(comm.size - 1):
        comm.step(f"step {step}")
        comm.sendrecv(tensor.clone(), right, tensor, left)


def writes_nonsense(comm: Communicator, tensor: torch.Tensor) -> None:
    tensor.fill_(-5)


def hears_but_does_not_add(comm: Communicator, tensor: torch.Tensor) -> None:
    everyone_to_everyone(comm, tensor, lambda room, rank: torch.zeros_like(room))


def one_room_for_all(comm: Communicator, tensor: torch.Tensor) -> None:
    """Rows of one inbox, of which the last is added for all."""
    inbox = tensor.new_empty((comm.size, len(tensor)))
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    work = [comm.irecv(inbox[rank], rank) for rank in others] + [comm.isend(tensor, rank) for rank in others]
    for message in work:
        message.wait()
    for _ in others:
        comm.combine(tensor, inbox[others[-1]])


def sends_first(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.size > 1:
        comm.send(tensor, (comm.rank + 1) % comm.size)


def sends_too_much(comm: Communicator, tensor: torch.Tensor) -> None:
    for rank in range(1, comm.size):
        if comm.rank == 0:
            comm.send(tensor, rank)
        elif comm.rank == rank:
            comm.recv(tensor[:-1], 0)


def raises(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 1:
        raise KeyError("nobody knows")
    comm.barrier()


def leaves_a_message(comm: Communicator, tensor: torch.Tensor) -> None:
    right(comm, tensor)
    if comm.size > 1 and comm.rank == 0:
        comm.isend(tensor, 1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            forgets_the_last,
            "with 2 ranks and 8 elements, rank 0, element 7: rank 1 is missing (no message brought rank 0 this element)",
        ),
        (adds_the_next_one_twice, "with 3 ranks and 8 elements, rank 2, elements 0 to 7: rank 1 counted 2 times"),
        (turned, "with 1 rank and 8 elements, rank 0, element 0: the sum of all ranks, but of element 7"),
        (
            backwards,
            "with 2 ranks and 8 elements, rank 0, elements 0 to 7: every rank is in the sum, but not with the same element",
        ),
        (
            ring_that_forgets_to_add,
            "with 2 ranks and 8 elements, rank 0, elements 0 to 7: rank 0 is missing (rank 1 sent it in step 'step 0' before "
            "adding rank 0's)",
        ),
        (writes_nonsense, "with 1 rank and 8 elements, rank 0, elements 0 to 7: -5 is no sum of the ranks' values; was the"),
        (
            hears_but_does_not_add,
            "with 2 ranks and 8 elements, rank 0, elements 0 to 7: rank 1 is missing (rank 1's message brought it, but it was "
            "not added)",
        ),
        (
            one_room_for_all,
            "with 3 ranks and 8 elements, rank 0, elements 0 to 7: rank 1 is missing; rank 2 counted 2 times (rank 1's message "
            "brought it, but it was not added)",
        ),
        (sends_first, "with 2 ranks and 8 elements, deadlock: rank 0 -> rank 1 -> rank 0, each waits for the next"),
        (
            sends_too_much,
            "with 2 ranks and 8 elements, Mismatch: message from rank 0 to rank 1, tag 0: the sender sends int64[8], the "
            "receiver expects int64[7]",
        ),
        (raises, "with 2 ranks and 8 elements, KeyError: 'nobody knows' (raised by rank 1 of 2, at 0 s of virtual time)"),
        (leaves_a_message, "with 2 ranks and 8 elements, 1 messages were sent and never received, or awaited and never sent"),
    ],
)
def test_the_first_wrong_thing_is_said(function: Function, said: str) -> None:
    verdict = check.all_reduce(function)
    assert not verdict and verdict.text.startswith(said), verdict


def test_blocks_that_come_back_to_the_wrong_place_are_seen() -> None:
    """A ring whose second round stores each sum one block too far: the numbers are all there, the places are not."""

    def ring_all_reduce(comm: Communicator, tensor: torch.Tensor, shift: int = 1) -> None:
        blocks, rank, p = tensor.tensor_split(comm.size), comm.rank, comm.size
        if p == 1 or tensor.numel() % p:
            return collectives.all_reduce(comm, tensor)
        collectives.reduce_scatter(comm, mine := torch.empty_like(blocks[rank]), list(blocks))
        gathered = [torch.empty_like(mine) for _ in range(p)]
        collectives.all_gather(comm, gathered, mine)
        for place_, block in enumerate(gathered):
            blocks[(place_ + shift) % p].copy_(block)
        return None

    verdict = check.all_reduce(ring_all_reduce)
    assert verdict.text.startswith(
        "with 2 ranks and 8 elements, rank 0, elements 0 to 3: the sum of all ranks, but of elements 4 to 7"
    ), verdict
    assert check.all_reduce(lambda comm, tensor: ring_all_reduce(comm, tensor, 0))


def test_what_was_added_before_it_was_complete_is_traced_to_its_message() -> None:
    """The chain of a tree: rank 2 passes on what it has before rank 3's part has come."""

    def chain(comm: Communicator, tensor: torch.Tensor) -> None:
        room = torch.empty_like(tensor)
        for rank in reversed(range(1, comm.size)):
            hop = comm.size - 1 - rank
            comm.step(f"hop {hop}")
            if comm.rank == rank:
                comm.send(tensor, rank - 1)
            elif comm.rank == rank - 1:
                comm.recv(room, rank)
                if rank != 3:
                    comm.combine(tensor, room)
        collectives.broadcast(comm, tensor, 0)

    verdict = check.all_reduce(chain)
    said = "with 4 ranks and 8 elements, rank 0, elements 0 to 7: rank 3 is missing (rank 1 sent it in step 'hop 2' before adding"
    assert verdict.text.startswith(said), verdict


# ---- the other collectives ----------------------------------------------------------------------------------------------


def test_reduce_leaves_the_others_alone() -> None:
    def everywhere(comm: Communicator, tensor: torch.Tensor, dst: int) -> None:
        collectives.all_reduce(comm, tensor)

    assert check.reduce(everywhere).text == (
        "with 2 ranks and 8 elements, rank 0's tensor was changed; only that of rank 1 should be"
    )


def test_a_root_that_receives_over_its_own_part_is_asked_whether_it_does() -> None:
    def keeps_the_last(comm: Communicator, tensor: torch.Tensor, dst: int) -> None:
        if comm.rank != dst:
            return comm.send(tensor, dst)
        for rank in set(range(comm.size)) - {dst}:
            comm.recv(tensor, rank)
        return None

    refused(check.reduce(keeps_the_last), "rank 1, elements 0 to 7: rank 1 is missing (was a message received in its place")


def adds_up_in_the_input(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    for part in parts:
        collectives.all_reduce(comm, part)
    output.copy_(parts[comm.rank])


def empties_what_it_has_sent(comm: Communicator, output_list: list[torch.Tensor], input_list: list[torch.Tensor]) -> None:
    collectives.all_to_all(comm, output_list, input_list)
    for part in input_list:
        part.zero_()


@pytest.mark.parametrize(
    ("exercise", "function", "said"),
    [
        ("reduce_scatter", adds_up_in_the_input, "rank 0's input_list[0] was changed; only the output should be"),
        ("all_to_all", empties_what_it_has_sent, "rank 0's input_list[0] was changed; only the output_list should be"),
    ],
)
def test_inputs_stay_as_they_were(exercise: str, function: Function, said: str) -> None:
    refused(getattr(check, exercise)(function), said)


def posts_and_forgets(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    if comm.rank != src:
        comm.recv(tensor, src)
        return
    for rank in range(comm.size):
        if rank != src:
            comm.isend(tensor, rank)


def test_sends_are_waited_for() -> None:
    refused(check.broadcast(posts_and_forgets), "with 2 ranks and 8 elements, 1 send nobody waits for, of ranks [1]")


def test_the_sum_of_another_part_is_not_the_right_part() -> None:
    def next_part(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
        collectives.reduce_scatter(comm, output, parts[1:] + parts[:1])

    said = "with 2 ranks and 8 elements, rank 0, elements 0 to 7: the sum of all ranks, but of elements 0 to 7 of part 1"
    assert check.reduce_scatter(next_part).text.startswith(said)


def test_a_sum_of_mixed_parts_is_told_which_it_should_be_of() -> None:
    def sends_its_own(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
        collectives.reduce_scatter(comm, output, [parts[comm.rank]] * comm.size)

    refused(check.reduce_scatter(sends_its_own), "rank 0, elements 0 to 7: every rank is in the sum, but not with the same ",
            "element; this one is to be made of everybody's part 0")  # fmt: skip


def test_a_sum_that_was_never_written_is_said_to_be() -> None:
    said = "with 1 rank and 8 elements, rank 0, elements 0 to 7: never written"
    assert check.reduce_scatter(lambda comm, output, parts: comm.barrier()).text.startswith(said)


def adding_broadcast(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    collectives.all_reduce(comm, tensor)


def wrong_broadcast(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    collectives.broadcast(comm, tensor, 0)


def always_to_rank_0(comm: Communicator, tensor: torch.Tensor, dst: int) -> None:
    collectives.reduce(comm, tensor, 0)


def always_from_rank_0(comm: Communicator, tensor: torch.Tensor, parts: list[torch.Tensor] | None, src: int) -> None:
    collectives.scatter(comm, tensor, parts if comm.rank == 0 else None, 0)


def always_at_rank_0(comm: Communicator, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int) -> None:
    collectives.gather(comm, tensor, gather_list if comm.rank == 0 else None, 0)


@pytest.mark.parametrize(
    ("exercise", "function", "said"),
    [
        ("reduce", always_to_rank_0, "rank 0's tensor was changed; only that of rank 1 should be"),
        ("scatter", always_from_rank_0, "scatter_list"),
        ("gather", always_at_rank_0, "gather_list"),
    ],
)
def test_another_root_than_rank_0_is_asked_for(exercise: str, function: Function, said: str) -> None:
    verdict = getattr(check, exercise)(function)
    assert not verdict and said in verdict.text, verdict


def lazy_scatter(comm: Communicator, tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None, src: int) -> None:
    if scatter_list:
        tensor.copy_(scatter_list[0])


def scatter_to_the_neighbor(comm: Communicator, tensor: torch.Tensor, parts: list[torch.Tensor] | None, src: int) -> None:
    collectives.scatter(comm, tensor, parts and parts[1:] + parts[:1], src)


def gather_in_reverse(comm: Communicator, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None, dst: int) -> None:
    collectives.gather(comm, tensor, gather_list and gather_list[::-1], dst)


def gather_ones_own(comm: Communicator, tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
    tensor_list[comm.rank].copy_(tensor)


def keep_what_is_for_others(comm: Communicator, output_list: list[torch.Tensor], input_list: list[torch.Tensor]) -> None:
    for output, given in zip(output_list, input_list, strict=True):
        output.copy_(given)


@pytest.mark.parametrize(
    ("exercise", "function", "said"),
    [
        (
            "broadcast",
            adding_broadcast,
            "rank 0, tensor, elements 0 to 7: holds a sum, of ranks 0, 1; should be element 0 of rank 1",
        ),
        (
            "broadcast",
            wrong_broadcast,
            "rank 0, tensor, elements 0 to 7: holds element 0 of rank 0; should be element 0 of rank 1",
        ),
        ("scatter", lazy_scatter, "rank 0, tensor, elements 0 to 7: never written; should be element 0 of rank 1"),
        (
            "scatter",
            scatter_to_the_neighbor,
            "rank 0, tensor, elements 0 to 7: holds element 0 of part 1 of rank 1; should be element 0 of rank 1",
        ),
        (
            "gather",
            gather_in_reverse,
            "rank 1, gather_list[0], elements 0 to 7: holds element 0 of rank 1; should be element 0 of rank 0",
        ),
        ("all_gather", gather_ones_own, "rank 0, tensor_list[1], elements 0 to 7: never written; should be element 0 of rank 1"),
        (
            "all_to_all",
            keep_what_is_for_others,
            "rank 0, output_list[1], elements 0 to 7: holds element 0 of part 1 of rank 0; should be element 0 of rank 1",
        ),
    ],
)
def test_what_is_not_where_it_belongs_is_named(exercise: str, function: Function, said: str) -> None:
    verdict = getattr(check, exercise)(function)
    assert verdict.text == f"with 2 ranks and 8 elements, {said}"


def puts_tensors_of_its_own_into_the_list(comm: Communicator, tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
    tensor_list[:] = [torch.empty_like(part) for part in tensor_list]
    collectives.all_gather(comm, tensor_list, tensor)


def empties_the_list(comm: Communicator, tensor_list: list[torch.Tensor], tensor: torch.Tensor) -> None:
    tensor_list.clear()


@pytest.mark.parametrize("function", [puts_tensors_of_its_own_into_the_list, empties_the_list])
def test_a_list_must_keep_its_tensors(function: Function) -> None:
    """They may be parts of another tensor, as the caller's: what is put in their place never gets there."""
    said = "rank 0, tensor_list[0], elements 0 to 7: never written; should be element 0 of rank 0"
    assert check.all_gather(function).text == f"with 1 rank and 8 elements, {said}"


def shrinks(comm: Communicator, tensor: torch.Tensor) -> None:
    tensor.resize_(len(tensor) // 2)


def makes_it_another_dtype(comm: Communicator, tensor: torch.Tensor) -> None:
    right(comm, tensor)
    tensor.data = tensor.double()


@pytest.mark.parametrize(
    ("function", "what"), [(shrinks, "4 elements of torch.int64"), (makes_it_another_dtype, "8 elements of torch.float64")]
)
def test_a_tensor_must_stay_what_it_is(function: Function, what: str) -> None:
    said = f"rank 0's tensor has become {what}; write into it instead"
    assert check.all_reduce(function).text == f"with 1 rank and 8 elements, {said}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_who_does_nothing_does_not_pass(exercise: str) -> None:
    assert not getattr(check, exercise)(lambda comm, *arguments: None)


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
