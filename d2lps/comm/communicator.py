"""One rank's end of a group of ranks: the calls that every algorithm of the book is written in.

A world (processes on this machine, several machines, a simulated cluster) supplies some small methods, which stand at the
end of the class. The rules are the same in all of them:

- Messages from one rank to another with the same tag arrive in the order in which they were sent; what is received
  must have the length and dtype of what was sent.
- Rendezvous: a send is complete only when the other rank has posted the receive that matches it.
- A tensor in flight is not touched until its `Work.wait()`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

import torch

from d2lps.comm.aliasing import Addressed, check_messages, check_writable
from d2lps.comm.explain import disagreement
from d2lps.comm.ops import ReduceOp
from d2lps.comm.rank import Rank, running
from d2lps.comm.staging import stage, unstage
from d2lps.comm.status import readers_line
from d2lps.comm.work import Work, in_thread, once

STATEMENT = 896  # bytes of what a rank tells the others, so that ranks that say different things can still exchange them


class Communicator(Rank):
    """
    >>> def hello(comm):
    ...     if comm.rank == 0:
    ...         comm.send(torch.ones(3), dst=1)
    ...     if comm.rank == 1:
    ...         comm.recv(into := torch.zeros(3), src=0)
    ...         return into.sum().item()
    >>> d2lps.run(hello, 2)     # doctest: +SKIP
    Run([None, 3.0])
    """

    # ---- messages -------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Give `tensor` to rank `dst`; return when it has been delivered."""
        self._exchange(((tensor, dst),), (), tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        """Fill `tensor` with what rank `src` sends; return when it is there."""
        self._exchange((), ((tensor, src),), tag)

    def sendrecv(self, tensor: torch.Tensor, dst: int, into: torch.Tensor, src: int, tag: int = 0) -> None:
        """Send and receive at the same time, so that a ring of ranks that all send first does not deadlock.

        Into other memory: a ValueError, before anything is sent, if `into` and `tensor` share any.
        """
        self._exchange(((tensor, dst),), ((into, src),), tag, ("into", "tensor"))

    def exchange(self, sends: Iterable[Addressed], receives: Iterable[Addressed], tag: int = 0) -> None:
        """Post several messages at once, then wait for all: none waits for another, and they share the links.

        >>> comm.exchange(sends=[(mine, 1), (mine, 2)], receives=[(room[1], 1), (room[2], 2)])       # doctest: +SKIP

        Two messages to one rank must stand in the order in which that rank receives them. What is received goes into memory that
        is neither sent from nor received into twice: a ValueError that names both, before anything is sent. One tensor may be
        sent to many.
        """
        self._exchange([*sends], [*receives], tag, ("receives[{}]", "sends[{}]"))

    def _exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed], tag: int, names: Sequence[str] = ()) -> None:
        """names: what the caller calls what it receives and what it sends, if they may share memory."""
        for tensor, src in receives:
            self._check_message("recv", tensor, src, tag)
        for tensor, dst in sends:
            self._check_message("send", tensor, dst, tag)
        if names and not self._apart:
            check_messages(receives, sends, names)
        with self.together():
            posted = [self._posted("recv", *received, tag) for received in receives]
            posted += [self._posted("send", *sent, tag) for sent in sends]
        for work in posted:
            work.wait()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start to send; the message is delivered when the returned `Work` has been waited for."""
        self._check_message("send", tensor, dst, tag)
        return self._posted("send", tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Say where a message from `src` shall go; it is there when the returned `Work` has been waited for."""
        self._check_message("recv", tensor, src, tag)
        return self._posted("recv", tensor, src, tag)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Post several messages in this block that depend on one another, and wait after it.

        NCCL needs to be told, and then treats them as one; in all other worlds posted messages progress by themselves.

        >>> with comm.together():                           # doctest: +SKIP
        ...     work = [comm.irecv(room[src], src) for src in others] + [comm.isend(mine, dst) for dst in others]
        """
        yield

    def barrier(self) -> None:
        """Return when every rank of the group has called this."""
        self._check_lane()
        with self.waiting("barrier"):
            self._barrier()

    def agree(self, statement: str) -> None:
        """Raise Mismatch on every rank unless all ranks make the same statement."""
        with self.waiting("agree"):
            said = self._tell("agree", statement)
        if len(set(said)) > 1:
            raise disagreement(said, self.members)

    # ---- groups and time ------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int | None = None, axis: str = "") -> Communicator | None:
        """One new communicator for each color, its ranks ordered by (key, rank); `color=None` joins none.

        >>> row = comm.split(color=comm.rank // 4)      # ranks 0..3 together, 4..7 together   # doctest: +SKIP

        axis: what traces and pictures call the direction in which these groups lie, "tp" for one; their own groups inherit it.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**62):
                raise ValueError(f"{name} must be None or an integer below 2**62, not {value!r}")
        if axis and not axis.isalpha():
            raise ValueError(f"axis={axis!r} is not a word of letters")
        self._check_lane()
        with self.waiting("split"):
            wishes = self._tell("split", (color, self.rank if key is None else key))
            self._splits += 1
            if color is None:
                return None
            ordered = sorted((wish[1], rank) for rank, wish in enumerate(wishes) if wish[0] == color)
            child = self._child([rank for _, rank in ordered], f"{self.name}/{axis}{self._splits}.{color}")
            child.connect()
        return child

    def start(self, function: Callable[..., Any], *args: Any) -> Work:
        """Let `function(comm', *args)` go on beside what this rank does next: a collective under a backward pass.

        >>> work = comm.start(all_reduce, gradient)         # doctest: +SKIP
        >>> compute_the_next_gradient()                     # doctest: +SKIP
        >>> work.wait()                                     # now `gradient` is the sum     # doctest: +SKIP

        comm' has the same ranks, and messages of its own: they meet none of this communicator's. The nth start on each rank of
        a communicator belong together. A function ends when all that it has started has ended, and raises what nobody has
        waited for; `wait` raises what the function raised. Within it only comm' is to be used: RuntimeError otherwise. In the
        trace it has a lane of its own. Costs a thread (a greenlet in a simulation), and over torch.distributed a process group.
        """
        if not callable(function):
            raise TypeError(f"start needs a function of a communicator, not {function!r}")
        self._check_lane()
        self._starts += 1
        beside = self._child(range(self.size), f"{self.name}/start{self._starts}")
        beside.started = {}
        beside.lane = next(lane for lane in range(1, len(self.lanes) + 2) if lane not in self.lanes)
        self.lanes.add(beside.lane)
        if self.recorder:
            self.recorder.vocabulary.buffers.look_around()
            beside.recorder = self.recorder.beside(beside.lane, getattr(function, "__name__", "function"))

        def to_its_end() -> None:
            try:
                function(beside, *args)
                beside.finish()
            finally:
                beside.lanes.discard(beside.lane)

        started = self.started[beside] = self._start(beside, to_its_end)
        return Work(lambda: self._join(beside), started.done)

    def _start(self, beside: Communicator, function: Callable[[], None]) -> Future[Any]:
        """In real worlds a thread, which lets go of the interpreter while it waits for other ranks or adds up tensors."""

        began = readers_line(sys._getframe())

        def live() -> None:
            running.lane, running.began = beside.lane, began
            with beside.waiting("start"):
                beside.connect(beside=True)
            try:
                function()
            finally:
                beside.disconnect()

        return in_thread(live, f"lane {beside.lane}")

    def _join(self, beside: Rank) -> None:
        if (started := self.started.get(beside)) is not None:  # and has not been waited for at the end of the rank's function
            with self.waiting("join", tag=beside.recorder.thread if beside.recorder else 0):
                error = started.exception()
            self.started.pop(beside, None)  # another lane that waited, too, may have done it
            if error is not None:
                raise error

    def finish(self) -> None:
        """Wait for what was started and not yet waited for; called by the world when the rank's function has returned."""
        while self.started:
            self._join(next(iter(self.started)))

    def _child(self, ranks: Sequence[int], name: str) -> Self:
        """A communicator of some of these ranks, whose messages meet none of this one's once it has been connected."""
        child = copy.copy(self)
        child._become([self.members[rank] for rank in ranks], ranks.index(self.rank), name)
        return child

    # ---- checks and glue ------------------------------------------------------------------------------------------

    def _check_message(self, action: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self._check_lane()
        side = "dst" if action == "send" else "src"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a message is a torch.Tensor, not {type(tensor).__name__}: {tensor!r}")
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < self.size:
            raise ValueError(f"{side}={peer!r} is not a rank of this group of {self.size} (0 to {self.size - 1})")
        if peer == self.rank:
            raise ValueError(f"{side}={peer} is this rank itself: a rank sends no message to itself, use comm.copy")
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < 2**31:
            raise ValueError(f"tag={tag!r} is not an integer from 0 to 2**31 - 1")
        if action == "recv":
            check_writable(tensor)

    def _posted(self, action: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a message, and say what its completion entails."""
        self.touched = True
        staged = stage(tensor, self._wire())
        recorder, nbytes = self.recorder, tensor.numel() * tensor.element_size()
        recorded = recorder.message(action, tensor, self.name, self.members[peer], tag) if recorder else None
        try:
            transfer = self._post(action, staged, peer, tag)
        except RuntimeError:  # over torch.distributed, the failure of another rank is noticed here, too
            self.note(action, peer, tag, nbytes)
            raise
        for watcher in self.watchers:
            watcher.moved(self, action, nbytes)

        def finish() -> None:
            with self.waiting(action, peer, tag, nbytes):
                transfer.wait()
            if action == "recv":
                unstage(staged, tensor)
            if recorded:
                recorded()

        return Work(once(finish), transfer.is_done)

    def _tell(self, call: str, word: Any) -> list[Any]:
        """What every rank of the group says with the same call ("barrier", "split", "agree"), by rank; outside the trace.

        Numbers, or a text, of which a long one ends in its hash.
        """
        told = json.dumps(word, ensure_ascii=False).encode()
        if len(told) > STATEMENT:  # a letter takes six bytes at most: a control character's \u001f does
            told = json.dumps(word[: STATEMENT // 7] + hashlib.sha1(told).hexdigest(), ensure_ascii=False).encode()
        return [json.loads(said) for said in self._exchange_statements(call, told.ljust(STATEMENT))]

    # ---- what a world supplies ------------------------------------------------------------------------------------

    def _post(self, action: str, staged: torch.Tensor, peer: int, tag: int) -> Any:
        """Begin to send or receive a flat tensor; the result has `wait()`, and `is_done()`: whether that is at once."""
        raise NotImplementedError  # in a simulation, which has a way of its own from `exchange` to the network

    def _exchange_statements(self, call: str, mine: bytes) -> list[bytes]:
        """What all ranks say, each as many bytes; in a simulation, they tell one another without."""
        raise NotImplementedError

    def _wire(self) -> torch.device:
        """The device that the transport reads from."""
        return torch.device("cpu")

    def _barrier(self) -> None:
        self._tell("barrier", None)

    def connect(self, beside: bool = False) -> None:
        """Wait for the other ranks of a child, if messages need that. beside: for a function that is started."""

    def disconnect(self) -> None:
        """What a started function leaves when it has ended."""

    @abstractmethod
    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """The world's own all-reduce, to compare ours with."""
