"""A parameter server that fits on a page: all that is needed as long as nothing goes wrong.

    d2lps.run(naive.play, 4, worker)            # three workers and, as the last rank, the server

It has the real one's calls, so the same worker runs on both. Read it first, then ask what it does when a worker is slow, when
one dies, when the server dies, when a message is sent again, when the model does not fit on one server, when workers push in
different orders. The rest of this folder is the answers.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from d2lps.comm import Communicator, Work
from d2lps.comm.rank import describe

INIT, PUSH, PULL, LEAVE = range(4)  # a request is three numbers: one of these, the key's number, the tensor's length
WORDS = "init", "push", "pull", "leave"


class Worker:
    """A worker's side. All must name the same keys in the same order: then a key's number is enough."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.num_workers, self.server = comm, comm.rank, comm.size - 1, comm.size - 1
        self.keys: list[str] = []

    def init(self, key: str, value: torch.Tensor) -> None:
        self.keys.append(key)
        self._ask(INIT, key, value).wait()

    def push(self, key: str, value: torch.Tensor) -> Work:
        return self._ask(PUSH, key, value)

    def pull(self, key: str, out: torch.Tensor) -> Work:
        return self._ask(PULL, key, out)

    def clock(self) -> None:
        """Nothing: the server takes one request of each worker in turn, so that no pull overtakes another worker's push."""

    def leave(self) -> None:
        self.comm.step(WORDS[LEAVE])
        self.comm.send(torch.tensor([LEAVE, 0, 0]), self.server)

    def _ask(self, op: int, key: str, tensor: torch.Tensor) -> Work:
        if key not in self.keys or tensor.dtype != torch.float32:
            raise ValueError(f"key {key!r} with {describe(tensor)}: init comes first, and all is float32 here")
        self.comm.step(WORDS[op])
        self.comm.send(torch.tensor([op, self.keys.index(key), tensor.numel()]), self.server)
        if op != PULL:
            return self.comm.isend(tensor, self.server)
        return self.comm.irecv(tensor, self.server)


def serve(comm: Communicator, store: MutableMapping[int, torch.Tensor]) -> None:
    """One request of each worker in turn, until all have left, on any dictionary."""
    request = torch.empty(3, dtype=torch.int64)
    at_work = list(range(comm.size - 1))
    while at_work:
        for worker in list(at_work):
            comm.recv(request, worker)
            op, key, length = request.tolist()
            if op == LEAVE:
                at_work.remove(worker)
            elif op == PULL:
                comm.send(store[key], worker)
            else:
                pushed = torch.empty(length, device=comm.device)
                comm.recv(pushed, worker)
                if key not in store:  # the first init
                    store[key] = pushed.clone()
                elif op == PUSH:
                    held = store[key]
                    comm.combine(held, pushed)
                    store[key] = held


def play(comm: Communicator, worker: Callable[..., Any], *args: Any) -> Any:
    """This rank's part: the last one serves, all others call `worker(kv, *args)`; what that returns.

    >>> from d2lps import simulate, topology
    >>> def worker(kv):
    ...     weights = torch.zeros(2)
    ...     kv.init("weights", weights)
    ...     kv.push("weights", torch.full((2,), 10.0**kv.rank))
    ...     kv.clock()
    ...     kv.pull("weights", weights).wait()
    ...     return weights.tolist()
    >>> simulate(play, topology.star(4, bandwidth=1e9), worker)[:3]
    [[111.0, 111.0], [111.0, 111.0], [111.0, 111.0]]

    Cost: with m workers and n bytes, the server's port carries m n each way, one worker after another. Errors: a worker whose
    calls are not those of the others makes everybody wait: a Deadlock in a simulation, RankHung on processes.
    """
    if comm.rank == comm.size - 1:
        serve(comm, {})
        return None
    kv = Worker(comm)
    result = worker(kv, *args)
    kv.leave()
    return result
