"""All-reduce among four processes of this machine: ours beside gloo, OpenMPI and a plain copy, all in one run and in turn."""

import ctypes
import importlib.util
import os
import shutil
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from d2lps import sharedmemory
from d2lps.bench.turns import LOOPBACK, Arena, Operation, Plan, Rival, Row, answer, arena, in_turn, row, text
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.launch import run

RANKS = 4
SIZES = (8, 1024, 65_536, 1_000_000, 160_000_000)  # bytes
COPY, GLOO, MPI = "memcpy in each rank", "gloo", "OpenMPI"
OURS = ("ours, in place", "ours, ordinary tensors", COPY)
COLUMNS = {"bytes": "{bytes:,}", "us": "{median:,.1f}", "from": "{least:,.1f}", "to": "{most:,.1f}"}
COLUMNS |= {"algbw": "{algbw:.2f}", "busbw": "{busbw:.2f}", "x gloo": "{ratio:.2f}"}


def measure(rounds: int = 11, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """A row for each way and size (see `turns.row`), in microseconds, with "algbw" and "busbw" in GB/s; the peer is gloo."""
    rows = []
    with arena() as place:
        rivals = _rivals(place)
        for nbytes in sizes:
            repeats = max(1, min(30, 20_000_000 // nbytes))
            orders = {way: (rival, (way, nbytes, repeats)) for way, rival in rivals.items()}
            times = {way: [each / repeats for each in seconds] for way, seconds in in_turn(orders, rounds).items()}
            rows += [_row(way, nbytes, seconds, times[GLOO]) for way, seconds in times.items()]
    return rows


def table(rounds: int = 11) -> tuple[str, list[Row]]:
    """Median, range, algbw (bytes / time) and busbw (algbw x 2(p - 1)/p, as nccl-tests counts), and the ratio to gloo."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in which all ways take turns; algbw and busbw in GB/s"
    return text(f"all-reduce, {RANKS} ranks", COLUMNS, rows, note, left_out()), rows


def left_out() -> str:
    """What this machine lacks to compare with."""
    ours, mpi = sharedmemory.missing(), "" if _has_mpi() else "OpenMPI (no mpirun or no mpi4py)"
    return "left out: " + ", ".join(filter(None, [ours and f"ours ({ours})", mpi, "MPICH, UCC"]))


def _row(way: str, nbytes: int, seconds: list[float], gloo: list[float]) -> Row:
    """A copy has no bus bandwidth: it is no collective."""
    figures = row(way, seconds, gloo, 1e-6, bytes=nbytes)
    algbw = nbytes / figures["median"] / 1e3
    return figures | {"algbw": algbw, "busbw": float("nan") if way == COPY else algbw * 2 * (RANKS - 1) / RANKS}


# ---- the rivals -----------------------------------------------------------------------------------------------------


def _rivals(place: Arena) -> dict[str, Rival]:
    """By way; all of ours are the same processes."""
    rivals = {}
    if not sharedmemory.missing():
        ours = place.ours("ours", RANKS, lambda door: run(_ours, RANKS, door, timeout=600.0))
        rivals = {way: ours for way in OURS}
    rivals[GLOO] = place.program(GLOO, RANKS, "all_reduce", GLOO)
    if _has_mpi():
        before = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS)]
        rivals[MPI] = place.program(MPI, RANKS, "all_reduce", MPI, before)
    return rivals


def _has_mpi() -> bool:
    return bool(shutil.which("mpirun") and importlib.util.find_spec("mpi4py"))


def _ours(comm: Communicator, door: str) -> None:
    kept: dict[int, dict[str, Operation]] = {}

    def prepare(order: tuple[str, int, int]) -> Plan:
        way, nbytes, repeats = order
        if nbytes not in kept:
            kept.clear()
            kept[nbytes] = _ways(comm, nbytes)
        return kept[nbytes][way], comm.barrier, repeats

    answer(door, prepare)


def _ways(comm: Communicator, nbytes: int) -> dict[str, Operation]:
    shared, mine, other = comm.empty(nbytes // 4).fill_(0), _ordinary(nbytes), _ordinary(nbytes)
    calls = [partial(all_reduce, comm, tensor, algorithm="native") for tensor in (shared, mine)]
    return dict(zip(OURS, [*calls, lambda: ctypes.memmove(other.data_ptr(), mine.data_ptr(), nbytes)], strict=True))


def _ordinary(nbytes: int) -> torch.Tensor:
    """Written to, so that it has memory of its own."""
    return torch.empty(nbytes // 4).fill_(0)


def start(door: str, how: str) -> None:
    """Gloo as in PyTorch's tutorial "Writing Distributed Applications"; one of mpirun's ranks as in mpi4py's."""
    if how == GLOO:
        mp.spawn(_gloo, (door,), RANKS)
    else:
        _mpi(door)


def _gloo(rank: int, door: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{door}.store", rank=rank, world_size=RANKS)
    kept: dict[int, torch.Tensor] = {}

    def prepare(order: tuple[str, int, int]) -> Plan:
        _, nbytes, repeats = order
        if nbytes not in kept:
            kept.clear()
            kept[nbytes] = _ordinary(nbytes)
        return partial(dist.all_reduce, kept[nbytes]), dist.barrier, repeats

    answer(door, prepare)
    dist.destroy_process_group()


def _mpi(door: str) -> None:
    import numpy as np
    from mpi4py import MPI

    kept: dict[int, Any] = {}

    def prepare(order: tuple[str, int, int]) -> Plan:
        _, nbytes, repeats = order
        if nbytes not in kept:
            kept.clear()
            kept[nbytes] = np.full(nbytes // 4, 0, np.float32)
        return partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, kept[nbytes]), MPI.COMM_WORLD.Barrier, repeats

    answer(door, prepare)
