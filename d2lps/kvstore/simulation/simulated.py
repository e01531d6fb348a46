"""The parameter server in virtual time: the same `Server.step`, the same worker function, on a described cluster.

Messages cost their tensors' bytes, and those of row numbers (8 a row), but nothing for what else they say: requests and
answers without tensors take a route's latency. A worker and a server have one connection each way, which carries one
message at a time, those of high priority first; all connections share the links max-min fairly, as in every simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from d2lps import simulator
from d2lps.kvstore.core.events import Event
from d2lps.kvstore.core.report import StoreRun
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.worker import KVWorker
from d2lps.kvstore.simulation.endpoints import ServerNode, Setup, SimulatedTransport
from d2lps.simulator.communicator import SimulatedCommunicator
from d2lps.topology import Topology


def simulate(
    worker: Callable[..., Any],
    topology: Topology,
    workers: int | Sequence[Hashable],
    servers: int | Sequence[Hashable],
    *args: Any,
    consistency: str = "bsp",
    staleness: int = 0,
    absent: Sequence[int] = (),
    events: Sequence[tuple[float, Event]] = (),
    log: bool = False,
    split: int = 1_000_000,
    placement: str = "hash",
    **options: Any,
) -> StoreRun:
    """Call `worker(kv, *args)` on the workers of a described cluster that has parameter servers.

    >>> import torch
    >>> def worker(kv, n):
    ...     value = torch.ones(n, device=kv.comm.device)
    ...     kv.init("w", value)
    ...     start = kv.comm.now()
    ...     kv.pushpull("w", value, value).wait()
    ...     return round(kv.comm.now() - start, 9)
    >>> from d2lps.topology import star
    >>> simulate(worker, star(6, bandwidth=16e9), 4, 2, 40_000_000, device="meta")[0]   # each server: 2 x 4 x 80 MB
    0.04

    workers, servers: how many, on the first devices and on those that follow; or the nodes that they live on, each as often
    as you like, also for both. consistency, staleness: see `Server`. absent: workers that are no members at first,
    and call kv.join(). events: (time, event) for all servers, such as (1.5, Lost(2)). log: keep the servers' logs. split,
    placement: see `Placement`. options: device, model and trace of d2lps.simulate; combined bytes are those that are pushed.
    Results are the workers', the time is when the last of them returned. Raises as d2lps.simulate does, Refused and, see
    `Placement`, Mismatch.
    """
    homes = _homes(topology, "workers", workers, 0)
    places = _homes(topology, "servers", servers, len(homes) if isinstance(workers, int) else 0)
    rules: dict[str, Any] = {"consistency": consistency, "staleness": staleness}
    setup = Setup(len(homes), len(places), rules, {"split": split, "by": placement}, absent, events, log)
    setup.placed(), Server((), **rules)  # to hear at once what is wrong with them
    return StoreRun(simulator.simulate(_life, topology, worker, setup, args, ranks=homes + places, **options), len(homes))


def _homes(topology: Topology, name: str, wanted: int | Sequence[Hashable], first: int) -> list[Hashable]:
    if not isinstance(wanted, int):
        return list(wanted)
    free = topology.devices[first:]
    if not 1 <= wanted <= len(free):
        raise ValueError(f"{name}={wanted}, but {topology.name} has {len(free)} devices for them; name the nodes to live on")
    return free[:wanted]


def _life(comm: SimulatedCommunicator, worker: Callable[..., Any], setup: Setup, args: tuple[Any, ...]) -> Any:
    """One rank's: a worker's result and the time of it, or a server's report."""
    serves = comm.rank >= setup.workers
    end = ServerNode(comm, setup) if serves else SimulatedTransport(comm, setup)
    group = comm.split(int(serves))  # also waits until all ends are there
    if isinstance(end, ServerNode):
        return end.serve()
    assert group is not None
    kv = KVWorker(end, group, setup.placed())
    result, ended = worker(kv, *args), comm.now()
    kv.finish()
    return result, ended
