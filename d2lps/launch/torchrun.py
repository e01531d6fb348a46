"""A run inside a job that somebody else started: torchrun, Slurm, or anything that sets RANK and WORLD_SIZE."""

import os
import pickle
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from d2lps.comm import RankFailed, RankHung
from d2lps.comm.explain import describe_status
from d2lps.comm.status import Status
from d2lps.launch.lastnote import LastNote, meaning, release
from d2lps.launch.rank import Success, execute
from d2lps.processgroup import ProcessGroupCommunicator
from d2lps.result import Run
from d2lps.trace import merge

_inside = False


def under_launcher() -> bool:
    """Whether this process is a rank of a job. Inside a joined run it is not: a nested run starts its own processes."""
    return not _inside and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def join(
    function: Callable[..., Any], ranks: int, args: tuple[Any, ...], backend: str, timeout: float, trace: bool, debug: bool
) -> Run:
    """Call the function as this job's rank; every rank returns the whole Run."""
    world = int(os.environ["WORLD_SIZE"])
    if ranks != world:
        raise ValueError(f"ranks={ranks}, but this job was launched with WORLD_SIZE={world} processes: they must be equal")
    try:
        comm, meeting = _groups(*_resolve(backend), timeout)
    except dist.DistStoreError as error:
        told = f"rank {os.environ['RANK']} has waited for more than timeout={timeout:g} s for every rank of the job to call run"
        raise RankHung(told) from error
    comm.debug = debug
    global _inside
    _inside = True
    try:
        return _exchange(_called(function, comm, args, timeout, trace), comm.rank, meeting, trace)
    except BaseException as error:
        release(error)
        raise
    finally:
        _inside = False
        for group in (comm.group, meeting):
            dist.destroy_process_group(group)
        # gloo closes a group's sockets when the last reference is gone; until then others would wait for this rank.
        comm.group = group = meeting = None


def _called(
    function: Callable[..., Any], comm: ProcessGroupCommunicator, args: tuple[Any, ...], timeout: float, trace: bool
) -> Success:
    """The outcome of the function; a wait that fails is explained."""
    comm.board = note = LastNote()
    try:
        return execute(comm, function, args, trace)
    except (RuntimeError, TimeoutError) as error:
        told = _explained(error, note.status, timeout) if note.status is not None else None
        if told is None:  # it did not fail in a wait
            raise
        raise told from error


def _resolve(backend: str) -> tuple[str, torch.device]:
    """Each process of a launcher sees its machine's GPUs and its own number there."""
    local, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if backend == "shm":
        raise ValueError("backend='shm' joins processes that run starts itself; under a launcher use 'gloo', 'nccl' or 'auto'")
    if backend == "nccl" and gpus < local_ranks:
        raise ValueError(f"backend='nccl' needs a GPU for each rank: {local_ranks} ranks here, but this machine has {gpus}")
    if backend != "gloo" and gpus >= local_ranks:
        torch.cuda.set_device(local)
        return "nccl", torch.device("cuda", local)
    if backend == "auto" and gpus:
        warnings.warn(f"{local_ranks} ranks share {gpus} GPUs: messages are staged through the host's memory", stacklevel=4)
        return "gloo", torch.device("cuda", local % gpus)
    return "gloo", torch.device("cpu")


def _groups(backend: str, device: torch.device, timeout: float) -> tuple[ProcessGroupCommunicator, Any]:
    """A group of this run's own, whose timeout and messages are nobody else's, and one to meet in at its end.

    There a rank may wait for as long as another still works: `timeout` bounds the waits within the function.
    """
    if not dist.is_initialized():
        dist.init_process_group(backend)
    group, meeting = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout)), dist.new_group(backend=backend)
    # A store of this run's own too: an earlier run that failed has left its signatures behind.
    store = dist.PrefixStore(f"d2lps/{group.group_name}", dist.distributed_c10d._get_default_store())
    return ProcessGroupCommunicator(group, device, store, timeout), meeting


def _explained(error: Exception, status: Status, timeout: float) -> Exception | None:
    """A wait that failed, told as a run on one machine would tell it, as far as this rank can know."""
    kind = meaning(error)
    if kind is RankHung:
        return RankHung(f"rank {status.rank} has waited for more than timeout={timeout:g} s\n{describe_status(status)}")
    if kind is RankFailed:
        return RankFailed(f"rank {status.rank} has lost another rank, which tells why itself\n{describe_status(status)}")
    return None


def _exchange(mine: Success, rank: int, meeting: Any, trace: bool) -> Run:
    """Tell every rank what every rank returned; torch pickles it, among processes of one job that trust one another."""
    everyone: list[Any] = [None] * meeting.size()
    try:
        dist.all_gather_object(everyone, (socket.gethostname(), pickle.dumps(mine)), group=meeting)
    except RuntimeError as error:
        raise RankFailed(f"rank {rank} has returned, but another rank has failed, which tells why itself") from error
    outcomes: list[tuple[str, Success]] = [(host, pickle.loads(packed)) for host, packed in everyone]
    logs = [log for _, outcome in outcomes for log in outcome.logs]
    return Run(
        [cloudpickle.loads(outcome.result) for _, outcome in outcomes],
        _longest(outcomes),
        merge(logs, len(outcomes)) if trace else None,
    )


def _longest(outcomes: list[tuple[str, Success]]) -> float:
    """From the first start to the last end; clocks of different machines are not compared, their spans are."""
    spans = []
    for host in {host for host, _ in outcomes}:
        here = [outcome for where, outcome in outcomes if where == host]
        spans.append(max(outcome.ended for outcome in here) - min(outcome.started for outcome in here))
    return max(spans)
