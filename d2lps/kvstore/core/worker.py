"""The worker's end: what `worker(kv, ...)` is given. It cuts tensors into parts, asks the servers, and puts answers together.

How a request travels is not its affair: it hands it to a Transport and gets something to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from d2lps.comm import Communicator, Work
from d2lps.comm.rank import describe
from d2lps.kvstore.core.compression import Codec, make_codec
from d2lps.kvstore.core.events import LOSS, Refused, Reply, Request, replace
from d2lps.kvstore.core.placement import Part, Placement, Rows


class Answer(Protocol):
    """An answer that is under way."""

    reply: Reply | None  # once it is there

    def wait(self) -> Reply: ...

    def is_done(self) -> bool: ...


class Transport(Protocol):
    """Carries requests to servers, each client's to each server in order, as often as it takes: see `Session`."""

    def request(self, server: int, request: Request) -> Answer:
        """Send it off, before others of lower priority; its value is not touched until the answer is there."""

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that the servers can reach, if there is such a thing here; any tensor if not."""


class _Answers:
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


class KVWorker:
    """
    >>> def worker(kv, steps):
    ...     weights, gradient = torch.zeros(3), torch.ones(3)
    ...     kv.init("w", weights)
    ...     for _ in range(steps):
    ...         kv.push("w", gradient)                  # without an optimizer, pushes are added
    ...         kv.clock()                              # ends the iteration
    ...         kv.pull("w", weights).wait()
    ...     return weights.tolist()
    >>> from d2lps.kvstore import simulate
    >>> from d2lps.topology import star
    >>> simulate(worker, star(3, 1e9), 2, 1, 5) == [[10.0] * 3] * 2
    True

    `push`, `pull` and their kin return a Work: the tensors that they were given are the store's until its `wait`, and a push
    has been applied, or is safe where that was promised, after it. What a worker asks of one server is done in the order of
    asking, so a pull sees the pushes before it; a request of higher priority overtakes those of the same iteration that
    have not left yet. Tensors may be strided, and on any device: they are copied then.
    """

    def __init__(self, transport: Transport, comm: Communicator, placement: Placement) -> None:
        self.comm, self.rank, self.num_workers = comm, comm.rank, comm.size
        self.placement, self.transport = placement, transport
        self.iteration = 0  # how often clock() has been called
        self.codec: Codec | None = None
        self.unheard: deque[_Answers] = deque()  # in the order of asking: to be reported at the end, if they are refused
        self.code: dict[str, Any] = {}  # the options of a push, from which the server makes the codec that it needs

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that need not be copied to be added up, where workers and servers share memory.

        >>> gradient = kv.empty((1000, 1000))       # doctest: +SKIP

        They do on one machine (Linux, on CPUs), but for address "tcp"; under bsp it is copied all the same. Raises MemoryError.
        """
        return self.transport.empty(shape, dtype)

    # ---- whole tensors ----------------------------------------------------------------------------------------------------

    def init(self, key: str | int, value: torch.Tensor) -> None:
        """Give a key its first value; the first worker to do so wins, and all workers should, to learn its shape.

        Of a tensor in parts, each server keeps what it is offered, until the server of the first part has decided who wins,
        of those whose whole value is there: no key begins with parts of two workers' values, whoever dies meanwhile.
        """
        home, *others = parts = self._parts(key, value)
        op, found = "offer" if others else "init", list[Reply]()
        self._work("init", key, [(part, self._pushing(op, part, value, 0)) for part in parts], value.nbytes).wait()
        if others:
            self._work("init", key, [(home, Request("choose", home.name))], 0, found.extend).wait()
            chosen = Request("choose", options={"owner": list(found[0].owner)})
            self._work("init", key, [(part, replace(chosen, key=part.name)) for part in others], 0).wait()

    def push(self, key: str | int, value: torch.Tensor, priority: int = 0) -> Work:
        """Add `value` to what the servers have, or hand it to their optimizer as a gradient.

        Under bsp that happens when all have ended the iteration; else as it arrives. Each worker sends n bytes.
        """
        requests = [(part, self._pushing("push", part, value, priority)) for part in self._parts(key, value)]
        return self._work("push", key, requests, value.nbytes)

    def pull(self, key: str | int, out: torch.Tensor, priority: int = 0) -> Work:
        """Fill `out` with the value, once the slowest worker is no more than the staleness behind. Each receives n bytes."""
        return self._fetch("pull", key, out, out, priority)

    def peek(self, key: str | int, out: torch.Tensor, priority: int = 0) -> Work:
        """As pull, for an evaluation: with a memory budget, what is in use stays in memory, and nothing is written."""
        return self._fetch("peek", key, out, out, priority)

    def pushpull(self, key: str | int, value: torch.Tensor, out: torch.Tensor, priority: int = 0) -> Work:
        """Push, and pull what comes of this iteration: ends this worker's iteration as far as this key is concerned.

        So under bsp the answer need not wait until all have called clock(), only until all have pushed this key.
        """
        return self._fetch("pushpull", key, value, out, priority)

    def compress(self, codec: str | None, **options: Any) -> None:
        """From now on this worker sends what it pushes in fewer bytes: "half", "1bit", or a registered codec; None: as it is.

        >>> kv.compress("1bit")         # 1/32 of the bytes of float32; what is lost comes with the next push   # doctest: +SKIP

        Whole tensors of floats, that is; rows and integers travel as they are, and so does what is pulled. ValueError.
        """
        self.codec = None if codec is None else make_codec(codec, **options)
        self.code = {} if codec is None else {"codec": codec, **options}

    # ---- rows -------------------------------------------------------------------------------------------------------------

    def push_rows(self, key: str | int, rows: torch.Tensor, values: torch.Tensor, priority: int = 0) -> Work:
        """Push values[i] to row rows[i]; a row that occurs twice gets the sum. Only the touched rows travel, and change.

        >>> kv.push_rows("embedding", torch.tensor([7, 2, 7]), gradients)       # gradients: float32[3, dim]   # doctest: +SKIP
        """
        requests = []
        for part, mine, local in self._split_rows(key, rows, "values", values):
            requests.append((part, Request("push", part.name, _wire(values[mine]), rows=local, priority=priority)))
        return self._work("push_rows", key, requests, values.nbytes)

    def pull_rows(self, key: str | int, rows: torch.Tensor, out: torch.Tensor, priority: int = 0) -> Work:
        """Fill out[i] with row rows[i]."""
        split = self._split_rows(key, rows, "out", out)
        requests = [(part, Request("pull", part.name, rows=local, priority=priority)) for part, _, local in split]

        def place(replies: list[Reply]) -> None:
            for (_, mine, _), reply in zip(split, replies, strict=True):
                out.detach()[mine] = reply.value.to(out.device)  # type: ignore[union-attr]

        return self._work("pull_rows", key, requests, out.nbytes, place)

    def _split_rows(self, key: str | int, rows: torch.Tensor, name: str, tensor: torch.Tensor) -> list[Rows]:
        """See `Placement.split_rows`; `tensor` has a row for each of them."""
        if str(key) not in self.placement.shapes:
            raise ValueError(f"key {key!r} is unknown to this worker: it must call init, to learn how many rows there are")
        if rows.dim() != 1 or rows.dtype != torch.int64:
            raise ValueError(f"rows must be flat, of int64, not {describe(rows)}")
        wanted = [len(rows), *self.placement.shapes[str(key)][0][1:]]
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} is {describe(tensor)}, but {len(rows)} rows of key {key!r} are {wanted}")
        return self.placement.split_rows(str(key), rows.detach().cpu())

    # ---- time -------------------------------------------------------------------------------------------------------------

    def clock(self) -> Work:
        """End this iteration, on every server. Nobody need wait for it to arrive."""
        self.iteration += 1
        return self._everywhere(Request("clock"))

    def barrier(self) -> None:
        """Return when every live worker has called this, and all that each asked for before has been done."""
        self._everywhere(Request("barrier")).wait()

    def set_optimizer(self, name: str, reduction: str = "mean", **hyper: Any) -> None:
        """From now on the servers hand what is pushed to an optimizer; calling it again changes its hyperparameters.

        >>> kv.set_optimizer("sgd", lr=0.1, momentum=0.9)       # or "adam", "adagrad", or a registered one   # doctest: +SKIP

        reduction: "mean", an iteration's gradients are divided by the number of workers, so that one learning rate does for
        any number of them; "sum": they are not, and the steps grow with the workers.
        """
        options = {"name": name, "reduction": reduction, **hyper}
        self._everywhere(Request("set_optimizer", options=options)).wait()

    def join(self) -> None:
        """Come in while others are at work: begin where the slowest of them is."""
        joining = _Answers("join", [self.transport.request(server, Request("join")) for server in self.placement.servers])
        joining.wait()
        self.iteration = max(reply.clock for reply in joining.replies)
        self._everywhere(Request("clock"))

    def leave(self) -> None:
        """Nobody waits for this worker from now on. Called for you when your function returns."""
        self._everywhere(Request("leave")).wait()

    def finish(self) -> None:
        """The worker's function has returned: leave, and raise what was refused without anybody having waited for it."""
        try:
            self.leave()
        except Refused as error:
            if LOSS in str(error):
                raise
            return  # it was given up before, or has never joined: what it has asked counts for nothing, and it knows
        for answers in self.unheard:
            if not answers.heard:
                answers.check([answer.reply for answer in answers.answers], more="; nobody has waited for this")

    # ---- how --------------------------------------------------------------------------------------------------------------

    def _parts(self, key: str | int, tensor: torch.Tensor) -> list[Part]:
        if not isinstance(key, str | int) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a key is a string or a number, with a torch.Tensor: not {key!r} with {tensor!r}")
        parts = self.placement.place(str(key), tensor.shape, tensor.dtype)
        known = self.placement.shapes[str(key)]
        if known != (tuple(tensor.shape), tensor.dtype):
            raise ValueError(f"key {key!r} is {known[1]}{list(known[0])}, not {tensor.dtype}{list(tensor.shape)}")
        return parts

    def _pushing(self, op: str, part: Part, value: torch.Tensor, priority: int) -> Request:
        """A request that brings a part of a tensor, encoded if that was wished."""
        tensor = _wire(part.of(value))
        if self.codec is None or op in ("offer", "init") or not tensor.is_floating_point():
            return Request(op, part.name, tensor, priority=priority)
        return Request(op, part.name, self.codec.encode(part.name, tensor), options=self.code, priority=priority)

    def _fetch(self, op: str, key: str | int, value: torch.Tensor, out: torch.Tensor, priority: int) -> Work:
        parts = self._parts(key, value)
        requests = []
        for part in self._parts(key, out):
            asked = self._pushing(op, part, value, priority) if op == "pushpull" else Request(op, part.name, priority=priority)
            requests.append((part, replace(asked, out=part.of(out).detach())))

        def place(replies: list[Reply]) -> None:
            for part, reply in zip(parts, replies, strict=True):
                target, came = part.of(out), reply.value
                assert came is not None
                if came.is_meta or came.data_ptr() != target.data_ptr():  # else the server has written it there
                    self.comm.copy(target, came)

        return self._work(op, key, requests, out.nbytes, place)

    def _everywhere(self, request: Request) -> Work:
        requests = [(Part(server, "", 0), request) for server in self.placement.servers]
        return self._work(request.op, "", requests, 0)

    def _work(
        self,
        op: str,
        key: str | int,
        requests: list[tuple[Part, Request]],
        nbytes: int,
        place: Callable[[list[Reply]], None] = lambda replies: None,
    ) -> Work:
        """Ask, and say what is to be done with the answers."""
        stamped = [(part.server, replace(request, clock=self.iteration)) for part, request in requests]
        what = f"kv.{op}({repr(key) if key != '' else ''})"
        answers = _Answers(what, [self.transport.request(server, request) for server, request in stamped])
        self.unheard.append(answers)
        while self.unheard and self.unheard[0].settled():
            self.unheard.popleft()

        def finish() -> None:
            with self.comm.waiting("answer", nbytes=nbytes):
                answers.wait()
            place(answers.replies)

        return Work(finish, answers.is_done)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """What can be sent: without its history, in one run of memory, where the processor can read it; a view if possible."""
    tensor = tensor.detach()
    return (tensor if tensor.is_meta else tensor.cpu()).contiguous()
