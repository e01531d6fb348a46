"""All-reduce among four processes of this machine: ours beside gloo, OpenMPI and a plain copy, all in one run and in turn."""

import ctypes
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from d2lps import sharedmemory
from d2lps.bench import mpi
from d2lps.bench.figures import record
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.launch import run
from d2lps.processgroup import ProcessGroupCommunicator

RANKS = 4
SIZES = (8, 1024, 65_536, 1_000_000, 160_000_000)  # bytes
COPY, GLOO, MPI = "memcpy in each rank", "gloo", "OpenMPI"
Operation = Callable[[], object]


def measure(rounds: int = 11, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """A row for each way and size: "median", "least" and "most" in microseconds, "algbw" and "busbw" in GB/s, "to_gloo"."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, _workers(os.path.join(folder, "door")) as worlds:
        for nbytes in sizes:
            times = _measured(worlds, nbytes, rounds)
            rows += [_row(way, nbytes, seconds, times[GLOO]) for way, seconds in times.items()]
    return rows


def table(rounds: int = 11) -> str:
    """Median, range, algbw (bytes / time) and busbw (algbw x 2(p - 1)/p, as nccl-tests counts), and the ratio to gloo."""
    rows = measure(rounds)
    record("all_reduce", rows)
    lines = [f"{f'all-reduce, {RANKS} ranks':26}{'bytes':>12}{'us':>11}{'from':>11}{'to':>11}" + "   algbw   busbw  x gloo"]
    lines += [
        f"{r['way']:26}{r['bytes']:>12,}{r['median']:>11,.1f}{r['least']:>11,.1f}{r['most']:>11,.1f}"
        f"{r['algbw']:>8.2f}{r['busbw']:>8.2f}{r['to_gloo']:>8.2f}"
        for r in rows
    ]
    return "\n".join([*lines, f"medians of {rounds} rounds, in which all ways take turns; algbw and busbw in GB/s"])


def _row(way: str, nbytes: int, seconds: list[float], gloo: list[float]) -> dict[str, Any]:
    median = statistics.median(seconds)
    algbw = nbytes / median / 1e9
    spread = {"median": median * 1e6, "least": min(seconds) * 1e6, "most": max(seconds) * 1e6}
    speeds = {"algbw": algbw, "busbw": algbw * (1 if way == COPY else 2 * (RANKS - 1) / RANKS)}
    return {"way": way, "bytes": nbytes, **spread, **speeds, "to_gloo": statistics.median(gloo) / median}


def _measured(worlds: dict[str, list[Connection]], nbytes: int, rounds: int) -> dict[str, list[float]]:
    """The seconds that one call took, by way and round; the first of each is not counted."""
    repeats = max(1, min(30, 20_000_000 // nbytes))
    times: dict[str, list[float]] = {way: [] for way in worlds}
    for number in range(rounds + 1):
        for way, ranks in worlds.items():
            for rank in ranks:
                rank.send((way, nbytes, repeats))
            spans = [rank.recv() for rank in ranks]
            if number:
                times[way].append((max(end for _, end in spans) - min(start for start, _ in spans)) / repeats)
    return times


# ---- the ranks ------------------------------------------------------------------------------------------------------


@contextmanager
def _workers(door: str) -> Iterator[dict[str, list[Connection]]]:
    """The ways that there are on this machine, each with the lines to its ranks, which sleep until they are called."""
    ours = [COPY, GLOO, "ring over gloo"]
    ours = ours if sharedmemory.missing() else ["ours, in place", "ours, ordinary tensors", *ours]
    with Listener(door) as listener:
        thread = threading.Thread(target=run, args=(_serve, RANKS, door), kwargs={"timeout": 600.0})
        thread.start()
        lines = [listener.accept() for _ in range(RANKS)]
        worlds = {way: lines for way in ours}
        others, process = [], None
        if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
            process = subprocess.Popen([*mpi.COMMAND, "-n", str(RANKS), sys.executable, mpi.__file__, door])
            others = [listener.accept() for _ in range(RANKS)]
            worlds[MPI] = others
        try:
            yield worlds
        finally:
            for line in [*lines, *others]:
                line.send(None)
            thread.join()
            if process is not None:
                process.wait()


def _serve(comm: Communicator, door: str) -> None:
    """One of our ranks: also a rank of gloo, so that both are measured in the same process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = Path(door).with_name("store")
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    ring = ProcessGroupCommunicator()
    with Client(door) as line:
        kept: tuple[int, dict[str, Operation]] = 0, {}
        while (order := line.recv()) is not None:
            way, nbytes, repeats = order
            if kept[0] != nbytes:
                kept = nbytes, _ways(comm, ring, nbytes)
            line.send(mpi.timed(kept[1][way], comm.barrier, repeats))
    dist.destroy_process_group()


def _ways(comm: Communicator, ring: Communicator, nbytes: int) -> dict[str, Operation]:
    shared = comm.empty(nbytes // 4).fill_(0)
    mine, other = (torch.empty(nbytes // 4).fill_(0) for _ in range(2))  # written to, so that they have memory of their own
    return {
        "ours, in place": lambda: all_reduce(comm, shared, algorithm="native"),
        "ours, ordinary tensors": lambda: all_reduce(comm, mine, algorithm="native"),
        COPY: lambda: ctypes.memmove(other.data_ptr(), mine.data_ptr(), nbytes),
        GLOO: lambda: dist.all_reduce(mine),
        "ring over gloo": lambda: all_reduce(ring, mine, algorithm="ring"),
    }
