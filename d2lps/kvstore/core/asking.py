"""How a worker asks: it cuts tensors into parts, hands requests to a Transport, and gets something to wait for.

How a request travels is not its affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from d2lps.comm import Communicator, Work
from d2lps.comm.aliasing import check_apart, same_place
from d2lps.comm.rank import describe
from d2lps.compress import ErrorFeedback
from d2lps.compress.codec import check_finite, widened
from d2lps.kvstore.core.events import Op, Refused, Reply, Request, replace
from d2lps.kvstore.core.placement import Part, Placement, Rows, described
from d2lps.kvstore.core.transport import Answer, Transport

Key = str | int
Keys = Key | Sequence[Key]
Tensors = torch.Tensor | Sequence[torch.Tensor]
Place = Callable[[list[Reply]], None]  # what is done with the answers


class Answers:
    """All parts of one operation."""

    def __init__(self, what: str, answers: Sequence[Answer]) -> None:
        self.what, self.answers = what, answers
        self.replies: list[Reply] = []
        self.heard = False  # whether somebody waits, and so hears of an error

    def is_done(self) -> bool:
        return all(answer.is_done() for answer in self.answers)

    def settled(self) -> bool:
        """Whether there is nothing that nobody will hear of."""
        return self.heard or all(answer.reply is not None and not answer.reply.error for answer in self.answers)

    def wait(self) -> None:
        self.heard = True
        self.replies = [answer.wait() for answer in self.answers]
        self.check(self.replies)

    def check(self, replies: Sequence[Reply | None], more: str = "") -> None:
        for reply in replies:
            if reply is not None and reply.error:
                raise Refused(f"{self.what}: {reply.error}{more}")


class Asking:
    """One worker's end of the lines to all servers."""

    def __init__(self, transport: Transport, comm: Communicator, placement: Placement) -> None:
        self.comm, self.rank, self.num_workers = comm, comm.rank, comm.size
        self.placement, self.transport = placement, transport
        self.iteration = 0  # how often clock() has been called
        self.codec: ErrorFeedback | None = None
        self.left: dict[str, torch.Tensor] = {}  # of parts, what codecs have not sent; it outlives them
        self.code: dict[str, Any] = {}  # the options of a push, from which the server makes the codec that it needs
        self.unheard: deque[Answers] = deque()  # in the order of asking: to be reported at the end, if they are refused

    # ---- what is asked, of tensors that fit -------------------------------------------------------------------------------

    def parts(self, key: Key, *tensors: torch.Tensor) -> list[Part]:
        """Where the parts of a key are, which these tensors fit; of one without `init` here, where it is if it is whole."""
        named = isinstance(key, str | int) and not isinstance(key, bool)
        if not named or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            name = repr(key) if named else type(key).__name__
            given = ", ".join(type(tensor).__name__ for tensor in tensors)
            raise TypeError(f"a key is a string or a number, with a torch.Tensor, or both are lists: not {name} with {given}")
        check_dense(key, *tensors)
        shape, dtype = self.placement.shapes.get(str(key), (tuple(tensors[0].shape), tensors[0].dtype))
        for tensor in tensors:
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise ValueError(f"key {key!r} is {described(shape, dtype)}, not {describe(tensor)}")
        return self.placement.parts.get(str(key)) or [self.placement.home(str(key))]

    def begin(self, key: Key, tensor: torch.Tensor, everywhere: bool) -> list[Part]:
        """Place a key. What it is as a whole is kept at its home, so that all mean the same by it; Refused if they don't."""
        parts, name, placement = self.parts(key, tensor), str(key), self.placement
        said = described(tensor.shape, tensor.dtype, everywhere)
        if name in placement.parts and placement.describe(name) != said:
            raise ValueError(f"key {key!r} is {placement.describe(name)}, not {said}")
        if name not in placement.parts:
            parts = placement.place(name, tensor.shape, tensor.dtype, everywhere)
            try:
                self.declare(key, [name])
            except Refused:
                placement.forget(name)
                raise
        return parts

    def declare(self, key: Key, names: Sequence[str]) -> None:
        """Tell the homes of these keys what they are as a whole, but for those that lie there as they are."""
        declared = []
        for name in names:
            home, first = self.placement.home(name), self.placement.parts[name][0]
            if (home.server, home.name) != (first.server, first.name):
                whole = self.placement.describe(name)
                declared.append((home, Request("declare", home.name, options={"whole": whole})))
        if declared:
            self.ask("init", key, declared)

    def cut(self, priority: int, key: Keys, *tensors: Tensors) -> list[tuple[Any, ...]]:
        """(part, that part of each tensor) for all keys; what is wrong with any of them is said before a word is sent."""
        if type(priority) is not int:
            raise TypeError(f"priority={priority!r} is not a whole number")
        return [(part, *map(part.of, mine)) for name, *mine in pairs(key, *tensors) for part in self.parts(name, *mine)]

    def bring(self, op: Op, priority: int, key: Keys, value: Tensors, *out: Tensors) -> list[tuple[Part, Request]]:
        """Requests with all parts of tensors, encoded if that was wished; `out` must fit, too."""
        cut = self.cut(priority, key, value, *out)
        for room in out:
            check_room(op, key, room, value)
        if self.codec is not None:
            for name, tensor in [pair for pair in pairs(key, value) if pair[1].is_floating_point()]:
                check_finite(tensor, str(name))
        requests, encoded, turn = [], torch.empty(0), 0
        for part, tensor, *_ in cut:
            sent, code = wire(tensor), {}
            if self.codec is not None and sent.is_floating_point():
                if not part.copied or part.server == self.placement.servers[0]:  # the other copies get the same
                    turn, encoded = self.codec.turns[part.name], self.codec.encode(part.name, sent)
                sent, code = encoded, {**self.code, "turn": turn}
            elif part.name in self.left:
                sent = self.with_left(part, sent)
            requests.append((part, Request(op, part.name, sent, options=code, priority=priority)))
        return requests

    def with_left(self, part: Part, tensor: torch.Tensor) -> torch.Tensor:
        """A part, and what no codec has sent of it before; that is then forgotten, of copies with the last one."""
        left = self.left[part.name]
        if not part.copied or part.server == self.placement.servers[-1]:
            del self.left[part.name]
        return (widened(tensor).flatten() + left).view(tensor.shape).to(tensor.dtype)

    def fetch(self, op: str, key: Keys, requests: list[tuple[Part, Request]], outs: list[torch.Tensor]) -> Work:
        """Ask for values, and put each where it is wanted."""

        def place(replies: list[Reply]) -> None:
            for (part, _), target, reply in zip(requests, outs, replies, strict=True):
                came = reply.value
                assert came is not None
                if came.shape != target.shape:  # this worker has not called init, and takes the key for another
                    alike = f"a copy needs two tensors alike, not {describe(target)} and {describe(came)}"
                    raise ValueError(f"kv.{op} of {part.name!r}: {alike}")
                if came.is_meta or came.data_ptr() != target.data_ptr():  # else the server has written it there
                    self.comm.copy(target, came)

        return self.work(op, key, requests, place, outs)

    def split_rows(self, key: Key, rows: torch.Tensor, name: str, tensor: torch.Tensor) -> list[Rows]:
        """See `Placement.split_rows`; `tensor` has a row for each of them."""
        if not isinstance(rows, torch.Tensor) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"rows and {name} of {key!r} are torch.Tensors, not {rows!r} and {tensor!r}")
        check_dense(key, rows, tensor)
        if str(key) not in self.placement.shapes:
            raise ValueError(f"key {key!r} is unknown to this worker: it must call init, to learn how many rows there are")
        if rows.dim() != 1 or rows.dtype != torch.int64:
            raise ValueError(f"rows must be flat, of int64, not {describe(rows)}")
        if not (shape := self.placement.shapes[str(key)][0]):
            raise ValueError(f"key {key!r} is {self.placement.describe(str(key))}, one number, which has no rows")
        if tensor.dtype != self.placement.shapes[str(key)][1]:
            raise ValueError(f"{name} is {describe(tensor)}, but key {key!r} is {self.placement.describe(str(key))}")
        count, *row = shape
        if list(tensor.shape) != [len(rows), *row]:
            raise ValueError(f"{name} is {describe(tensor)}, but {len(rows)} rows of key {key!r} are {[len(rows), *row]}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
            raise ValueError(f"rows of {key!r} go from 0 to {count - 1}, not from {int(rows.min())} to {int(rows.max())}")
        return self.placement.split_rows(str(key), rows.detach().cpu())

    def is_mine(self, part: Part) -> bool:
        """Of copies, a worker asks one."""
        return not part.copied or part.server == self.placement.servers[self.rank % len(self.placement.servers)]

    # ---- how it is asked --------------------------------------------------------------------------------------------------

    def ask_all(self, request: Request) -> Work:
        return self.work(request.op, "", [(Part(server, "", 0), request) for server in self.placement.servers])

    def ask(self, op: str, key: Keys, requests: list[tuple[Part, Request]]) -> list[Reply]:
        """Ask, and wait for the answers."""
        replies: list[Reply] = []
        self.work(op, key, requests, replies.extend).wait()
        return replies

    def work(
        self,
        op: str,
        key: Keys,
        requests: list[tuple[Part, Request]],
        place: Place = lambda replies: None,
        outs: Sequence[torch.Tensor] = (),
    ) -> Work:
        """Ask, and say what is to be done with the answers, or where values of theirs may be written at once."""
        what = f"kv.{op}({repr(key) if key != '' else ''})"
        stamped = [(part.server, replace(request, clock=self.iteration)) for part, request in requests]
        nbytes = sum(tensor.nbytes for tensor in [*(request.value for _, request in requests), *outs] if tensor is not None)
        asked = [self.transport.request(server, request, out) for (server, request), out in zip_longest(stamped, outs)]
        answers = Answers(what, asked)
        self.unheard.append(answers)
        while self.unheard and self.unheard[0].settled():
            self.unheard.popleft()

        def finish() -> None:
            with self.comm.waiting("answer", nbytes=nbytes):
                answers.wait()
            place(answers.replies)

        return Work(finish, answers.is_done)


def pairs(key: Keys, *tensors: Tensors) -> list[tuple[Any, ...]]:
    """(key, its tensors), of one key or of each in a list.

    >>> pairs(["a", "b"], [1, 2], [3, 4])
    [('a', 1, 3), ('b', 2, 4)]
    """
    if not isinstance(key, list | tuple):
        return [(key, *tensors)]
    counts = [len(found) if isinstance(found, list | tuple) else type(found).__name__ for found in tensors]
    if counts != [len(key)] * len(counts):
        raise ValueError(f"{len(key)} keys, {list(key)}, need a list of as many tensors, not {counts}")
    return list(zip(key, *tensors, strict=True))


def check_room(op: str, key: Keys, out: Tensors, value: Tensors | None = None) -> None:
    """What is pulled needs a place of its own for each key; a key's may be just where its value is pushed from."""
    rooms, index = [room for _, room in pairs(key, out)], "[{}]" if isinstance(key, list | tuple) else ""
    sent = [] if value is None else [pushed for _, pushed in pairs(key, value)]
    sent = [pushed.new_empty(0) if same_place(room, pushed) else pushed for room, pushed in zip(rooms, sent, strict=False)]
    try:
        check_apart(rooms, sent, ("out" + index, "value" + index))
    except ValueError as error:
        raise ValueError(f"kv.{op}({key!r}): {error}") from None


def check_dense(key: Key, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(f"{describe(tensor)} for key {key!r} is {tensor.layout}: push_rows sends its rows, as dense tensors")


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """What can be sent: without its history, in one run of memory, where the processor can read it; a view if possible."""
    tensor = tensor.detach()
    return (tensor if tensor.is_meta else tensor.cpu()).contiguous()
