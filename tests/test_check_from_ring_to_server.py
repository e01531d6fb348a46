"""The exercises of *From ring to server*: what is wrong is refused, in words."""


import torch
from solutions import refusing, solution

from d2lps import Communicator
from d2lps.collectives import all_reduce
from d2lps_book.check import from_ring_to_server as check

Tensor = torch.Tensor


def test_pieces_that_pass_have_their_own_time() -> None:
    assert check.in_pieces(solution("ex-server-pieces")["in_pieces"]).text.endswith("32 pieces take 33 ms, where one takes 64")


def of_neighbors(comm: Communicator, tensor: Tensor) -> None:
    """The middle one of three, again and again around the ring: what one number for each element can carry."""
    for _ in range(comm.size - 1):
        other = torch.empty_like(tensor)
        comm.sendrecv(tensor, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)
        tensor.copy_(torch.stack([tensor, other, tensor]).median(0).values)


WITHOUT_CLOCK = "enumerate(pairs)]\n    kv.clock() -> enumerate(pairs)]"
PUSHPULL, WAIT = "kv.pushpull(key, g, w) for -> ", "for pull in pulls:\n        pull.wait() -> pass"
SCATTER = "reduce_scatter(machine, mine, list(gradient.tensor_split(devices))) -> "
STORED = "kv.push(key, mine)\n    kv.clock()\n    kv.pull(key, mine).wait() -> "
MY_PART = "mine.copy_(gradient.tensor_split(devices)[machine.rank])"
ROOM = "blocks = -> room = [torch.empty_like(tensor) for _ in range(comm.size)]\n    "
MEDIAN = "torch.stack(mine).median(0).values -> "

test_refused = refusing({
    "ex-server-by-hand by_hand": [
        ("..., ..., ...", "not all is filled in"),
        ("(90, 90, 28.8), (90, 90, 14.4), (75, 75, 12)", "three servers, a server sends"),
        ("(90, 180, 14.4), (90, 90, 14.4), (75, 75, 12)", "three servers, ms", "first in and then out"),
        ("(90, 180, 28.8), (90, 90, 14.4), (90, 90, 14.4)", "colocated, a worker sends", "never reaches the port"),
        ("(90, 180, 28.8), (90, 90, 14.4), 12", "3 numbers are wanted"),
    ],
    "ex-server-racks racks": [
        ("(8, 64), (2, 80)", "without the tree, ms", "come back up"), ("(4, 128), (2, 80)", "without the tree, gradients"),
        ("(8, 128), (1, 80)", "with the tree, gradients"), ("(8, 128), (2, 56)", "with the tree, ms", "four parts"),
    ],
    "ex-server-sum sum_or_mean": [("0.5, 4", "rate"), ("2.0, 4", "rate"), ("0.125, 16", "factor"), ("0.125, 2", "factor")],
    "ex-server-pieces in_pieces": [
        (WITHOUT_CLOCK, "clock comes next"),
        ((WITHOUT_CLOCK, "pairs = zip -> if kv.iteration < 1 and weights.any(): kv.clock()\n    pairs = zip"),
         "has called clock() 1 times in two"),
        ("in_order", "40.0 are possible"),
        (f"{PUSHPULL}(kv.push(key, g), kv.pull(key, w))[1] for", "has it waited, and pulled after clock()"),
        ((f"{PUSHPULL}kv.pushpull(key, g, w).wait() for", WAIT), "ms, and ", " are possible"),  # each waits for the one before
        (WAIT, "has it waited?"),
        ("for pull in pulls: -> for pull in pulls[:1]:", "rank 0 has"),
        ("pairs = zip -> for key, part in enumerate(weights.tensor_split(pieces)): kv.init(key, part)\n    pairs = zip",
         "in every iteration"),
        (lambda kv, gradient, weights, pieces: (all_reduce(kv.comm, gradient), weights.add_(gradient), kv.clock()),
         "pushes 0 times"),
        (lambda kv, gradient, weights, pieces: (all_reduce(kv.comm, gradient), weights.add_(gradient)), "clock"),
        (lambda kv, gradient, weights, pieces:
         (weights.add_(gradient / 10**kv.rank * (1111 if kv.num_workers == 4 else 1)), kv.clock()), "pushes 0 times"),
    ],
    "ex-server-blocks blocks": [
        (('mine, key = parts[machine.rank].clone(), f"part {machine.rank}" -> mine, key = weights.clone(), "all"',
          f"{SCATTER}mine.copy_(gradient)", "all_gather(machine, parts, mine) -> weights.copy_(mine)"), "6 gradients are pushed"),
        (f"{SCATTER}{MY_PART}", "rank 0 has weight 0 at"),
        ("mine *= -rate -> mine *= -0.5", "rate 0.25: rank 0 has 2 times the weights"),
        ("mine *= -rate -> mine *= rate", "rank 0 has -1 times the weights"),
        ((f"{SCATTER}d2lps.collectives.all_reduce(kv.comm, gradient); {MY_PART}", f"{STORED}pass"), "nothing was pushed"),
        (f"{SCATTER}d2lps.collectives.all_reduce(machine, gradient, algorithm='flat'); {MY_PART}", "28.8 are possible"),
        ("return weights -> return weights.tensor_split(2)[0]", "not the 8 weights"),
        (f"{STORED}kv.pushpull(key, mine, mine).wait(); kv.clock()", "when every worker has pushed that key"),
    ],
    "ex-server-uneven places": [
        ("equal", "[3, 1]: 92.2 ms, and 46.1"),
        (lambda speeds: [0, 0, 0, 1][: sum(speeds)] if len(speeds) == 2 else [0], "[1, 1]"),  # made for the text's servers
        (lambda speeds: [s for s, v in enumerate(speeds) for _ in range(max(speeds) // v)], "1 for speed 3, 3 for speed 1"),
        (lambda speeds: [s for s, v in enumerate(sorted(speeds)) for _ in range(v)], "[3, 1]"),  # forgets whose speed it is
        ("range(speed // unit) -> range(speed * speed)", "[3, 1]", "9 for speed 3"),
        (lambda speeds: [speeds.index(max(speeds))], "[1, 1]"),
        (lambda speeds: speeds, "no list of servers"),
        (lambda speeds: [], "no list of servers"),
        (lambda speeds: {0: 1}, "no list of servers"),
    ],
    "ex-server-median median": [
        (lambda comm, tensor: (all_reduce(comm, tensor), tensor.div_(comm.size)),
         "3 ranks, 6 elements: rank 0, element 0 is ", " the median of"),
        (of_neighbors, "the median of"),
        (f"{ROOM}all_gather(comm, room, tensor.clone())\n"
         "    return tensor.copy_(torch.stack(room).median(0).values)\n    blocks =",
         "4.00 gradients go through some rank's port, and the ring needs 1.60"),
        (f"{ROOM}d2lps.collectives.gather(comm, tensor, room if comm.rank == 0 else None, 0, algorithm='linear')\n"
         "    if comm.rank == 0:\n        tensor.copy_(torch.stack(room).median(0).values)\n"
         "    return d2lps.collectives.broadcast(comm, tensor, 0, algorithm='flat')\n    blocks =", "4.00 gradients"),
        (lambda comm, tensor: tensor.clone(), "the median of", "the result belongs in it"),
        (f"{MEDIAN}torch.stack(mine).mean(0)", "the median of"),
        (f"{MEDIAN}torch.stack(mine).sort(0).values[int(len(mine) > 1)]", "5 ranks"),
        ("tensor.tensor_split -> tensor.chunk", "Error: "),  # which may give fewer chunks than were asked for
    ],
})  # fmt: skip
