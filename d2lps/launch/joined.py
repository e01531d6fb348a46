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
    backend, device = _resolve(backend)
    comm = _communicator(backend, device, timeout)
    comm.debug = debug
    global _inside
    _inside = True
    try:
        success = execute(comm, function, args, trace)
    finally:
        _inside = False
    run = _exchange(success, comm, trace)
    dist.destroy_process_group(comm.group)
    return run


def _resolve(backend: str) -> tuple[str, torch.device]:
    """Each process of a launcher sees its machine's GPUs and its own number there."""
    local, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < local_ranks:
        raise ValueError(f"backend='nccl' needs a GPU for each rank: {local_ranks} ranks here, but this machine has {gpus}")
    if backend != "gloo" and gpus >= local_ranks:
        torch.cuda.set_device(local)
        return "nccl", torch.device("cuda", local)
    if backend == "auto" and gpus:
        warnings.warn(f"{local_ranks} ranks share {gpus} GPUs: messages are staged through the host's memory", stacklevel=4)
        return "gloo", torch.device("cuda", local % gpus)
    return "gloo", torch.device("cpu")


def _communicator(backend: str, device: torch.device, timeout: float) -> ProcessGroupCommunicator:
    """A group of this run's own, so that its timeout and its messages are nobody else's."""
    if not dist.is_initialized():
        dist.init_process_group(backend)
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
    store = dist.distributed_c10d._get_default_store()
    return ProcessGroupCommunicator(group, device, timeout=timeout, store=store)


def _exchange(mine: Success, comm: ProcessGroupCommunicator, trace: bool) -> Run:
    """Tell every rank what every rank returned; torch pickles it, among processes of one job that trust one another."""
    everyone: list[Any] = [None] * comm.size
    dist.all_gather_object(everyone, (socket.gethostname(), pickle.dumps(mine)), group=comm.group)
    outcomes: list[tuple[str, Success]] = [(host, pickle.loads(packed)) for host, packed in everyone]
    logs = [outcome.log for _, outcome in outcomes if outcome.log is not None]
    return Run(
        [cloudpickle.loads(outcome.result) for _, outcome in outcomes],
        _longest(outcomes),
        merge(logs, comm.size) if trace else None,
    )


def _longest(outcomes: list[tuple[str, Success]]) -> float:
    """From the first start to the last end; clocks of different machines are not compared, their spans are."""
    spans = []
    for host in {host for host, _ in outcomes}:
        here = [outcome for where, outcome in outcomes if where == host]
        spans.append(max(outcome.ended for outcome in here) - min(outcome.started for outcome in here))
    return max(spans)
