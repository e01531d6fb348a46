"""A worker process: its lines to the servers, its function, and the goodbye at its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from d2lps.comm import Communicator, RankHung
from d2lps.kvstore.core.worker import KVWorker
from d2lps.kvstore.network.deployment import Deployment
from d2lps.kvstore.network.transport import SocketTransport
from d2lps.launch.rank import Timed
from d2lps.sharedmemory.linux import keep_freed_memory


def work(
    comm: Communicator,
    worker: Callable[..., Any],
    plan: Deployment,
    endpoints: dict[int, str],
    args: tuple[Any, ...],
    patience: float | None = None,
) -> Timed:
    """Call `worker(kv, *args)`: its result, and when it had it.

    endpoints: where each server listens. patience: seconds that it may wait for an answer; None, as long as whoever has
    started it lets it.
    """
    if plan.room:
        begun(plan, comm.rank).touch()  # from here on the others can do without it
    keep_freed_memory()
    transport = SocketTransport(comm, plan, endpoints, patience)
    try:
        kv = KVWorker(transport, comm, plan.placed())
        result, ended = worker(kv, *args), comm.now()
        with suppress(RankHung):  # nobody is there any more
            kv.finish()
        return Timed(result, ended)
    finally:
        transport.close()


def begun(plan: Deployment, rank: int) -> Path:
    """The file that is there as soon as a worker has begun."""
    return Path(plan.room) / f"w{rank}"
