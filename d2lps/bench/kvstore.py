"""Push and pull between two workers and two servers of this machine: ours beside torch RPC, all in one run and in turn."""

import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

from d2lps import kvstore
from d2lps.bench.turns import LOOPBACK, Plan, Row, answer, arena, in_turn, row, text

WORKERS, SERVERS = 2, 2
SIZES = {4_000_000: 16, 1_000: 200}  # bytes of a key: how many keys
RPC = "torch RPC"
COLUMNS = {"bytes": "{bytes:,}", "GB/s": "{speed:.3f}", "from": "{slowest:.3f}", "to": "{fastest:.3f}"}
COLUMNS |= {"messages/s": "{messages:,.0f}", "x RPC": "{ratio:.2f}"}
# By way: the durability, and whether the tensors come from kv.empty.
OURS = {
    "ours, memory": ("memory", False),
    "ours, memory, tensors of kv.empty": ("memory", True),
    "ours, log": ("log", False),
    "ours, replica": ("replica", False),
}


def measure(rounds: int = 9, ways: Sequence[str] = tuple(OURS)) -> list[Row]:
    """Each worker pushes all keys, waits, pulls all, waits; a row for each size and way (see `turns.row`); the peer is RPC.

    ways: those of ours that RPC is to be measured beside. "bytes": of a key. "speed", "slowest", "fastest": GB/s, both
    directions counted. "messages": in a second.
    """
    rows = []
    with arena() as place:
        rivals = {way: place.ours(way, WORKERS, partial(_run, *OURS[way])) for way in ways}
        # Idle, RPC's processes look for messages all the time: they are stopped while it is not their turn.
        rivals[RPC] = place.program(RPC, WORKERS + SERVERS, "kvstore", RPC, asleep=True)
        for nbytes in SIZES:
            times = in_turn({way: (rival, nbytes) for way, rival in rivals.items()}, rounds)
            rows += [_row(way, nbytes, seconds, times[RPC]) for way, seconds in times.items()]
    return rows


def table(rounds: int = 9) -> tuple[str, list[Row]]:
    """Bytes both ways in a second, messages in a second, and their ratio to RPC's."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in which all ways take turns; both directions counted"
    ray = "Ray (not measured here)" if importlib.util.find_spec("ray") else "Ray (not installed)"
    heading = f"push and pull, {WORKERS} workers, {SERVERS} servers"
    return text(heading, COLUMNS, rows, note, f"left out: {ray}, ps-lite, BytePS"), rows


def _row(way: str, nbytes: int, seconds: list[float], rpcs: list[float]) -> Row:
    messages = 2 * WORKERS * SIZES[nbytes]
    figures, amount = row(way, seconds, rpcs, bytes=nbytes), messages * nbytes / 1e9
    speeds = {"speed": amount / figures["median"], "slowest": amount / figures["most"], "fastest": amount / figures["least"]}
    return figures | speeds | {"messages": messages / figures["median"]}


# ---- ours -----------------------------------------------------------------------------------------------------------------

Call = Callable[[int, torch.Tensor], Any]  # key, tensor -> something that has a wait()


def _run(durability: str, shared: bool, door: str) -> None:
    kvstore.run(_ours, WORKERS, SERVERS, door, shared, consistency="asp", durability=durability, timeout=600.0)


def _ours(kv: kvstore.KVWorker, door: str, shared: bool) -> None:
    def init(values: dict[int, torch.Tensor]) -> None:
        for key, value in values.items():
            kv.init(key, value)

    answer(door, _plans(init, kv.push, kv.pull, kv.comm.barrier, kv.empty if shared else torch.empty))


def _plans(
    init: Callable[[dict[int, torch.Tensor]], None],
    push: Call,
    pull: Call,
    barrier: Callable[[], Any],
    empty: Callable[[int], torch.Tensor] = torch.empty,
) -> Callable[[int], Plan]:
    """For an order, a key's bytes: the same for ours and for RPC."""
    kept: dict[int, dict[int, torch.Tensor]] = {}

    def prepare(nbytes: int) -> Plan:
        if nbytes not in kept:
            kept[nbytes] = {nbytes + key: empty(nbytes // 4).fill_(1.0) for key in range(SIZES[nbytes])}
            init(kept[nbytes])
            barrier()
        return partial(_push_and_pull, push, pull, kept[nbytes]), barrier, 1

    return prepare


def _push_and_pull(push: Call, pull: Call, values: dict[int, torch.Tensor]) -> None:
    for call in (push, pull):
        for work in [call(key, value) for key, value in values.items()]:
            work.wait()


# ---- torch RPC ------------------------------------------------------------------------------------------------------------

_store: dict[int, torch.Tensor] = {}


def _init(key: int, value: torch.Tensor) -> None:
    _store.setdefault(key, value)


def _push(key: int, value: torch.Tensor) -> None:
    _store[key].add_(value)


def _pull(key: int) -> torch.Tensor:
    return _store[key]


class _Filled:
    """A pulled tensor is copied to where the worker wants it, as ours is."""

    def __init__(self, future: Any, out: torch.Tensor) -> None:
        self.future, self.out = future, out

    def wait(self) -> None:
        self.out.copy_(self.future.wait())


def start(door: str, _: str) -> None:
    """As in PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework"."""
    mp.spawn(_remote, (door,), WORKERS + SERVERS)


def _remote(rank: int, door: str) -> None:
    """Ranks 0 and 1 are workers, the others servers; each key lives on one server whole."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    warnings.simplefilter("ignore")
    store, ranks = dist.FileStore(f"{door}.barrier", WORKERS), WORKERS + SERVERS
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{door}.store", rpc_timeout=600)
    rpc.init_rpc(str(rank), rank=rank, world_size=ranks, rpc_backend_options=options)
    if rank < WORKERS:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
        answer(door, _plans(_remote_init, _remote_push, _remote_pull, dist.barrier))
    else:
        answer(door, lambda nbytes: (time.time, time.time, 0))
    rpc.shutdown()


def _server(key: int) -> str:
    return str(WORKERS + key % SERVERS)


def _remote_init(values: dict[int, torch.Tensor]) -> None:
    for key, value in values.items():
        rpc.rpc_sync(_server(key), _init, args=(key, value))


def _remote_push(key: int, value: torch.Tensor) -> Any:
    return rpc.rpc_async(_server(key), _push, args=(key, value))


def _remote_pull(key: int, out: torch.Tensor) -> Any:
    return _Filled(rpc.rpc_async(_server(key), _pull, args=(key,)), out)
