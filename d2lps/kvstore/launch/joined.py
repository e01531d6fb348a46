"""`kvstore.run` inside a job that somebody else started, on any number of machines: roles by rank.

The first ranks are workers, the others are servers. There is no coordinator: the launcher has started all of them, and ends
them all when one of them dies, so a server keeps its values in memory only. It is done when every worker has left.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from msgspec.structs import replace

from d2lps.collectives import all_gather
from d2lps.comm import Communicator
from d2lps.disk import passing_folder
from d2lps.kvstore.core.report import StoreRun
from d2lps.kvstore.launch.working import work
from d2lps.kvstore.network.deployment import Deployment, deploy
from d2lps.kvstore.network.serving import serving
from d2lps.kvstore.network.sockets import LOOPBACK, check_address, derive_keys, new_secret
from d2lps.launch import run

ENDPOINT = 64  # bytes of a server's address, or of a secret, at most


# What a launcher that starts nobody again leaves no choice of.
ONLY: dict[str, Any] = {"saboteur": None, "monitor": None, "durability": "memory", "absent": ()}


def join(
    worker: Callable[..., Any], workers: int, servers: int, args: tuple[Any, ...], backend: str, timeout: float, **options: Any
) -> StoreRun:
    """Take this rank's part of the job; every rank returns the whole StoreRun."""
    for name, only in ONLY.items():
        if (given := options.pop(name, only)) != only:
            raise ValueError(f"{name}={given!r}: under a launcher, which starts nobody again, it must be {only!r}")
    if options.get("address", "ipc") not in ("ipc", "tcp"):
        raise ValueError(f"address={options['address']!r}: under a launcher each server listens where its machine is reached")
    plan = deploy(workers, servers, **options | {"address": "tcp"})  # which address, a server knows when all have met
    agree = options.get("secret") is None
    found = run(_role, workers + servers, worker, plan, agree, args, timeout, backend=backend, timeout=timeout, trace=plan.trace)
    return StoreRun(found, workers)


def own_address() -> str:
    """Where the others reach this machine: the loopback interface, if all of the job is here; IPv4, where there is a choice."""
    host, port, here = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ.get("LOCAL_WORLD_SIZE")
    if here == os.environ["WORLD_SIZE"]:
        return LOOPBACK
    for family, kind, _, _, there in sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)):
        with suppress(OSError), socket.socket(family, kind) as finder:  # sends nothing: it only looks for the way
            finder.connect(there)
            return check_address(f"tcp://{finder.getsockname()[0]}")
    raise OSError(f"this machine has no way to the first one of the job, MASTER_ADDR={host!r}")


def _role(
    comm: Communicator, worker: Callable[..., Any], plan: Deployment, agree: bool, args: tuple[Any, ...], timeout: float
) -> Any:
    """One rank's: a worker's result and its seconds, or a server's report. agree: rank 0 thinks of a secret for all."""
    if agree:
        plan = replace(plan, keys=derive_keys(_exchange(comm, "" if comm.rank else new_secret())[0]))
    number, plan = comm.rank - plan.workers, replace(plan, address=own_address())
    group, started = comm.split(int(number >= 0)), comm.now()
    assert group is not None
    if number >= 0:
        pages = passing_folder() if plan.memory_budget else nullcontext("")
        with pages as folder, serving(
            replace(plan, folder=folder), number, plan.endpoint(number), recorder=comm.recorder
        ) as server:
            _exchange(comm, server.endpoint)
            return server.serve(timeout)
    endpoints = _exchange(comm, "")[plan.workers :]
    result, ended = work(group, worker, plan, dict(enumerate(endpoints)), args, timeout)
    return result, ended - started


def _exchange(comm: Communicator, endpoint: str) -> list[str]:
    """What every rank has said, by rank; it goes as all that the job's ranks tell one another."""
    mine = torch.frombuffer(bytearray(endpoint.encode().ljust(ENDPOINT)), dtype=torch.uint8).to(comm.device)
    everyone = [torch.empty_like(mine) for _ in range(comm.size)]
    all_gather(comm, everyone, mine)
    return [bytes(said.tolist()).decode().strip() for said in everyone]
