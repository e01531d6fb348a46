"""Public bug reports of other libraries, each as the smallest program of its situation, and what is right: a table.

`pytest tests/test_reports.py -v` shows it: the report, by its repository and number; the situation, in our words; what is right;
and in which world. A program says by its argument where it runs: `comm`, as ranks, and `kv`, as workers of a store, in processes
and in a simulation; any other by itself.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle
import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import d2lps
from d2lps import Deadlock, Mismatch, RankDied, RankHung, ReduceOp, kvstore
from d2lps.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from d2lps.feeding import Loader
from d2lps.kvstore import Refused
from d2lps.parallel import (
    Checkpoints,
    DataParallel,
    DiLoCo,
    Experts,
    LossScaler,
    MixedPrecision,
    Plan,
    Trainer,
    Transformer,
    Zero,
    clip_by_global_norm,
    execute,
    expert_parallel,
    module_pieces,
    one_f_one_b,
    resume,
    ring_attention,
    save_run,
    text,
    train,
)
from d2lps.parallel.context import folded, in_turn, local
from d2lps.parallel.prediction.parts import matrix_flops
from d2lps.parallel.saving.checkpoint import load, save
from d2lps.topology import Topology, star

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks get the programs themselves, and need not import pytest
SGD = partial(torch.optim.SGD, lr=1.0)
SOON = {"timeout": 5.0}  # of runs that are to end by it


@dataclass(frozen=True)
class Report:
    """A row: a program, what each of its ranks returns (or, by rank), or the error and the words that it ends in."""

    source: str
    program: Callable[..., Any]
    gives: Any = None
    by_rank: Sequence[Any] | None = None
    raises: tuple[Any, ...] = ()
    ranks: int = 2  # or workers
    servers: int = 1
    simulated: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # of the run in processes

    def __str__(self) -> str:
        return f"{self.source}: {' '.join((self.program.__doc__ or '').split())}"

    @property
    def wants(self) -> list[str]:
        return list(signature(self.program).parameters)

    def worlds(self) -> list[str]:
        if not {"comm", "kv"} & {*self.wants}:
            return ["here"]
        return ["processes", "simulated"] if self.simulated else ["processes"]

    def run(self, world: str, folder: Path) -> Any:
        given = [str(folder)] if "folder" in self.wants else []
        if world == "here":
            return [self.program(*given)]
        if "comm" in self.wants and world == "simulated":
            return d2lps.simulate(self.program, star(self.ranks, 1e9), *given)
        if "comm" in self.wants:
            return d2lps.run(self.program, self.ranks, *given, **self.options)
        if world == "simulated":
            return kvstore.simulate(self.program, star(self.ranks + self.servers, 1e9), self.ranks, self.servers, *given)
        return kvstore.run(self.program, self.ranks, self.servers, *given, **self.options)


TABLE: list[Report] = []


def report(source: str, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a program into the table, whose docstring says: situation -> what is right; more: see `Report`."""

    def enter(program: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.append(Report(source, program, **more))
        return program

    return enter


def refused(comm: Any, call: Callable[[], Any], *tensors: torch.Tensor) -> str:
    """What each rank is told of a call that is refused before anything is sent or changed, so that all can go on."""
    before = [tensor.clone() for tensor in tensors]
    try:
        call()
        return "it returned"
    except (TypeError, ValueError) as error:
        told = str(error)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True)), "something was changed"
    all_reduce(comm, ones := torch.ones(3))
    assert ones.tolist() == [comm.size] * 3, "a message was left over"
    return told


def says(told: str, *words: str) -> None:
    assert not [word for word in words if word not in told], told


# ---- launching, and ranks that fail ---------------------------------------------------------------------------------


@report("pytorch/pytorch#20375", gives=[0, 10])
def of_a_cell() -> list[int]:
    """A function of a notebook's cell, which is in no file -> other processes can run it."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec("scale = 10\ndef work(comm):\n    return scale * comm.rank", cell)
    return list(d2lps.run(cell["work"], 2))


def told_of(variables: dict[str, str], call: str) -> str:
    """What a script says before it fails, in a shell in which these are set."""
    command = [sys.executable, "-c", f"import d2lps\nd2lps.run({call})"]
    run = subprocess.run(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True, timeout=200)
    return run.stderr if run.returncode else "it returned"


@report("huggingface/accelerate#56, pytorch/examples#458, dnth/DEIMKit#6")
def left_in_the_shell() -> None:
    """RANK and WORLD_SIZE are left in the shell from another job, whose other processes never come
    -> an error after the timeout that names these variables.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    says(told_of(job, "lambda comm: None, 2, timeout=1.5"), "RankHung", "timeout=1.5 s", "WORLD_SIZE=2", "not so rank 1")


@report("facebookresearch/fairseq#4645, deepspeedai/DeepSpeed#8444")
def by_mpirun() -> None:
    """Two processes of mpirun, which names their ranks in variables of its own -> what to type, not two jobs of one."""
    told = told_of({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "lambda comm: None, 2")
    says(told, "OMPI_COMM_WORLD_SIZE=2", "MASTER_ADDR", "mpirun")


@report("tqdm/tqdm#375, tqdm/tqdm#565")
def progress_bars() -> None:
    """Every rank has a progress bar, a line that is written again and again -> its last state, and whose it is."""

    def works(comm: Any) -> None:
        for done in range(0, 101, 20):
            print(f"\r{done}%", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)

    with redirect_stderr(io.StringIO()) as told:
        d2lps.run(works, 2)
    assert told.getvalue() == "rank 0 | 100%\nrank 1 | 100%\n"


@report("pytorch/pytorch#65604, pytorch/pytorch#31357", gives=[4000, 1000.0])
def of_a_large_tensor() -> list[Any]:
    """A rank returns a row of a large tensor -> the row comes, without the rest of the memory."""
    row = d2lps.run(lambda comm: torch.ones(1000, 1000)[:1], 1)[0]
    return [row.untyped_storage().nbytes(), row.sum().item()]


@report("pytorch/torchtitan#1790", raises=(ValueError, "spatial dimensions differ"))
def one_raises(comm: Any) -> None:
    """One rank raises, the others wait in a collective -> its own error, at once."""
    if comm.rank == 1:
        raise ValueError("spatial dimensions differ")
    all_reduce(comm, torch.ones(3))


@report("pytorch/pytorch#138322", raises=(RankHung, "rank 0 waits at a barrier", "rank 2 has returned"), ranks=3, options=SOON)
def one_skips_a_barrier(comm: Any) -> None:
    """One rank skips a barrier and ends -> who waits, and who has returned."""
    if comm.rank != 2:
        comm.barrier()


@report("sgl-project/sglang#20287", raises=(RankDied, "rank 1", "SIGKILL"), simulated=False)
def one_is_killed(comm: Any) -> None:
    """The kernel kills a rank that is out of memory -> which rank, and by what signal."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


# ---- messages -------------------------------------------------------------------------------------------------------


@report("NVIDIA/nccl#479", raises=(Deadlock, "rank 0 -> rank 1 -> rank 0"), options=SOON)
def both_send_first(comm: Any) -> None:
    """Both ranks send first, and then receive -> a deadlock, told with its circle of ranks."""
    comm.send(torch.ones(4), 1 - comm.rank)
    comm.recv(torch.zeros(4), 1 - comm.rank)


@report("pytorch/pytorch#109401", gives=[1.0, 2.0])
def interleaved(comm: Any) -> list[float]:
    """Isend and irecv of two directions, interleaved -> all complete."""
    rooms, peer = [torch.zeros(1), torch.zeros(1)], 1 - comm.rank
    work = [comm.irecv(rooms[0], peer), comm.isend(torch.ones(1), peer)]
    work += [comm.isend(torch.full((1,), 2.0), peer), comm.irecv(rooms[1], peer)]
    for each in reversed(work):
        each.wait()
    return [room.item() for room in rooms]


@report("pytorch/pytorch#62283", by_rank=[None, [[0, 2, 4], [1, 3, 5]]])
def transposed(comm: Any) -> Any:
    """A transposed tensor is sent into a contiguous one -> elements arrive in their places."""
    if comm.rank == 0:
        return comm.send(torch.arange(6).view(3, 2).T, 1)
    comm.recv(room := torch.zeros(2, 3, dtype=torch.long), 0)
    return room.tolist()


@report("pytorch/pytorch#77554")
def of_qr(comm: Any) -> None:
    """A matrix of torch.linalg.qr, whose columns lie one behind the other -> arrives as it is."""
    q, _ = torch.linalg.qr(torch.arange(16.0).view(4, 4) + 5 * torch.eye(4))
    if comm.rank == 0:
        return comm.send(q, 1)
    comm.recv(room := torch.zeros(4, 4), 0)
    assert_close(room, q, rtol=0, atol=0)


@report("NVIDIA/nccl#1938", raises=(Mismatch, "6", "4"), options=SOON)
def too_small(comm: Any) -> None:
    """The receiver's tensor is smaller than the sender's -> an error with both lengths."""
    comm.send(torch.ones(6), 1) if comm.rank == 0 else comm.recv(torch.zeros(4), 0)


@report("pytorch/pytorch#83912", gives=True)
def to_itself(comm: Any) -> bool:
    """A rank sends to itself -> refused by name."""
    says(refused(comm, lambda: comm.send(torch.ones(2), comm.rank)), f"dst={comm.rank}", "itself")
    return True


@report("pytorch/gloo#308", by_rank=[None, [0.0, 1.0, 2.0]])
def by_tags(comm: Any) -> Any:
    """Several sends and receives at once, told apart by tags, waited for in any order -> each where its tag says."""
    tensors = [torch.full((1,), float(tag) * (1 - comm.rank)) for tag in range(3)]
    order = [0, 1, 2] if comm.rank == 0 else [2, 0, 1]
    post = partial(comm.isend, dst=1) if comm.rank == 0 else partial(comm.irecv, src=0)
    for work in [post(tensors[tag], tag=tag) for tag in order]:
        work.wait()
    return [tensor.item() for tensor in tensors] if comm.rank else None


@report("pytorch/PiPPy#941", by_rank=[None, [1 + 2j, 3 - 1j]])
def complex_numbers(comm: Any) -> Any:
    """Complex numbers are sent -> they arrive."""
    if comm.rank == 0:
        return comm.send(torch.tensor([1 - 2j, 3 + 1j]).conj(), 1)
    comm.recv(room := torch.zeros(2, dtype=torch.complex64), 0)
    return room.tolist()


# ---- collectives: shapes, strides, dtypes ---------------------------------------------------------------------------


@report("pytorch/pytorch#76527", by_rank=[[6.0] * 5, [2.0] * 5, [3.0] * 5], ranks=3)
def reduce_keeps(comm: Any) -> list[float]:
    """Reduce, where only rank 0 asks for the sum -> the others keep what they had."""
    reduce(comm, tensor := torch.full((5,), comm.rank + 1.0), 0)
    return tensor.tolist()


@report("pytorch/pytorch#192920", by_rank=[[[1, 2], [1, 2], [11, 12]], [[10, 20], [1, 2], [10, 10]]])
def columns(comm: Any) -> Any:
    """Scatter, broadcast and reduce of a matrix's column -> as of contiguous tensors."""

    def column(*values: float) -> torch.Tensor:
        return torch.tensor([values] * 3).T.contiguous()[:, 1]

    scatter(comm, part := column(0.0, 0.0), [column(1.0, 2.0), column(10.0, 20.0)] if comm.rank == 0 else None, 0)
    broadcast(comm, whole := column(1.0 + comm.rank, 2.0), 0)
    reduce(comm, total := column(*((1.0, 2.0) if comm.rank == 0 else (10.0, 10.0))), 0)
    return [part.tolist(), whole.tolist(), total.tolist()]


@report("pytorch/pytorch#74809", by_rank=[None, [[[0.0, 5.0], [1.0, 6.0]]] * 2])
def from_numpy(comm: Any) -> Any:
    """Gather of a tensor made of a transposed numpy array -> elements in their places."""
    tensor = torch.from_numpy(np.transpose(np.array([[0.0, 1.0], [5.0, 6.0]])))
    rooms = [torch.zeros_like(tensor) for _ in range(2)] if comm.rank == 1 else None
    gather(comm, tensor, rooms, 1)
    return rooms and [room.tolist() for room in rooms]


@report("pytorch/pytorch#85234, pytorch/gloo#179, pytorch/pytorch#20651", gives=[(0,), [(1, 0, 2)] * 2])
def without_elements(comm: Any) -> Any:
    """Collectives of tensors without elements -> nothing to add, and nothing hangs."""
    all_reduce(comm, summed := torch.zeros(0))
    reduce(comm, summed, 1)
    all_gather(comm, rooms := [torch.ones(1, 0, 2) for _ in range(2)], torch.ones(1, 0, 2))
    return [tuple(summed.shape), [tuple(room.shape) for room in rooms]]


@report("pytorch/gloo#154, pytorch/gloo#209", gives=[3.0, 3.0, 3.0], ranks=1)
def alone(comm: Any) -> list[float]:
    """Collectives of a single rank -> what it has."""
    all_reduce(comm, summed := torch.tensor([3.0]))
    all_gather(comm, rooms := [torch.zeros(1)], summed)
    reduce_scatter(comm, part := torch.zeros(1), rooms)
    return [summed.item(), rooms[0].item(), part.item()]


@report(
    "pytorch/pytorch#89197, pytorch/pytorch#90245",
    by_rank=[[[[True, False], [False, False]], [False, True], [True, False]], [None, [True, False], [True, False]]],
)
def bools(comm: Any) -> Any:
    """Bools in broadcast, gather, scatter and a maximum -> as other numbers."""
    mine, part = torch.tensor([comm.rank == 0, False]), torch.zeros(2, dtype=torch.bool)
    rooms = [torch.ones(2, dtype=torch.bool) for _ in range(2)] if comm.rank == 0 else None
    gather(comm, mine, rooms, 0)
    scatter(comm, part, [torch.tensor([False, True]), torch.tensor([True, False])] if comm.rank == 0 else None, 0)
    all_reduce(comm, mine, ReduceOp.MAX)
    broadcast(comm, mine, 1)
    return [rooms and [room.tolist() for room in rooms], part.tolist(), mine.tolist()]


@report("pytorch/pytorch#2699")
def every_dtype(comm: Any) -> None:
    """Broadcast of every integer and floating dtype -> all of them."""
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    for kind in [*kinds, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]:
        broadcast(comm, tensor := torch.full((3,), 1 + comm.rank).to(kind), 1)
        assert tensor.float().tolist() == [2.0] * 3, kind


@report("pytorch/pytorch#111131", gives=[3.5, -1.0])
def bfloat16(comm: Any) -> list[float]:
    """All-reduce of bfloat16 -> the sum."""
    all_reduce(comm, tensor := torch.tensor([[1.5, -0.5], [2.0, -0.5]][comm.rank], dtype=torch.bfloat16))
    return tensor.tolist()


@report("meta-pytorch/torchcomms#287, intel/torch-xpu-ops#3020", gives=[[2.0] * 7, 2.0], ranks=3)
def average(comm: Any) -> Any:
    """AVG of seven elements, and of a scalar, over three ranks
    -> divided by the ranks, not by the elements; of integers, refused by name.
    """
    all_reduce(comm, tensor := torch.full((7,), comm.rank + 1.0), ReduceOp.AVG)
    all_reduce(comm, scalar := torch.tensor(comm.rank + 1.0), ReduceOp.AVG)
    says(refused(comm, lambda: all_reduce(comm, torch.ones(7, dtype=torch.int32), ReduceOp.AVG)), "AVG", "int32")
    return [tensor.tolist(), scalar.item()]


def extremes_of_nan(comm: Any, *algorithms: str) -> None:
    for algorithm in algorithms:
        for who in range(comm.size):
            tensor = torch.full((6,), float(comm.rank))
            tensor[who] = torch.nan if comm.rank == who else tensor[who]
            for op, right in ((ReduceOp.MAX, 2.0), (ReduceOp.MIN, 0.0)):
                all_reduce(comm, found := tensor.clone(), op, algorithm)
                wanted = torch.full((6,), right)
                wanted[who] = torch.nan
                assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


@report("ml-explore/mlx#4072, openshmem-org/specification#467", ranks=3)
def maximum_of_nan(comm: Any) -> None:
    """MAX and MIN where one rank has NaN, first, in the middle or last -> NaN, as torch.maximum gives, by every algorithm."""
    extremes_of_nan(comm, "flat", "tree", "ring", "double_tree", "two_rings", "blockwise", "halving_doubling", "auto")


@report("ml-explore/mlx#4072", ranks=3, simulated=False, options={"backend": "gloo"})
def maximum_of_nan_by_gloo(comm: Any) -> None:
    """MAX and MIN of NaN by gloo's own all-reduce, which takes the number of the two -> NaN, as by all others."""
    extremes_of_nan(comm, "native")


@report("ml-explore/mlx#4072", ranks=3, simulated=False)
def maximum_of_nan_in_shared_memory(comm: Any) -> None:
    """MAX and MIN of NaN by shared memory's own all-reduce -> NaN, as by all others."""
    extremes_of_nan(comm, "native")


@report("NVIDIA/nccl#1417, NVIDIA/nccl#1394", raises=(Mismatch, "float32[100]", "float32[50]"), options=SOON)
def different_sizes(comm: Any) -> None:
    """Ranks all-reduce tensors of different sizes -> an error that says who sends how much, and no number."""
    all_reduce(comm, torch.ones(100 if comm.rank == 0 else 200))


@report("pytorch/pytorch#146468", by_rank=[[[1.0], []], [[2.0], []]])
def nothing_to_send(comm: Any) -> Any:
    """An all-to-all in which one rank has nothing to send -> the other's part arrives."""
    mine = [torch.tensor([1.0]), torch.tensor([2.0])] if comm.rank == 0 else [torch.zeros(0), torch.zeros(0)]
    all_to_all(comm, rooms := [torch.zeros(1), torch.zeros(0)], mine)
    return [room.tolist() for room in rooms]


@report("pytorch/pytorch#117486", raises=(Mismatch, "1", "3"), options=SOON)
def different_splits(comm: Any) -> None:
    """An all-to-all whose ranks mean different sizes -> an error with both lengths."""
    all_to_all(comm, [torch.zeros(1 if r == comm.rank else 3) for r in range(2)], [torch.ones(1) for _ in range(2)])


@report(
    "horovod/horovod#2640",
    raises=(Mismatch, "all_reduce", "broadcast", "rank 0", "rank 1"),
    simulated=False,
    options={"debug": True},
)
def different_calls(comm: Any) -> None:
    """Ranks call different collectives -> in debug mode: which rank calls what."""
    all_reduce(comm, torch.ones(2)) if comm.rank == 0 else broadcast(comm, torch.ones(2), 0)


@report("pytorch/pytorch#5506, pytorch/pytorch#14632", gives=True)
def one_room_for_all(comm: Any) -> bool:
    """All-gather into a list of one tensor, as often as there are ranks -> refused, with the two places in the list."""
    rooms = [torch.zeros(1)] * 2
    says(refused(comm, lambda: all_gather(comm, rooms, torch.ones(1)), rooms[0]), "tensor_list[0]", "tensor_list[1]")
    return True


@report("pytorch/pytorch#5506", raises=(ValueError, "gather_list[0]", "gather_list[1]"))
def one_room_at_the_root(comm: Any) -> None:
    """Gather into a list of one tensor -> refused on the root, with the two places in the list."""
    gather(comm, torch.ones(1), [torch.zeros(1)] * 2 if comm.rank == 0 else None, 0)


@report("llnl/Elemental#146, TysonRayJones/Distributed-Full-State-Algorithms#2", gives=True)
def one_buffer_to_swap(comm: Any) -> bool:
    """Two ranks swap a tensor by sendrecv, from and into the same memory -> refused, with both arguments' names."""
    mine, peer = torch.arange(4.0) + 10 * comm.rank, 1 - comm.rank
    says(refused(comm, lambda: comm.sendrecv(mine, peer, mine, peer), mine), "into", "tensor", "memory")
    says(refused(comm, lambda: comm.sendrecv(mine[1:], peer, mine[:-1], peer), mine), "into", "tensor", "memory")
    comm.sendrecv(mine[2:], peer, mine[:2], peer)  # which do not meet
    assert mine.tolist() == [v + 10 * r for r, v in ((peer, 2), (peer, 3), (comm.rank, 2), (comm.rank, 3))]
    return True


@report("pmodels/mpich#2049, OpenMDAO/OpenMDAO#904, FFTW/fftw3#47", gives=True)
def transposed_in_place(comm: Any) -> bool:
    """An all-to-all from and into the same list -> refused, with both lists' names and places."""
    mine = [torch.tensor([10.0 * comm.rank + r]) for r in range(2)]
    says(refused(comm, lambda: all_to_all(comm, mine, mine), *mine), "output_list[", "input_list[")
    return True


@report("llnl/Aluminum#22", gives=[[0.0, 0.0, 1.0, 1.0], [2.0, 4.0]])
def rightly_in_place(comm: Any) -> Any:
    """All-gather from the rank's own part of the output, reduce-scatter into that of the input -> as out of place."""
    whole = torch.full((4,), float(comm.rank))
    all_gather_into_tensor(comm, whole, whole.chunk(2)[comm.rank])
    given = torch.tensor([2.0, 4.0, 2.0, 4.0]) / 2
    reduce_scatter_tensor(comm, part := given.chunk(2)[comm.rank], given)
    return [whole.tolist(), part.tolist()]


@report("pytorch/pytorch#126556, pytorch/pytorch#152706", gives=True)
def no_sum(comm: Any) -> bool:
    """Sums of dtypes that torch cannot add: float8, unsigned integers of 16 bits and more -> refused by name."""
    for kind in (torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64):
        for algorithm in ("ring", "tree", "flat"):
            told = refused(comm, lambda kind=kind, how=algorithm: all_reduce(comm, torch.ones(4).to(kind), algorithm=how))
            says(told, "SUM", str(kind))
    return True


@report("pytorch/pytorch#191978", gives=True, simulated=False)
def no_sum_of_bools(comm: Any) -> bool:
    """A sum of truth values, by our algorithms and by the world's own -> refused by all alike, and what to use instead."""
    for algorithm in ("ring", "native"):
        told = refused(comm, lambda how=algorithm: all_reduce(comm, torch.ones(4, dtype=torch.bool), algorithm=how))
        says(told, "SUM", "bool")
    return True


# ---- groups of some ranks -------------------------------------------------------------------------------------------


@report("pytorch/pytorch#25390", raises=(RankHung, "split", "rank 2 has returned"), ranks=3, options=SOON)
def members_alone(comm: Any) -> None:
    """A group's members alone make it -> who waits in split, and who has returned."""
    if comm.rank != 2:
        comm.split(0)


@report(
    "pytorch/pytorch#38375, pytorch/pytorch#130102",
    by_rank=[[3.0, [0.0, 3.0]], [3.0, [1.0, 2.0]], [3.0, [1.0, 2.0]], [3.0, [0.0, 3.0]], None],
    ranks=5,
)
def two_groups(comm: Any) -> Any:
    """Collectives in two groups at once, one of them of ranks 0 and 3
    -> each its own; ranks count from 0 in it; who is in none gets None.
    """
    group = comm.split({0: 0, 3: 0, 1: 1, 2: 1}.get(comm.rank))
    if group is None:
        return None
    all_reduce(group, total := torch.tensor([float(comm.rank)]))
    all_gather(group, rooms := [torch.zeros(1), torch.zeros(1)], torch.tensor([float(comm.rank)]))
    return [total.item(), [room.item() for room in rooms]]


@report("pytorch/torchtitan#110, pytorch/pytorch#104026", gives=[[2.0, 2.0], [4.0, 4.0], [8.0, 8.0]])
def in_a_model_without_contents(comm: Any) -> Any:
    """Groups are made, and tensors added up, where a model is built under torch.device("meta")
    -> what they need themselves has contents: the sums.
    """
    tensor, found = torch.ones(2), []
    with torch.device("meta"):
        for group in (comm, comm.split(0), comm.split(0, key=-comm.rank)):
            all_reduce(group, tensor)
            found.append(tensor.tolist())
    return found


@report("pytorch/torchtitan#110", gives=[2.0], simulated=False)
def torchs_group_without_contents(comm: Any) -> list[float]:
    """PyTorch's group of a run is made under torch.device("meta") -> a group like any other."""
    with torch.device("meta"):
        group = d2lps.backend.group(comm)
    dist.all_reduce(ones := torch.ones(1), group=group)
    return ones.tolist()


@report("sgl-project/sglang#39469, NVIDIA/Megatron-LM#723", raises=(RankHung, "rank 0", "5 s"), simulated=False, options=SOON)
def the_groups_own_timeout(comm: Any) -> None:
    """PyTorch's group of a run, and one rank skips an all-reduce of it -> told within the run's timeout, not in half an hour."""
    d2lps.backend.group(comm)
    if comm.rank == 0:
        dist.all_reduce(torch.ones(2))


# ---- gradients: replicas, and PyTorch's own on the backend "d2lps" --------------------------------------------------


@report("huggingface/transformers#24970", gives=[[1.0], [2.0]], simulated=False)
def other_weights(comm: Any) -> Any:
    """DDP on the backend, each rank uses another of two weights, find_unused_parameters
    -> the mean over the ranks, with zeros for who has not used it.
    """

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weights[comm.rank] * x).sum()

    model = DistributedDataParallel(Two(), process_group=d2lps.backend.group(comm), find_unused_parameters=True)
    model(torch.tensor([2.0 * (comm.rank + 1)])).backward()
    return [weight.grad.tolist() for weight in model.parameters()]


@report("microsoft/PyMarlin#80, pytorch/pytorch#38174", raises=(RankHung, "rank 0 waits", "rank 1 has returned"), options=SOON)
def a_batch_more(comm: Any) -> None:
    """One rank has a batch more than the other -> who waits for whom, and who has returned."""
    model = DataParallel(comm, nn.Linear(2, 1))
    for _ in range(2 - comm.rank):
        model(torch.ones(1, 2)).sum().backward()


@report("pytorch/pytorch#105723", raises=(RuntimeError, "rank 1", "1.weight", "1.bias"), options=SOON)
def left_out(comm: Any) -> None:
    """A weight is left out of a loss on one rank -> its name, and the rank that left it out."""
    model = DataParallel(comm, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    layers = model.module if comm.rank == 0 else model.module[0]
    layers(torch.ones(1, 2)).sum().backward()


@report("huggingface/accelerate#1726, pytorch/PiPPy#1133", by_rank=[[1.0, 6.5], [10.0, 6.5]])
def no_sync(comm: Any) -> list[float]:
    """No_sync around the backward pass alone, the forward pass outside
    -> the first backward pass stays on its rank, the second averages both.
    """
    model, x = DataParallel(comm, nn.Linear(1, 1, bias=False)), torch.tensor([[1.0 + 9 * comm.rank]])
    first, second = model(x), model(torch.ones(1, 1))
    with model.no_sync():
        first.sum().backward()
    alone = model.module.weight.grad.item()
    second.sum().backward()
    return [alone, model.module.weight.grad.item()]


@report("pytorch/pytorch#47163, pytorch/pytorch#72787")
def odd_strides(comm: Any) -> None:
    """1 x 1 convolutions on channels-last memory: odd strides of gradients -> the whole batch's gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3)).double().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    wanted = torch.autograd.grad(net(x).square().mean(), [*net.parameters()])
    model = DataParallel(comm, net)
    model(x.chunk(2)[comm.rank]).square().mean().backward()
    assert_close([parameter.grad for parameter in net.parameters()], [*wanted])


@report("pytorch/pytorch#22095, pytorch/pytorch#65907")
def called_twice(comm: Any) -> None:
    """A model with a batch norm is called twice before one backward pass
    -> both calls' gradients, and no complaint of buffers that were written into.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    x, y = torch.randn(2, 8, 2, dtype=torch.float64)  # the same on all ranks, and so is the mean
    wanted = torch.autograd.grad((net(x) * net(y)).mean(), [*net.parameters()])
    model = DataParallel(comm, net)
    (model(x) * model(y)).mean().backward()
    assert_close([parameter.grad for parameter in net.parameters()], [*wanted])


@report("deepspeedai/DeepSpeed#8467")
def no_elements(comm: Any) -> None:
    """A layer without outputs: a parameter of no elements, but of a shape -> it keeps its shape, and the others train."""
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 0)), torch.ones(1, 4)
        wanted = net[0].weight.detach() - 1
        owner = Zero(comm, net, SGD, stage) if stage else DataParallel(comm, net)
        (net(x).sum() + net[0](x).sum()).backward()
        owner.step() if stage else SGD([*net.parameters()]).step()
        with owner.gathered() if stage else nullcontext():
            assert_close(net[0].weight.detach(), wanted)
            assert tuple(net[1].weight.shape) == (0, 2), stage


@report("deepspeedai/DeepSpeed#8130, huggingface/transformers#47254")
def recomputed(comm: Any) -> None:
    """ZeRO-3 of a model with frozen layers whose passes are recomputed -> the step of one process."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
            self.norm.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda y: torch.tanh(self.linear(self.norm(y))), x, use_reentrant=False)

    torch.manual_seed(0)
    net, x = nn.Sequential(Block(), Block()).double(), torch.randn(4, 4, dtype=torch.float64)
    reference = deepcopy(net)
    reference(x).square().mean().backward()
    wanted = [p.detach() - p.grad for p in reference.parameters() if p.requires_grad]
    zero = Zero(comm, net, SGD, 3)
    net(x.chunk(2)[comm.rank]).square().mean().backward()
    zero.step()
    with zero.gathered():
        assert_close([p.detach() for p in net.parameters() if p.requires_grad], wanted)


@report("huggingface/transformers#34191, modelscope/ms-swift#10165")
def tokens_that_count(comm: Any) -> None:
    """Ranks and micro-batches with different numbers of tokens that count
    -> the mean over all tokens of the batch, whoever has them, and its gradient.
    """

    class Ragged:
        def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            dice = [torch.Generator().manual_seed(number) for number in range(first, first + count)]
            tokens = torch.stack([torch.randint(11, (8,), generator=each) for each in dice])
            targets = tokens.roll(-1, 1)
            for row, number in zip(targets, range(first, first + count), strict=True):
                row[1 + number % 7 :] = -100
            return tokens, targets

    sizes = Transformer(layers=2, hidden=8, heads=2, vocab=11, sequence=8)
    trainer = train(comm, sizes, Plan(dp=2, micro_batch=1, precision="fp64"), Ragged(), 1, 8, SGD)
    net, (tokens, targets) = sizes.module(0, torch.float64), Ragged().batch(0, 8)
    loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    norm = torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).norm()
    assert_close((trainer.losses[0], trainer.norms[0]), (loss.item(), norm.item()))


@report("pytorch/pytorch#115710, pytorch/pytorch#136009", gives=[False, True, 4.0])
def overflow_on_one(comm: Any) -> Any:
    """A gradient overflows on one rank of two, under a loss scale
    -> both skip the step, with the same scale after it and the same weights.
    """
    net = nn.Linear(1, 1, bias=False)
    trainer = MixedPrecision(comm, net, SGD, torch.float16, scaler=LossScaler(8.0))
    stepped = []
    for size in (1e6 if comm.rank == 1 else 1.0, 1.0):
        trainer.backward((net(torch.ones(1, 1, dtype=torch.float16)).float() * size).sum())
        stepped.append(trainer.step())
    weights = [torch.zeros_like(net.weight) for _ in range(2)]
    all_gather(comm, weights, net.weight.detach())
    assert torch.equal(*weights)
    return [*stepped, trainer.scaler.scale]


def unfreezes(comm: Any, stage: int) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    alone = deepcopy(net)
    net[0].requires_grad_(False)
    owner = Zero(comm, net, SGD, stage) if stage else DataParallel(comm, net)
    net[0].requires_grad_(True)
    (net if stage else owner)(x[comm.rank :][:1]).square().mean().backward()
    (owner if stage else SGD([*net.parameters()])).step()
    alone(x).square().mean().backward()
    SGD([*alone.parameters()]).step()
    with owner.gathered() if stage else nullcontext():
        assert_close([*net.parameters()], [*alone.parameters()])


@report("Lightning-AI/pytorch-lightning#20340")
def unfrozen(comm: Any) -> None:
    """Layers that were frozen when DataParallel was made are trained from now on -> they train as in one process."""
    unfreezes(comm, 0)


@report("Lightning-AI/pytorch-lightning#20340")
def unfrozen_in_shards(comm: Any) -> None:
    """Layers that were frozen when Zero was made are trained from now on -> they train as in one process."""
    for stage in (1, 2, 3):
        unfreezes(comm, stage)


class Counting(nn.Module):
    """That makes a new tensor of its buffer in each pass, as a batch norm does of how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().sum()
        return self.layer(x)


@report("pytorch/pytorch#63916, pytorch/pytorch#111138", gives=[[9.0], [3.0]])
def reassigned_buffers(comm: Any) -> Any:
    """Buffers that become new tensors in forward passes of DataParallel -> they are rank 0's; without broadcasts those from which
    all begin are.
    """
    found = []
    for broadcasts in (True, False):
        net = Counting()
        net.seen += 3 + 7 * comm.rank
        model = DataParallel(comm, net, broadcast_buffers=broadcasts)
        begun = net.seen.tolist()
        for _ in range(3):
            model(torch.full((2, 1), 1.0 + comm.rank)).sum().backward()
        found.append(net.seen.tolist() if broadcasts else begun)
    return found


@report("pytorch/pytorch#51427", simulated=False)
def rebuilt_buckets(comm: Any) -> None:
    """DDP's buckets change after the first passes, and a codec has left values unsent -> they go to the parameters of which they
    were left: of every parameter, what has come adds up to its gradients, but for what one value may be behind.
    """
    net = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in ((4, 6), (6, 3), (3, 5))))
    with torch.no_grad():
        for weight, size in zip(net.parameters(), (0.5, 0.05, 5.0), strict=True):
            weight.fill_(size)
    alone = deepcopy(net)
    model = DistributedDataParallel(net, process_group=d2lps.backend.group(comm), static_graph=True, bucket_cap_mb=1e-4)
    model.register_comm_hook(*d2lps.backend.ddp_hook(d2lps.compress.top_k(0.3)))
    alone(x := torch.ones(1, 4)).sum().backward()
    came = [torch.zeros_like(weight) for weight in net.parameters()]
    for _ in range(passes := 12):
        model.zero_grad()
        model(x).sum().backward()
        for total, weight in zip(came, net.parameters(), strict=True):
            total += weight.grad
    for total, weight in zip(came, alone.parameters(), strict=True):
        assert (total / passes - weight.grad).abs().max() <= weight.grad.abs().max() / 2


@report("pytorch/pytorch#57410, pytorch/pytorch#59522", gives=32768.0, simulated=False)
def overflow_in_a_hook(comm: Any) -> float:
    """A gradient overflows under GradScaler and a hook of 16 bits -> all ranks skip the step and halve the scale."""
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=d2lps.backend.group(comm))
    model.register_comm_hook(*d2lps.backend.ddp_hook(d2lps.compress.half()))
    optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler("cpu")
    for size in (1.0, 1e36, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).sum() * size).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@report("deepspeedai/DeepSpeed#6480", raises=(RuntimeError, "reduce"))
def clipped_too_early(comm: Any) -> None:
    """Clipping the shards of ZeRO before its reduction -> refused: what is to come first."""
    zero = Zero(comm, net := nn.Linear(4, 1, bias=False), SGD, 2)
    net(torch.full((1, 4), 100.0)).sum().backward()
    clip_by_global_norm(zero.shards, 1.0)
    zero.step()


class OutOfMemory(torch.autograd.Function):
    """On the way back, at a long sample."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("too long a sample")


@report("pytorch/pytorch#44353, pytorch/pytorch#64636", gives=[[2.5, 2.5]])
def caught_on_all(comm: Any) -> Any:
    """A backward pass runs out of memory on all ranks, which catch it, drop the batch and go on -> the next batch's gradient."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    nn.init.ones_(net[0].weight), nn.init.ones_(net[1].weight)
    model = DataParallel(comm, net)
    try:
        net[1](OutOfMemory.apply(net[0](torch.ones(1, 2)))).sum().backward()
    except MemoryError:
        model.drop()
    model(torch.tensor([[1.0 + comm.rank, 1.0]])).sum().backward()
    return net[1].weight.grad.tolist()


@report("pytorch/pytorch#17356", raises=(ValueError, "0.weight", "sparse"))
def sparse_gradients(comm: Any) -> None:
    """An embedding with sparse gradients in DataParallel -> refused by its name."""
    model = DataParallel(comm, nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)))
    model(torch.tensor([comm.rank, 3])).sum().backward()


@report("deepspeedai/DeepSpeed#1958, modelscope/ms-swift#4374", raises=(OverflowError, "scale"))
def never_recovers() -> None:
    """Every step overflows, and the loss scale is halved for ever -> an error, not steps that are skipped in silence."""
    scaler = LossScaler()
    for _ in range(2000):
        scaler.update(True)


@report("NVIDIA/Megatron-LM#372, NVIDIA/Megatron-LM#502", gives=-301.0)
def many_micro_batches(comm: Any) -> float:
    """Micro-batches in BF16 with gradients of 256, 1, 1, ... -> their sum of FP32, where BF16's stays 256."""
    nn.init.zeros_((net := nn.Linear(1, 1, bias=False)).weight)
    trainer = MixedPrecision(comm, net, SGD, torch.bfloat16, torch.float32, main_grads=True)
    for size in (256.0, *[1.0] * 45):
        trainer.backward(net(torch.full((1, 1), size, dtype=torch.bfloat16)).sum())
    trainer.step()
    return trainer.masters[0].item()


@report("deepspeedai/DeepSpeed#2768", gives=-302.0)
def many_passes_in_shards(comm: Any) -> float:
    """Passes in BF16 under ZeRO with gradients of 256, 1, 1, ... -> their sum of FP32 in every stage, where BF16's stays 256."""
    steps = []
    for stage in (1, 2, 3):
        nn.init.zeros_((net := nn.Linear(1, 1, bias=False)).weight)
        zero = Zero(comm, net, SGD, stage, param_dtype=torch.bfloat16, main_grads=True)
        for size in (256.0, *[1.0] * 46):
            net(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
        zero.step()
        steps.append(sum(shard.sum() for shard in zero.shards))
    all_reduce(comm, found := torch.stack(steps))
    assert found.tolist() == [found[0]] * 3
    return found[0].item()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@report(
    "pytorch/pytorch#143536, huggingface/transformers#10596",
    raises=(RankHung, "rank 0 waits", "rank 1 has returned"),
    options=SOON,
)
def saved_on_one(comm: Any, folder: str) -> None:
    """A sharded model is saved on rank 0 alone -> who waits for whom, and who has returned."""
    zero = Zero(comm, nn.Linear(4, 4), SGD, 3)
    if comm.rank == 0:
        save(comm, folder, 1, zero.pieces())


@report("deepspeedai/DeepSpeed#2413, huggingface/transformers#10789", raises=(ValueError, "0.weight"))
def placeholders(comm: Any, folder: str) -> None:
    """A ZeRO-3 model's own parameters are saved, which are not there between passes -> refused by name."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    Zero(comm, net, SGD, 3)
    save(comm, folder, 1, module_pieces(net))


@report("deepspeedai/DeepSpeed#6771, deepspeedai/DeepSpeed#5439")
def frozen_and_buffers(comm: Any, folder: str) -> None:
    """A model with frozen layers and a batch norm's statistics is saved under ZeRO -> all of it is in the checkpoint."""
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        net[0].requires_grad_(False)
        zero = Zero(comm, net, SGD, stage)
        net(torch.arange(8.0).view(2, 4)).square().mean().backward()
        zero.step()
        save(comm, f"{folder}/{stage}", 1, zero.pieces())
        other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        load(comm, f"{folder}/{stage}", module_pieces(other))
        with zero.gathered():
            assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)


@report("huggingface/pytorch-image-models#110, pytorch/pytorch#30718", raises=(ValueError, "1.running_mean", "rank"))
def unlike_statistics(comm: Any, folder: str) -> None:
    """A batch norm's statistics are each rank's own -> a checkpoint names them, and is no mixture of two ranks'."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    net(torch.arange(8.0).view(2, 4) * (1 + comm.rank))
    save(comm, folder, 1, module_pieces(net))


SMALL = Transformer(layers=2, hidden=8, heads=2, vocab=96, sequence=8, tied=True)
ADAM = partial(torch.optim.AdamW, lr=1e-2)


@report("pytorch/torchtitan#4598, pytorch/pytorch#60265", gives=True, simulated=False)
def schedules(comm: Any, folder: str) -> bool:
    """A schedule of learning rates is made before a run goes on from a checkpoint -> the rates and losses of a run that was not
    interrupted; left out, it is refused.
    """

    def steps(count: int, begin: bool) -> list[tuple[float, float]]:
        trainer = Trainer(comm, SMALL, Plan(dp=2, zero=1, precision="fp64"), text(8), batch=6, optimizer=ADAM)
        optimizer = trainer.zeros[0].optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        if not begin:
            try:
                resume(trainer, folder)
            except ValueError as error:
                says(str(error), "zeros[0].optimizer", "schedule")
            else:
                raise AssertionError("nothing was refused")
            resume(trainer, folder, states={"schedule": schedule})
        found = []
        for _ in range(count):
            trainer.step()
            found.append((optimizer.param_groups[0]["lr"], trainer.losses[-1]))
            schedule.step()
            if begin and len(found) == 2:
                save_run(trainer, Checkpoints(comm, folder), {"schedule": schedule}).wait()
        return found

    return steps(4, True)[2:] == steps(2, False)


@report("meta-pytorch/torchft#277", gives=True)
def rare_talk(comm: Any, folder: str) -> bool:
    """DiLoCo goes on from a checkpoint in the middle of a round -> as if it had not been interrupted, outer momentum and all."""

    def trains(first: int, last: int) -> list[float]:
        nn.init.ones_((net := nn.Linear(2, 1, bias=False)).weight)
        optimizer, diloco = SGD(net.parameters()), DiLoCo(comm, net.parameters(), every=3)
        states = {"net": net, "optimizer": optimizer, "diloco": diloco}
        if first:
            load(comm, folder, {}, states=states)
        for step in range(first, last):
            optimizer.zero_grad()
            net(torch.tensor([[1.0 + step, comm.rank]])).square().sum().mul(1e-3).backward()
            optimizer.step()
            diloco.step()
            if step + 1 == 4 and not first:
                save(comm, folder, 4, {}, states=states)
        return [*net.weight.flatten().tolist()]

    return trains(0, 9) == trains(4, 9)


def some_steps(comm: Any, plan: Plan, steps: int, folder: str = "", begin: bool = True) -> list[tuple[float, float]]:
    """Loss and norm of each step; the first ones are saved, or what was saved goes on."""
    trainer = Trainer(comm, SMALL, plan, text(8), batch=6, optimizer=ADAM)
    if not begin:
        resume(trainer, folder)
    for _ in range(steps):
        trainer.step()
    if folder and begin:
        save_run(trainer, checkpoints := Checkpoints(comm, folder))
        checkpoints.wait()
    return [*zip(trainer.losses, trainer.norms, strict=True)]


@report("deepspeedai/DeepSpeed#2898, deepspeedai/Megatron-DeepSpeed#439")
def other_ranks(folder: str) -> None:
    """A run of two ranks under ZeRO-3 goes on with three, under ZeRO-1
    -> the losses and norms of the run that was never interrupted, by one rank.
    """
    d2lps.run(some_steps, 2, Plan(dp=2, zero=3, precision="fp64"), 2, folder)
    found = d2lps.run(some_steps, 3, Plan(dp=3, zero=1, precision="fp64"), 2, folder, False)
    wanted = d2lps.simulate(some_steps, star(1, 1e9), Plan(precision="fp64"), 4)
    assert_close([*found], [wanted[0]] * 3)


# ---- pipelines, experts, long sequences -----------------------------------------------------------------------------


def two_stages(comm: Any, x: Sequence[torch.Tensor], y: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Through a pipeline of two ranks: the loss, and this rank's gradients, as a model's own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    loss = execute(comm, {comm.rank: net[comm.rank]}, one_f_one_b(2, len(x)), x, y, nn.MSELoss(reduction="sum"))
    total = sum(nn.functional.mse_loss(net(a), b, reduction="sum") for a, b in zip(x, y, strict=True))
    assert comm.rank == 0 or (loss is not None and torch.allclose(loss, total))
    wanted = torch.autograd.grad(total, [*net[comm.rank].parameters()])
    assert_close([parameter.grad for parameter in net[comm.rank].parameters()], [*wanted])
    return total.item(), [*wanted]


def samples(count: int, *shape: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, generator=dice) for _ in range(count)]


@report("deepspeedai/DeepSpeed#5729")
def own_targets(comm: Any) -> None:
    """A pipeline's last stage compares outputs with targets, several micro-batches under way
    -> each with its own: one process's loss and gradients.
    """
    two_stages(comm, samples(5, 2, 3), samples(5, 2, 2))


@report("deepspeedai/DeepSpeed#5696")
def longer(comm: Any) -> None:
    """The next batch through a pipeline has longer sequences -> each batch's own shape."""
    two_stages(comm, samples(3, 2, 5, 3), samples(3, 2, 5, 2))
    two_stages(comm, samples(3, 2, 7, 3), samples(3, 2, 7, 2))


class TwoOutputs(nn.Module):
    """A stage that makes a tuple."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, x


@report("pytorch/PiPPy#1054", raises=(ValueError, "stage 0", "micro-batch 0", "tuple"))
def of_two_outputs(comm: Any) -> None:
    """A pipeline's stage makes a tuple -> refused, with the stage and the micro-batch."""
    stage = TwoOutputs() if comm.rank == 0 else nn.Linear(3, 2)
    execute(comm, {comm.rank: stage}, one_f_one_b(2, 2), [torch.ones(2, 3)] * 2, [torch.ones(2, 2)] * 2, nn.MSELoss())


@report("pytorch/pytorch#126600", raises=(ValueError, "micro-batch 1", "[1, 3]", "[2, 3]"))
def uneven_micro_batches(comm: Any) -> None:
    """A batch of three in a pipeline's micro-batches of two -> refused, with both shapes."""
    stage, x = (nn.Linear(3, 3), nn.Linear(3, 2))[comm.rank], torch.ones(3, 3)
    execute(comm, {comm.rank: stage}, one_f_one_b(2, 2), x.split(2), torch.ones(3, 2).split(2), nn.MSELoss())


@report("NVIDIA/Megatron-LM#7228, NVIDIA/Megatron-LM#7227")
def tied(comm: Any) -> None:
    """An embedding that is tied to the head, in two stages of a pipeline
    -> counted once in the gradient's norm: one rank's losses and norms.
    """
    wanted = d2lps.simulate(some_steps, star(1, 1e9), Plan(precision="fp64"), 2)[0]
    assert_close(some_steps(comm, Plan(pp=2, precision="fp64"), 2), wanted)


@report("NVIDIA/Megatron-LM#5916, ROCm/TransformerEngine#715")
def cut_and_whole(comm: Any) -> None:
    """Layers that are cut by tensor parallelism beside norms that are whole
    -> each number once in the gradient's norm: one rank's losses and norms.
    """
    wanted = d2lps.simulate(some_steps, star(1, 1e9), Plan(precision="fp64"), 2)[0]
    assert_close(some_steps(comm, Plan(tp=2, sequence_parallel=True, precision="fp64"), 2), wanted)


@report("NVIDIA/Megatron-LM#4851, PaddlePaddle/PaddleFormers#3010")
def no_tokens(comm: Any) -> None:
    """All tokens of all ranks choose experts of one rank -> nobody waits: outputs and gradients of one process."""
    torch.manual_seed(0)
    sizes = Transformer(1, hidden=4, heads=1, vocab=7, sequence=6, experts=4, capacity=float("inf"), balance=0.0)
    whole, x = Experts(sizes).double(), torch.rand(2, 6, 4, dtype=torch.float64) + 1
    with torch.no_grad():
        whole.router.weight.copy_(torch.tensor([[9.0], [1.0], [0.0], [0.0]]).expand(4, 4))
    mine = expert_parallel(comm, deepcopy(whole))
    out, right = mine(x[comm.rank : comm.rank + 1]), whole(x)
    assert_close(out, right[comm.rank : comm.rank + 1])
    assert whole.load.tolist() == [12, 0, 0, 0]
    out.square().mean().backward()
    right.square().mean().backward()
    for name in ("up", "down"):
        assert_close(getattr(mine, name).grad, getattr(whole, name).grad.chunk(2)[comm.rank])


@report("zhuzilin/ring-flash-attention#54, gpu-mode/ring-attention#6")
def in_parts(comm: Any) -> None:
    """Causal attention in parts, where the mask hides whole parts -> torch's of the whole sequence, and its gradients."""
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 8, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    wide = [given[0], *(each.repeat_interleave(2, 1) for each in given[1:])]
    wanted = nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    gradients = torch.autograd.grad(wanted.sin().sum(), given)
    for place in (folded, in_turn):
        mine = [local(comm, each.detach(), 2, place).requires_grad_() for each in given]
        out = ring_attention(comm, *mine, place=place)
        out.sin().sum().backward()
        assert_close(out, local(comm, wanted, 2, place))
        assert_close([each.grad for each in mine], [local(comm, each, 2, place) for each in gradients])


@report("huggingface/transformers#36607, NVIDIA-BioNeMo/bionemo-recipes#1449")
def next_tokens(comm: Any) -> None:
    """A sequence's last token on one rank, the next on another
    -> every token's target is the next one of the sequence: one rank's losses and norms.
    """
    wanted = d2lps.simulate(some_steps, star(1, 1e9), Plan(precision="fp64"), 2)[0]
    assert_close(some_steps(comm, Plan(cp=2, precision="fp64"), 2), wanted)


# ---- the store ------------------------------------------------------------------------------------------------------


@report("apache/mxnet#365, apache/mxnet#7893", gives=True, ranks=3, servers=2)
def pull_after_init(kv: Any) -> bool:
    """Pull at once after init, which all workers call with values of their own -> one of the values, the same for all."""
    kv.init("w", torch.full((4,), kv.rank + 1.0))
    kv.pull("w", out := torch.zeros(4)).wait()
    all_gather(kv.comm, rooms := [torch.zeros(4) for _ in range(3)], out)
    return out[0].item() in (1.0, 2.0, 3.0) and all(torch.equal(room, out[:1].expand(4)) for room in rooms)


@report("apache/mxnet#365", raises=(Refused, "'w'", "init comes first"), ranks=1)
def pull_before_init(kv: Any) -> None:
    """Pull of a key that nobody has given a value -> its name, and what comes first."""
    kv.pull("w", torch.zeros(4)).wait()


@report("dmlc/keras#63", raises=(ValueError, "'w'", "float32[64]", "float32[256, 64]"))
def other_shape(kv: Any) -> None:
    """Push of another shape than that of init -> the key and both shapes, before anything is sent."""
    kv.init("w", torch.zeros(64))
    kv.push("w", torch.zeros(256, 64))


@report("apache/mxnet#11638, apache/mxnet#9557", servers=2)
def in_two_parts(kv: Any) -> None:
    """An optimizer on servers that have parts of a matrix each -> torch's of the whole."""
    value, out = torch.arange(8.0).view(4, 2), torch.zeros(4, 2)
    kv.init("w", value)
    kv.set_optimizer("adamw", lr=0.1, weight_decay=0.1)
    weight = nn.Parameter(value.clone())
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    for step in range(3):
        weight.grad = torch.full((4, 2), step + 1.5)
        kv.pushpull("w", torch.full((4, 2), step + 1.0 + kv.rank), out).wait()
        kv.clock()
        optimizer.step()
    assert_close(out, weight.detach())


@report("dmlc/ps-lite#68, dmlc/parameter_server#32")
def a_server_is_killed() -> None:
    """A server is killed while two workers train
    -> it is started anew, with every push that was acknowledged; nobody waits for ever.
    """

    def adds(kv: Any) -> list[float]:
        kv.init("w", value := torch.zeros(3))
        for _ in range(300):
            kv.pushpull("w", torch.ones(3), value).wait()
            kv.clock()
        return value.tolist()

    run = kvstore.run(adds, 2, 2, durability="log", saboteur=lambda cluster: cluster.servers[0].kill())
    assert run == [[600.0] * 3] * 2
    says("; ".join(run.history), "server 0 was killed by SIGKILL", "server 0 runs again")


class Deadly(os.PathLike[str]):
    """A path at which whoever would write to it is killed."""

    def __fspath__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@report("Lightning-AI/pytorch-lightning#688, Lightning-AI/pytorch-lightning#19970")
def killed_while_it_saves(folder: str) -> None:
    """The worker that writes a checkpoint for all is killed there -> the next one writes it, and nothing else is left."""

    def saves(kv: Any) -> Any:
        kv.init("w", torch.arange(3.0))
        kv.save(Deadly() if kv.rank == 0 else f"{folder}/w.safetensors")
        return sorted(os.listdir(folder))

    with pytest.warns(match="rank 0 of 2 was killed by SIGKILL; the others go on"):
        run = kvstore.run(saves, 2, 1)
    assert list(run) == [None, ["w.safetensors"]]
    assert load_file(f"{folder}/w.safetensors")["w"].tolist() == [0, 1, 2]


@report("apache/mxnet#15923, apache/mxnet#4638", gives=True, servers=2)
def momentum_goes_on(kv: Any, folder: str) -> bool:
    """Momentum on two servers, saved and loaded on others -> it goes on as if it had not been interrupted."""

    def steps(count: int) -> list[float]:
        for _ in range(count):
            kv.push("w", torch.tensor([1.0, 2.0]))
            kv.clock()
        kv.pull("w", out := torch.zeros(2)).wait()
        return out.tolist()

    kv.init("w", torch.zeros(2))
    kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
    steps(2)
    kv.save(f"{folder}/w.safetensors")
    wanted = steps(2)
    kv.load(f"{folder}/w.safetensors")
    return steps(2) == wanted


@report("apache/mxnet#6078", gives=True, simulated=False, options={"consistency": "ssp", "staleness": 1})
def one_ahead(kv: Any) -> bool:
    """Staleness of 1, and one worker slower than the other -> no pull is more than an iteration ahead."""
    kv.init("w", out := torch.zeros(1))
    behind = []
    for step in range(8):
        if kv.rank == 1:
            kv.comm.sleep(0.005)
        kv.push("w", torch.ones(1))
        kv.clock()
        kv.pull("w", out).wait()
        behind.append(2 * (step + 1) - out.item())  # of the other's pushes
    return max(behind) <= 1


@report("pytorch/pytorch#77091, apache/mxnet#15923", gives=[3.0, 3.0], ranks=3)
def first_run(kv: Any, folder: str) -> list[float]:
    """Load, and where there is nothing yet, init -> the error is every worker's, and so they all init."""
    try:
        kv.load(f"{folder}/none.safetensors")
    except FileNotFoundError:
        kv.init("w", torch.zeros(2))
    kv.push("w", torch.ones(2))
    kv.clock()
    kv.pull("w", out := torch.zeros(2)).wait()
    return out.tolist()


@report("pytorch/pytorch#52040")
def by_ipv6(folder: str) -> None:
    """The processes of a job meet at an address of IPv6 -> they meet, and the store serves them."""
    Path(program := f"{folder}/job.py").write_text(
        "import torch\nfrom d2lps import kvstore\n\ndef worker(kv):\n    kv.init('w', out := torch.zeros(1))\n"
        "    kv.pushpull('w', torch.ones(1), out).wait()\n    return out.tolist()\n\nprint(kvstore.run(worker, 1, 1).results)"
    )
    with socket.socket(socket.AF_INET6) as free:
        try:
            free.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        job = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = [subprocess.Popen([sys.executable, program], env=job | {"RANK": rank}, stdout=-1, text=True) for rank in "01"]
    try:
        assert [process.communicate(timeout=200)[0] for process in processes] == ["[[1.0]]\n"] * 2
    finally:
        for process in processes:
            process.kill()
            process.wait()


@report("apache/mxnet#9190, apache/mxnet#9887", gives=True)
def unfit_rooms(kv: Any) -> bool:
    """Rows are pulled into a tensor of another dtype, and into an expanded one -> refused, with the key."""
    kv.init("w", torch.arange(8.0).view(4, 2))
    for out in (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(1, 2).expand(2, 2)):
        try:
            kv.pull_rows("w", torch.tensor([0, 3]), out).wait()
        except (TypeError, ValueError) as error:
            says(str(error), "'w'")
        else:
            raise AssertionError("nothing was refused")
    kv.pull_rows("w", torch.tensor([0, 3]), out := torch.zeros(2, 2)).wait()
    return out.tolist() == [[0.0, 1.0], [6.0, 7.0]]


# ---- data -----------------------------------------------------------------------------------------------------------


def drawn(loader: Loader, batches: int | None = None) -> list[int]:
    return [int(sample) for batch in islice(loader, batches) for sample in batch]


@report("pytorch/pytorch#31771, kan-bayashi/ParallelWaveGAN#177")
def two_epochs() -> None:
    """Two epochs of a shuffled loader, without a call of set_epoch
    -> each has every sample once over the ranks, in another order.
    """
    loaders = [Loader(range(20), 4, rank, 2) for rank in range(2)]
    first, second = ([drawn(loader) for loader in loaders] for _ in range(2))
    assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == [*range(20)]
    assert first != second


@report("pytorch/pytorch#25162")
def not_twice() -> None:
    """An evaluation of 10 samples in batches of 4 on 3 ranks -> no sample twice, none left out."""
    batches = [batch for rank in range(3) for batch in Loader(range(10), 4, rank, 3, shuffled=False)]
    assert sorted(int(sample) for batch in batches if batch is not None for sample in batch) == [*range(10)]


@report("pytorch/pytorch#5059, facebookresearch/fairseq#1383")
def own_dice() -> None:
    """Random numbers in the transforms of four workers
    -> each sample its own, however many workers there are, and others in the next epoch.
    """

    def noisy(sample: int, dice: torch.Generator) -> torch.Tensor:
        return torch.randint(2**40, (1,), generator=dice)

    one, four = (Loader(range(16), 8, transform=noisy, workers=workers) for workers in (1, 4))
    epochs = [[drawn(loader) for _ in range(2)] for loader in (one, four)]
    assert epochs[0] == epochs[1]
    assert len({*epochs[0][0], *epochs[0][1]}) == 32


@report("huggingface/accelerate#2016, KempnerInstitute/KempnerForge#57")
def twice_interrupted() -> None:
    """A loader is interrupted twice, in its second epoch -> what would have come, and no sample twice."""
    whole = Loader(range(12), 2)
    wanted = drawn(whole) + drawn(whole) + drawn(whole)
    first = Loader(range(12), 2)
    found = drawn(first) + drawn(first, 2)
    for batches in (2, None):
        state = json.loads(json.dumps(first.state_dict()))
        first = Loader(range(12), 2)
        first.load_state_dict(state)
        found += drawn(first, batches)
    assert found + drawn(first) == wanted


@report("meta-pytorch/data#1437")
def at_the_end() -> None:
    """A loader's state is taken at the very end of an epoch -> the next epoch is whole."""
    first, wanted = Loader(range(12), 2), Loader(range(12), 2)
    drawn(first)
    drawn(wanted)
    again = Loader(range(12), 2)
    again.load_state_dict(first.state_dict())
    assert drawn(again) == drawn(wanted)


# ---- planning -------------------------------------------------------------------------------------------------------


@report("bigscience-workshop/Megatron-DeepSpeed#283, NVIDIA/Megatron-LM#682, allenai/OLMo-core#478")
def operations() -> None:
    """Operations of a model with gated MLPs of an odd width and fewer heads of keys -> the closed form."""
    layers, h, heads, kv, ffn, vocab, s = 3, 48, 6, 2, 80, 100, 32
    model = Transformer(layers, h, heads, vocab, s, ffn=ffn, kv_heads=kv, gated=True)
    attention = 2 * h * (h + 2 * h * kv // heads) + 4 * s * h + 2 * h * h  # q, k and v; scores and values; the projection
    assert matrix_flops(model) == s * (layers * (attention + 3 * 2 * h * ffn) + 2 * h * vocab)


@report("AI-Hypercomputer/maxtext#678, deepspeedai/Megatron-DeepSpeed#398")
def visits_of_experts() -> None:
    """Operations of a mixture of experts, for MFU -> those of the experts that a token visits, whatever slots stay empty."""
    one = Transformer(2, 48, 6, 100, 32, ffn=80)
    for top_k, capacity in ((1, 1.0), (1, 4.0), (2, 1.25), (2, float("inf"))):
        mixture = Transformer(2, 48, 6, 100, 32, ffn=80, experts=8, top_k=top_k, capacity=capacity)
        more = 32 * 2 * ((top_k - 1) * 2 * 2 * 48 * 80 + 2 * 48 * 8)  # the other visits, and the routers
        assert matrix_flops(mixture) == matrix_flops(one) + more


# ---- topologies -----------------------------------------------------------------------------------------------------


@report("mininet/mininet#71, networkx/networkx#598", raises=(TypeError, "MultiDiGraph", "parallel links"))
def parallel_links() -> None:
    """A topology with two links from one node to another -> refused: what both of them carry is one link's bandwidth."""
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(["a", "b"], kind="device")
    for ends in (("a", "b"), ("b", "a")):
        graph.add_edges_from([ends, ends], bandwidth=1e9, latency=0.0)
    Topology(graph, "two links")


# ---- the table ------------------------------------------------------------------------------------------------------


def rows() -> Iterator[Any]:
    for row in TABLE:
        for world in row.worlds():
            yield pytest.param(row, world, id=f"{row} [{world}]")


@pytest.mark.parametrize("row, world", [*rows()])
def test_report(row: Report, world: str, tmp_path: Path) -> None:
    if row.raises:
        kind, *words = row.raises
        with pytest.raises(kind) as caught:
            row.run(world, tmp_path)
        says(str(caught.value), *words)
    else:
        results = list(row.run(world, tmp_path))
        assert results == (row.by_rank or [row.gives] * len(results))
