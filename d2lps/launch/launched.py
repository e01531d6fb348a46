"""A run in a job that somebody else started: torchrun, Slurm, MPI, or anything that sets RANK and WORLD_SIZE.

Nobody watches over the ranks here: each tells what it knows, and what another one has left in the job's store.
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from d2lps.comm import RankFailed, RankHung
from d2lps.comm.rank import SEED
from d2lps.comm.work import in_thread
from d2lps.launch.failure import in_our_words, in_short, release
from d2lps.launch.rank import Job, Success, execute, place, run_of
from d2lps.processgroup import ProcessGroupCommunicator, connect
from d2lps.result import Run
from d2lps.signatures import own_connection

_inside = False  # a joined run
_runs = 0  # joined so far
_default: Any = None  # torch's default group, if the first of them has made it
_PATIENCE = 1800.0  # seconds that a rank which has returned waits for the others, as torch's own groups do
_kept: list[Any] = []  # gloo's groups in torch 2.6, which may wait for ever for their own threads when they are let go

# ---- whose job it is ----------------------------------------------------------------------------------------------------

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PLACE = ("MASTER_ADDR", "MASTER_PORT")
# How jobs are started, and what each process of theirs is told in the place of these names. Slurm's shell around a job has a
# number too, and how many tasks the job may have, but it is no task of a step.
_STARTED = {
    "RANK={rank} WORLD_SIZE={size} MASTER_ADDR={first} MASTER_PORT=29500 python": _NAMES,
    "mpirun -x MASTER_ADDR={first} -x MASTER_PORT=29500 -n {size} python": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "MASTER_ADDR={first} MASTER_PORT=29500 mpiexec -n {size} python": (
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
    "MASTER_ADDR={first} MASTER_PORT=29500 srun -n {size} python": (
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    ),
}  # fmt: skip
JOB_VARIABLES = {*_PLACE, *chain(*_STARTED.values())}


def under_launcher() -> bool:
    """Whether this process is a rank of a job. Inside a joined run it is not: a nested run starts its own processes.

    RuntimeError, with what to type, if it is one and nothing says where the ranks meet.
    """
    if _inside:
        return False
    for command, names in _STARTED.items():
        rank, size, *_ = told = [os.environ.get(name, "") for name in names]
        if rank.isdigit() and size.isdigit() and (int(size) > 1 or names is _NAMES):
            if {*_PLACE} <= os.environ.keys():
                os.environ.update({name: number for name, number in zip(_NAMES, told, strict=True) if number.isdigit()})
                return True
            if int(size) > 1:
                raise RuntimeError(_what_to_type(command, names, *told))
    return False


def _what_to_type(command: str, names: Sequence[str], rank: str, size: str, _: str, here: str) -> str:
    first = "127.0.0.1" if here == size else "ADDRESS_OF_THE_FIRST_MACHINE"
    if "srun" in command and here != size:
        first = "$(scontrol show hostnames | head -n 1)"
    typed = f"{command.format(rank=rank, size=size, first=first)} {os.path.basename(sys.argv[0]) or 'script.py'}"
    who = f"{names[0]}={rank} and {names[1]}={size} say that this is one of {size} processes"
    alone = f"if it is to start ranks of its own, os.environ.pop({names[0]!r}) before"
    return f"{who}, but nothing says where they meet: type\n  {typed}\n(29500 being a port that is free there); {alone}"


# ---- joining it ---------------------------------------------------------------------------------------------------------


def join(function: Callable[..., Any], args: tuple[Any, ...], job: Job) -> Run:
    """Call the function as this job's rank; every rank returns the whole Run."""
    global _inside
    world = int(os.environ["WORLD_SIZE"])
    if job.ranks != world:
        raise ValueError(f"ranks={job.ranks}, but this job was launched with WORLD_SIZE={world} processes: they must be equal")
    device = place(job.device, int(os.environ.get("LOCAL_RANK", 0)))
    rank = int(os.environ["RANK"])
    store = _wait_for_all(job, rank)
    try:
        comm, meeting = _connected(job, rank, device, store)
    except dist.DistStoreError as error:
        raise RankHung(f"rank {rank} has waited for more than timeout={job.timeout:g} s for all ranks to connect") from error
    _inside = True
    try:
        outcomes = _outcomes(function, comm, args, job, meeting)
        if torch.__version__ < "2.7":
            _kept.append((comm.group, meeting.group))
        return run_of(outcomes, job.trace)
    except BaseException as error:
        release(error)
        raise
    finally:
        _inside = False
        # gloo closes a group's sockets when the last reference is gone; until then others would wait for this rank.
        comm.leave()
        meeting.leave()


def _wait_for_all(job: Job, rank: int) -> dist.Store:
    """A store of this run's own, once every rank of the job has called run; RankHung, with who has not, after the timeout.

    Nowhere in here torch waits, which hears of no interrupt meanwhile. What an earlier run has left lies elsewhere.
    """
    global _runs, _default
    deadline, limit = time.monotonic() + job.timeout, timedelta(seconds=job.timeout)
    waited = f"rank {rank} has waited for more than timeout={job.timeout:g} s for every rank of the job to call run"
    if not dist.is_initialized():
        store = _store(rank, job.ranks, deadline, waited)
        store.set_timeout(limit)
    else:
        store = own_connection(dist.distributed_c10d._get_default_store())
    _runs += 1
    here = dist.PrefixStore(f"d2lps/run {_runs}", store)
    if here.add("ranks", 1) == job.ranks:
        here.compare_set("fate", "", "all are here")  # unless one has given up: either is so for all ranks
    here.set(str(rank), "")
    while not here.check(["fate"]):
        if time.monotonic() > deadline:
            missing = ", ".join(f"rank {other}" for other in range(job.ranks) if not here.check([str(other)]))
            here.compare_set("fate", "", f"{waited}; not so {missing}")
        time.sleep(0.005)
    if (fate := here.get("fate").decode()) != "all are here":
        raise RankHung(f"{fate}{'' if dist.is_initialized() else _looked()}")
    if not dist.is_initialized():
        dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.ranks, timeout=limit)
        _default = dist.group.WORLD
    if dist.group.WORLD is _default:  # not the program's own
        dist.distributed_c10d._set_pg_timeout(limit, _default)
    return here


def _store(rank: int, ranks: int, deadline: float, waited: str) -> dist.Store:
    """The job's store, as torch's env:// makes it: the first rank serves it, unless the launcher does."""
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while why := in_thread(partial(_unreached, address, None if serves else port), "knocks").result():
        if time.monotonic() > deadline:
            raise RankHung(f"{waited}; rank 0 was not reached ({why}){_looked()}")
        time.sleep(0.05)
    options = {"multi_tenant": True, "use_libuv": os.environ.get("USE_LIBUV", "1") == "1", "wait_for_workers": False}
    try:
        return dist.TCPStore(address, port, ranks, serves, timedelta(seconds=10), **options)
    except dist.DistNetworkError as error:
        raise RankFailed(f"rank {rank} has no store: {str(error).splitlines()[0]}{_looked()}") from error


def _unreached(address: str, port: int | None) -> str:
    """Why a name is not known, or nobody answers at its port; "" if all is well."""
    try:
        socket.getaddrinfo(address, port)
        if port is not None:
            socket.create_connection((address, port), 1.0).close()
    except OSError as error:
        return str(error)
    return ""


def _looked() -> str:
    """Where this rank has looked for the others, and what to do if that is an old story."""
    addr, port, world = (f"{name}={os.environ[name]}" for name in (*_PLACE, "WORLD_SIZE"))
    return f".\nThat is where {addr}, {port} and {world} say; left over from another job, os.environ.pop('RANK') ends it"


def _connected(
    job: Job, rank: int, device: torch.device, store: dist.Store
) -> tuple[ProcessGroupCommunicator, ProcessGroupCommunicator]:
    """A communicator of this run's own, whose timeout and messages are nobody else's, and one to meet with at its end.

    There a rank may wait for as long as another still works: `timeout` bounds the waits within the function.
    """
    made = []
    for name, patience in (("run", job.timeout), ("end", max(job.timeout, _PATIENCE))):
        group = connect(job.backend, dist.PrefixStore(name, store), rank, job.ranks, patience)
        made.append(ProcessGroupCommunicator(group, device, store, patience))
    comm, meeting = made
    comm.debug, comm.timeout = job.debug, job.timeout
    return comm, meeting


def _outcomes(function: Callable[..., Any], comm: Any, args: tuple[Any, ...], job: Job, meeting: Any) -> list[Success]:
    """What every rank returned; if one failed, that is raised there, and told on all others that hear of it."""
    try:
        # The caller's own random numbers go on afterwards as if nothing had been drawn.
        with torch.random.fork_rng(devices=[comm.device] if comm.device.type == "cuda" else []):
            torch.manual_seed(SEED)
            mine = execute(comm, function, args, job.trace)
    except BaseException as error:
        told = in_our_words(error, comm, _first_failure(comm, error))
        if told is error:
            raise
        raise told from error
    try:
        # In a thread, since gloo's own waits hear of no interrupt. These processes trust one another: they may pickle.
        told = in_thread(partial(_told_to_all, meeting, pickle.dumps(mine)), "meets at the end").result()
    except RuntimeError as error:
        raise RankFailed(f"rank {comm.rank} has returned, but another rank has failed{_first_failure(comm)}") from error
    return [pickle.loads(outcome) for outcome in told]


def _told_to_all(meeting: ProcessGroupCommunicator, mine: bytes) -> list[bytes]:
    """What every rank says, however long."""
    if meeting.device.type == "cuda":
        torch.cuda.set_device(meeting.device)  # each thread has its own
    lengths = [int.from_bytes(said) for said in meeting._exchange_statements("", len(mine).to_bytes(8))]
    everyone = meeting._exchange_statements("", mine.ljust(max(lengths)))
    return [said[:length] for said, length in zip(everyone, lengths, strict=True)]


def _first_failure(comm: ProcessGroupCommunicator, error: BaseException | None = None) -> str:
    """`: rank 1 raised RuntimeError: on purpose (in work, line 3: ...)`: who failed first, as far as the store tells.

    A rank that fails leaves its own words there, if nobody has before, and only then lets go of the others.
    """
    mine = in_short(error, comm) if error else ""
    asked = partial(comm.signatures.store.compare_set, "failed", "", mine[:2000])
    try:
        first = in_thread(asked, "asks who failed first").result(comm.timeout).decode()  # torch waits on behind a cut cable
    except (RuntimeError, TimeoutError):  # the store has gone with the first rank, or cannot be reached
        first = mine
    return ", which tells why itself" if first == mine else f": {first}"
