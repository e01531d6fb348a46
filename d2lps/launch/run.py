"""`d2lps.run`: a function of a communicator, on ranks that are real processes."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from d2lps import sharedmemory
from d2lps.launch.local import run_local
from d2lps.launch.rank import Job
from d2lps.launch.torchrun import join, under_launcher
from d2lps.result import Run

BACKENDS = ("auto", "shm", "gloo", "nccl")
_SLOTS = 1024  # more ranks than this on one machine is a slip of the finger


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    backend: str = "auto",
    timeout: float = 60.0,
    trace: bool = False,
    live: bool = False,
    debug: bool = False,
) -> Run:
    """Call `function(comm, *args)` on every one of `ranks` processes, and return their results as a `Run`.

    >>> d2lps.run(lambda comm: comm.rank ** 2, 4)       # doctest: +SKIP
    Run([0, 1, 4, 9])

    The function may live in a notebook cell. `backend`: "shm" (memory that all ranks share; Linux), "gloo" (sockets), "nccl"
    (each rank a GPU of its own), "auto" (NCCL if there are GPUs enough; else shm where it is, or gloo). A function that
    calls torch.distributed by itself needs gloo or NCCL. `timeout`: seconds that one wait for another rank may last.
    `trace`: record every message. `live`: show what ranks print as it comes, not at the end. `debug`: ranks compare, before
    anything moves, what they are about to send, receive or call; slow.

    Under torchrun (or any launcher that sets RANK and WORLD_SIZE) it starts nothing and joins that job: `ranks` must
    equal WORLD_SIZE, and every rank gets the whole Run.

    Raises the first failing rank's own exception; RankDied if a rank was killed; RankHung or Deadlock, with where every
    rank stood, if one waited too long. Whatever happens, no process, port or file is left when it returns.
    """
    _check(function, ranks, backend, timeout)
    if under_launcher():
        return join(function, ranks, args, backend, timeout, trace, debug)
    backend, device = resolve(backend, ranks)
    return run_local(function, args, Job(ranks, backend, device, 0, timeout, trace, debug), live)


def _check(function: Callable[..., Any], ranks: int, backend: str, timeout: float) -> None:
    if not callable(function):
        raise TypeError(f"run needs a function of a communicator, not {function!r}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _SLOTS:
        raise ValueError(f"ranks={ranks!r} is not a number of processes from 1 to {_SLOTS}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: choose one of {', '.join(map(repr, BACKENDS))}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds above 0")


def resolve(backend: str, ranks: int) -> tuple[str, str]:
    """Which transport, and where the ranks' tensors live."""
    gpus, missing = torch.cuda.device_count(), sharedmemory.missing()
    if backend == "nccl" and gpus < ranks:
        raise ValueError(f"backend='nccl' needs a GPU for each rank: {ranks} ranks, but this machine has {gpus}")
    if backend == "shm" and missing:
        raise ValueError(f"backend='shm' is not there: {missing}; use 'gloo', or 'auto'")
    if backend == "nccl" or (backend == "auto" and gpus >= ranks):
        return "nccl", "cuda"
    if backend == "auto" and gpus:
        warnings.warn(
            f"{ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: NCCL needs one each, so messages are staged "
            "through the host's memory by gloo",
            stacklevel=3,
        )
        return "gloo", "cuda:shared"
    if backend == "auto":
        backend = "gloo" if missing else "shm"
    return backend, "cpu"
