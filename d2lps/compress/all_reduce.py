"""The sum of all ranks' tensors, of which fewer bytes are sent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from d2lps import collectives
from d2lps.collectives.arguments import check_tensor, collective
from d2lps.comm import Communicator
from d2lps.compress.codec import Codec, Done, narrow, wide
from d2lps.compress.feedback import ErrorFeedback


@collective("tensor", "codec", "name", "algorithm")
def all_reduce(
    comm: Communicator,
    tensor: Tensor | Sequence[Tensor],
    codec: Codec | ErrorFeedback,
    name: str = "",
    *,
    turn: int = 0,
    algorithm: str | None = None,
    **options: Any,
) -> None:
    """Every rank's `tensor` holds the sum of all ranks' tensors, as far as the codec lets it through; the same on all ranks.

    >>> feedback = d2lps.compress.ErrorFeedback(d2lps.compress.top_k(0.01))                 # doctest: +SKIP
    >>> d2lps.compress.all_reduce(comm, layer.grad, feedback, name="layer")                 # doctest: +SKIP

    tensor: of any shape; or several, sent together. codec: with `ErrorFeedback`, what is left unsent of `name` is added first.
    turn: how often this was done before, for what is random in a codec; ErrorFeedback counts by itself. algorithm, with n bytes
    before and c after encoding:
    "two_stage"   all-to-all of encoded chunks, which their owners decode and add up in rank order, in FP32 or better, and encode
                  again; all-gather: 2(p - 1) steps, each rank sends 2(p - 1)/p c bytes. For all codecs; who owns a chunk keeps a
                  second residual. By default for those that are not linear.
    "all_gather"  everyone gets everyone's code, and adds up: p - 1 steps, (p - 1) c bytes. For all codecs; no second error.
    another       of `collectives.all_reduce`, with its options, on what a linear codec sends: c in place of n bytes, twice with
                  PowerSGD. Sums are rounded in the codec's dtype. By default "ring" for linear codecs.
    Errors: ValueError if a linear codec is asked for, or a tensor is not finite and would spoil what is sent with it.
    Source: two stages: Tang et al. 2021 (1-bit Adam).
    """
    tensors = [tensor] if isinstance(tensor, Tensor) else list(tensor)
    for each in tensors:
        check_tensor("tensor", each)
    memory, codec = (codec, codec.codec) if isinstance(codec, ErrorFeedback) else (None, codec)
    job = _Job(comm, codec, memory, name, turn if memory is None else memory.turns[name], tensors[0].dtype)
    algorithm = algorithm or ("ring" if codec.linear else "two_stage")
    staged = {"two_stage": job.two_stage, "all_gather": job.all_gather}.get(algorithm)
    if staged is None and not codec.linear:
        raise ValueError(f"algorithm={algorithm!r} adds up codes, as {codec} does not allow: choose 'two_stage' or 'all_gather'")
    data = torch.cat([each.detach().reshape(-1) for each in tensors])
    wanted = data.to(wide(data.dtype)) if memory is None else memory.owed(name, data)
    total = staged(wanted) if staged else job.ride(wanted, [each.shape for each in tensors], algorithm, options)
    for each, part in zip(tensors, total.split([each.numel() for each in tensors]), strict=True):
        each.detach().copy_(part.view(each.shape))
    if memory is not None:
        memory.turns[name] += 1


class _Job:
    """One call: who encodes what with which codec, and remembers what."""

    def __init__(
        self, comm: Communicator, codec: Codec, memory: ErrorFeedback | None, name: str, turn: int, dtype: torch.dtype
    ) -> None:
        self.comm, self.codec, self.memory, self.name, self.turn, self.dtype = comm, codec, memory, name, turn, dtype

    # ---- in two stages, or gathered by all ------------------------------------------------------------------------

    def two_stage(self, wanted: Tensor) -> Tensor:
        comm = self.comm
        chunks = comm.chunks(wanted, comm.size)
        codes = [self.encode(chunk) for chunk in chunks]
        room = [torch.empty_like(codes[comm.rank]) for _ in codes]
        collectives.all_to_all(comm, room, codes)
        total = self.add_up(room, chunks[comm.rank])
        if self.memory is not None:
            self.memory.left[self.name] = wanted - torch.cat([self.decode(*pair) for pair in zip(codes, chunks, strict=True)])
            total = self.memory.owed(self.name, total, self.memory.second)
        code = self.encode(total)
        sums = [torch.empty_like(other) for other in codes]
        collectives.all_gather(comm, sums, code)
        parts = [self.decode(part, chunk, rank) for rank, (part, chunk) in enumerate(zip(sums, chunks, strict=True))]
        if self.memory is not None:
            self.memory.second[self.name] = total - parts[comm.rank]
        return torch.cat(parts)

    def all_gather(self, wanted: Tensor) -> Tensor:
        code = self.encode(wanted)
        room = [torch.empty_like(code) for _ in range(self.comm.size)]
        collectives.all_gather(self.comm, room, code)
        if self.memory is not None:
            self.memory.left[self.name] = wanted - self.decode(code, wanted)
        return self.add_up(room, wanted)

    def add_up(self, codes: Sequence[Tensor], like: Tensor) -> Tensor:
        """What the ranks' codes mean together, added in their order, so that it is the same wherever it is done."""
        total = self.decode(codes[0], like, 0)
        for rank, code in enumerate(codes[1:], 1):
            self.comm.combine(total, self.decode(code, like, rank))
        return total

    def encode(self, data: Tensor) -> Tensor:
        with self.computing("encode"):
            return self.codec.encode(narrow(data, self.dtype), self.turn_of(self.comm.rank))

    def decode(self, code: Tensor, like: Tensor, rank: int | None = None) -> Tensor:
        """In the precision of `like`; rank: who has sent it, if not this one."""
        with self.computing("decode"):
            turn = self.turn_of(self.comm.rank if rank is None else rank)
            return self.codec.decode(code, torch.empty_like(like, dtype=self.dtype, device="meta"), turn).to(like.dtype)

    def turn_of(self, rank: int) -> int:
        """Linear codecs draw the same on all ranks; of others the errors shall not be alike, so that they cancel."""
        return self.turn if self.codec.linear else self.turn * self.comm.size + rank

    def computing(self, label: str) -> AbstractContextManager[None]:
        """What a codec takes, where there is a device to say how long that is."""
        topology = self.comm.topology
        return self.comm.compute(label) if topology is None or topology.device(self.comm.node) else nullcontext()

    # ---- on an all-reduce -----------------------------------------------------------------------------------------

    def ride(self, wanted: Tensor, shapes: Sequence[torch.Size], algorithm: str, options: dict[str, Any]) -> Tensor:
        """Sum what the codec wants to be summed, round by round, of all tensors in one message."""
        codec = self.codec.among(self.comm.size)
        parts = narrow(wanted, self.dtype).split([shape.numel() for shape in shapes])
        kept = (self.memory.kept.get(self.name) if self.memory else None) or [None] * len(parts)
        rounds = [codec.rounds(part.view(shape), self.turn, q) for part, shape, q in zip(parts, shapes, kept, strict=True)]
        own: dict[int, Tensor] = {}
        done: dict[int, Done] = {}
        asked = {index: next(each) for index, each in enumerate(rounds)}
        while asked:
            if self.memory is not None:
                own |= {index: each.own() for index, each in asked.items() if each.own}
            message = torch.cat([each.message.flatten() for each in asked.values()])
            collectives.all_reduce(self.comm, message, algorithm=algorithm, **options)
            sums = message.split([each.message.numel() for each in asked.values()])
            for (index, each), part in zip(list(asked.items()), sums, strict=True):
                try:
                    asked[index] = rounds[index].send(part.to(each.message.dtype).view(each.message.shape))
                except StopIteration as end:
                    done[index] = end.value
                    del asked[index]
        if self.memory is not None:
            self.memory.left[self.name] = wanted - torch.cat([own[index].flatten() for index in sorted(own)]).to(wanted.dtype)
            self.memory.kept[self.name] = [done[index].kept for index in sorted(done)]
        return torch.cat([done[index].total.flatten() for index in sorted(done)])
