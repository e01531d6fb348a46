"""Push and pull between two workers and two servers of this machine: ours beside torch RPC, all in one run and in turn."""

import importlib.util
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed.rpc as rpc

from d2lps import kvstore
from d2lps.bench.figures import record
from d2lps.collectives import all_gather
from d2lps.comm import Communicator
from d2lps.launch import run

WORKERS, SERVERS = 2, 2
SIZES = {4_000_000: 16, 1_000: 200}  # bytes of a key: how many keys
RPC = "torch RPC"
# By way: the durability, and whether the tensors come from kv.empty.
OURS = {
    "ours, memory": ("memory", False),
    "ours, memory, tensors of kv.empty": ("memory", True),
    "ours, log": ("log", False),
    "ours, replica": ("replica", False),
}


def measure(rounds: int = 9, ways: Sequence[str] = tuple(OURS)) -> list[dict[str, Any]]:
    """Each worker pushes all keys, waits, pulls all, waits; one row for each size and way.

    ways: those of ours that RPC is to be measured beside. bytes: of a key. median, least, most: GB/s, both directions
    counted. messages: in a second. to_rpc: times as fast as RPC.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder, _workers(os.path.join(folder, "door"), ways) as (lines, pids):
        for nbytes, keys in SIZES.items():
            times = _measured(lines, pids, nbytes, rounds)
            rows += [_row(way, nbytes, keys, seconds, times[RPC]) for way, seconds in times.items()]
    return rows


def table(rounds: int = 9) -> str:
    """Bytes both ways in a second, messages in a second, and their ratio to RPC's."""
    rows = measure(rounds)
    record("kvstore", rows)
    heading = f"push and pull, {WORKERS} workers, {SERVERS} servers"
    lines = [f"{heading:36}{'bytes':>10}{'GB/s':>8}{'from':>8}{'to':>8}{'messages/s':>12}{'x RPC':>8}"]
    lines += [
        f"{r['way']:36}{r['bytes']:>10,}{r['median']:>8.3f}{r['least']:>8.3f}{r['most']:>8.3f}{r['messages']:>12,.0f}{r['to_rpc']:>8.2f}"
        for r in rows
    ]
    ray = "is not among the ways measured here" if importlib.util.find_spec("ray") else "is not installed"
    return "\n".join([*lines, f"medians of {rounds} rounds, in which all ways take turns; both directions counted; Ray {ray}"])


def _row(way: str, nbytes: int, keys: int, seconds: list[float], rpcs: list[float]) -> dict[str, Any]:
    messages = 2 * WORKERS * keys
    speeds = sorted(messages * nbytes / second / 1e9 for second in seconds)
    median = statistics.median(seconds)
    spread = {"median": statistics.median(speeds), "least": speeds[0], "most": speeds[-1]}
    ratios = {"messages": messages / median, "to_rpc": statistics.median(rpcs) / median}
    return {"way": way, "bytes": nbytes, **spread, **ratios}


def _measured(ways: dict[str, list[Connection]], pids: list[int], nbytes: int, rounds: int) -> dict[str, list[float]]:
    """The seconds from the first worker's start to the last one's end, by way and round; the first two are not counted."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for way, workers in ways.items():
            with _awake(pids if way == RPC else []):
                for worker in workers:
                    worker.send(nbytes)
                spans = [worker.recv() for worker in workers]
            if number > 1:
                times[way].append(max(end for _, end in spans) - min(start for start, _ in spans))
    return times


@contextmanager
def _awake(pids: list[int]) -> Iterator[None]:
    """Processes that are stopped at other times: idle, PyTorch's RPC looks for messages all the time, and takes half a core."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)


# ---- the workers ----------------------------------------------------------------------------------------------------------


@contextmanager
def _workers(door: str, wanted: Sequence[str]) -> Iterator[tuple[dict[str, list[Connection]], list[int]]]:
    """All ways, each with the lines to its workers, which sleep until they are called; and RPC's processes, which never do."""
    ways, threads = {}, []
    with Listener(door) as listener:
        for way, (durability, shared) in [(way, how) for way, how in OURS.items() if way in wanted]:
            options = {"consistency": "asp", "durability": durability, "timeout": 600.0}
            threads.append(threading.Thread(target=kvstore.run, args=(_ours, WORKERS, SERVERS, door, shared), kwargs=options))
            threads[-1].start()
            ways[way] = [listener.accept() for _ in range(WORKERS)]
            assert [line.recv() for line in ways[way]] == [[]] * WORKERS
        rest = {"backend": "gloo", "timeout": 600.0}
        threads.append(threading.Thread(target=run, args=(_rpc, WORKERS + SERVERS, door), kwargs=rest))
        threads[-1].start()
        ways[RPC] = [listener.accept() for _ in range(WORKERS)]
        pids, _ = [line.recv() for line in ways[RPC]]
        try:
            with _awake(pids):  # they have started
                time.sleep(0.1)
            yield ways, pids
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            for line in [line for lines in ways.values() for line in lines]:
                line.send(None)
            for thread in threads:
                thread.join()


Call = Callable[[int, torch.Tensor], Any]  # key, tensor -> something that has a wait()


def _serve(
    door: str,
    barrier: Callable[[], None],
    make: Callable[[dict[int, torch.Tensor]], tuple[Call, Call]],
    empty: Callable[[int], torch.Tensor] = torch.empty,
    pids: Sequence[int] = (),
) -> None:
    """Say which processes never sleep; then do what the caller asks for, and say when it began and ended."""
    kept: dict[int, tuple[Call, Call, dict[int, torch.Tensor]]] = {}
    with Client(door) as line:
        line.send(list(pids))
        while (nbytes := line.recv()) is not None:
            if nbytes not in kept:
                values = {nbytes + key: empty(nbytes // 4).fill_(1.0) for key in range(SIZES[nbytes])}
                kept[nbytes] = *make(values), values
                barrier()
            push, pull, values = kept[nbytes]
            barrier()
            start = time.monotonic()
            for call in (push, pull):
                for work in [call(key, value) for key, value in values.items()]:
                    work.wait()
            line.send((start, time.monotonic()))


def _ours(kv: kvstore.KVWorker, door: str, shared: bool) -> None:
    def make(values: dict[int, torch.Tensor]) -> tuple[Call, Call]:
        for key, value in values.items():
            kv.init(key, value)
        return kv.push, kv.pull

    _serve(door, kv.comm.barrier, make, kv.empty if shared else torch.empty)


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


def _rpc(comm: Communicator, door: str) -> None:
    """Ranks 0 and 1 are workers, the others servers; each key lives on one server whole."""
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    warnings.simplefilter("ignore")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{door}.rpc", rpc_timeout=600)
    rpc.init_rpc(str(comm.rank), rank=comm.rank, world_size=comm.size, rpc_backend_options=options)
    mine = comm.split(int(comm.rank < WORKERS))
    assert mine is not None
    pids = [torch.tensor([0]) for _ in range(comm.size)]
    all_gather(comm, pids, torch.tensor([os.getpid()]))
    if comm.rank < WORKERS:
        _serve(door, mine.barrier, _remote, pids=[int(pid) for pid in pids])
    rpc.shutdown()


def _remote(values: dict[int, torch.Tensor]) -> tuple[Call, Call]:
    def place(key: int) -> str:
        return str(WORKERS + key % SERVERS)

    for key, value in values.items():
        rpc.rpc_sync(place(key), _init, args=(key, value))
    return (
        lambda key, value: rpc.rpc_async(place(key), _push, args=(key, value)),
        lambda key, out: _Filled(rpc.rpc_async(place(key), _pull, args=(key,)), out),
    )
