"""All-reduce on shared memory: nobody sends anything, every rank reads what the others have.

    small       each rank puts its tensor into a slot, they meet, and each adds up all slots: one meeting
    in place    every tensor lies in the shared file: each rank adds up its block of all of them, and writes it to all of them
    staged      ordinary tensors: the same, on copies of a few pieces at a time

In every way a rank adds in the order of the ranks, rounding in the tensor's dtype each time: the sum is the same to the bit
on every rank, and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from d2lps.comm import ReduceOp, ops
from d2lps.sharedmemory.arena import Arena
from d2lps.sharedmemory.layout import LINE
from d2lps.sharedmemory.meeting import Meeting, values_of
from d2lps.sharedmemory.stage import Stage, piece_bytes

CACHE = 1 << 17  # bytes of each tensor at a time: a running sum of as many stays in the processor's own cache
Kernel = Callable[..., torch.Tensor]


def small(meeting: Meeting, turn: int, tensor: torch.Tensor, op: ReduceOp, meet: Callable[[], object]) -> None:
    """One meeting; every rank reads p n bytes. With 2 ranks that hold [1] and [2]: slots [1] [2], and both add up [3]."""
    slots = meeting.slots(turn % 2, tensor.dtype, tensor.numel())
    slots[meeting.rank].copy_(tensor)
    meet()
    combine(ops.kernel(op), slots, tensor)


def in_place(meeting: Meeting, arena: Arena, tensor: torch.Tensor, op: ReduceOp, heard: Sequence[bytes]) -> None:
    """Two meetings, before and after; each rank reads n bytes and writes n bytes, in n / (p * 128 KB) rounds."""
    whole = [arena.tensor(values_of(said)[0], tensor.dtype, tensor.numel()) for said in heard]
    begin, end = block(tensor.numel(), tensor.element_size(), meeting.rank, len(whole))
    kernel, length = ops.kernel(op), CACHE // tensor.element_size()
    room = tensor.new_empty(min(length, end - begin))
    for parts in zip(*(each[begin:end].split(length) for each in whole), strict=True):
        total = room[: parts[0].numel()]
        combine(kernel, parts, total)
        for part in parts:
            part.copy_(total)
    meeting.come()
    meeting.complete()


def staged(meeting: Meeting, stage: Stage, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Three things in each step: piece k + 1 goes in, piece k is added up, piece k - 1 comes out; and a meeting after it.

    Each rank copies (p - 1)/p n bytes in and as many out, and in between works in the processors' common cache.
    """
    pieces = tensor.split(piece_bytes(len(meeting.members)) // tensor.element_size())
    for step in range(len(pieces) + 2):
        if step < len(pieces):
            _take_in(meeting, stage, step, pieces[step])
        if 1 <= step <= len(pieces):
            _add_up(meeting, stage, step - 1, pieces[step - 1], op)
        if step >= 2:
            _bring_out(meeting, stage, step - 2, pieces[step - 2])
        meeting.come()
        if step <= len(pieces):  # after the last step nobody waits until the stage is needed again
            meeting.complete()


def _take_in(meeting: Meeting, stage: Stage, step: int, piece: torch.Tensor) -> None:
    """What the others will add up: everything but this rank's block."""
    begin, end = block(piece.numel(), piece.element_size(), meeting.rank, len(meeting.members))
    there = stage.at(meeting.rank, step, piece)
    there[:begin].copy_(piece[:begin])
    there[end:].copy_(piece[end:])


def _add_up(meeting: Meeting, stage: Stage, step: int, piece: torch.Tensor, op: ReduceOp) -> None:
    """This rank's block of one piece: its own part from the tensor, the others' from their stages, the sum to both."""
    begin, end = block(piece.numel(), piece.element_size(), meeting.rank, len(meeting.members))
    parts = [stage.at(rank, step, piece)[begin:end] for rank in range(len(meeting.members))]
    total, parts[meeting.rank] = parts[meeting.rank], piece[begin:end]
    length = CACHE // piece.element_size()
    for into, *some in zip(*(each.split(length) for each in [total, *parts]), strict=True):
        combine(ops.kernel(op), some, into)
        some[meeting.rank].copy_(into)


def _bring_out(meeting: Meeting, stage: Stage, step: int, piece: torch.Tensor) -> None:
    """The others' blocks of one piece."""
    for rank in meeting.others:
        begin, end = block(piece.numel(), piece.element_size(), rank, len(meeting.members))
        piece[begin:end].copy_(stage.at(rank, step, piece)[begin:end])


def combine(kernel: Kernel, parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """`total = parts[0] + parts[1] + ...`, in this order."""
    if len(parts) == 1:
        total.copy_(parts[0])
        return
    kernel(parts[0], parts[1], out=total)
    for part in parts[2:]:
        kernel(total, part, out=total)


def block(length: int, itemsize: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements that a rank adds up; blocks begin at whole lines, so `block(100, 4, 1, 4) == (32, 64)`."""
    line = max(1, LINE // itemsize)
    size = -(-length // (ranks * line)) * line
    return min(length, rank * size), min(length, (rank + 1) * size)
