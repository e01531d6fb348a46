"""The world of ranks that share a machine's memory."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch

from d2lps.comm import Communicator, Mismatch, ReduceOp
from d2lps.comm.ops import op_name
from d2lps.comm.standing import IN_VAIN, Standing, callers_line
from d2lps.comm.started import InThread
from d2lps.comm.work import Transfer
from d2lps.sharedmemory import all_reduce
from d2lps.sharedmemory.arena import DTYPES, NUMBER, Arena, bytes_of
from d2lps.sharedmemory.mailbox import Mailbox
from d2lps.sharedmemory.meeting import Call, Meeting, Places, Values, call_of, disagree, values_of
from d2lps.sharedmemory.message import Receiving, Sending
from d2lps.sharedmemory.reading import allow_siblings
from d2lps.sharedmemory.stage import Stage
from d2lps.sharedmemory.waiting import Waiting
from d2lps.signatures import by_statement, fixed

_BARRIER, _AGREE, _EMPTY, _SPLIT, _PLACES, _ALL_REDUCE = range(6)
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Rank:
    """What one process has in the shared memory, whatever groups it belongs to."""

    def __init__(self, descriptor: int, ranks: int, rank: int, timeout: float = math.inf, numbers: Sequence[int] = ()) -> None:
        self.arena = Arena(descriptor, ranks, rank)
        self.waiting = Waiting(self.arena, timeout, numbers)
        self.mailbox = Mailbox(self.arena, self.waiting)
        self.stage, self.places = Stage(self.arena), Places(self.arena)


class SharedMemoryCommunicator(Communicator):
    """A communicator of ranks on one machine; `d2lps.run(..., backend="shm")` makes it."""

    def __init__(self, mine: Rank, members: Sequence[int], place: int, name: str = "world") -> None:
        super().__init__(members, list(members).index(mine.arena.rank), name)
        self.mine = mine
        allow_siblings()
        if place >= 0:
            self._enter(place)
        self.device, self.node = torch.device("cpu"), socket.gethostname()
        self.generator = torch.Generator().manual_seed(self.rank)
        self._number = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")  # alike in all members
        self._turn = self._splits = 0
        self.unreadable: str | None = None  # why ordinary tensors pass by a stage, however big; not known before the first one

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of this rank that all ranks map, to read it and write to it where it is.

        The ranks meet: if there is not enough memory for all, it is a MemoryError on all, before any of it was taken.
        """
        if self.device.type != "cpu":
            return super().empty(shape, dtype)
        nbytes = bytes_of(shape, dtype)
        with self.standing("barrier"):
            heard = self._meet((_EMPTY, 0, 0, 0), (nbytes, self.mine.arena.space.free(nbytes), 0))
        needed, free = sum(values_of(said)[0] for said in heard), min(values_of(said)[1] for said in heard)
        if needed > free:
            raise MemoryError(f"{needed:,} bytes of shared memory are needed for {self.size} ranks; {free:,} are left")
        return self.mine.arena.empty(shape, dtype)

    def leave(self) -> None:
        """Tell the others that this rank is done: whoever waits for it from now on waits in vain, and nobody else cares."""
        self.mine.waiting.leave()

    # ---- messages -------------------------------------------------------------------------------------------------

    def _wire(self) -> torch.device:
        return torch.device("cpu")

    def _post_send(self, staged: torch.Tensor, dst: int, tag: int) -> Transfer:
        return _Transfer(self, self.mine.mailbox.send(staged, self.members[dst], self._number, tag), dst, tag)

    def _post_recv(self, staged: torch.Tensor, src: int, tag: int) -> Transfer:
        return _Transfer(self, self.mine.mailbox.receive(staged, self.members[src], self._number, tag), src, tag)

    # ---- together -------------------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        self._meet((_BARRIER, 0, 0, 0))

    def agree(self, statement: str) -> None:
        text = fixed(statement.encode())
        with self.standing("agree"):
            self._meet((_AGREE, 0, 0, 0), text=text)
            said = [each.rstrip(b"\0").decode(errors="replace") for each in self.meeting.texts(len(text))]
        if len(set(said)) > 1:
            raise Mismatch("the ranks disagree: " + by_statement(said, self.members))

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Every rank adds up a part, where the tensors are (see `d2lps.sharedmemory.all_reduce`)."""
        with self.standing("native", nbytes=tensor.nbytes):
            host = tensor.cpu()
            self._all_reduce(host, op)
        if host is not tensor:
            tensor.copy_(host)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        mine, nbytes = self.mine, tensor.nbytes
        call = (_ALL_REDUCE, _OPS.index(op_name(op)), NUMBER[tensor.dtype], tensor.numel())
        meet = partial(self._meet, call)
        if not nbytes:
            meet()
            return
        if nbytes <= self.meeting.layout.slot:
            self._turn += 1
            all_reduce.small(self.meeting, self._turn, tensor, op, meet)
            return
        address = 0 if tensor.is_pinned() else tensor.data_ptr()  # what belongs to a device's driver cannot be read by others
        heard = meet((mine.arena.offset_of(tensor), address, os.getpid()))
        if all(values_of(said)[0] >= 0 for said in heard):
            all_reduce.in_place(self.meeting, mine.arena, tensor, op, heard)
        elif nbytes > all_reduce.BIG and all(values_of(said)[1] for said in heard) and not self._unreadable(heard, meet):
            all_reduce.by_reading(self.meeting, tensor, op, heard)
        else:
            all_reduce.staged(self.meeting, mine.stage, tensor, op, meet)

    def _unreadable(self, heard: Sequence[bytes], meet: Callable[..., list[bytes]]) -> str:
        """Tried once, and remembered."""
        if self.unreadable is None:
            self.unreadable = all_reduce.unreadable(self.meeting, heard, meet)
        return self.unreadable

    def _split(self, color: int | None, key: int) -> SharedMemoryCommunicator | None:
        wishes = [values_of(said) for said in self._meet((_SPLIT, 0, 0, 0), (color is not None, color or 0, key))]
        self._splits += 1
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for rank in sorted(range(self.size), key=lambda rank: (wishes[rank][2], rank)):
            if wishes[rank][0]:
                groups[wishes[rank][1]].append(rank)
        mine = groups[color] if color is not None else []
        place = self.mine.places.new(len(mine)) if mine and mine[0] == self.rank else 0
        places = [values_of(said)[0] for said in self._meet((_PLACES, 0, 0, 0), (place, 0, 0))]
        if not mine:
            return None
        members = [self.members[rank] for rank in mine]
        return SharedMemoryCommunicator(self.mine, members, places[mine[0]], f"{self.name}/{self._splits}.{color}")

    def _enter(self, place: int) -> None:
        self.meeting = Meeting(self.mine.arena, self.mine.mailbox, self.members, self.rank, place)
        self.mine.places.enter(self.meeting)

    def _beside(self, name: str) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(self.mine, self.members, -1, name)

    def _start(self, beside: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> InThread:
        def work(comm: SharedMemoryCommunicator, *args: Any) -> None:
            with comm.standing("start"):
                comm._agree_on_a_place()
            try:
                function(comm, *args)
            finally:
                del comm.meeting  # its place is free when the last rank has left it

        return InThread(beside, work, args)

    def _agree_on_a_place(self) -> None:
        """The first rank tells the others, by message: there is no place yet where they could meet."""
        place = torch.tensor([self.mine.places.new(self.size) if self.rank == 0 else -1])
        if self.rank == 0:
            transfers = [self._post_send(place, other, 0) for other in range(1, self.size)]
        else:
            transfers = [self._post_recv(place, 0, 0)]
        for transfer in transfers:
            transfer.wait()
        self._enter(int(place))

    def _meet(self, call: Call, values: Values = (0, 0, 0), text: bytes = b"") -> list[bytes]:
        """Meet, and make sure that all mean the same."""
        heard = self.meeting.exchange(call, values, text)
        if disagree(heard):
            calls = [call_of(said) for said in heard]
            if len({kind for kind, *_ in calls}) > 1:  # rank 0 at a barrier, rank 1 at a split: neither will ever be complete
                self.mine.waiting.wait(lambda: False, lambda: [])  # as in every world: the launcher will see, and explain
            raise Mismatch("the ranks disagree: " + by_statement([_spell(call) for call in calls], self.members))
        return heard

    # ---- notes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def standing(self, action: str, peer: int = -1, tag: int = 0, nbytes: int = 0) -> Iterator[None]:
        """As everywhere, but the note is only written once a wait turns out to be long: most are shorter than the writing."""
        if action == "join":  # a wait for a thread, of which `waiting` does not know whether it is long
            with super().standing(action, tag=tag):
                yield
            return
        peer, waiting = self.members[peer] if peer >= 0 else -1, self.mine.waiting
        start, since, noted = self.now(), time.monotonic(), False

        def note(in_vain: bool) -> bool:
            nonlocal noted
            noted, line, when = True, callers_line(), IN_VAIN if in_vain else since
            standing = Standing(action, peer, tag, nbytes, self._collective, self.members, *line, when)
            self.board.write(standing, self.lane)
            return self.board.watched

        waiting.noting(note)
        yield
        waiting.noting(None)
        if noted:
            self.board.write(None, self.lane)
        if self.recorder:
            self.recorder.waited(action, self.name, peer, tag, nbytes, start)


class _Transfer:
    """A posted message of one communicator."""

    def __init__(self, comm: SharedMemoryCommunicator, message: Sending | Receiving, peer: int, tag: int) -> None:
        self.comm, self.message, self.peer, self.tag = comm, message, peer, tag

    def wait(self) -> None:
        self.comm.mine.mailbox.wait(self.message, self.comm.members[self.peer], self.tag)

    def is_done(self) -> bool:
        return self.comm.mine.mailbox.is_done(self.message)


def join(descriptor: int, ranks: int, rank: int) -> SharedMemoryCommunicator:
    """This process's end of the group of all ranks, from the descriptor that `create` has made."""
    mine = Rank(descriptor, ranks, rank)
    return SharedMemoryCommunicator(mine, range(ranks), mine.arena.layout.meeting)


def _spell(call: Call) -> str:
    """`all_reduce(float32[3], op=SUM)`: the only call that has something to be told apart by."""
    _, op, dtype, length = call
    return f"all_reduce({str(DTYPES[dtype]).removeprefix('torch.')}[{length}], op={_OPS[op]})"
