"""Numbers that are wrong, silently: damaged before, within or after the sum over all ranks.

Damage that happens before the sum, or while it is made, is spread by it: afterwards all replicas agree, on something wrong. So
it has to be looked for where it happens.

- before: `damaged` lets another rank compute the same gradient again. It finds every bit, at the price of that computing; done
  for one micro-batch out of many, now and then, of a few percent.
- within: `checked_all_reduce` carries a checksum that is linear, as the sum is: what comes out must have the sum of the ranks'
  checksums. It is Huang and Abraham's for matrices (IEEE Trans. Computers C-33, 1984). It names chunk, rank and link.
- after: `d2lps.parallel.Replicas` compares fingerprints.
"""

import math
from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from d2lps.collectives import all_gather_into_tensor
from d2lps.collectives.ring import Ring, Step, all_gather_steps, play, reduce_scatter_steps
from d2lps.comm import Communicator, Mismatch, ReduceOp
from d2lps.parallel.data.replicas import fingerprint


def damaged(comm: Communicator, mine: Tensor, again: Callable[[int], Tensor], turn: int = 0) -> list[int]:
    """The ranks whose gradients are not what another rank computes from the same micro-batch and weights; on every rank.

    >>> found = damaged(comm, gradient, lambda rank: gradient_of(model, micro_batch(step, rank)), turn=step)    # doctest: +SKIP

    again(rank): computes `rank`'s gradient here. Each rank is the witness of one other, another one in each turn. Where a witness
    disagrees, a second one decides by majority; with two ranks both are named. Equal devices and the same program are needed:
    the comparison is exact. Cost: one more gradient, and all-gathers of 8 bytes a rank.
    """
    if comm.size == 1:
        return []
    first = 1 + turn % (comm.size - 1)
    own, seen = _shared(comm, mine), _witnessed(comm, again, first)
    doubted = [rank for rank in range(comm.size) if own[rank] != seen[rank]]
    if not doubted or comm.size == 2:
        return [comm.members[rank] for rank in ([0, 1] if doubted else [])]
    second = first % (comm.size - 1) + 1
    third = _witnessed(comm, again, second)
    wrong = set()
    for rank in doubted:
        wrong.add((rank + first) % comm.size if third[rank] == own[rank] else rank)
    return sorted(comm.members[rank] for rank in wrong)


def _witnessed(comm: Communicator, again: Callable[[int], Tensor], away: int) -> list[int]:
    """Of each rank, the fingerprint that the rank `away` beyond it finds."""
    seen = _shared(comm, again((comm.rank - away) % comm.size))
    return [seen[(rank + away) % comm.size] for rank in range(comm.size)]


def _shared(comm: Communicator, tensor: Tensor) -> list[int]:
    return _gathered(comm, torch.tensor([fingerprint(tensor)])).flatten().tolist()


def checksum(chunk: Tensor, seed: int) -> Tensor:
    """Two numbers in float64: the sum of the elements with signs drawn from `seed`, and the chunk's length (its 2-norm).

    >>> checksum(torch.tensor([3.0, 4.0]), seed=0)
    tensor([1., 5.], dtype=torch.float64)

    The first is linear. The signs see to it that two changes do not cancel, and that rounding errors nearly do.
    """
    signs = torch.randint(2, (chunk.numel(),), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = chunk.detach().double()
    return torch.stack([exact @ (2 * signs - 1), exact.norm()])


def checked_all_reduce(comm: Communicator, tensor: Tensor, step: int = 0) -> None:
    """A ring all-reduce (SUM) of a flat tensor of floats that raises Mismatch, on every rank, if the sum is wrong: where.

    >>> checked_all_reduce(comm, gradient)                                                          # doctest: +SKIP
    Mismatch: chunk 3 is wrong as it comes to rank 2: rank 1 has added wrongly to it, or the way from rank 1 has changed it

    A chunk that has been to ranks a, b, c must have the sum of their checksums, but for rounding. With e half the distance from
    1 to the next float, a sum of h has an error of at most (h - 1) e times the sizes of its summands; and signs at random let
    the errors of n elements add up to more than 8 times the root of their squares once in 4e13 (Hoeffding). So what is refused
    is wrong, and what changes by less than 8 (h - 1) e times the summands' lengths is not seen. step: for other signs each time.
    Cost: the ring's steps and bytes, an all-gather of 16 p bytes a rank, and reading what arrives once more, in float64.
    ValueError for another tensor, and for one that is only described.
    """
    if tensor.dim() != 1 or not tensor.is_floating_point() or tensor.is_meta:
        raise ValueError(f"a flat tensor of floats is summed, not {tensor.dtype}, shape {list(tensor.shape)} on {tensor.device}")
    chunks, p = comm.chunks(tensor, comm.size), comm.size
    mine = torch.stack([checksum(chunk, step * p + number) for number, chunk in enumerate(chunks)])
    table = _gathered(comm, mine)  # [rank, chunk, 2]
    lost = (~table.isfinite()).any(2).nonzero().tolist()
    if lost:
        rank, number = lost[0]
        raise Mismatch(f"chunk {number} of rank {comm.members[rank]} holds what is no number, before any sum")
    ring = Ring.of(comm.rank, range(p), chunks)
    first = torch.tensor([math.inf, 0, 0])  # after how many hops a chunk was wrong, which, and where

    def checked(steps: Iterator[Step], hops: Iterator[int]) -> Iterator[Step]:
        for move, hop in zip(steps, hops, strict=False):
            yield move
            number = (comm.rank - hop) % p
            summed, lengths = table[[(number + away) % p for away in range(min(hop, p))], number].sum(0)
            found, _ = checksum(move[2], step * p + number)
            rounding = (min(hop, p) - 1) * torch.finfo(tensor.dtype).eps / 2 + 2.0**-40
            if not abs(found - summed) <= 8 * rounding * lengths and hop < first[0]:
                first.copy_(torch.tensor([hop, number, comm.rank]))

    hops = count(1)
    play(comm, "reduce-scatter", p, checked(reduce_scatter_steps(comm, ring, ReduceOp.SUM), hops))
    play(comm, "all-gather", p, checked(all_gather_steps(ring), hops))
    hop, number, rank = min(_gathered(comm, first).tolist())
    if hop < math.inf:
        here, before = comm.members[int(rank)], comm.members[int(rank) - 1]
        did = f"rank {before} has added wrongly to it, or " if 1 < hop <= p else ""
        how = f"{did}the way from rank {before} has changed it{_beyond(table[:, int(number), 1].sum(), tensor.dtype)}"
        raise Mismatch(f"chunk {number:.0f} is wrong as it comes to rank {here}: {how}")


def _beyond(length: Tensor, dtype: torch.dtype) -> str:
    """Of a sum that may be so long, what else may be wrong with it."""
    return f"; or its sum is beyond {most:g}, {dtype}'s largest" if length > (most := torch.finfo(dtype).max) else ""


def _gathered(comm: Communicator, mine: Tensor) -> Tensor:
    table = mine.new_empty(comm.size, *mine.shape)
    all_gather_into_tensor(comm, table, mine)
    return table
