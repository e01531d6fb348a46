"""The checks of *Ring synchronization*: wrong answers are refused in words."""

from solutions import refusing, tried
from test_check import everyone_to_everyone

from d2lps import ReduceOp, collectives

TURNS, FULLEST = "(1, halves[0]), (-1, halves[1]) -> ", "shares[(r + 1) % len(shares)] -> "
SPARED, ENOUGH, OUTSIDE, LIBRARY = "in the second", "are enough", "to other machines", "the library's"

test_refused = refusing({
    "ex-ring-both both_ways": [
        (f"{TURNS}(1, halves[0]), (1, halves[1])", "half should go each way"),
        (("tensor): -> tensor, way=0):\n    if not way:\n        return both_ways(comm, tensor, 1), both_ways(comm, tensor, -1)",
          f"{TURNS}(way, halves[way < 0]),"), "under way in every step"),  # one way after the other
        ("ring", "each way"), (everyone_to_everyone, "not its neighbor"), (f"{TURNS}(-1, halves[1]),", "missing"),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor, algorithm="two_rings"), LIBRARY),
    ],
    "ex-ring-bytes bytes_on_links": [
        ("400, 0, 2, 3", "how long is a chunk"), ("320, 320, 2, 3", "to the left"), ("320, 0, 1, 3", "first half"),
        ("320, 0, 2, 2", "second half"), ("0.32, 0, 2, 3", "a thousand times too small"),
    ],
    "ex-ring-unequal carried": [
        (lambda shares, r: 2 * (len(shares) - 1) / len(shares), SPARED), (f"{FULLEST}shares[r]", SPARED),
        (f"{FULLEST}shares[r - 1]", SPARED), (lambda shares, r: 2 * shares[r], SPARED),
    ],
    "ex-ring-isend isend_ring": [
        ("ring", "a function that yours calls uses sendrecv"),
        ("sending.wait() -> pass", "sends nobody waits for"),
        (lambda comm, tensor: comm.sendrecv(tensor, 0, tensor.clone(), 0), "do without"),
        (everyone_to_everyone, "only right neighbors"),
        (lambda comm, tensor: comm.size > 1 and comm.send(tensor, (comm.rank + 1) % comm.size), "deadlock"),
        (("right, left = -> left, right =", "place = r - step -> place = -r - step"), "only right neighbors"),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor), LIBRARY),
    ],
    "ex-ring-mean ring_mean": [
        ("lambda comm, tensor: ring_mean(comm, tensor[:len(tensor) // comm.size * comm.size])",
         "with 2 ranks and 83 elements, rank 0, element 82"),
        ("lambda comm, tensor: (ring(comm, tensor), tensor.div_(comm.size))", ENOUGH),
        ("lambda comm, tensor: (tensor.mul_(1 / comm.size), ring(comm, tensor))", ENOUGH), ("ring", "the mean is"),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor, ReduceOp.AVG), LIBRARY),
    ],
    "ex-ring-hierarchical ring_of_rings": [
        ("lambda comm, tensor, inside: ring(comm, tensor)", OUTSIDE),
        ("lambda comm, tensor, inside: ring_of_rings(comm, tensor, 2)", OUTSIDE),
        (("scatter_reduce(local, chunks) -> ring(local, tensor)", "chunks[(seat + 1) % inside] -> tensor",
          "all_gather(local, chunks) -> pass"), OUTSIDE),  # all get the machine's sum, and the whole of it goes between them
        (lambda comm, tensor, inside: collectives.all_reduce(comm, tensor, algorithm="hierarchical"), LIBRARY),
    ],
    "ex-ring-contest beat_the_ring": [
        ("ring", "has 14"), ("lambda comm, tensor: [ring(comm, half) for half in tensor.tensor_split(2)]", "has 14"),
        ("lambda comm, tensor: ring(comm, tensor.tensor_split(2)[1])", "missing"),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor), LIBRARY),
    ],
    "ex-ring-half half_as_fast": [
        ("5.185, (4, 1), 6.22", "which ring is last"), ("10.37, (2, 1), 6.22", "10.37"), ("10.37, (1, 4), 6.22", "take"),
        ("10.37, (4, 1), 5.185", "both rings carry"), ("10.37, 4, 6.22", "no pair"), ("10.37, (4, 1, 1), 6.22", "no pair"),
    ],
})  # fmt: skip


def test_shares_may_be_in_other_units():
    assert tried("ex-ring-half half_as_fast", "10.37, (8, 2), 6.22")


def test_all_at_once_is_allowed_and_questioned():
    said = tried("ex-ring-contest beat_the_ring", everyone_to_everyone)
    assert said and "3.6 µs" in said.text and "at once for nothing" in said.text and "14 " not in said.text, said
