"""All-reduce by two trees at once: the leaves of one tree, half of the ranks, have little to do; in the other they work.

So every rank has children in at most one of the two trees, each tree carries half of the data, and no rank sends or
receives more than 2n bytes, however many ranks there are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from d2lps import cost
from d2lps.arguments import whole
from d2lps.collectives.all_reduce.placement import link
from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator, ReduceOp


def double_tree(comm: Communicator, data: Tensor, op: ReduceOp, *, chunks: int | None = None) -> None:
    """Up two trees to their roots and down again, in chunks, so that all levels of the trees work at the same time.

    chunks: into how many each half is cut; by default as many as `cost.best_chunks` finds best. With C of them, and trees
    of height H = floor(log2 p): at most 2(C + H - 1) steps, in which no rank sends or receives more than 2 chunks, n/C
    bytes. Time: at most 2(C + H - 1)(alpha + n beta / C). With 4 ranks, n beta = 10 ms and 10 chunks: 22 ms.
    Source: Sanders, Speck, Traeff 2009; NCCL, src/graph/trees.cc.
    """
    chunks = cost.best_chunks(data.nbytes, comm.size, *link(comm)) if chunks is None else whole("chunks", chunks)
    height, count = comm.size.bit_length() - 1, max(1, min(chunks, data.numel() // 2))
    halves = zip(orders(comm.size), data.tensor_split(2), strict=True)
    trees = [Seat.of(comm.rank, order, comm.chunks(half, count)) for order, half in halves]
    for clock in range(count + height - 1):
        comm.step("up {}", clock + 1)
        _up(comm, trees, clock - height, op)
    for chunk in (chunk for tree in trees if not tree.parents for chunk in tree.chunks):  # complete, at the root
        divide(chunk, op, comm.size)
    for clock in range(count + height - 1):
        comm.step("down {}", clock + 1)
        _down(comm, trees, clock)


# ---- where a rank sits ------------------------------------------------------------------------------------------------


def orders(size: int) -> tuple[list[int], list[int]]:
    """Which rank sits where in each tree; who sits at an odd position in one sits at an even one, a leaf, in the other.

    >>> orders(4), orders(5)
    (([0, 1, 2, 3], [3, 2, 1, 0]), ([0, 1, 2, 3, 4], [4, 0, 1, 2, 3]))
    """
    ranks = list(range(size))
    return ranks, ranks[::-1] if size % 2 == 0 else ranks[-1:] + ranks[:-1]


def family(position: int, size: int) -> tuple[int, int | None, list[int]]:
    """(depth, parent, children) in a binary tree whose left and right sides are the positions before and after it.

    Parents sit at odd positions, leaves at even ones.

    >>> [family(position, 5) for position in (3, 1, 0)]     # 3 is the root; 1 has 0 and 2 below it, and 4 is a leaf
    [(0, None, [1, 4]), (1, 3, [0, 2]), (2, 1, [])]
    """
    low, high, depth, parent = 0, size, 0, None
    while (here := _top(low, high)) != position:
        low, high = (low, here) if position < here else (here + 1, high)
        depth, parent = depth + 1, here
    sides = (low, here), (here + 1, high)
    return depth, parent, [_top(*side) for side in sides if side[0] < side[1]]


def _top(low: int, high: int) -> int:
    """The root of positions low .. high - 1: the odd one in the middle. `low` is always even."""
    return low if high - low == 1 else (low + high) // 2 | 1


class Seat(NamedTuple):
    """Where a rank sits in a tree, and the part of its data that goes through that tree."""

    depth: int
    parents: list[int]  # the one above, or none
    children: list[tuple[Tensor, int]]  # with room for what each sends
    chunks: Sequence[Tensor]

    @classmethod
    def of(cls, rank: int, order: Sequence[int], chunks: Sequence[Tensor]) -> "Seat":
        depth, parent, children = family(order.index(rank), len(order))
        parents = [] if parent is None else [order[parent]]
        # The first chunk is never smaller than another.
        return cls(depth, parents, [(chunks[0].new_empty(chunks[0].shape), order[child]) for child in children], chunks)

    def chunk(self, turn: int) -> Sequence[Tensor]:
        """The one chunk whose turn it is; none before the first and after the last."""
        return self.chunks[turn : turn + 1] if turn >= 0 else ()


# ---- the two ways -----------------------------------------------------------------------------------------------------
# Both ends of a message know its turn: chunk c leaves depth d in turn c + height - d on the way up, c + d on the way
# down. So a rank posts the messages of a turn together, waits for them together, and nobody waits in a circle.


def _up(comm: Communicator, trees: list[Seat], turn: int, op: ReduceOp) -> None:
    sends = [(chunk, parent) for tree in trees for chunk in tree.chunk(turn + tree.depth) for parent in tree.parents]
    sums = [(chunk, child) for tree in trees for chunk in tree.chunk(turn + tree.depth + 1) for child in tree.children]
    receives = [(room[: chunk.numel()], child) for chunk, (room, child) in sums]
    comm.exchange(sends, receives)
    for (chunk, _), (incoming, _) in zip(sums, receives, strict=True):
        comm.combine(chunk, incoming, op)


def _down(comm: Communicator, trees: list[Seat], turn: int) -> None:
    sends = [(chunk, child) for tree in trees for chunk in tree.chunk(turn - tree.depth) for _, child in tree.children]
    receives = [(chunk, parent) for tree in trees for chunk in tree.chunk(turn - tree.depth + 1) for parent in tree.parents]
    comm.exchange(sends, receives)
