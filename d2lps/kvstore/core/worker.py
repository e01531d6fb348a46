"""The worker's end: what `worker(kv, ...)` is given. It cuts tensors into parts, asks the servers, and puts answers together.

How a request travels is not its affair: it hands it to a Transport and gets something to wait for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from d2lps.comm import Communicator, Work
from d2lps.comm.rank import describe
from d2lps.kvstore.core import saving
from d2lps.kvstore.core.compression import Codec, make_codec
from d2lps.kvstore.core.events import LOSS, Refused, Reply, Request, replace
from d2lps.kvstore.core.placement import Part, Placement, Rows, whole

Key = str | int
Keys = Key | Sequence[Key]
Tensors = torch.Tensor | Sequence[torch.Tensor]


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

    Of whole tensors many can be named at once, kv.push(["a", "b"], [x, y]): all are looked at before any is sent.
    """

    def __init__(self, transport: Transport, comm: Communicator, placement: Placement) -> None:
        self.comm, self.rank, self.num_workers = comm, comm.rank, comm.size
        self.placement, self.transport = placement, transport
        self.iteration = 0  # how often clock() has been called
        self.codec: Codec | None = None
        self.unheard: deque[_Answers] = deque()  # in the order of asking: to be reported at the end, if they are refused
        self.code: dict[str, Any] = {}  # the options of a push, from which the server makes the codec that it needs

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that need not be copied to be pushed, nor after it was pulled, where workers and servers share memory.

        >>> gradient = kv.empty((1000, 1000))       # doctest: +SKIP

        They do on one machine (Linux, on CPUs), but for durability "replica" and address "tcp". Raises MemoryError.
        """
        return self.transport.empty(shape, dtype)

    # ---- whole tensors ----------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Tensors, everywhere: bool = False) -> None:
        """Give a key its first value; the first worker to do so wins, and all workers should, to learn its shape.

        everywhere: every server gets a copy; pushes go to all of them, and a pull to one, by rank, so that a key that is used
        more than all others keeps no server busier than others. Under bsp the copies are equal; else each adds up as it hears.

        Of a tensor in parts or copies, each server keeps what it is offered, until the server of the first one has decided who
        wins, of those whose whole value is there: no key begins with parts of two workers' values, whoever dies meanwhile.
        """
        cut = [(self._parts(name, tensor, everywhere=everywhere), tensor) for name, tensor in _pairs(key, value)]
        first = [
            (part, Request("init" if len(parts) == 1 else "offer", part.name, _wire(part.of(tensor))))
            for parts, tensor in cut
            for part in parts
        ]
        try:
            self._ask("init", key, first)
            for (home, *others), _ in cut:
                if others:
                    [chosen] = self._ask("init", key, [(home, Request("choose", home.name))])
                    owner = {"owner": list(chosen.owner)}
                    self._ask("init", key, [(part, Request("choose", part.name, options=owner)) for part in others])
        except Refused:
            for name, _ in _pairs(key, value):
                self.placement.forget(str(name))
            raise

    def push(self, key: Keys, value: Tensors, priority: int = 0) -> Work:
        """Add `value` to what the servers have, or hand it to their optimizer as a gradient.

        Under bsp that happens when all have ended the iteration; else as it arrives. Each worker sends n bytes.
        """
        return self._work("push", key, [request for *_, request in self._pushing("push", priority, key, value)])

    def pull(self, key: Keys, out: Tensors, priority: int = 0) -> Work:
        """Fill `out` with the value, once the slowest worker is no more than the staleness behind. Each receives n bytes."""
        return self._fetch("pull", key, out, priority)

    def peek(self, key: Keys, out: Tensors, priority: int = 0) -> Work:
        """As pull, for an evaluation: with a memory budget, what is in use stays in memory, and nothing is written."""
        return self._fetch("peek", key, out, priority)

    def pushpull(self, key: Keys, value: Tensors, out: Tensors, priority: int = 0) -> Work:
        """Push, and pull what comes of this iteration: ends this worker's iteration as far as this key is concerned.

        So under bsp the answer need not wait until all have called clock(), only until all have pushed this key.
        """
        requests, outs = [], []
        for part, target, (_, request) in self._pushing("pushpull", priority, key, value, out):
            here = self._serves_me(part)
            asked = {"out": target.detach()} if here else {"options": {**request.options, "silent": True}}
            requests.append((part, replace(request, **asked)))
            outs.append(target)
        return self._work("pushpull", key, requests, self._placing(outs))

    def compress(self, codec: str | None, **options: Any) -> None:
        """From now on this worker sends what it pushes in fewer bytes: "half", "1bit", or a registered codec; None: as it is.

        >>> kv.compress("1bit")         # 1/32 of the bytes of float32; what is lost comes with the next push   # doctest: +SKIP

        Whole tensors of floats, that is; rows and integers travel as they are, and so does what is pulled. ValueError.
        """
        self.codec = None if codec is None else make_codec(codec, **options)
        self.code = {} if codec is None else {"codec": codec, **options}

    # ---- rows -------------------------------------------------------------------------------------------------------------

    def push_rows(self, key: Key, rows: torch.Tensor, values: torch.Tensor, priority: int = 0) -> Work:
        """Push values[i] to row rows[i]; a row that occurs twice gets the sum. Only the touched rows travel, and change.

        >>> kv.push_rows("embedding", torch.tensor([7, 2, 7]), gradients)       # gradients: float32[3, dim]   # doctest: +SKIP
        """
        requests = []
        for part, mine, local in self._split_rows(key, rows, "values", values, priority):
            requests.append((part, Request("push", part.name, _wire(values[mine]), rows=local, priority=priority)))
        return self._work("push_rows", key, requests)

    def pull_rows(self, key: Key, rows: torch.Tensor, out: torch.Tensor, priority: int = 0) -> Work:
        """Fill out[i] with row rows[i]."""
        split = [(*found,) for found in self._split_rows(key, rows, "out", out, priority) if self._serves_me(found[0])]
        requests = [(part, Request("pull", part.name, rows=local, priority=priority)) for part, _, local in split]

        def place(replies: list[Reply]) -> None:
            for (_, mine, _), reply in zip(split, replies, strict=True):
                out.detach()[mine] = reply.value.to(out.device)  # type: ignore[union-attr]

        return self._work("pull_rows", key, requests, place)

    def _split_rows(self, key: Key, rows: torch.Tensor, name: str, tensor: torch.Tensor, priority: int) -> list[Rows]:
        """See `Placement.split_rows`; `tensor` has a row for each of them."""
        _check_priority(priority)
        if str(key) not in self.placement.shapes:
            raise ValueError(f"key {key!r} is unknown to this worker: it must call init, to learn how many rows there are")
        if rows.dim() != 1 or rows.dtype != torch.int64:
            raise ValueError(f"rows must be flat, of int64, not {describe(rows)}")
        count, *row = self.placement.shapes[str(key)][0]
        if list(tensor.shape) != [len(rows), *row]:
            raise ValueError(f"{name} is {describe(tensor)}, but {len(rows)} rows of key {key!r} are {[len(rows), *row]}")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
            raise ValueError(f"rows of {key!r} go from 0 to {count - 1}, not from {int(rows.min())} to {int(rows.max())}")
        return self.placement.split_rows(str(key), rows.detach().cpu())

    # ---- time -------------------------------------------------------------------------------------------------------------

    def clock(self) -> Work:
        """End this iteration, on every server. Nobody need wait for it to arrive."""
        self.iteration += 1
        return self._everywhere(Request("clock"))

    def barrier(self) -> None:
        """Return when every live worker has called this, and all that each asked for before has been done."""
        self._everywhere(Request("barrier")).wait()

    def set_optimizer(self, name: str | None, reduction: str = "mean", **hyper: Any) -> None:
        """From now on the servers hand what is pushed to an optimizer; calling it again changes its hyperparameters.

        >>> kv.set_optimizer("sgd", lr=0.1, momentum=0.9)       # torch.optim's, or a registered one   # doctest: +SKIP
        >>> kv.set_optimizer(None, reduction="median")          # none: what comes of the pushes is added   # doctest: +SKIP

        reduction: what it gets of an iteration's gradients: their "mean" over the workers, so that one learning rate does for
        any number of them; their "sum"; "median" or "trimmed_mean" (trim=1), which bear workers that send nonsense, and need
        bsp. See `reductions`.
        """
        options = {"name": name, "reduction": reduction, **hyper}
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"set_optimizer: {options}: finite numbers, texts and lists can be sent: {error}") from error
        self._everywhere(Request("set_optimizer", options=options)).wait()

    # ---- files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all keys' values, their optimizer's state and its options into one safetensors file.

        >>> kv.save("weights.safetensors")      # every worker calls it, between two iterations   # doctest: +SKIP

        It begins and ends with a barrier, and the first of the live workers writes, all at once or not at all: it needs room
        for all tensors. Refused in an iteration that has begun to push.
        """
        self._alone(lambda found: saving.write(path, saving.collect(self._asking("save"), found)))

    def load(self, path: str | Path) -> None:
        """Give the servers, however many, what was saved; every worker calls it, with the same file, between two iterations.

        A key that is there must be as in the file (Refused, and nothing is changed); one that is new is made. Other keys stay
        as they are. A file of another program's tensors does too: then they begin with a new optimizer's state.
        """

        def give(found: Sequence[saving.Inventory]) -> None:
            saved = saving.read(path)
            if new := saving.check(path, saved, found):
                self.init(new, [saved.values[key] for key in new])
            saving.spread(self._asking("load"), saving.inventories(self._asking("load"), self.placement.servers), saved)

        self._alone(give)

    def _alone(self, do: Callable[[Sequence[saving.Inventory]], None]) -> None:
        """Let the first of the live workers do it, while the others wait."""
        self.barrier()
        try:
            found = saving.inventories(self._asking("state"), self.placement.servers)
            if self.rank == found[0].workers[0]:
                do(found)
        finally:
            self.barrier()

    def _asking(self, op: str) -> saving.Ask:
        return lambda requests: self._ask(op, "", requests)

    # ---- those who come and go --------------------------------------------------------------------------------------------

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

    def _parts(self, key: Key, *tensors: torch.Tensor, everywhere: bool | None = None) -> list[Part]:
        """Where the parts of a key are, for tensors that fit it; everywhere: to be answered by who makes it, in `init`."""
        if not isinstance(key, str | int) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise TypeError(f"a key is a string or a number, with torch.Tensors: not {key!r} with {tensors!r}")
        name, placement = str(key), self.placement
        new = name not in placement.parts
        parts = placement.place(name, tensors[0].shape, tensors[0].dtype, bool(everywhere))
        try:
            for tensor in tensors:
                given = whole(tensor.shape, tensor.dtype, parts[0].copied if everywhere is None else everywhere)
                if (known := placement.whole(name)) != given:
                    raise ValueError(f"key {key!r} is {known}, not {given}")
            home = placement.home(name)
            if new and (home.server, home.name) != (parts[0].server, parts[0].name):
                said = {"whole": known, "new": everywhere is not None}
                self._ask("init" if said["new"] else "declare", key, [(home, Request("declare", home.name, options=said))])
        except BaseException:
            if new:
                placement.forget(name)
            raise
        return parts

    def _cut(self, priority: int, key: Keys, *tensors: Tensors, pushed: bool) -> list[tuple[Any, ...]]:
        """(part, that part of each tensor) for all keys; what is wrong with any of them is said before a word is sent."""
        _check_priority(priority)
        pairs = _pairs(key, *tensors)
        cut = [(part, *map(part.of, mine)) for name, *mine in pairs for part in self._parts(name, *mine)]
        for name, value, *_ in pairs:
            if pushed and self.codec is not None and value.is_floating_point():
                self.codec.check(str(name), value)
        return cut

    def _pushing(self, op: str, priority: int, key: Keys, *tensors: Tensors) -> list[tuple[Any, ...]]:
        """(part, that part of `out` if there is one, (part, request that brings that part of the value))"""
        cut = self._cut(priority, key, *tensors, pushed=True)
        return [(part, *out, (part, self._bringing(op, part, value, priority))) for part, value, *out in cut]

    def _bringing(self, op: str, part: Part, value: torch.Tensor, priority: int) -> Request:
        """A request with a part of a tensor, encoded if that was wished."""
        tensor = _wire(value)
        if self.codec is None or not tensor.is_floating_point():
            return Request(op, part.name, tensor, priority=priority)
        return Request(op, part.name, self.codec.encode(part.name, tensor), options=self.code, priority=priority)

    def _serves_me(self, part: Part) -> bool:
        """Of copies, one is asked by this worker."""
        return not part.copied or part.server == self.placement.servers[self.rank % len(self.placement.servers)]

    def _fetch(self, op: str, key: Keys, out: Tensors, priority: int) -> Work:
        cut = [(part, target) for part, target in self._cut(priority, key, out, pushed=False) if self._serves_me(part)]
        requests = [(part, Request(op, part.name, priority=priority, out=target.detach())) for part, target in cut]
        return self._work(op, key, requests, self._placing([target for _, target in cut]))

    def _placing(self, outs: Sequence[torch.Tensor]) -> Callable[[list[Reply]], None]:
        def place(replies: list[Reply]) -> None:
            for target, reply in zip(outs, replies, strict=True):
                came = reply.value
                if came is not None and (came.is_meta or came.data_ptr() != target.data_ptr()):  # else it is there already
                    self.comm.copy(target, came)

        return place

    def _everywhere(self, request: Request) -> Work:
        requests = [(Part(server, "", 0), request) for server in self.placement.servers]
        return self._work(request.op, "", requests)

    def _ask(self, op: str, key: Keys, requests: list[tuple[Part, Request]]) -> list[Reply]:
        """Ask, and wait for the answers."""
        replies: list[Reply] = []
        self._work(op, key, requests, replies.extend).wait()
        return replies

    def _work(
        self,
        op: str,
        key: Keys,
        requests: list[tuple[Part, Request]],
        place: Callable[[list[Reply]], None] = lambda replies: None,
    ) -> Work:
        """Ask, and say what is to be done with the answers."""
        stamped = [(part.server, replace(request, clock=self.iteration)) for part, request in requests]
        what = f"kv.{op}({repr(key) if key != '' else ''})"
        answers = _Answers(what, [self.transport.request(server, request) for server, request in stamped])
        nbytes = sum(tensor.nbytes for _, request in requests for tensor in (request.value, request.out) if tensor is not None)
        self.unheard.append(answers)
        while self.unheard and self.unheard[0].settled():
            self.unheard.popleft()

        def finish() -> None:
            with self.comm.waiting("answer", nbytes=nbytes):
                answers.wait()
            place(answers.replies)

        return Work(finish, answers.is_done)


def _pairs(key: Keys, *tensors: Tensors) -> list[tuple[Any, ...]]:
    """(key, its tensors), of one key or of each in a list.

    >>> _pairs(["a", "b"], [1, 2], [3, 4])
    [('a', 1, 3), ('b', 2, 4)]
    """
    if not isinstance(key, list | tuple):
        return [(key, *tensors)]
    for found in tensors:
        if not isinstance(found, list | tuple) or len(found) != len(key):
            many = f"a list of {len(found)}" if isinstance(found, list | tuple) else f"one {type(found).__name__}"
            raise ValueError(f"{len(key)} keys, {list(key)}, need a list of as many tensors, not {many}")
    return list(zip(key, *tensors, strict=True))


def _check_priority(priority: int) -> None:
    if type(priority) is not int:
        raise TypeError(f"priority={priority!r} is not a whole number")


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """What can be sent: without its history, in one run of memory, where the processor can read it; a view if possible."""
    tensor = tensor.detach()
    return (tensor if tensor.is_meta else tensor.cpu()).contiguous()
