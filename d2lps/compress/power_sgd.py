"""A matrix as the product of two thin ones, found together by all ranks in two rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from d2lps.compress.codec import Codec, Done, Round, Rounds, chance, check_count, expect, wide


def power_sgd(rank: int = 2, seed: int = 0) -> Codec:
    """M of n x m becomes P Q^T with P of n x r and Q of m x r: r(n + m) elements in place of nm.

    >>> codec = power_sgd(rank=1)
    >>> matrix = torch.outer(torch.arange(1.0, 4), torch.arange(1.0, 5))        # of rank 1: nothing is lost
    >>> sent = codec.encode(matrix)
    >>> sent.numel(), torch.allclose(codec.decode(sent, matrix), matrix)
    (7, True)

    Linear in two rounds: P = M Q for a Q that all have, summed and made orthonormal; then Q = M^T P, summed. The last Q is a good
    first one of the next step, and `rounds` gives it as what is to be kept. A tensor of more dimensions is a matrix of its first
    by the others; one of fewer, or so small that it has no fewer elements as a product, is sent as it is.
    Source: Vogels, Karimireddy, Jaggi 2019 (PowerSGD).
    """
    return PowerSGD(rank, seed)


@dataclass(frozen=True)
class PowerSGD(Codec):
    rank: int
    seed: int

    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    def factors(self, like: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and rank of what it is sent as, unless it is sent as it is.

        >>> power_sgd(2).factors(torch.empty(9, 2, 4)), power_sgd(2).factors(torch.empty(9))
        ((9, 8, 2), None)
        """
        if like.dim() < 2 or not like.numel():
            return None
        rows = like.shape[0]
        columns = like.numel() // rows
        rank = min(rows, columns, self.rank)
        return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None

    def first_q(self, like: Tensor, turn: int = 0) -> Tensor:
        """What all ranks begin with, m x r: drawn by chance, the same on all of them."""
        _, columns, rank = self.factors(like) or (0, 0, 0)
        drawn = torch.empty(columns, rank, dtype=wide(like.dtype), device=like.device)
        return drawn if like.is_meta else drawn.copy_(torch.randn(columns, rank, generator=chance(self.seed, turn)))

    def encode(self, tensor: Tensor, turn: int = 0, q: Tensor | None = None) -> Tensor:
        """P and Q, found by this rank alone; q: to begin with."""
        if self.factors(tensor) is None:
            return tensor.detach().flatten().clone()
        matrix, q = self._begin(tensor, turn, q)
        p = torch.linalg.qr(matrix @ q).Q
        return torch.cat([p.flatten(), (matrix.T @ p).flatten()])

    def decode(self, sent: Tensor, like: Tensor, turn: int = 0) -> Tensor:
        if (factors := self.factors(like)) is None:
            expect(sent, like.dtype, like.numel(), f"{like.numel()} elements")
            return sent.clone().view(like.shape)
        rows, columns, rank = factors
        expect(sent, wide(like.dtype), rank * (rows + columns), f"the factors of {rows} x {columns}")
        p, q = sent.split([rows * rank, columns * rank])
        return (p.view(rows, rank) @ q.view(columns, rank).T).to(like.dtype).view(like.shape)

    def rounds(self, tensor: Tensor, turn: int = 0, kept: Tensor | None = None) -> Rounds:
        if self.factors(tensor) is None:
            return (yield from super().rounds(tensor, turn))
        matrix, q = self._begin(tensor, turn, kept)
        p = torch.linalg.qr((yield Round(matrix @ q))).Q  # by the same arithmetic on all ranks
        mine = matrix.T @ p
        q = yield Round(mine, lambda: self._product(p, mine, tensor))
        return Done(self._product(p, q, tensor), q)

    def _begin(self, tensor: Tensor, turn: int, q: Tensor | None) -> tuple[Tensor, Tensor]:
        self.check(tensor)
        matrix = tensor.detach().reshape(tensor.shape[0], -1).to(wide(tensor.dtype))
        return matrix, torch.linalg.qr(self.first_q(tensor, turn) if q is None else q).Q

    def _product(self, p: Tensor, q: Tensor, like: Tensor) -> Tensor:
        return (p @ q.T).to(like.dtype).view(like.shape)
