"""A run inside a job that somebody else started: torchrun, Slurm, or anything that sets RANK and WORLD_SIZE."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from d2lps.comm import RankFailed, RankHung
from d2lps.comm.explain import State, describe_state
from d2lps.launch.failure import LastNote, meaning, release
from d2lps.launch.rank import Job, Success, execute, place, run_of
from d2lps.processgroup import ProcessGroupCommunicator
from d2lps.result import Run

_inside = False


def under_launcher() -> bool:
    """Whether this process is a rank of a job. Inside a joined run it is not: a nested run starts its own processes."""
    return not _inside and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def join(function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Run:
    """Call the function as this job's rank; every rank returns the whole Run."""
    global _inside
    world = int(os.environ["WORLD_SIZE"])
    if job.ranks != world:
        raise ValueError(f"ranks={job.ranks}, but this job was launched with WORLD_SIZE={world} processes: they must be equal")
    try:
        comm, meeting = _groups(job)
    except dist.DistStoreError as error:
        waited = f"rank {os.environ['RANK']} has waited for more than timeout={job.timeout:g} s"
        raise RankHung(f"{waited} for every rank of the job to call run") from error
    _inside = True
    try:
        return run_of(_everyones(_called(function, comm, args, job), comm.rank, meeting), job.trace)
    except BaseException as error:
        release(error)
        raise
    finally:
        _inside = False
        for group in (comm.group, meeting):
            dist.destroy_process_group(group)
        # gloo closes a group's sockets when the last reference is gone; until then others would wait for this rank.
        comm.group = group = meeting = None


def _groups(job: Job) -> tuple[ProcessGroupCommunicator, Any]:
    """A group of this run's own, whose timeout and messages are nobody else's, and one to meet in at its end.

    There a rank may wait for as long as another still works: `timeout` bounds the waits within the function.
    """
    device = place(job.device, int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        dist.init_process_group(job.backend)
    group = dist.new_group(backend=job.backend, timeout=timedelta(seconds=job.timeout))
    meeting = dist.new_group(backend=job.backend)
    # A store of this run's own too: an earlier run that failed has left its signatures behind.
    store = dist.PrefixStore(f"d2lps/{group.group_name}", dist.distributed_c10d._get_default_store())
    comm = ProcessGroupCommunicator(group, device, timeout=job.timeout, store=store)
    comm.board, comm.debug = LastNote(), job.debug
    return comm, meeting


def _called(function: Callable[..., Any], comm: Any, args: tuple[Any, ...], job: Job) -> Success:
    """The outcome of the function. A wait that fails is told as on one machine, as far as this rank can know."""
    try:
        return execute(comm, function, args, job.trace)
    except (RuntimeError, TimeoutError) as error:
        kind, note = meaning(error), comm.board.standing
        if note is None or kind is None:  # it did not fail in a wait
            raise
        hung, lost = f"has waited for more than timeout={job.timeout:g} s", "has lost another rank, which tells why itself"
        why = f"rank {comm.rank} {hung if kind is RankHung else lost}"
        raise kind(f"{why}\n{describe_state(State(comm.rank, note))}") from error


def _everyones(mine: Success, rank: int, meeting: Any) -> list[Success]:
    """What every rank returned, told to every rank; torch pickles it, among processes of one job that trust one another."""
    everyone: list[Any] = [None] * meeting.size()
    try:
        dist.all_gather_object(everyone, mine, group=meeting)
    except RuntimeError as error:
        raise RankFailed(f"rank {rank} has returned, but another rank has failed, which tells why itself") from error
    return everyone
