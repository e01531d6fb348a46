"""The sum of all ranks' tensors, of which fewer bytes are sent."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from d2lps import collectives
from d2lps.collectives.arguments import check_tensor, collective
from d2lps.comm import Communicator
from d2lps.comm.aliasing import check_apart
from d2lps.compress.codec import Codec, ErrorFeedback, Rounds, counting, flat


@collective("tensor", "codec", "name", "turn", "algorithm")
def all_reduce(
    comm: Communicator, tensor: Tensor | Sequence[Tensor], codec: Codec | ErrorFeedback, name: str | Sequence[str] = "",
    *, turn: int = 0, algorithm: str | None = None, **options: Any,
) -> None:
    """Every rank's `tensor` holds the sum of all ranks' tensors, as far as the codec lets it through; the same on all ranks.

    >>> feedback = d2lps.compress.ErrorFeedback(d2lps.compress.top_k(0.01))                 # doctest: +SKIP
    >>> d2lps.compress.all_reduce(comm, layer.grad, feedback, name="layer")                 # doctest: +SKIP

    tensor: of any shape; or several, sent together. codec: with `ErrorFeedback`, what is left unsent of `name` is added first.
    name: of all of them together, or a list with one for each, which may then be sent in other company the next time.
    turn: how often this was done before, for what is random in a codec; ErrorFeedback counts by itself. algorithm, with n bytes
    before and c after encoding:
    "two_stage"   all-to-all of encoded chunks, which their owners decode and add up in rank order, in FP32 or better, and encode
                  again; all-gather: 2(p - 1) steps, each rank sends 2(p - 1)/p c bytes. For all codecs; who owns a chunk keeps a
                  second residual. By default for those that are not linear.
    "all_gather"  everyone gets everyone's code, and adds up: p - 1 steps, (p - 1) c bytes. For all codecs; no second error.
    another       of `collectives.all_reduce`, with its options, on what a linear codec sends: c in place of n bytes, in two
                  rounds with PowerSGD. Sums are rounded in the codec's dtype. By default "ring" for linear codecs.
    The first two take all for one flat tensor, of which PowerSGD makes no matrix. Errors: ValueError for another algorithm if the
    codec is not linear, and for a tensor that is not finite, where that would spoil what is sent or kept with it; TypeError for
    what is no codec, and for tensors that are neither of floats nor of integers.
    Source: two stages: Tang et al. 2021 (1-bit Adam).
    """
    tensors, memory = _several(tensor), counting(codec)
    named = _named(name, tensors)
    if memory is not codec:
        memory.turns.update(dict.fromkeys(named, turn))
    job, linear = _Job(comm, memory, named), memory.codec.linear
    staged = {"two_stage": job.two_stage, "all_gather": job.all_gather, None: None if linear else job.two_stage}.get(algorithm)
    if staged is None and not linear:
        raise ValueError(f"algorithm={algorithm!r} adds up codes, which {memory.codec} forbids: take 'two_stage' or 'all_gather'")
    if staged and options:
        raise TypeError(f"options {', '.join(options)} are of no algorithm that takes codes in stages")
    wanted = job.owed(memory.left, flat(tensors), job.places)
    total = staged(wanted) if staged else job.ride(wanted, algorithm or "ring", **options)
    for each, part in zip(tensors, total.split([each.numel() for each in tensors]), strict=True):
        each.detach().copy_(part.view(each.shape))
    memory.turns.update(named.keys())


def _several(tensor: Any) -> list[Tensor]:
    """One or many, if a sum can be put into each of them."""
    tensors = [*tensor] if isinstance(tensor, Iterable) and not isinstance(tensor, Tensor) else [tensor]
    if not tensors:
        raise ValueError("tensor=[]: there is nothing to sum")
    for each in tensors:
        check_tensor("tensor", each)
    check_apart(tensors, (), ("tensor[{}]", ""))
    return tensors


def _named(name: str | Sequence[str], tensors: list[Tensor]) -> dict[str, list[Tensor]]:
    """What there is under each name: all of them, or one."""
    if isinstance(name, str):
        return {name: tensors}
    if len(name) != len(tensors) or len(set(name)) != len(name):
        raise ValueError(f"name={name!r}: one for all {len(tensors)} tensors together, or one for each, no two of them alike")
    return {each: [tensor] for each, tensor in zip(name, tensors, strict=True)}


Places = dict[str, tuple[int, int]]  # what of a flat tensor belongs to each name: from, to


class _Job:
    """One call: whose codec it is, and what is kept under which names."""

    def __init__(self, comm: Communicator, memory: ErrorFeedback, named: dict[str, list[Tensor]]) -> None:
        self.comm, self.codec, self.memory, self.named = comm, memory.codec, memory, named
        self.turn = memory.turns[next(iter(named))]
        ends = accumulate((sum(each.numel() for each in tensors) for tensors in named.values()), initial=0)
        self.places: Places = dict(zip(named, pairwise(ends), strict=True))

    def owed(self, left: dict[str, Tensor], data: Tensor, places: Places) -> Tensor:
        """What should be sent: the data, and what is left of those before."""
        parts = [self.memory.owed(left, name, data[begin:end]) for name, (begin, end) in places.items()]
        return flat(parts) if parts else data

    def keep(self, left: dict[str, Tensor], wanted: Tensor, places: Places, sent: Callable[[], Tensor]) -> None:
        """Of what should have been sent, keep what was not."""
        sent = cache(sent)
        for name, (begin, end) in places.items():
            self.memory.keep(left, name, wanted[begin:end], lambda begin=begin, end=end: sent()[begin:end])  # type: ignore[misc]

    def own(self, wanted: Tensor, first: int = 0, count: int = 0) -> Places:
        """Of whose sums this rank hands out which part, and where they lie in that; what it has kept of others, it sends."""
        found = {}
        for name, (begin, end) in self.places.items():
            start, stop = (min(max(edge, begin), end) for edge in (first, first + count))
            self.memory.own(name, start - begin, stop - start, wanted[begin:end])
            if start < stop:
                found[name] = start - first, stop - first
        return found

    def two_stage(self, wanted: Tensor) -> Tensor:
        comm, memory = self.comm, self.memory
        chunks = comm.chunks(wanted, comm.size)
        first = sum(map(len, chunks[: comm.rank]))
        mine = self.own(wanted, first, len(chunks[comm.rank]))
        codes = [self.encode(chunk) for chunk in chunks]
        room = [torch.empty_like(codes[comm.rank]) for _ in codes]
        collectives.all_to_all(comm, room, codes)
        self.keep(memory.left, wanted, self.places, lambda: flat(map(self.decode, codes, chunks)))
        total = self.owed(memory.second, self.add_up(room, chunks[comm.rank]), mine)
        sums = list(map(torch.empty_like, codes))
        collectives.all_gather(comm, sums, self.encode(total))
        parts = [self.decode(part, chunk, rank) for rank, (part, chunk) in enumerate(zip(sums, chunks, strict=True))]
        self.keep(memory.second, total, mine, lambda: parts[comm.rank])
        return torch.cat(parts)

    def all_gather(self, wanted: Tensor) -> Tensor:
        self.own(wanted)
        code = self.encode(wanted)
        room = [torch.empty_like(code) for _ in range(self.comm.size)]
        collectives.all_gather(self.comm, room, code)
        self.keep(self.memory.left, wanted, self.places, lambda: self.decode(code, wanted))
        return self.add_up(room, wanted)

    def ride(self, wanted: Tensor, algorithm: str, **options: Any) -> Tensor:
        """Have summed what the codec wants to be summed, round by round, of all tensors in one message."""
        self.own(wanted)
        rounds = list(self.rounds(wanted))
        ended: dict[Rounds, Any] = {}
        with self.computing("encode"):
            asked = {each: next(each) for each in rounds}
        while asked:
            message = flat(asked.values())
            collectives.all_reduce(self.comm, message, algorithm=algorithm, **options)
            sums = message.split([part.numel() for part in asked.values()])
            with self.computing("decode"):
                for each, total in zip(list(asked), sums, strict=True):
                    try:
                        asked[each] = each.send(total.view(asked[each].shape))
                    except StopIteration as end:
                        ended[each] = end.value
                        del asked[each]
        totals, mine, kept = zip(*(ended[each] for each in rounds), strict=True)
        self.keep(self.memory.left, wanted, self.places, lambda: flat([part() for part in mine]))
        rest = iter(kept)
        self.memory.kept.update({name: list(islice(rest, len(tensors))) for name, tensors in self.named.items()})
        return flat(totals)

    def rounds(self, wanted: Tensor) -> Iterator[Rounds]:
        """Of each tensor, what is to be summed over the ranks; it begins with what the last time has found under its name."""
        codec, sizes = self.codec.among(self.comm.size), [each.numel() for each in chain(*self.named.values())]
        parts = iter(wanted.split(sizes))
        for name, tensors in self.named.items():
            for tensor, kept in zip(tensors, self.memory.kept.get(name) or [None] * len(tensors), strict=True):
                yield codec.rounds(next(parts).view(tensor.shape), self.memory.turns[name], kept)

    def add_up(self, codes: Sequence[Tensor], like: Tensor) -> Tensor:
        """What the ranks' codes mean together, added in their order, so that it is the same wherever it is done."""
        total = self.decode(codes[0], like, 0)
        for rank, code in enumerate(codes[1:], 1):
            self.comm.combine(total, self.decode(code, like, rank))
        return total

    def encode(self, data: Tensor) -> Tensor:
        with self.computing("encode"):
            return self.codec.encode(data, self.turn_of(self.comm.rank))

    def decode(self, code: Tensor, like: Tensor, rank: int | None = None) -> Tensor:
        """rank: who has sent it, if not this one."""
        with self.computing("decode"):
            return self.codec.decode(code, like, self.turn_of(self.comm.rank if rank is None else rank))

    def turn_of(self, rank: int) -> int:
        """Linear codecs draw the same on all ranks; of others the errors shall not be alike, so that they cancel."""
        return self.turn if self.codec.linear else self.turn * self.comm.size + rank

    def computing(self, label: str) -> AbstractContextManager[None]:
        """What a codec takes, where there is a device to say how long that is."""
        topology = self.comm.topology
        return self.comm.compute(label) if topology is None or topology.device(self.comm.node) else nullcontext()
