"""The checks of *Ring synchronization*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refused, solution
from test_check_beyond_the_ring import everyone_to_everyone

from d2lps import ReduceOp, collectives
from d2lps_book.check import ring_synchronization as check


def test_right_numbers_pass():
    assert check.bytes_on_links(320, 0, 2, 3)
    assert check.half_as_fast(10.37, (4, 1), 6.22) and check.half_as_fast(10.37, (8, 2), 6.22)
    assert check.carried(lambda shares, r: 2 - shares[r] - shares[(r + 1) % len(shares)])


def ring(comm, tensor, way=1, wait=True):
    """Once round with isend and recv; without `wait` nobody waits for a send."""
    p, r = comm.size, comm.rank
    chunks = tensor.tensor_split(p)
    for step in range(2 * (p - 1)):
        out, mine = chunks[(way * r - step) % p], chunks[(way * r - step - 1) % p]
        room = torch.empty_like(mine) if step < p - 1 else mine
        sending = comm.isend(out, (r + way) % p, tag=way + 1)
        comm.recv(room, (r - way) % p, tag=way + 1)
        if wait:
            sending.wait()
        if step < p - 1:
            comm.combine(mine, room)


def both_to_the_right(comm, tensor):
    for half in tensor.tensor_split(2):
        ring(comm, half)


def one_way_after_the_other(comm, tensor):
    for way, half in zip((1, -1), tensor.tensor_split(2), strict=True):
        ring(comm, half, way)


def never_waits(comm, tensor):
    ring(comm, tensor, wait=False)


def left_half_only(comm, tensor):
    ring(comm, tensor.tensor_split(2)[1], -1)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(both_to_the_right, "half should go each way"), (one_way_after_the_other, "under way in every step"), (ring, "each way"),
     (everyone_to_everyone, "not its neighbor"), (left_half_only, "missing"),
     (lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="two_rings"), "the library's")],
)  # fmt: skip
def test_both_ways_refuses(wrong, word):
    refused(check.both_ways(wrong), word)


@pytest.mark.parametrize(
    ("answers", "word"),
    [((400, 0, 2, 3), "how long is a chunk"), ((320, 320, 2, 3), "to the left"), ((320, 0, 1, 3), "first half"),
     ((320, 0, 2, 2), "second half"), ((0.32, 0, 2, 3), "a thousand times too small")],
)  # fmt: skip
def test_bytes_on_links_refuses(answers, word):
    refused(check.bytes_on_links(*answers), word)


@pytest.mark.parametrize(
    "wrong",
    [lambda w, r: 2 * (len(w) - 1) / len(w), lambda w, r: 2 - 2 * w[r], lambda w, r: 2 - w[r] - w[r - 1], lambda w, r: 2 * w[r]],
)
def test_carried_refuses(wrong):
    verdict = check.carried(wrong)
    assert not verdict and "in the second" in verdict.text, verdict


def sends_first(comm, tensor):
    comm.send(tensor, (comm.rank + 1) % comm.size)


def with_sendrecv(comm, tensor):
    comm.sendrecv(tensor, 0, tensor.clone(), 0)


def with_the_chapters_halves(comm, tensor):
    """Functions of the chapter do it, by sendrecv."""
    chapter = solution("ex-ring-mean")
    chunks = tensor.tensor_split(comm.size)
    chapter.value("scatter_reduce")(comm, chunks)
    chapter.value("all_gather")(comm, chunks)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(with_the_chapters_halves, "a function that yours calls uses sendrecv"),
     (never_waits, "sends nobody waits for"), (with_sendrecv, "do without"), (everyone_to_everyone, "only right neighbors"),
     (sends_first, "Deadlock"), (lambda comm, tensor: ring(comm, tensor, -1), "only right neighbors"),
     (lambda comm, tensor: collectives.all_reduce(comm, tensor), "the library's")],
)  # fmt: skip
def test_isend_ring_refuses(wrong, word):
    verdict = check.isend_ring(wrong)
    assert not verdict and (word in verdict.text or word == "Deadlock"), verdict


def divides_at_the_end(comm, tensor):
    ring(comm, tensor)
    tensor /= comm.size


def divides_before(comm, tensor):
    tensor *= 1 / comm.size
    ring(comm, tensor)


def only_equal_chunks(comm, tensor):
    """The mean, except of the elements that are too many for chunks of one length."""
    solution("ex-ring-mean")["ring_mean"](comm, tensor[: len(tensor) // comm.size * comm.size])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(only_equal_chunks, "with 2 ranks and 83 elements, rank 0, element 82"),
     (divides_at_the_end, "are enough"), (divides_before, "are enough"), (ring, "the mean is"),
     (lambda comm, tensor: collectives.all_reduce(comm, tensor, ReduceOp.AVG), "the library's")],
)  # fmt: skip
def test_ring_mean_refuses(wrong, word):
    refused(check.ring_mean(wrong), word)


def flat(comm, tensor, inside):
    ring(comm, tensor)


def always_two(comm, tensor, inside):
    solution("ex-ring-hierarchical")["ring_of_rings"](comm, tensor, 2)


def whole_tensor_between(comm, tensor, inside):
    """Inside all get the machine's sum; then the whole of it goes between the machines."""
    if comm.size % inside:
        return ring(comm, tensor)
    machine, seat = divmod(comm.rank, inside)
    local, across = comm.split(machine, seat), comm.split(seat, machine)
    ring(local, tensor)
    ring(across, tensor)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(flat, "to other machines"), (always_two, "to other machines"), (whole_tensor_between, "to other machines"),
     (lambda comm, tensor, inside: collectives.all_reduce(comm, tensor, algorithm="hierarchical"), "the library's")],
)  # fmt: skip
def test_ring_of_rings_refuses(wrong, word):
    refused(check.ring_of_rings(wrong), word)


def test_beat_the_ring():
    assert "3.6 µs" in check.beat_the_ring(everyone_to_everyone).text
    assert "14 " not in check.beat_the_ring(everyone_to_everyone).text
    assert "at once for nothing" in check.beat_the_ring(everyone_to_everyone).text  # allowed, and questioned
    for wrong, word in ((ring, "has 14"), (both_to_the_right, "has 14"), (left_half_only, "missing")):
        verdict = check.beat_the_ring(wrong)
        assert not verdict and word in verdict.text, verdict
    assert "the library's" in check.beat_the_ring(lambda comm, tensor: collectives.all_reduce(comm, tensor)).text


@pytest.mark.parametrize(
    ("answers", "word"),
    [((5.185, (4, 1), 6.22), "which ring is last"), ((10.37, (2, 1), 6.22), "10.37"), ((10.37, (1, 4), 6.22), "take"),
     ((10.37, (4, 1), 5.185), "both rings carry"), ((10.37, 4, 6.22), "no pair"), ((10.37, (4, 1, 1), 6.22), "no pair")],
)  # fmt: skip
def test_half_as_fast_refuses(answers, word):
    refused(check.half_as_fast(*answers), word)
