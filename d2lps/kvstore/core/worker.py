"""The worker's end: what `worker(kv, ...)` is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from d2lps.comm import Work
from d2lps.compress import ErrorFeedback
from d2lps.kvstore.core import growth, saving
from d2lps.kvstore.core.asking import Asking, Key, Keys, Tensors, check_room, pairs, wire
from d2lps.kvstore.core.compression import make_codec
from d2lps.kvstore.core.events import LOSS, Op, Refused, Reply, Request
from d2lps.kvstore.core.placement import Part


class KVWorker(Asking):
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

    # ---- whole tensors ----------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Tensors, everywhere: bool = False) -> None:
        """Give a key its first value; the first worker to do so wins, and all workers should, to learn its shape.

        everywhere: every server gets a copy; pushes go to all of them, and a pull to one, by rank, so that a key that is used
        more than all others keeps no server busier than others. Under bsp the copies are equal, unless a worker dies while it
        pushes; else each adds up as it hears.

        Of a tensor in parts or copies, each server keeps what it is offered, until the server of the first one has decided who
        wins, of those whose whole value is there: no key begins with parts of two workers' values, whoever dies meanwhile.
        """
        known = {*self.placement.parts}
        cut = [(self.begin(name, tensor, everywhere), tensor) for name, tensor in pairs(key, value)]
        first = [(len(parts), part, wire(part.of(tensor))) for parts, tensor in cut for part in parts]
        try:
            self.ask("init", key, [(part, Request("init" if n == 1 else "offer", part.name, mine)) for n, part, mine in first])
            several = [parts for parts, _ in cut if len(parts) > 1]
            chosen = self.ask("init", key, [(home, Request("choose", home.name)) for home, *_ in several])
            owners = [{"owner": list(reply.owner)} for reply in chosen]
            rest = [(part, owner) for (_, *others), owner in zip(several, owners, strict=True) for part in others]
            self.ask("init", key, [(part, Request("choose", part.name, options=owner)) for part, owner in rest])
        except Refused:
            for name in self.placement.parts.keys() - known:
                self.placement.forget(name)
            raise

    def push(self, key: Keys, value: Tensors, priority: int = 0) -> Work:
        """Add `value` to what the servers have, or hand it to their optimizer as a gradient.

        Under bsp that happens when all have ended the iteration; else as it arrives. Each worker sends n bytes.
        """
        return self.work("push", key, self.bring("push", priority, key, value))

    def pull(self, key: Keys, out: Tensors, priority: int = 0) -> Work:
        """Fill `out` with the value, once the slowest worker is no more than the staleness behind. Each receives n bytes.

        Several keys need several tensors: a ValueError that names both, before anything is asked, if two share memory.

        Behind this iteration, even if the next one has begun before the answer is there: under bsp it has the rounds before this
        one, no more and no less. Only if a server dies before its answer is there, it is read anew, and may have later ones.
        """
        return self._read("pull", key, out, priority)

    def peek(self, key: Keys, out: Tensors) -> Work:
        """As pull, for an evaluation: with a memory budget, what is in use stays in memory, and nothing is written."""
        return self._read("peek", key, out, 0)

    def _read(self, op: Op, key: Keys, out: Tensors, priority: int) -> Work:
        mine = [found for found in self.cut(priority, key, out) if self.is_mine(found[0])]
        check_room(op, key, out)
        requests = [(part, Request(op, part.name, priority=priority)) for part, _ in mine]
        return self.fetch(op, key, requests, [to.detach() for _, to in mine])

    def pushpull(self, key: Keys, value: Tensors, out: Tensors, priority: int = 0) -> Work:
        """Push, and pull what comes of this iteration: ends this worker's iteration as far as this key is concerned.

        So under bsp the answer need not wait until all have called clock(), only until all have pushed this key. Not of a key
        that is everywhere, of which each server would answer: push it, and pull it. A key's `value` and `out` may be one tensor;
        otherwise no tensor shares memory with an `out`: ValueError.
        """
        if copied := [name for name, *_ in pairs(key, value, out) if str(name) in self.placement.everywhere]:
            raise ValueError(f"pushpull of {copied[0]!r}, which is everywhere: push it, end the iteration, and pull it")
        requests = self.bring("pushpull", priority, key, value, out)
        return self.fetch("pushpull", key, requests, [to.detach() for _, to in self.cut(priority, key, out)])

    def compress(self, codec: str | None, **options: Any) -> None:
        """From now on this worker sends what it pushes in fewer bytes; None: as it is. What is lost comes with the next push.

        >>> kv.compress("top_k", fraction=0.01)         # or "1bit", "half", "bfloat16", "fp8", "int8", "int4"  # doctest: +SKIP

        codec: of `d2lps.compress`, with its options. Whole tensors of floats, that is; rows and
        integers travel as they are, and so does what is pulled. Where servers come or go, parts are cut anew, and begin with
        nothing left. What one codec has left comes with the next push under the next one, or under none, whole. ValueError for
        another codec or option, and from then on for pushes that are not finite.
        """
        self.codec = None if codec is None else ErrorFeedback(make_codec(codec, **options))
        if self.codec is not None:
            self.codec.left = self.left
        self.code = {} if codec is None else {"codec": codec, **options}

    # ---- rows -------------------------------------------------------------------------------------------------------------

    def push_rows(self, key: Key, rows: torch.Tensor, values: torch.Tensor) -> Work:
        """Push values[i] to row rows[i]; a row that occurs twice gets the sum. Only the touched rows travel, and change.

        >>> kv.push_rows("embedding", torch.tensor([7, 2, 7]), gradients)       # gradients: float32[3, dim]   # doctest: +SKIP

        Under an optimizer that counts its steps (adam, adamw, nadam ...) what comes of it depends on the number of servers: each
        part of a table counts the steps that touched its own rows, since only those servers hear of a push that have its rows.
        """
        requests = []
        for part, mine, local in self.split_rows(key, rows, "values", values):
            requests.append((part, Request("push", part.name, wire(values[mine]), rows=local)))
        return self.work("push_rows", key, requests)

    def pull_rows(self, key: Key, rows: torch.Tensor, out: torch.Tensor) -> Work:
        """Fill out[i] with row rows[i]; `out` has the key's dtype, and a place for each of its elements."""
        split = [(*found,) for found in self.split_rows(key, rows, "out", out) if self.is_mine(found[0])]
        check_room("pull_rows", key, out)
        requests = [(part, Request("pull", part.name, rows=local)) for part, _, local in split]

        def place(replies: list[Reply]) -> None:
            for (_, mine, _), reply in zip(split, replies, strict=True):
                out.detach()[mine] = reply.value.to(out.device)  # type: ignore[union-attr]

        return self.work("pull_rows", key, requests, place)

    # ---- time -------------------------------------------------------------------------------------------------------------

    def clock(self) -> Work:
        """End this iteration, on every server. Nobody need wait for it to arrive."""
        self.iteration += 1
        return self.ask_all(Request("clock"))

    def barrier(self) -> None:
        """Return when every live worker has called this, and all that each asked for before has been done.

        Between two iterations, servers that somebody has wished for come or go meanwhile (see `Cluster.add_server`).
        """
        if wanted := self.meet(None):
            number, *servers = json.loads(wanted)
            growth.change(self, number, servers)

    def set_optimizer(self, name: str | None, reduction: str = "mean", **hyper: Any) -> None:
        """From now on the servers hand what is pushed to an optimizer; calling it again changes its hyperparameters.

        >>> kv.set_optimizer("sgd", lr=0.1, momentum=0.9)       # torch.optim's, or a registered one   # doctest: +SKIP
        >>> kv.set_optimizer(None, reduction="median")          # none: what comes of the pushes is added   # doctest: +SKIP

        reduction: what it gets of an iteration's gradients: their "mean" over the workers, so that one learning rate does for
        any number of them; their "sum"; "median" or "trimmed_mean" (trim=1), which bear workers that send nonsense, and need
        bsp. See `reductions`.
        """
        options = ({} if name is None else {"name": name}) | {"reduction": reduction, **hyper}
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"set_optimizer: {options}: finite numbers, texts and lists can be sent: {error}") from error
        self.ask_all(Request("set_optimizer", options=options)).wait()

    # ---- files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write all keys' values, their optimizer's state and its options into one safetensors file.

        >>> kv.save("weights.safetensors")      # every worker calls it, between two iterations   # doctest: +SKIP

        It begins and ends with a barrier, and the first of the live workers writes, all at once or not at all: it needs room
        for all tensors. When it returns, the file is there: if that worker is killed, the next one writes. What goes wrong is
        raised by all: OSError, ValueError; Refused in an iteration that has begun to push.
        """
        self.alone("save", lambda ask, found: saving.write(path, *saving.collect(ask, found)))

    def load(self, path: str | Path) -> None:
        """Give the servers, however many, what was saved; every worker calls it, with the same file, between two iterations.

        A key that is there must be as in the file, and in no iteration that has begun (Refused, and nothing is changed); one
        that is new is made. Other keys stay as they are. A file of another program's tensors does too: then they begin with a
        new optimizer's state. The first of the live workers reads; if it is killed, the next one does all of it anew. What goes
        wrong is raised by all: FileNotFoundError and ValueError, and nothing is changed; Refused, of a server that has no room.
        """
        self.alone("load", partial(self.give, path))

    def give(self, path: str | Path, ask: saving.Ask, found: saving.Found) -> None:
        """What the first live worker does in `load`."""
        tensors, meta = saving.read(path)
        new = saving.missing(found, tensors, meta)
        saving.instruct(ask, self.placement.servers, meta)
        for everywhere in (False, True):
            keys = [key for key in new if (key in meta["everywhere"]) is everywhere]
            self.init(keys, [tensors[key] for key in keys], everywhere)
        saving.spread(ask, saving.look(ask, self.placement.servers), tensors, meta)

    def alone(self, what: str, do: Callable[[saving.Ask, saving.Found], None]) -> None:
        """Let the first of the live workers do it, while the others wait, and hear what has come of it.

        Of one that is killed nobody hears, and the next one does it: by the barrier all servers have given the first one up.
        """
        ask, heard, cause = partial(self.ask, what, ""), "", None
        self.meet("")
        while not heard:
            found, said = saving.look(ask, self.placement.servers), ""
            if self.rank == found[min(found)].workers[0]:
                said, cause = saving.attempt(self.rank, partial(do, ask, found))
            heard = self.meet(said)
        saving.hear(heard, cause)

    def meet(self, said: str | None) -> str:
        """A barrier, and what somebody has said to all in it: the first server has heard of it, or nobody has.

        None: nobody has anything to say, so the first server may say that other servers are wanted.
        """
        request = Request("barrier", options={} if said is None else {"said": said})
        return self.ask("barrier", "", [(Part(server, "", 0), request) for server in self.placement.servers])[0].said

    # ---- those who come and go --------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Come in while others are at work: begin where the slowest of them is. Refused while servers come or go."""
        growth.catch_up(self)
        self.iteration = 0
        self.iteration = growth.join(self, self.placement.servers, self.transport.changes)
        growth.begin(self, self.placement.servers)

    def leave(self) -> None:
        """Nobody waits for this worker from now on. Called for you when your function returns."""
        self.ask_all(Request("leave")).wait()

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
