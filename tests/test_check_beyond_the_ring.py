"""The checks of *Beyond the ring*: wrong answers are refused in words."""

import numpy as np
import pytest
import torch
from solutions import refused, solution

from d2lps import collectives
from d2lps_book.check import beyond_the_ring as check

LABELS = {"recursive_doubling": "doubling", "bruck": "bruck", "tree_merge": "variance"}
MINE = {name: solution(f"ex-beyond-{label}") for name, label in LABELS.items()}


def test_numbers_and_groups_pass():
    assert check.by_hand(450, 720, 360, 230, 235)
    assert check.groups(solution("ex-beyond-groups")["by_rack"])
    assert "np." not in repr(check.groups(np.arange(16).reshape(4, 4)))


@pytest.mark.parametrize(
    ("answers", "word"),
    [((480, 720, 360, 230, 235), "480 µs is not it: how many steps has a ring of 16"),
     ((450, 400, 360, 230, 235), "up and down"),
     ((450, 720, 720, 230, 235), "L steps"), ((450, 720, 360, 360, 235), "ring's bytes"), ((450, 720, 360, 230, 500), "the same"),
     ((0.45, 720, 360, 230, 235), "too small")],
)  # fmt: skip
def test_by_hand_refuses(answers, word):
    refused(check.by_hand(*answers), word)


def everyone_to_everyone(comm, tensor):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    room = {rank: torch.empty_like(tensor) for rank in others}
    for work in [comm.irecv(room[rank], rank) for rank in others] + [comm.isend(tensor, rank) for rank in others]:
        work.wait()
    for rank in others:
        comm.combine(tensor, room[rank])


def to_and_from_0(comm, tensor):
    """A chain of whole tensors to rank 0 and back."""
    room = torch.empty_like(tensor)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            comm.recv(room, rank)
            comm.combine(tensor, room)
        elif comm.rank == rank:
            comm.send(tensor, 0)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            comm.send(tensor, rank)
        elif comm.rank == rank:
            comm.recv(tensor, 0)


def without_guests(comm, tensor):
    """For powers of two alone."""
    room, distance = torch.empty_like(tensor), 1
    while distance < comm.size:
        comm.sendrecv(tensor, comm.rank ^ distance, room, comm.rank ^ distance)
        comm.combine(tensor, room)
        distance *= 2


def all_at_once_among_three(comm, tensor):
    """Right, and in the fewest steps, with more messages than the exercise's method."""
    method = everyone_to_everyone if comm.size == 3 else MINE["recursive_doubling"]["recursive_doubling"]
    method(comm, tensor)


def halves(comm, tensor):
    for part in tensor.tensor_split(2):
        MINE["recursive_doubling"]["recursive_doubling"](comm, part)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="ring"), "the library's"), (to_and_from_0, "steps"),
     (everyone_to_everyone, "only hand theirs in"), (without_guests, "rank 2"), (halves, "steps"),
     (all_at_once_among_three, "tensors are sent")],
)  # fmt: skip
def test_recursive_doubling_refuses(wrong, word):
    refused(check.recursive_doubling(wrong), word)


def by_ring(comm, tensor_list, tensor):
    comm.copy(tensor_list[comm.rank], tensor)
    p, r = comm.size, comm.rank
    for step in range(p - 1):
        comm.sendrecv(tensor_list[(r - step) % p], (r + 1) % p, tensor_list[(r - step - 1) % p], (r - 1) % p)


def direct(comm, tensor_list, tensor):
    comm.copy(tensor_list[comm.rank], tensor)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for work in [comm.irecv(tensor_list[r], r) for r in others] + [comm.isend(tensor, r) for r in others]:
        work.wait()


def unsorted(comm, tensor_list, tensor):
    """Part k of the row is left in place k."""
    p, have, row = comm.size, 1, tensor.new_empty(comm.size * len(tensor))
    m = len(tensor)
    comm.copy(row[:m], tensor)
    while have < p:
        more = min(have, p - have)
        left, right = (comm.rank - have) % p, (comm.rank + have) % p
        comm.sendrecv(row[: more * m], left, row[have * m : (have + more) * m], right)
        have += more
    for k in range(p):
        comm.copy(tensor_list[k], row[k * m : (k + 1) * m])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lambda comm, tensor_list, tensor: collectives.all_gather(comm, tensor_list, tensor), "the library's"),
     (by_ring, "can double"), (direct, "can double"), (unsorted, "tensor_list")],
)  # fmt: skip
def test_bruck_refuses(wrong, word):
    refused(check.bruck(wrong), word)


def merge(one, two):
    MINE["tree_merge"]["merge"](one, two)


def star_of_one_round(comm, triple):
    if comm.rank:
        return comm.send(triple, 0)
    room = [torch.empty_like(triple) for _ in range(1, comm.size)]
    for work in [comm.irecv(part, rank + 1) for rank, part in enumerate(room)]:
        work.wait()
    for part in room:
        merge(triple, part)


def chain(comm, triple):
    room = torch.empty_like(triple)
    if comm.rank + 1 < comm.size:
        comm.recv(room, comm.rank + 1)
        merge(triple, room)
    if comm.rank:
        comm.send(triple, comm.rank - 1)


def mean_of_means(comm, triple):
    collectives.reduce(comm, triple, 0)
    triple[1] /= comm.size


def overwrites_what_it_needs(comm, triple):
    """Count and mean are new before M asks for the old ones."""

    def merge(one, two):
        count, step = one[0] + two[0], two[1] - one[1]
        one[0] = count
        one[1] += step * two[0] / count
        one[2] += two[2] + (two[1] - one[1]) ** 2 * one[0] * two[0] / count

    room = torch.empty_like(triple)
    if comm.rank + 1 < comm.size:
        comm.recv(room, comm.rank + 1)
        merge(triple, room)
    if comm.rank:
        comm.send(triple, comm.rank - 1)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(overwrites_what_it_needs, "from before the merge"),
     (star_of_one_round, "that is a star"), (chain, "one after another"), (mean_of_means, "the mean on rank 0"),
     (lambda comm, triple: comm.rank, "as it was before: write the merge")],
)  # fmt: skip
def test_tree_merge_refuses(wrong, word):
    verdict = check.tree_merge(wrong)
    assert not verdict and word in verdict.text and "np." not in verdict.text, verdict


@pytest.mark.parametrize(
    ("wrong", "word"),
    [([list(range(16))], "which links"), ([list(range(k, 16, 4)) for k in range(4)], "which links"),
     (4, "no list of groups"), ([4] * 4, "no list of groups"),
     ([[0, 1, 2, 3]], "each rank"), ([list(range(4 * k, 4 * k + 4)) for k in (0, 1, 2, 2)], "each rank")],
)  # fmt: skip
def test_groups_refuses(wrong, word):
    refused(check.groups(wrong), word)


def test_five_times():
    halving = solution("ex-beyond-contest")["mine"]
    assert check.five_times(halving)
    for wrong, word in ((lambda comm, tensor: collectives.all_reduce(comm, tensor), "the library's"),
                        (lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="hierarchical"), "the library's"),
                        (lambda comm, tensor: comm.barrier(), "missing"), (to_and_from_0, "out of its machine")):  # fmt: skip
        verdict = check.five_times(wrong)
        assert not verdict and word in verdict.text, verdict
