"""All-reduce on shared memory: nobody sends anything, every rank reads what the others have.

    small       each rank puts its tensor into a slot, they meet, and each adds up all slots: one meeting
    in place    every tensor lies in the shared file: each rank adds up its block of all of them, and writes it to all of them
    staged      ordinary tensors: each rank lays out a copy, adds up its block of all copies, and takes the others' sums
    by reading  big ordinary tensors: the same without laying out, where the kernel lets a rank read another one's memory

In every way a rank adds in the order of the ranks, rounding in the tensor's dtype each time: the sum is the same to the bit
on every rank, and in every run.
"""

import errno
import os
from collections.abc import Sequence
from functools import partial

import torch

from d2lps.comm import ReduceOp
from d2lps.comm.ops import KERNELS, Kernel, op_name
from d2lps.comm.rank import describe
from d2lps.sharedmemory.arena import LINE
from d2lps.sharedmemory.linux import read
from d2lps.sharedmemory.meeting import Meeting

CACHE = 1 << 17  # bytes of each tensor at a time: a running sum of as many stays in the processor's own cache
READ = 1 << 21  # bytes of all tensors together that are read at a time: they stay in the cache that processors share
PIECE = 1 << 22  # bytes that pass by at a time: those of a few ranks fit together into the cache that processors share
BIG = PIECE  # bytes: up to here it is faster to lay out a copy than to ask the kernel
Heard = Sequence[tuple[int, ...]]  # of each rank's tensor: where it lies in the shared file, its address, its process


def all_reduce(meeting: Meeting, tensor: torch.Tensor, op: ReduceOp) -> None:
    """The fastest way for this tensor, or these: the ranks' may lie in different kinds of memory."""
    name, nbytes = op_name(op), tensor.nbytes
    call, kernel = f"all_reduce({describe(tensor)}, op={name})", KERNELS[name]
    if not nbytes:
        meeting.exchange(call)
    elif nbytes <= meeting.slot:
        _small(meeting, call, tensor, kernel)
    else:
        address = 0 if tensor.is_pinned() else tensor.data_ptr()  # what belongs to a device's driver cannot be read by others
        heard = meeting.exchange_numbers(call, meeting.arena.offset_of(tensor), address, os.getpid())
        if all(offset >= 0 for offset, _, _ in heard):
            _in_place(meeting, tensor, kernel, heard)
        elif nbytes > BIG and all(address for _, address, _ in heard) and not _unreadable(meeting, call, heard):
            _by_reading(meeting, tensor, kernel, heard)
        else:
            for piece in tensor.split(PIECE // tensor.element_size()):
                _staged(meeting, call, piece, kernel)


def _small(meeting: Meeting, call: str, tensor: torch.Tensor, kernel: Kernel) -> None:
    """One meeting; every rank reads p n bytes. With 2 ranks that hold [1] and [2]: slots [1] [2], and both add up [3]."""
    slots = meeting.slots(tensor.dtype, tensor.numel())
    slots[meeting.rank].copy_(tensor)
    meeting.exchange(call)
    _combine(kernel, slots, tensor)


def _in_place(meeting: Meeting, tensor: torch.Tensor, kernel: Kernel, heard: Heard) -> None:
    """Two meetings, before and after; each rank reads n bytes and writes n bytes, in n / (p * 128 KB) rounds."""
    whole = [meeting.arena.tensor(offset, tensor.dtype, tensor.numel()) for offset, _, _ in heard]
    begin, end = block(tensor, meeting.rank, len(whole))
    length = CACHE // tensor.element_size()
    room = tensor.new_empty(min(length, end - begin))
    for parts in zip(*(each[begin:end].split(length) for each in whole), strict=True):
        total = room[: parts[0].numel()]
        _combine(kernel, parts, total)
        for part in parts:
            part.copy_(total)
    meeting.meet()


def _staged(meeting: Meeting, call: str, tensor: torch.Tensor, kernel: Kernel) -> None:
    """Three meetings for each 4 MB, and nobody waits for the third; each rank copies (p - 1)/p n bytes in, and as many out."""
    arena, (begin, end) = meeting.arena, block(tensor, meeting.rank, len(meeting.members))
    offset = arena.pool.take(PIECE)
    mine, own = arena.tensor(offset, tensor.dtype, tensor.numel()), tensor[begin:end]
    mine[:begin].copy_(tensor[:begin])  # what the others will add up: everything but this rank's block
    mine[end:].copy_(tensor[end:])
    copies = [arena.tensor(theirs, tensor.dtype, tensor.numel()) for (theirs,) in meeting.exchange_numbers(call, offset)]
    parts = [own if rank == meeting.rank else copy[begin:end] for rank, copy in enumerate(copies)]
    _combine(kernel, parts, mine[begin:end])
    own.copy_(mine[begin:end])
    meeting.meet()
    for rank in meeting.others:
        begin, end = block(tensor, rank, len(copies))
        tensor[begin:end].copy_(copies[rank][begin:end])
    meeting.come()
    arena.pool.give(offset, unused=partial(meeting.is_over, meeting.count))


def _by_reading(meeting: Meeting, tensor: torch.Tensor, kernel: Kernel, heard: Heard) -> None:
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
        _combine(kernel, parts, own, rooms[meeting.rank, : own.numel()])
    meeting.meet()
    for rank in meeting.others:
        begin, end = block(tensor, rank, ranks)
        _fetch(meeting, heard, rank, begin, tensor[begin:end])
    meeting.meet()


def _unreadable(meeting: Meeting, call: str, heard: Heard) -> str:
    """Why some rank may not read another one's memory; "" if each may. All try once, tell the others, and remember."""
    if meeting.unreadable is None:
        code = 0
        try:
            for rank in meeting.others:
                read(heard[rank][2], heard[rank][1], torch.empty(1, dtype=torch.uint8))
        except OSError as error:
            code = error.errno or errno.EIO
        worst = max(code for (code,) in meeting.exchange_numbers(call, code))
        meeting.unreadable = os.strerror(worst) if worst else ""
    return meeting.unreadable


def _fetch(meeting: Meeting, heard: Heard, rank: int, start: int, into: torch.Tensor) -> None:
    """Read elements, from number `start` on, of the tensor that a rank has told of."""
    _, address, process = heard[rank]
    try:
        read(process, address + start * into.element_size(), into)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EFAULT):
            raise
        meeting.waiting.wait_in_vain(meeting.members[rank])  # it has died, or given up: there is nothing to read any more


def _combine(kernel: Kernel, parts: Sequence[torch.Tensor], into: torch.Tensor, room: torch.Tensor | None = None) -> None:
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
