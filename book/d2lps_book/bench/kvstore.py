"""Push and pull between two workers and two servers of this machine: ours beside torch RPC, all in one run and in turn."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from d2lps import kvstore
from d2lps_book.bench.turns import Operation, Rival, Row, answer, compare, text

WORKERS, SERVERS = 2, 2
SIZES = {4_000_000: 16, 1_000: 200}  # bytes of a key: how many keys
LAPS = 5  # at a time, as in a loop of training: a single one after a pause is hardly ever a usual one, of RPC least of all
RPC = "torch RPC"
COLUMNS = {"bytes": "{bytes:,}", "GB/s": "{speed:.3f}", "from": "{slowest:.3f}", "to": "{fastest:.3f}"}
COLUMNS |= {"messages/s": "{messages:,.0f}", "x RPC": "{ratio:.2f}"}
OURS = {"ours, memory": "memory", "ours, log": "log", "ours, replica": "replica"}  # by way: the durability


def measure(rounds: int = 9, ways: Sequence[str] = tuple(OURS)) -> list[Row]:
    """Each worker pushes all keys, waits, pulls all, waits; a row for each size and way (see `turns.row`); the peer is RPC.

    ways: those of ours that RPC is to be measured beside. "bytes": of a key. "speed", "slowest", "fastest": GB/s, both
    directions counted. "messages": in a second.
    """
    rivals = {way: Rival(way, _ours, WORKERS, (way,)) for way in ways}
    rivals[RPC] = Rival(RPC, _rank, WORKERS, spawn=WORKERS + SERVERS, sleepless=True)
    rows = compare(rivals, RPC, [{"bytes": nbytes, "repeats": LAPS} for nbytes in SIZES], rounds)
    for row in rows:
        messages = 2 * WORKERS * SIZES[row["bytes"]]
        amount, row["messages"] = messages * row["bytes"] / 1e9, messages / row["median"]
        row.update(speed=amount / row["median"], slowest=amount / row["most"], fastest=amount / row["least"])
    return rows


def table(rounds: int = 9) -> tuple[str, list[Row]]:
    """Bytes both ways in a second, messages in a second, and their ratio to RPC's."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in which all ways take turns; both directions counted"
    heading = f"push and pull, {WORKERS} workers, {SERVERS} servers"
    return text(heading, COLUMNS, rows, note, "left out: Ray, ps-lite, BytePS"), rows


# ---- the workers ----------------------------------------------------------------------------------------------------------


def _ours(door: str, way: str) -> None:
    kvstore.run(_our_worker, WORKERS, SERVERS, door, consistency="asp", durability=OURS[way], timeout=600.0)


def _our_worker(kv: kvstore.KVWorker, door: str) -> None:
    _work(door, kv, kv.comm.barrier)


def _work(door: str, kv: Any, barrier: Operation) -> None:
    """A worker of ours, or of RPC: `kv` has init, push and pull."""

    @cache
    def values(nbytes: int) -> dict[int, torch.Tensor]:
        kept = {nbytes + key: torch.ones(nbytes // 4) for key in range(SIZES[nbytes])}
        for key, value in kept.items():
            kv.init(key, value)
        barrier()
        return kept

    def push_and_pull(values: dict[int, torch.Tensor]) -> None:
        for call in (kv.push, kv.pull):
            for work in [call(key, value) for key, value in values.items()]:
                work.wait()

    answer(door, lambda way, case: (partial(push_and_pull, values(case["bytes"])), barrier))


# ---- torch RPC ------------------------------------------------------------------------------------------------------------

_store: dict[int, torch.Tensor] = {}


def _init(key: int, value: torch.Tensor) -> None:
    _store.setdefault(key, value)


def _push(key: int, value: torch.Tensor) -> None:
    _store[key].add_(value)


def _pull(key: int) -> torch.Tensor:
    return _store[key]


class _Remote:
    """The worker's side; each key lives on one server whole."""

    def init(self, key: int, value: torch.Tensor) -> None:
        self._call(_init, key, value).wait()

    def push(self, key: int, value: torch.Tensor) -> Any:
        return self._call(_push, key, value)

    def pull(self, key: int, out: torch.Tensor) -> Any:
        """Copied, when it has come, to where the worker wants it, as ours is."""
        return self._call(_pull, key).then(lambda pulled: out.copy_(pulled.value()))

    def _call(self, function: Callable[..., Any], key: int, *args: torch.Tensor) -> Any:
        return rpc.rpc_async(str(WORKERS + key % SERVERS), function, args=(key, *args))


def _rank(rank: int, door: str) -> None:
    """As in PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework"."""
    warnings.simplefilter("ignore")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{door}.store", rpc_timeout=600)
    rpc.init_rpc(str(rank), rank=rank, world_size=WORKERS + SERVERS, rpc_backend_options=options)
    if rank < WORKERS:
        dist.init_process_group("gloo", init_method=f"file://{door}.barrier", rank=rank, world_size=WORKERS)
        _work(door, _Remote(), dist.barrier)
    rpc.shutdown()  # a server's serves until the workers are there, too
