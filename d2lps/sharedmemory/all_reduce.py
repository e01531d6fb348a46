"""All-reduce on shared memory: nobody sends anything, every rank reads what the others have.

    small       each rank puts its tensor into a slot, they meet, and each adds up all slots: one meeting
    in place    every tensor lies in the shared file: each rank adds up its block of all of them, and writes it to all of them
    staged      ordinary tensors: each rank lays out a copy, adds up its block of all copies, and takes the others' sums
    by reading  big ordinary tensors: the same without laying out, where the kernel lets a rank read another one's memory

In every way a rank adds in the order of the ranks, rounding in the tensor's dtype each time: the sum is the same to the bit
on every rank, and in every run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import torch

from d2lps.comm import ReduceOp, ops
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE
from d2lps.sharedmemory.meeting import Meeting, values_of
from d2lps.sharedmemory.reading import read
from d2lps.sharedmemory.stage import PIECE, Stage

CACHE = 1 << 17  # bytes of each tensor at a time: a running sum of as many stays in the processor's own cache
READ = 1 << 21  # bytes of all tensors together that are read at a time: they stay in the cache that processors share
BIG = PIECE  # bytes: up to here it is faster to lay out a copy than to ask the kernel
Kernel = Callable[..., torch.Tensor]


def small(meeting: Meeting, turn: int, tensor: torch.Tensor, op: ReduceOp, meet: Callable[[], object]) -> None:
    """One meeting; every rank reads p n bytes. With 2 ranks that hold [1] and [2]: slots [1] [2], and both add up [3]."""
    slots = meeting.slots(turn % 2, tensor.dtype, tensor.numel())
    slots[meeting.rank].copy_(tensor)
    meet()
    combine(ops.KERNELS[ops.op_name(op)], slots, tensor)


def in_place(meeting: Meeting, arena: Arena, tensor: torch.Tensor, op: ReduceOp, heard: Sequence[bytes]) -> None:
    """Two meetings, before and after; each rank reads n bytes and writes n bytes, in n / (p * 128 KB) rounds."""
    whole = [arena.tensor(values_of(said)[0], tensor.dtype, tensor.numel()) for said in heard]
    begin, end = block(tensor, meeting.rank, len(whole))
    kernel, length = ops.KERNELS[ops.op_name(op)], CACHE // tensor.element_size()
    room = tensor.new_empty(min(length, end - begin))
    for parts in zip(*(each[begin:end].split(length) for each in whole), strict=True):
        total = room[: parts[0].numel()]
        combine(kernel, parts, total)
        for part in parts:
            part.copy_(total)
    meeting.come()
    meeting.complete()


def staged(meeting: Meeting, stage: Stage, tensor: torch.Tensor, op: ReduceOp, meet: Callable[..., Sequence[bytes]]) -> None:
    """Three meetings for each 4 MB, and nobody waits for the third; each rank copies (p - 1)/p n bytes in, and as many out."""
    for piece in tensor.split(PIECE // tensor.element_size()):
        _pass_by(meeting, stage, piece, op, meet)


def _pass_by(meeting: Meeting, stage: Stage, tensor: torch.Tensor, op: ReduceOp, meet: Callable[..., Sequence[bytes]]) -> None:
    begin, end = block(tensor, meeting.rank, len(meeting.members))
    with stage.piece(meeting) as offset:
        mine, own = stage.arena.tensor(offset, tensor.dtype, tensor.numel()), tensor[begin:end]
        mine[:begin].copy_(tensor[:begin])  # what the others will add up: everything but this rank's block
        mine[end:].copy_(tensor[end:])
        copies = [stage.arena.tensor(values_of(said)[0], tensor.dtype, tensor.numel()) for said in meet((offset, 0, 0))]
        parts = [own if rank == meeting.rank else copy[begin:end] for rank, copy in enumerate(copies)]
        combine(ops.KERNELS[ops.op_name(op)], parts, mine[begin:end])
        own.copy_(mine[begin:end])
        meeting.come()
        meeting.complete()
        for rank in meeting.others:
            begin, end = block(tensor, rank, len(copies))
            tensor[begin:end].copy_(copies[rank][begin:end])


def by_reading(meeting: Meeting, tensor: torch.Tensor, op: ReduceOp, heard: Sequence[bytes]) -> None:
    """Three meetings, before, between and after; each rank reads 2 (p - 1)/p n bytes of the others' memory.

    First its block of all the others' tensors, piece by piece, which it adds up into its own; then the others' sums. Nobody
    writes what another reads in the same half.
    """
    ranks, length = len(heard), READ // len(heard) // tensor.element_size()
    begin, end = block(tensor, meeting.rank, ranks)
    rooms = tensor.new_empty((ranks, min(length, end - begin)))
    for start in range(begin, end, length):
        own = tensor[start : min(start + length, end)]
        parts = [own if rank == meeting.rank else room[: own.numel()] for rank, room in enumerate(rooms)]
        for rank in meeting.others:
            _fetch(meeting, heard, rank, start, parts[rank])
        combine(ops.KERNELS[ops.op_name(op)], parts, own, rooms[meeting.rank, : own.numel()])
    meeting.come()
    meeting.complete()
    for rank in meeting.others:
        begin, end = block(tensor, rank, ranks)
        _fetch(meeting, heard, rank, begin, tensor[begin:end])
    meeting.come()
    meeting.complete()


def unreadable(meeting: Meeting, heard: Sequence[bytes], meet: Callable[..., Sequence[bytes]]) -> str:
    """Why some rank may not read another one's memory; "" if each may. All try, and then tell the others."""
    code = 0
    try:
        for rank in meeting.others:
            _, address, process = values_of(heard[rank])
            read(process, address, torch.empty(1, dtype=torch.uint8))
    except OSError as error:
        code = error.errno or errno.EIO
    codes = [values_of(said)[0] for said in meet((code, 0, 0))]
    return os.strerror(max(codes)) if any(codes) else ""


def _fetch(meeting: Meeting, heard: Sequence[bytes], rank: int, start: int, into: torch.Tensor) -> None:
    """Read elements, from number `start` on, of the tensor that a rank has told of."""
    _, address, process = values_of(heard[rank])
    try:
        read(process, address + start * into.element_size(), into)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EFAULT):
            raise
        meeting.wait_in_vain(rank)  # it has died, or given up: there is nothing to read any more


def combine(kernel: Kernel, parts: Sequence[torch.Tensor], into: torch.Tensor, room: torch.Tensor | None = None) -> None:
    """`into = parts[0] + parts[1] + ...`, in this order; if `into` is one of the parts, `room` takes the sum on the way."""
    total, *rest = parts
    if not rest:
        into.copy_(total)
    for part in rest:
        total = kernel(total, part, out=into if room is None or part is parts[-1] else room)


def block(tensor: torch.Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """The elements that a rank adds up; blocks begin at whole lines: (32, 64) for rank 1 of 4 and 100 floats."""
    length, line = tensor.numel(), max(1, LINE // tensor.element_size())
    size = -(-length // (ranks * line)) * line
    return min(length, rank * size), min(length, (rank + 1) * size)
