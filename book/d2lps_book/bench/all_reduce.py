"""All-reduce among four processes of this machine: ours beside gloo, OpenMPI and a plain copy, all in one run and in turn."""

import ctypes
import importlib.util
import shutil
from functools import lru_cache, partial

import numpy as np
import torch
import torch.distributed as dist

from d2lps import sharedmemory
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.launch import run
from d2lps_book.bench.turns import Operation, Rival, Row, answer, compare, text

RANKS = 4
SIZES = (8, 1024, 65_536, 1_000_000, 160_000_000)  # bytes
COPY, GLOO, MPI = "memcpy in each rank", "gloo", "OpenMPI"
OURS = ("ours, in place", "ours, ordinary tensors", "the book's ring", COPY)  # the ring is what a call without `algorithm` takes
COLUMNS = {"bytes": "{bytes:,}", "us": "{median:,.1f}", "from": "{least:,.1f}", "to": "{most:,.1f}"}
COLUMNS |= {"algbw": "{algbw:.2f}", "busbw": "{busbw:.2f}", "x gloo": "{ratio:.2f}"}


def measure(rounds: int = 11, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """A row for each way and size (see `turns.row`), in microseconds, with "algbw" and "busbw" in GB/s; the peer is gloo."""
    cases = [{"bytes": nbytes, "repeats": max(3, min(30, 20_000_000 // nbytes))} for nbytes in sizes]
    rows = compare(_rivals(), GLOO, cases, rounds, 1e-6)
    for row in rows:
        algbw = row["bytes"] / row["median"] / 1e3
        # A copy has no bus bandwidth: it is no collective.
        row.update(algbw=algbw, busbw=float("nan") if row["way"] == COPY else algbw * 2 * (RANKS - 1) / RANKS)
    return rows


def table(rounds: int = 11) -> tuple[str, list[Row]]:
    """Median, range, algbw (bytes / time) and busbw (algbw x 2(p - 1)/p, as nccl-tests counts), and the ratio to gloo."""
    rows, note = measure(rounds), f"medians of {rounds} rounds, in which all ways take turns; algbw and busbw in GB/s"
    return text(f"all-reduce, {RANKS} ranks", COLUMNS, rows, note, left_out()), rows


def left_out() -> str:
    """What this machine lacks to compare with."""
    ours, mpi = sharedmemory.missing(), "" if _has_mpi() else "OpenMPI (no mpirun or no mpi4py)"
    return "left out: " + ", ".join(filter(None, [ours and f"ours ({ours})", mpi, "MPICH, UCC"]))


# ---- the rivals -----------------------------------------------------------------------------------------------------


def _rivals() -> dict[str, Rival]:
    """By way; all of ours are the same processes."""
    rivals = {} if sharedmemory.missing() else dict.fromkeys(OURS, Rival("ours", _ours, RANKS))
    rivals[GLOO] = Rival(GLOO, _gloo, RANKS, spawn=RANKS)
    if _has_mpi():
        rivals[MPI] = Rival(MPI, _mpi, RANKS, launcher=("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS)))
    return rivals


def _has_mpi() -> bool:
    return bool(shutil.which("mpirun") and importlib.util.find_spec("mpi4py"))


# Of each size a process makes its tensors once, and lets go of the last size's.


def _ours(door: str) -> None:
    run(_our_rank, RANKS, door, timeout=600.0)


def _our_rank(comm: Communicator, door: str) -> None:
    @lru_cache(1)
    def ways(nbytes: int) -> dict[str, Operation]:
        shared, mine, other = comm.empty(nbytes // 4).fill_(0), _ordinary(nbytes), _ordinary(nbytes)
        calls: list[Operation] = [partial(all_reduce, comm, tensor, algorithm="native") for tensor in (shared, mine)]
        calls += [partial(all_reduce, comm, mine), lambda: ctypes.memmove(other.data_ptr(), mine.data_ptr(), nbytes)]
        return dict(zip(OURS, calls, strict=True))

    answer(door, lambda way, case: (ways(case["bytes"])[way], comm.barrier))


def _gloo(rank: int, door: str) -> None:
    """As in PyTorch's tutorial "Writing Distributed Applications"."""
    dist.init_process_group("gloo", init_method=f"file://{door}.store", rank=rank, world_size=RANKS)
    tensor = lru_cache(1)(_ordinary)
    answer(door, lambda way, case: (partial(dist.all_reduce, tensor(case["bytes"])), dist.barrier))
    dist.destroy_process_group()


def _mpi(door: str) -> None:
    """One of mpirun's ranks, as in mpi4py's tutorial."""
    from mpi4py.MPI import COMM_WORLD, IN_PLACE

    array = lru_cache(1)(lambda nbytes: np.full(nbytes // 4, 0, np.float32))
    answer(door, lambda way, case: (partial(COMM_WORLD.Allreduce, IN_PLACE, array(case["bytes"])), COMM_WORLD.Barrier))


def _ordinary(nbytes: int) -> torch.Tensor:
    """Written to, so that it has memory of its own."""
    return torch.empty(nbytes // 4).fill_(0)
