"""Context parallel training: every rank has a part of each sequence, and keys and values go around a ring.

Attention is the only place in a transformer where tokens meet. A rank keeps its queries; blocks of keys and values pass by, and
what is added up is never a whole row of scores: a running maximum, a running sum and a running output, which is scaled down
whenever a block brings a larger maximum.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from d2lps.comm import Communicator
from d2lps.parallel.experts import Experts
from d2lps.parallel.transformer import Attention, Embed

Placement = Callable[[int, int, int], Tensor]  # (ranks, rank, length of the sequence) -> the positions that the rank has


def in_turn(ranks: int, rank: int, sequence: int) -> Tensor:
    """The plain placement: the first rank has the first positions. With a causal mask it waits for the last rank.

    >>> in_turn(2, 1, 8)
    tensor([4, 5, 6, 7])
    """
    if sequence % ranks:
        raise ValueError(f"a sequence of {sequence} can't be cut into {ranks} equal parts")
    return torch.arange(sequence).chunk(ranks)[rank]


def folded(ranks: int, rank: int, sequence: int) -> Tensor:
    """Two pieces for each rank, one from either end, so that with a causal mask all have the same work ("zigzag").

    >>> folded(2, 0, 8), folded(2, 1, 8)
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """
    if sequence % (2 * ranks):
        raise ValueError(f"a sequence of {sequence} can't be cut into 2 x {ranks} equal pieces, two for each rank")
    pieces = torch.arange(sequence).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


def zigzag(comm: Communicator, sequence: int) -> Tensor:
    """Which positions of a sequence this rank has, in rising order; ValueError unless 2 comm.size divides its length."""
    return folded(comm.size, comm.rank, sequence)


def local(comm: Communicator, tensor: Tensor, dim: int = 1, place: Placement = folded) -> Tensor:
    """This rank's part of a tensor that has the whole sequence along `dim`: of the tokens, and of the targets.

    >>> tokens, targets = text[:, :-1], text[:, 1:]     # first moved by one, then cut: never the other way     # doctest: +SKIP
    >>> tokens, targets = local(comm, tokens), local(comm, targets)                                 # doctest: +SKIP

    All ranks get equally many positions, so the mean loss of the sequence is the mean of the ranks' mean losses.
    """
    return tensor.index_select(dim, place(comm.size, comm.rank, tensor.shape[dim]).to(tensor.device))


def ring_attention(comm: Communicator, query: Tensor, key: Tensor, value: Tensor, place: Placement = folded) -> Tensor:
    """Causal attention of a whole sequence of which every rank has a part; what `scaled_dot_product_attention` gives for it.

    >>> out = ring_attention(comm, query, key, value)       # each [batch, heads, sequence / p, size]       # doctest: +SKIP

    Heads of keys and values may be fewer, each for as many of the queries'. place: which positions a rank has, its rows in
    rising order. The next block is on its way while this one is computed; in the backward pass keys and values go around once
    more, and their gradients with them, a rank behind, until they are at home.

    Cost, with n = 2 batch (sequence / p) kv_heads size, the elements of a rank's keys and values: p - 1 messages of n forward;
    p - 1 of n, and p of n for gradients (float32 at least), backward. Work a rank: with `folded`, half of a block's in every step
    but the first, on all ranks; with `in_turn`, rank r has r whole blocks. Memory: a block of scores, [sequence / p]^2 a head, in
    place of p^2 as many. ValueError for shapes that do not fit. Source: Liu et al. 2023 (Ring Attention); the folded placement as
    in Megatron-LM and ring-flash-attention.
    """
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 or 0 in shape for shape in shapes):
        raise ValueError(f"query, key, value of shapes {shapes}: [batch, heads, positions, size] is needed, none of them 0")
    if query.shape[1] % key.shape[1] or key.shape != value.shape or query[:, 0].shape != key[:, 0].shape:
        raise ValueError(f"query, key, value of shapes {shapes}: equal ones are needed, or a divisor of the queries' heads")
    with torch.autocast("cpu", enabled=False):  # or the forward pass would round scores that the backward pass does not
        return _Ring.apply(query, key, value, comm, place)


class _Ring(Function):
    """Inside, queries are [batch, kv heads, queries for each, positions, size], keys and values [2, batch, kv heads, 1, ...]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Communicator, place: Placement) -> Tensor:
        ctx.comm, ctx.place = comm, place
        query, pair = query.unflatten(1, (key.shape[1], -1)), torch.stack([key, value]).unsqueeze(3)
        out = torch.zeros_like(query, dtype=_wide(query))
        top = torch.full_like(out[..., :1], -torch.inf)
        total = torch.zeros_like(top)
        for source, block in _around(comm, pair):
            first, last, hidden = _seen(comm, source, query, place)
            if last == 0:
                continue
            scores, high_before = _scores(query, block, first, last, hidden), top[..., first:, :].clone()
            high = torch.maximum(top[..., first:, :], scores.amax(-1, keepdim=True), out=top[..., first:, :])
            scale, weights = (high_before - high).exp(), (scores - high).exp()
            total[..., first:, :].mul_(scale).add_(weights.sum(-1, keepdim=True))
            out[..., first:, :].mul_(scale).add_(weights @ block[1, ..., :last, :].to(out.dtype))
        out /= total
        ctx.save_for_backward(query, pair, out, top + total.log())
        return out.to(query.dtype).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, pair, out, logsum = ctx.saved_tensors
        grad = grad.unflatten(1, query.shape[1:3]).to(out.dtype)
        share = (grad * out).sum(-1, keepdim=True)  # what the softmax takes off the gradient of each of a row's scores
        ours, home = torch.zeros_like(out), None
        for source, block in _around(ctx.comm, pair):
            theirs = torch.zeros_like(block, dtype=out.dtype)
            first, last, hidden = _seen(ctx.comm, source, query, ctx.place)
            if last:
                weights = (_scores(query, block, first, last, hidden) - logsum[..., first:, :]).exp()
                asked, (key, value) = grad[..., first:, :], block[..., :last, :].to(out.dtype)
                slope = weights * (asked @ value.mT - share[..., first:, :]) / sqrt(query.shape[-1])
                ours[..., first:, :] += slope @ key
                theirs[0, ..., :last, :] = (slope.mT @ query[..., first:, :].to(out.dtype)).sum(2, keepdim=True)
                theirs[1, ..., :last, :] = (weights.mT @ asked).sum(2, keepdim=True)
            if home is not None:  # what the ranks before have found for this block
                ctx.comm.combine(theirs, home())
            with ctx.comm.about("gradients of keys, values x", "B T_* D"):
                home = _pass_on(ctx.comm, theirs)
        assert home is not None
        found = home().squeeze(3).to(pair.dtype)
        return ours.to(query.dtype).flatten(1, 2), found[0], found[1], None, None


def _around(comm: Communicator, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each rank's tensor in turn, with whose it is, this rank's first; the next one is on its way meanwhile."""
    for step in range(comm.size):
        with comm.about("keys, values x", "B T_* D"):
            comm.step("ring {}/{}", step + 1, comm.size)
            arrived = _pass_on(comm, mine) if step + 1 < comm.size else None
        yield (comm.rank - step) % comm.size, mine
        if arrived:
            mine = arrived()


def _pass_on(comm: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to send to the right, and to receive the like from the left; what is returned waits, and gives what has come."""
    if comm.size == 1:
        return lambda: tensor
    incoming = torch.empty_like(tensor)
    with comm.together():
        posted = comm.irecv(incoming, (comm.rank - 1) % comm.size), comm.isend(tensor, (comm.rank + 1) % comm.size)

    def arrived() -> Tensor:
        for work in posted:
            work.wait()
        return incoming

    return arrived


@lru_cache(1024)
def _span(place: Placement, ranks: int, rank: int, source: int, sequence: int) -> tuple[int, int, bool]:
    """The first of a rank's queries that sees any of a source's keys, how many keys are seen, and whether not all by all."""
    mine, theirs = place(ranks, rank, sequence), place(ranks, source, sequence)
    if bool((mine.diff() <= 0).any()):
        raise ValueError(f"rank {rank} of {ranks} has the positions {mine.tolist()}: they must be in rising order")
    first, last = int((mine < theirs[0]).sum()), int((theirs <= mine[-1]).sum())
    return first, last, last > 0 and first < len(mine) and bool(theirs[last - 1] > mine[first])


def _seen(comm: Communicator, source: int, query: Tensor, place: Placement) -> tuple[int, int, Tensor | None]:
    """As `_span`, but with the mask, where one is needed."""
    where = comm.size, comm.rank, source, comm.size * query.shape[-2]
    first, last, partly = _span(place, *where)
    if not partly:
        return first, last, None
    mine, theirs = (place(comm.size, rank, where[3]).to(query.device) for rank in (comm.rank, source))
    return first, last, theirs[:last] > mine[first:, None]


def _scores(query: Tensor, block: Tensor, first: int, last: int, hidden: Tensor | None) -> Tensor:
    wide = _wide(query)
    scores = query[..., first:, :].to(wide) @ block[0, ..., :last, :].to(wide).mT / sqrt(query.shape[-1])
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _wide(tensor: Tensor) -> torch.dtype:
    """In which scores, sums and gradients on their way are kept: 16 bits are too few for a sum of many."""
    return torch.promote_types(tensor.dtype, torch.float32)


def context_parallel(comm: Communicator, model: nn.Module, place: Placement = folded) -> nn.Module:
    """Let a Transformer's module, or a slice of it, compute on this rank's part of each sequence; changed in place.

    >>> model = context_parallel(mesh.cp, transformer.module(seed=0))                       # doctest: +SKIP
    >>> loss = cross_entropy(model(local(mesh.cp, tokens)).flatten(0, 1), local(mesh.cp, targets).flatten())     # doctest: +SKIP

    Sequences must have the full length of the model. Weights stay whole and alike on all ranks; each rank's gradients are those
    of its own positions' mean loss, so they are averaged over `mesh.data`, dp and cp together, as if each part of a sequence were
    an example of a batch. A mixture of experts balances over whole sequences, and fills its capacity by this rank's part alone.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = partial(ring_attention, comm, place=place)
        elif isinstance(module, Embed):
            module.positions = place(comm.size, comm.rank, module.places.num_embeddings).to(module.places.weight.device)
        elif isinstance(module, Experts):
            module.sequence = comm
    return model
