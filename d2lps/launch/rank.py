"""The life of one rank: take the job, join the group, call the function, send back what came of it."""

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from d2lps import sharedmemory as shm
from d2lps.comm import Communicator
from d2lps.comm.rank import SEED
from d2lps.comm.status import SharedBoard
from d2lps.processgroup import ProcessGroupCommunicator
from d2lps.signatures import store_at
from d2lps.trace.recorder import Log, Recorder

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# What torch imports when it is first needed (by an optimizer, DDP, a DTensor): a second of work, in every rank of every run.
_LATE = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


@dataclass
class Job:
    """What every rank gets besides the function, and besides a file to meet the others at.

    That file is the memory that all ranks share ("shm"), or the store's listening socket, for the first rank (the others).
    """

    ranks: int
    backend: str  # "shm", "gloo", "nccl"
    device: str  # "cpu", "cuda" (a GPU each), "cuda:shared" (GPUs in turn)
    store_port: int
    timeout: float
    trace: bool
    debug: bool


@dataclass
class Failure:
    """An exception on its way to the caller; the frames' source lines are looked up there, where the cell is known."""

    when: float
    pickled: bytes | None
    kind: str
    message: str
    frames: list[tuple[str, int | None, str]]


@dataclass
class Success:
    result: bytes
    started: float
    ended: float
    logs: list[Log]  # empty where nothing was recorded
    imported: tuple[str, ...] = ()  # what the fork server had better import for the ranks to come


def main(rank: int, control: int, out: int, err: int, board: int, stack: int, meeting: int = -1) -> None:
    """A rank, from the fork to its end; the arguments are file descriptors."""
    _redirect(out, err)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)  # where are you? asked when a run hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's to handle
    np.random.seed()  # a fork copies numpy's state: without this, all ranks would draw the same numbers
    torch.manual_seed(SEED)
    # A fork spoils torch's pool of threads; the first who asks for it makes another one, and two at a time would fail.
    torch.set_num_threads(torch.get_num_threads())
    caller = Connection(control)
    job: Job = pickle.loads(caller.recv_bytes())
    program = caller.recv_bytes()
    notes = SharedBoard(board, rank)
    comm: Communicator | None = None
    try:
        function, args = cloudpickle.loads(program)
        comm = shm.join(meeting, job.ranks, rank) if job.backend == "shm" else _join(rank, job, meeting)
        comm.board, comm.debug = notes, job.debug
        outcome: Success | Failure = execute(comm, function, args, job.trace)
    except BaseException as error:
        outcome = failure(error)
    flush()
    with contextlib.suppress(EOFError, OSError):  # the caller may have given up on this run
        caller.send_bytes(pickle.dumps(outcome))
        if isinstance(comm, shm.SharedMemoryCommunicator) and isinstance(outcome, Success):
            comm.leave()
        caller.recv_bytes()  # stay until all are done: others may still be reading from this rank's sockets


def execute(comm: Communicator, function: Callable[..., Any], args: tuple[Any, ...], trace: bool) -> Success:
    """Call the function with every rank starting at the same time, and pack its result."""
    comm._barrier()  # the launcher's, not the reader's: no note and no trace tells of it
    recorder = comm.recorder = Recorder(comm.rank, comm.now) if trace else None
    started = comm.now()
    result = function(comm, *args)
    comm.finish()
    ended = comm.now()
    logs = recorder.logs(started, ended, str(comm.node)) if recorder else []
    imported = tuple(name for name in _LATE if name in sys.modules)
    return Success(_packed(result, comm.rank), started, ended, logs, imported)


def _packed(result: Any, rank: int) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(
            f"rank {rank} returned a {kind}, which cannot be sent back to the caller ({error}); "
            "return numbers, strings, tensors, or containers of them"
        ) from None


def failure(error: BaseException) -> Failure:
    """Pack an exception: itself if it can be pickled, its text and frames in any case."""
    when = time.monotonic()  # pickling may take its time, and the earliest failure is the one that counts
    pickled: bytes | None
    try:
        pickled = cloudpickle.dumps(error) if isinstance(error, Exception) else None  # sys.exit() shall not end the caller
        pickle.loads(pickled or pickle.dumps(None))
    except Exception:
        pickled = None
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    # The reader's own frames: those of the launcher say nothing.
    launcher = os.path.join(_PACKAGE, "launch")
    shown = [frame for frame in frames if not frame[0].startswith(launcher)]
    return Failure(when, pickled, type(error).__name__, str(error), shown or frames)


def _redirect(out: int, err: int) -> None:
    """From here on, whatever is printed goes to files that the caller shows: at the descriptor, so C code's too."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def flush() -> None:
    """Write out what the rank has printed, even where its function has put something else in the streams' place, or nothing."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _join(rank: int, job: Job, listener: int) -> Communicator:
    """Meet the others at the store and form the process group, over the loopback interface only."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    patience = timedelta(seconds=max(30.0, 2 * job.timeout))  # ours runs out first, and knows more
    store = store_at(job.store_port, job.ranks, rank, listener, timeout=patience)
    device = _device(job.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.ranks, timeout=patience)
    return ProcessGroupCommunicator(dist.group.WORLD, device, store, patience.total_seconds())


def _device(kind: str, rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
