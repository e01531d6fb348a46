"""`d2lps.run`: a function of a communicator, on ranks that are real processes: of this machine, or of a job that is there."""

import errno
import os
import resource
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import cloudpickle
import torch

from d2lps import sharedmemory
from d2lps.comm.status import noted
from d2lps.launch.group import Group
from d2lps.launch.launched import join, under_launcher
from d2lps.launch.rank import Job, run_of
from d2lps.result import Run, pickled

_BACKENDS = ("auto", "shm", "gloo", "nccl")
_SLOTS = 1024  # more ranks than this on one machine is a slip of the finger


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    backend: str = "auto",
    timeout: float = 60.0,
    trace: bool | str = False,
    live: bool = False,
    debug: bool = False,
) -> Run:
    """Call `function(comm, *args)` on every one of `ranks` processes, and return their results as a `Run`.

    >>> d2lps.run(lambda comm: comm.rank ** 2, 4)       # doctest: +SKIP
    Run([0, 1, 4, 9])

    The function may live in a notebook cell. `backend`: "shm" (memory that all ranks share; Linux), "gloo" (sockets), "nccl"
    (each rank a GPU of its own), "auto" (NCCL if there are GPUs enough; else shm where it is, or gloo). A function that
    calls torch.distributed by itself needs gloo or NCCL. `timeout`: seconds that one wait for another rank may last.
    `trace`: record every message, and with "lines" the line that posted it. `live`: show what ranks print as it comes, not at
    the end; of a line that is rewritten, as a progress bar is, the last state. `debug`: ranks compare, before anything moves,
    what they are about to send, receive or call; slow.

    Under torchrun (or any launcher that sets RANK and WORLD_SIZE; mpirun and srun, if MASTER_ADDR and MASTER_PORT say where to
    meet) it starts nothing and joins that job: `ranks` must equal WORLD_SIZE, and every rank gets the whole Run.

    Raises the first failing rank's own exception; RankDied if a rank was killed; RankHung or Deadlock, with where every
    rank stood, if one waited too long. Whatever happens, no process, port or file is left when it returns.
    """
    check(function, "communicator", backend, timeout, ranks=ranks)
    noted(trace)
    if under_launcher():
        here, told = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "a launcher has started the processes of this job"
        return join(function, args, Job(ranks, *resolve(backend, here, told), timeout, trace, debug))
    return _run_here(function, args, Job(ranks, *resolve(backend, ranks), timeout, trace, debug), live)


def check(function: Callable[..., Any], of: str, backend: str, timeout: float, most: int = _SLOTS, **processes: int) -> None:
    """Refuse what no run can be made of, before anything is started."""
    if not callable(function):
        raise TypeError(f"run needs a function of a {of}, not {function!r}")
    for name, wanted in processes.items():
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= most:
            raise ValueError(f"{name}={wanted!r} is not a number of processes from 1 to {most}")
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: choose one of {', '.join(map(repr, _BACKENDS))}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds above 0")


def resolve(backend: str, ranks: int, missing: str = "") -> tuple[str, str]:
    """Which transport, and where the tensors of a machine's ranks live; missing: why they can share no memory."""
    gpus, missing = torch.cuda.device_count(), missing or sharedmemory.missing()
    if backend == "nccl" and gpus < ranks:
        raise ValueError(f"backend='nccl' needs a GPU for each rank: {ranks} ranks, but this machine has {gpus}")
    if backend == "shm" and missing:
        raise ValueError(f"backend='shm' is not there: {missing}; use 'gloo', or 'auto'")
    if backend == "nccl" or (backend == "auto" and gpus >= ranks):
        return "nccl", "cuda"
    if backend != "auto":
        return backend, "cpu"
    if not gpus:
        return "gloo" if missing else "shm", "cpu"
    shared = f"{ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''}"
    told = "NCCL needs one each, so messages are staged through the host's memory by gloo"
    warnings.warn(f"{shared}: {told}", stacklevel=3)
    return "gloo", "cuda"


# ---- on this machine ----------------------------------------------------------------------------------------------------


def packed(function: Callable[..., Any], *args: Any) -> bytes:
    """A function and its arguments, as they go to another process."""
    if "__mp_main__" in sys.modules:  # in a child of multiprocessing: its script's name, which no other process knows
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    try:
        return pickled((function, args))
    except Exception as error:
        raise TypeError(f"the function or its arguments cannot be sent to other processes: {error}") from None


def check_open_files(who: str, needed: int) -> None:
    """Refuse a run for which this process may have too few open files, before it has any: ZeroMQ would end the process."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        there = len(os.listdir("/dev/fd"))
    except OSError:  # not even one more
        there = most
    if most != resource.RLIM_INFINITY and there + needed > most:
        told = f"{who} take up to {needed} open files here beside the {there} that are open, and this process may have {most}"
        raise OSError(errno.EMFILE, f"{told}: raise it (ulimit -n), or run fewer")


def _run_here(function: Callable[..., Any], args: tuple[Any, ...], job: Job, live: bool) -> Run:
    program = packed(function, *args)
    check_open_files(f"{job.ranks} ranks", 5 * job.ranks + 12)
    with closing(Group(job, live)) as group:
        group.start(program)
        return run_of(group.watch(), job.trace)
