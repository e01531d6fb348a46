"""The world of ranks that share a machine's memory."""

import socket
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b

import torch

from d2lps.comm import Communicator, ReduceOp, Work
from d2lps.comm.staging import stage, unstage
from d2lps.sharedmemory.all_reduce import all_reduce
from d2lps.sharedmemory.arena import bytes_of
from d2lps.sharedmemory.linux import allow_siblings
from d2lps.sharedmemory.mailbox import Mailbox
from d2lps.sharedmemory.meeting import Meeting, new_place


class SharedMemoryCommunicator(Communicator):
    """A communicator of all ranks on one machine; `d2lps.run(..., backend="shm")` makes it."""

    notes_when_long = True

    def __init__(self, mailbox: Mailbox, name: str = "world") -> None:
        super().__init__(range(mailbox.arena.ranks), mailbox.rank, name)
        self.mailbox, self.arena = mailbox, mailbox.arena
        allow_siblings()
        self.meeting = Meeting(mailbox, self.members, self.rank, self.arena.layout.meeting)
        self.device, self.node = torch.device("cpu"), socket.gethostname()
        self.generator = torch.Generator().manual_seed(self.rank)

    def _become(self, members: Sequence[int], rank: int, name: str) -> None:
        super()._become(members, rank, name)
        self._number = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")  # alike in all members

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of this rank that all ranks map, to read it and write to it where it is.

        The ranks meet: if there is not enough memory for all, it is a MemoryError on all, before any of it was taken.
        """
        nbytes = bytes_of(shape, dtype)
        with self.waiting("barrier"):
            heard = self.meeting.exchange_numbers("empty", nbytes, self.arena.space.free(nbytes))
        needed, free = sum(wanted for wanted, _ in heard), min(free for _, free in heard)
        if needed > free:
            raise MemoryError(f"{needed:,} bytes of shared memory are needed for {self.size} ranks; {free:,} are left")
        return self.arena.empty(shape, dtype)

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Every rank adds up a part, where the tensors are (see `d2lps.sharedmemory.all_reduce`)."""
        staged = stage(tensor, self._wire())
        with self.waiting("native", nbytes=tensor.nbytes):
            all_reduce(self.meeting, staged, op)
        unstage(staged, tensor)

    def leave(self, failed: bool = False) -> None:
        """Tell the others that this rank is done: whoever waits for it from now on waits in vain, and nobody else cares."""
        self.mailbox.waiting.leave(failed)

    def _post(self, action: str, staged: torch.Tensor, peer: int, tag: int) -> Work:
        message = self.mailbox.post(action == "send", staged, self.members[peer], self._number, tag)
        return Work(partial(self.mailbox.wait, message), partial(self.mailbox.is_done, message))

    def _barrier(self) -> None:
        self.meeting.exchange("barrier")

    def _exchange_statements(self, call: str, mine: bytes) -> list[bytes]:
        return self.meeting.exchange(call, mine)

    def connect(self, beside: bool = False) -> None:
        """The first rank tells the others where they meet, by message: there is no place yet where they could."""
        place = torch.tensor([new_place(self.arena, self.size) if self.rank == 0 else -1], device="cpu")
        action, peers = ("send", range(1, self.size)) if self.rank == 0 else ("recv", range(1))
        for posted in [self._post(action, place, peer, 0) for peer in peers]:
            posted.wait()
        self.meeting = Meeting(self.mailbox, self.members, self.rank, int(place))

    def disconnect(self) -> None:
        del self.meeting  # its place is free when the last rank has left it


def join(descriptor: int, ranks: int, rank: int) -> SharedMemoryCommunicator:
    """This process's end of the group of all ranks, from the descriptor that `create` has made."""
    return SharedMemoryCommunicator(Mailbox(descriptor, ranks, rank))
