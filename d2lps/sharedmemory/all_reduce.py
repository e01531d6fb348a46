"""All-reduce on shared memory: nobody sends anything, every rank reads what the others have.

    small       each rank puts its tensor into a slot, they meet, and each adds up all slots: one meeting
    in place    every tensor lies in the shared file: each rank adds up its block of all of them, and writes it to all of them
    staged      ordinary tensors: each rank lays out a copy, adds up its block of all copies, and takes the others' sums
    by reading  big ordinary tensors: the same without laying out, where the kernel lets a rank read another one's memory

In every way a rank adds in the order of the ranks, rounding in the tensor's dtype each time: the sum is the same to the bit
on every rank, and in every run. It is

    reduce(partial(torch.add, out=total), parts)        # total = parts[0] + parts[1] + ...; the total is none of the parts
"""

import errno
import os
from collections.abc import Sequence
from functools import partial, reduce

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
    if not nbytes or not meeting.others:  # there is nothing to add, or nobody who would add something
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
    reduce(partial(kernel, out=tensor), slots)


def _in_place(meeting: Meeting, tensor: torch.Tensor, kernel: Kernel, heard: Heard) -> None:
    """Two meetings, before and after; each rank reads n bytes and writes n bytes, in n / (p * 128 KB) rounds."""
    mine, length = blocks(tensor, len(heard))[meeting.rank], CACHE // tensor.element_size()
    whole = [meeting.arena.tensor(offset, tensor.dtype, tensor.numel()) for offset, _, _ in heard]
    room = torch.empty_like(tensor[mine][:length])
    for parts in zip(*(each[mine].split(length) for each in whole), strict=True):
        total = reduce(partial(kernel, out=room[: parts[0].numel()]), parts)
        for part in parts:
            part.copy_(total)
    meeting.meet()


def _staged(meeting: Meeting, call: str, tensor: torch.Tensor, kernel: Kernel) -> None:
    """Three meetings for each 4 MB; each rank copies (p - 1)/p n bytes in, and as many out."""
    arena, block = meeting.arena, blocks(tensor, len(meeting.members))
    offset, mine = arena.space.take(PIECE), block[meeting.rank]
    room = arena.tensor(offset, tensor.dtype, tensor.numel())
    for rank in meeting.others:  # what they will add up
        room[block[rank]].copy_(tensor[block[rank]])
    copies = [arena.tensor(theirs, tensor.dtype, tensor.numel()) for (theirs,) in meeting.exchange_numbers(call, offset)]
    parts = [tensor[mine] if rank == meeting.rank else copy[mine] for rank, copy in enumerate(copies)]
    tensor[mine].copy_(reduce(partial(kernel, out=room[mine]), parts))
    meeting.meet()
    for rank in meeting.others:
        tensor[block[rank]].copy_(copies[rank][block[rank]])
    meeting.meet()
    arena.space.keep(offset)


def _by_reading(meeting: Meeting, tensor: torch.Tensor, kernel: Kernel, heard: Heard) -> None:
    """Three meetings, before, between and after; each rank reads 2 (p - 1)/p n bytes of the others' memory.

    First its block of all the others' tensors, piece by piece, which it adds up into its own; then the others' sums. Nobody
    writes what another reads in the same half.
    """
    block, length = blocks(tensor, len(heard)), READ // len(heard) // tensor.element_size()
    mine = tensor[block[meeting.rank]]
    total, *rooms = mine.new_empty((len(heard) + 1, min(length, mine.numel())))
    for piece in mine.split(length):
        parts = [piece if rank == meeting.rank else room[: piece.numel()] for rank, room in enumerate(rooms)]
        for rank in meeting.others:
            _fetch(meeting, heard, rank, piece, parts[rank])
        piece.copy_(reduce(partial(kernel, out=total[: piece.numel()]), parts))
    meeting.meet()
    for rank in meeting.others:
        _fetch(meeting, heard, rank, tensor[block[rank]], tensor[block[rank]])
    meeting.meet()


def _unreadable(meeting: Meeting, call: str, heard: Heard) -> str:
    """Why some rank may not read another one's memory; "" if each may. All try once, tell the others, and remember."""
    if meeting.unreadable is None:
        code = 0
        try:
            for rank in meeting.others:
                read(heard[rank][2], heard[rank][1], torch.empty(1, dtype=torch.uint8, device="cpu"))
        except OSError as error:
            code = error.errno or errno.EIO
        worst = max(code for (code,) in meeting.exchange_numbers(call, code))
        meeting.unreadable = os.strerror(worst) if worst else ""
    return meeting.unreadable


def _fetch(meeting: Meeting, heard: Heard, rank: int, part: torch.Tensor, into: torch.Tensor) -> None:
    """Read what a rank has where this one has that part of its tensor."""
    (_, mine, _), (_, address, process) = heard[meeting.rank], heard[rank]
    try:
        read(process, address + part.data_ptr() - mine, into)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EFAULT):
            raise
        meeting.waiting.wait_in_vain(meeting.members[rank])  # it has died, or given up: there is nothing to read any more


def blocks(tensor: torch.Tensor, ranks: int) -> Sequence[slice]:
    """The part that each rank adds up; they begin at whole lines: 0:32, 32:64, 64:96, 96:128 for 100 floats and 4 ranks."""
    line = max(1, LINE // tensor.element_size())
    size = -(-tensor.numel() // (ranks * line)) * line
    return [slice(rank * size, (rank + 1) * size) for rank in range(ranks)]
