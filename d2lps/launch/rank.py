"""The life of one rank: take the job, join the group, call the function, send back what came of it."""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from d2lps import sharedmemory as shm
from d2lps.comm import Communicator
from d2lps.comm.rank import SEED
from d2lps.comm.status import SharedBoard, Status, noted
from d2lps.launch.failure import Failure, in_our_words, pack
from d2lps.processgroup import ProcessGroupCommunicator, connect
from d2lps.result import Run, pickled
from d2lps.signatures import store_at
from d2lps.trace import Recorder, Trace

# What torch imports when it is first needed (by a backward pass that is given gradients, an optimizer, DDP, a DTensor): a second
# of work, in every rank of every run.
_LATE = ("torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")

_INSTEAD = "return numbers, strings, tensors, or containers of them"

runs_here: list[Communicator] = []  # that of the run of which this process is a rank, while the run's function runs

START = 30.0  # seconds that ranks may take to begin besides the timeout: one may still import what its function needs


@dataclass
class Job:
    """What every rank gets besides the function, and besides a file to meet the others at.

    That file is the memory that all ranks share ("shm"), or the place of their store (the others; see `place_to_meet`).
    """

    ranks: int
    backend: str  # "shm", "gloo", "nccl"
    device: str  # "cpu", "cuda" (GPUs in turn)
    timeout: float
    trace: bool | str = False
    debug: bool = False
    store_port: int = 0


@dataclass
class Success:
    result: bytes
    started: float
    ended: float
    node: str = ""
    logs: Sequence[Recorder] = ()  # none where nothing was recorded
    imported: Sequence[str] = ()  # what the fork server had better import for the ranks to come

    def returned(self, rank: int) -> Any:
        try:
            return cloudpickle.loads(self.result)
        except Exception as error:
            raise TypeError(f"what rank {rank} returned cannot be read by the caller ({error}); {_INSTEAD}") from error


class Timed(NamedTuple):
    """What a function returned that had more to do then, and when."""

    result: Any
    ended: float


def main(rank: int, job: Job, program: bytes, control: int, out: int, err: int, board: int, stack: int, meeting: int) -> None:
    """A rank, from the fork to its end. program: the function and its arguments; behind it are file descriptors."""
    _redirect(out, err)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)  # where are you? asked when a run hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's to handle
    np.random.seed()  # a fork copies numpy's state: without this, all ranks would draw the same numbers
    torch.manual_seed(SEED)
    # A fork spoils torch's pool of threads; the first who asks for it makes another one, and two at a time would fail.
    torch.set_num_threads(torch.get_num_threads())
    caller = Connection(control)
    comm: Communicator | None = None
    outcome: Success | Failure
    try:
        function, args = cloudpickle.loads(program)
        notes = SharedBoard(board, rank)
        notes.write(Status(rank, "begin", since=time.monotonic()))
        comm = shm.join(meeting, job.ranks, rank) if job.backend == "shm" else _join(rank, job, meeting)
        comm.board, comm.debug, comm.timeout = notes, job.debug, job.timeout
        outcome = execute(comm, function, args, job.trace)
    except BaseException as error:
        outcome = pack(in_our_words(error, comm) if comm else error)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(Exception):  # the function may have put something else in the streams' place, or nothing
            stream.flush()  # type: ignore[union-attr]
    with suppress(EOFError, OSError):  # the caller may have given up on this run
        caller.send(outcome)
        if isinstance(comm, shm.SharedMemoryCommunicator) and isinstance(outcome, Success):
            comm.leave()
        caller.recv_bytes()  # stay until all are done: others may still be reading from this rank's sockets


def execute(comm: Communicator, function: Callable[..., Any], args: tuple[Any, ...], trace: bool | str) -> Success:
    """Call the function with every rank starting at the same time, and pack its result."""
    with comm.waiting("begin"):  # the launcher's, not the reader's: no trace tells of it
        comm._barrier()
    recorder = comm.recorder = Recorder(comm.rank, comm.now, where=noted(trace)) if trace else None
    started = comm.now()
    runs_here.append(comm)
    try:
        result = function(comm, *args)
        comm.finish()
    finally:
        runs_here.remove(comm)
    ended = comm.now()
    logs = recorder.logs(started, ended, str(comm.node)) if recorder else ()
    try:
        packed = pickled(result)
    except Exception as error:
        kind = type(result.result if isinstance(result, Timed) else result).__name__
        told = f"rank {comm.rank} returned a {kind}, which cannot be sent back to the caller ({error})"
        raise TypeError(f"{told}; {_INSTEAD}") from None
    return Success(packed, started, ended, str(comm.node), logs, [name for name in _LATE if name in sys.modules])


def run_of(outcomes: Sequence[Success], trace: bool | str) -> Run:
    """What all ranks have returned; clocks of different machines are not compared, their spans are."""
    nodes: dict[str, list[Success]] = {}
    for outcome in outcomes:
        nodes.setdefault(outcome.node, []).append(outcome)
    seconds = max(max(each.ended for each in here) - min(each.started for each in here) for here in nodes.values())
    logs = [log for outcome in outcomes for log in outcome.logs]
    results = [outcome.returned(rank) for rank, outcome in enumerate(outcomes)]
    return Run(results, seconds, Trace(logs, len(outcomes)) if trace else None)


def _redirect(out: int, err: int) -> None:
    """From here on, whatever is printed goes to files that the caller shows: at the descriptor, so C code's too."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]


def _join(rank: int, job: Job, meeting: int) -> Communicator:
    """Meet the others at the store, and connect over the loopback interface only: for the run, and for torch's default group."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if rank and job.store_port:
        os.close(meeting)
    store, patience = store_at(meeting, job.store_port, job.ranks, rank), patience_of(job.timeout)
    device = place(job.device, rank)
    until, limit = (timedelta(seconds=seconds) for seconds in (patience, job.timeout))
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.ranks, timeout=until)
    # What the function itself calls of torch.distributed: nobody else sees it wait.
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    store.set_timeout(until)
    group = connect(job.backend, dist.PrefixStore("d2lps", store), rank, job.ranks, patience)
    return ProcessGroupCommunicator(group, device, store, patience)


def patience_of(timeout: float) -> float:
    """Seconds that an engine waits where somebody reads the ranks' notes: who does runs out first, and knows more."""
    return 2 * (START + timeout)


def place(kind: str, number: int) -> torch.device:
    """Where the tensors of a machine's rank of that number live: "cpu", or its GPU of that number, or again from the first."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
