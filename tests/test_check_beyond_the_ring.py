"""The checks of *Beyond the ring*: wrong answers are refused in words."""

import numpy as np
import torch
from solutions import refusing, solution, tried
from test_check import everyone_to_everyone

from d2lps import collectives
from d2lps_book.check import beyond_the_ring as check

recursive_doubling = solution("ex-beyond-doubling")["recursive_doubling"]


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


def all_at_once_among_three(comm, tensor):
    """Right, and in the fewest steps, with more messages than the exercise's method."""
    (everyone_to_everyone if comm.size == 3 else recursive_doubling)(comm, tensor)


def direct(comm, tensor_list, tensor):
    comm.copy(tensor_list[comm.rank], tensor)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.exchange([(tensor, rank) for rank in others], [(tensor_list[rank], rank) for rank in others])


def mean_of_means(comm, triple):
    collectives.reduce(comm, triple, 0)
    triple[1] /= comm.size


MERGED = "scratch, distance = torch.empty_like(triple), 1 -> scratch, distance = torch.empty_like(triple), comm.size\n    "
LIBRARY, LINKS, NO_LIST, EACH = "the library's", "which links", "no list of groups", "each rank"

test_refused = refusing({
    "ex-beyond-by-hand by_hand": [
        ("480, 720, 360, 230, 235", "480 µs is not it: how many steps has a ring of 16"),
        ("450, 400, 360, 230, 235", "up and down"), ("450, 720, 720, 230, 235", "L steps"),
        ("450, 720, 360, 360, 235", "ring's bytes"), ("450, 720, 360, 230, 500", "the same"),
        ("0.45, 720, 360, 230, 235", "too small"),
    ],
    "ex-beyond-doubling recursive_doubling": [
        (lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="ring"), LIBRARY),
        (to_and_from_0, "steps"),
        (everyone_to_everyone, "only hand theirs in"),
        ("1 << (comm.size.bit_length() - 1) -> comm.size", "rank 2"),  # for powers of two alone
        (lambda comm, tensor: [recursive_doubling(comm, half) for half in tensor.tensor_split(2)], "steps"),
        (all_at_once_among_three, "tensors are sent"),
    ],
    "ex-beyond-bruck bruck": [
        (lambda comm, tensor_list, tensor: collectives.all_gather(comm, tensor_list, tensor), LIBRARY),
        (("min(have, p - have) -> 1", "row[:more * m] -> row[(have - 1) * m:have * m]",
          "(rank - have) % p, (rank + have) % p -> (rank - 1) % p, (rank + 1) % p"), "can double"),  # round a ring
        (direct, "can double"),
        ("tensor_list[(rank + k) % p] -> tensor_list[k]", "tensor_list"),
    ],
    "ex-beyond-variance tree_merge": [
        ("one[2] += two[2] + step**2 * one[0] * two[0] / c\n    one[1] += step * two[0] / c\n    one[0] = c -> "
         "one[0] = c\n    one[1] += step * two[0] / c\n    one[2] += two[2] + (two[1] - one[1])**2 * one[0] * two[0] / c",
         "from before the merge"),
        (f"{MERGED}if comm.rank:\n        return comm.send(triple, 0)\n"
         "    rooms = [torch.empty_like(triple) for _ in range(1, comm.size)]\n"
         "    comm.exchange([], [(room, rank) for rank, room in enumerate(rooms, 1)])\n"
         "    for room in rooms:\n        merge(triple, room)", "that is a star"),
        (f"{MERGED}if comm.rank + 1 < comm.size:\n        comm.recv(scratch, comm.rank + 1)\n        merge(triple, scratch)\n"
         "    if comm.rank:\n        comm.send(triple, comm.rank - 1)", "one after another"),
        (mean_of_means, "the mean on rank 0"),
        (lambda comm, triple: comm.rank, "as it was before: write the merge"),
    ],
    "ex-beyond-groups groups": [
        ("[list(range(16))]", LINKS), ("[list(range(k, 16, 4)) for k in range(4)]", LINKS), ("4", NO_LIST), ("[4] * 4", NO_LIST),
        ("[[0, 1, 2, 3]]", EACH), ("[list(range(4 * k, 4 * k + 4)) for k in (0, 1, 2, 2)]", EACH),
    ],
    "ex-beyond-contest five_times": [
        (lambda comm, tensor: collectives.all_reduce(comm, tensor), LIBRARY),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="hierarchical"), LIBRARY),
        (lambda comm, tensor: comm.barrier(), "missing"),
        (to_and_from_0, "out of its machine"),
    ],
})  # fmt: skip


def test_no_verdict_shows_numpys_names():
    said = check.groups(np.arange(16).reshape(4, 4))
    assert said and "np." not in said.text + tried("ex-beyond-variance tree_merge", mean_of_means).text
