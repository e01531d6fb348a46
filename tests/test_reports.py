"""Public bug reports of other libraries, each as the smallest program of its situation, and what is right: a table.

`pytest tests/test_reports.py -v` shows it: the report, by its repository and number; the situation, in our words; what is right;
and in which world. A program says by its argument where it runs: `comm`, as ranks, and `kv`, as workers of a store, in processes
and in a simulation; any other by itself. Where the test of its subject has a report's situation, the table names that test.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import getdoc, signature
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from launching import ending
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import d2lps
from d2lps import Mismatch, RankHung, ReduceOp, kvstore
from d2lps.collectives import all_reduce, all_to_all, broadcast, gather, scatter
from d2lps.kvstore import Refused
from d2lps.parallel import (
    DataParallel,
    Experts,
    Transformer,
    Zero,
    execute,
    expert_parallel,
    one_f_one_b,
)
from d2lps.parallel.saving.checkpoint import save
from d2lps.topology import star

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


def says(told: str, *words: str) -> None:
    assert not [word for word in words if word not in told], told


# ---- launching, and ranks that fail ---------------------------------------------------------------------------------


@report("pytorch/pytorch#138322", raises=(RankHung, "rank 0 waits at a barrier", "rank 2 has returned"), ranks=3, options=SOON)
def one_skips_a_barrier(comm: Any) -> None:
    """One rank skips a barrier and ends -> who waits, and who has returned."""
    if comm.rank != 2:
        comm.barrier()


# ---- collectives: shapes, strides, dtypes ---------------------------------------------------------------------------


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


@report("pytorch/pytorch#117486", raises=(Mismatch, "1", "3"), options=SOON)
def different_splits(comm: Any) -> None:
    """An all-to-all whose ranks mean different sizes -> an error with both lengths."""
    all_to_all(comm, [torch.zeros(1 if r == comm.rank else 3) for r in range(2)], [torch.ones(1) for _ in range(2)])


# ---- groups of some ranks -------------------------------------------------------------------------------------------


@report("pytorch/pytorch#25390", raises=(RankHung, "split", "rank 2 has returned"), ranks=3, options=SOON)
def members_alone(comm: Any) -> None:
    """A group's members alone make it -> who waits in split, and who has returned."""
    if comm.rank != 2:
        comm.split(0)


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


# ---- pipelines, experts, long sequences -----------------------------------------------------------------------------


@report("deepspeedai/DeepSpeed#5696")
def longer(comm: Any) -> None:
    """The next batch through a pipeline has longer sequences -> each batch's own shape."""
    torch.manual_seed(0)
    net, summed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), nn.MSELoss(reduction="sum")
    for length in (5, 7):
        x, y = (torch.rand(3, 2, length, size, dtype=torch.float64).unbind() for size in (3, 2))
        loss = execute(comm, {comm.rank: net[comm.rank]}, one_f_one_b(2, 3), x, y, summed)
        total = sum(summed(net(a), b) for a, b in zip(x, y, strict=True))
        assert comm.rank == 0 or (loss is not None and torch.allclose(loss, total))
        wanted = torch.autograd.grad(total, [*net[comm.rank].parameters()])
        assert_close([parameter.grad for parameter in net[comm.rank].parameters()], [*wanted])
        net.zero_grad()


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


# ---- the store ------------------------------------------------------------------------------------------------------


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
    with ending(processes):
        assert [process.communicate(timeout=200)[0] for process in processes] == ["[[1.0]]\n"] * 2


# ---- reports whose situation the test of its subject has ----------------------------------------------------------------


def elsewhere() -> Iterator[Any]:
    """Which test it is, and below it the reports: situation -> what is right.

    test_run.test_a_function_defined_in_a_cell
        pytorch/pytorch#20375: A function of a notebook's cell, which is in no file -> other processes can run it.
    test_torchrun.test_the_first_meeting_ends_after_the_timeout_and_by_an_interrupt
        huggingface/accelerate#56, pytorch/examples#458, dnth/DEIMKit#6: RANK and WORLD_SIZE are left in the shell from another
        job, whose other processes never come -> an error after the timeout that names these variables.
    test_torchrun.test_who_is_a_task_of_a_job_is_told_how_to_meet
        facebookresearch/fairseq#4645, deepspeedai/DeepSpeed#8444: Two processes of mpirun, which names their ranks in variables
        of its own -> what to type, not two jobs of one.
    test_run.test_of_a_line_that_is_rewritten_the_last_state_is_shown
        tqdm/tqdm#375, tqdm/tqdm#565: Every rank has a progress bar, written again and again -> its last state, and whose it is.
    test_run.test_of_a_part_of_a_tensor_only_the_part_is_sent
        pytorch/pytorch#65604, pytorch/pytorch#31357: A rank returns a row of a large tensor -> the row, without the rest of the
        memory.
    test_failures.test_an_exception_is_raised_in_the_caller
        pytorch/torchtitan#1790: One rank raises, the others wait -> its own error, at once.
    test_failures.test_a_death_is_named_while_others_wait
        sgl-project/sglang#20287: The kernel kills a rank that is out of memory -> which rank, and by what signal.
    test_deadlocks.test_a_program_that_hangs_is_explained_in_every_world
        NVIDIA/nccl#479: Both ranks send first, and then receive -> a deadlock, told with its circle of ranks.
    test_run.test_messages_of_one_tag_arrive_in_order_both_ways
        pytorch/pytorch#109401: Isend and irecv of two directions, interleaved -> all complete.
    test_run.test_every_dtype
        pytorch/PiPPy#941: Complex numbers are sent, conjugated ones, too -> they arrive.
    test_run.test_strided_tensors_at_both_ends
        pytorch/pytorch#62283, pytorch/pytorch#77554: A transposed tensor is sent, a matrix of torch.linalg.qr -> elements in
        their places.
    test_run.test_a_message_that_does_not_fit_is_a_mismatch_at_both_ends
        NVIDIA/nccl#1938: The receiver's tensor is smaller than the sender's -> an error with both lengths.
    test_run.test_a_wrong_message_is_refused_before_anything_moves
        pytorch/pytorch#83912: A rank sends to itself -> refused by name.
    test_run.test_tags_and_sources_are_received_in_any_order
        pytorch/gloo#308: Several sends and receives at once, told apart by tags, in any order -> each where its tag says.
    test_collectives.test_gives_what_numpy_gives
        pytorch/pytorch#76527: Reduce, where only rank 0 asks for the sum -> the others keep what they had.
        pytorch/pytorch#192920: Scatter, broadcast and reduce of a matrix's column -> as of contiguous tensors.
        pytorch/pytorch#74809: Gather of a tensor made of a transposed numpy array -> elements in their places.
        pytorch/pytorch#85234, pytorch/gloo#179, pytorch/pytorch#20651: Tensors without elements -> nothing to add, and nothing
        hangs.
        pytorch/gloo#154, pytorch/gloo#209: Collectives of a single rank -> what it has.
        pytorch/pytorch#111131: All-reduce of bfloat16 -> the sum.
        meta-pytorch/torchcomms#287, intel/torch-xpu-ops#3020: AVG of seven elements, and of a scalar, over three ranks -> divided
        by the ranks, not by the elements.
        pytorch/pytorch#146468: An all-to-all in which one rank has nothing to send -> the other's part arrives.
    test_run.test_a_ring_in_which_one_rank_has_another_length_is_a_mismatch
        NVIDIA/nccl#1417, NVIDIA/nccl#1394: Ranks all-reduce tensors of different sizes -> who sends how much, and no number.
    test_run.test_debug_names_what_differs
        horovod/horovod#2640: Ranks call different collectives -> in debug mode: which rank calls what.
    test_aliasing.test_both_tensors_are_named_before_anything_is_sent
        pytorch/pytorch#5506, pytorch/pytorch#14632: All-gather or gather into a list of one tensor, as often as there are ranks
        -> refused, with the two places in the list.
        llnl/Elemental#146, TysonRayJones/Distributed-Full-State-Algorithms#2: Two ranks swap a tensor from and into the same
        memory -> refused, with both arguments' names.
        pmodels/mpich#2049, OpenMDAO/OpenMDAO#904, FFTW/fftw3#47: An all-to-all from and into one list -> refused, with both
        places.
    test_aliasing.test_what_lies_where_it_is_to_go_is_right
        llnl/Aluminum#22: All-gather from the rank's own part of the output, reduce-scatter into that of the input -> as out of
        place.
    test_collectives.test_what_one_algorithm_adds_up_or_refuses_all_do
        pytorch/pytorch#126556, pytorch/pytorch#152706: Sums of dtypes that torch cannot add, as float8 -> refused by name.
        pytorch/pytorch#191978: A sum of truth values, by our algorithms and by the world's own -> refused by all alike.
    test_collectives.test_an_extreme_of_no_number_is_none_by_every_algorithm_and_of_every_world
        ml-explore/mlx#4072, openshmem-org/specification#467: MAX and MIN where one rank has NaN, first, in the middle or last ->
        NaN, as torch.maximum gives, by every algorithm, shared memory's own and gloo's, too.
    test_collectives.test_groups_of_uneven_sizes_work_side_by_side
        pytorch/pytorch#38375, pytorch/pytorch#130102: Collectives in several groups at once, of any ranks -> each its own; ranks
        count from 0 in it; who is in none gets None.
    test_backend.test_a_wait_in_a_group_of_a_run_is_bounded_by_the_runs_timeout
        sgl-project/sglang#39469, NVIDIA/Megatron-LM#723: PyTorch's group of a run, and one rank skips an all-reduce of it -> told
        within the run's timeout, not in half an hour.
    test_overlap.test_in_ddp_the_forward_pass_decides_what_is_averaged_and_here_the_backward_pass
        huggingface/accelerate#1726, pytorch/PiPPy#1133: No_sync around the backward pass alone -> it stays on its rank.
    test_zero.test_odd_models
        deepspeedai/DeepSpeed#8130, huggingface/transformers#47254: ZeRO-3 of frozen layers that are recomputed -> as one process.
    test_train.test_as_one_process
        huggingface/transformers#34191, modelscope/ms-swift#10165: Ranks and micro-batches with different numbers of tokens that
        count -> the mean over all tokens of the batch, whoever has them, and its gradient.
        NVIDIA/Megatron-LM#7228, NVIDIA/Megatron-LM#7227: An embedding tied to the head, in two stages -> counted once in the
        norm.
        NVIDIA/Megatron-LM#5916, ROCm/TransformerEngine#715: Layers cut by tensor parallelism, norms whole -> each once in the
        norm.
        huggingface/transformers#36607, NVIDIA-BioNeMo/bionemo-recipes#1449: A sequence's last token on one rank, the next on
        another -> every token's target is the next one of the sequence.
    test_mixed_precision.test_an_overflow_on_one_rank_is_skipped_by_all
        pytorch/pytorch#115710, pytorch/pytorch#136009: A gradient overflows on one rank of two, under a loss scale -> both skip
        the step, with the same scale after it and the same weights.
    test_mixed_precision.test_a_scale_that_cannot_recover_is_an_error_on_all_ranks
        deepspeedai/DeepSpeed#1958, modelscope/ms-swift#4374: Every step overflows -> an error, not steps that are skipped in
        silence.
    test_mixed_precision.test_micro_batches_add_up_in_float32
        NVIDIA/Megatron-LM#372, NVIDIA/Megatron-LM#502: Micro-batches in BF16 with gradients of 1 -> their sum of FP32.
    test_zero.test_passes_are_added_up_in_the_dtype_of_the_masters
        deepspeedai/DeepSpeed#2768: Passes in BF16 under ZeRO with gradients of 1 -> their sum of FP32, where BF16's stays 256.
    test_strategies.test_who_trains_is_asked_anew
        Lightning-AI/pytorch-lightning#20340: Layers that were frozen at first are trained from now on -> they train as in one
        process.
    test_strategies.test_a_batch_that_is_dropped_or_has_failed_leaves_nothing
        pytorch/pytorch#44353, pytorch/pytorch#64636: A backward pass runs out of memory, which all catch -> the next batch's
        gradient.
    test_strategies.test_a_sparse_gradient_is_refused
        pytorch/pytorch#17356: An embedding with sparse gradients in DataParallel -> refused by its name.
    test_compress_hooks.test_residuals_follow_their_parameters_when_ddp_cuts_its_buckets_anew
        pytorch/pytorch#51427: DDP's buckets change after the first passes, and a codec has left values unsent -> they go to the
        parameters of which they were left.
    test_zero.test_clipping_before_the_reduction_is_an_error
        deepspeedai/DeepSpeed#6480: Clipping the shards of ZeRO before its reduction -> refused: what is to come first.
    test_pipeline.test_gradients_are_those_of_one_process
        deepspeedai/DeepSpeed#5729: The last stage compares outputs with targets, several micro-batches under way -> each with its
        own.
    test_pipeline.test_what_a_stage_makes_that_cannot_go_on_is_refused_with_stage_micro_batch_and_value
        pytorch/PiPPy#1054: A pipeline's stage makes a tuple -> refused, with the stage and the micro-batch.
    test_pipeline.test_micro_batches_must_be_alike
        pytorch/pytorch#126600: A batch of three in a pipeline's micro-batches of two -> refused, with both shapes.
    test_context.test_it_is_attention_of_the_whole_sequence
        zhuzilin/ring-flash-attention#54, gpu-mode/ring-attention#6: Causal attention in parts, where the mask hides whole parts
        -> torch's of the whole sequence, and its gradients.
    test_checkpoint.test_a_parameter_that_zero_3_has_taken_away_is_refused_by_name
        deepspeedai/DeepSpeed#2413, huggingface/transformers#10789: A ZeRO-3 model's own parameters are saved, which are not there
        between passes -> refused by name.
    test_checkpoint.test_all_of_a_model_and_its_optimizer_go_from_any_stage_and_ranks_to_any
        deepspeedai/DeepSpeed#6771, deepspeedai/DeepSpeed#5439: A model with frozen layers and a batch norm's statistics is saved
        under ZeRO -> all of it is in the checkpoint.
    test_checkpoint.test_copies_that_are_not_alike_are_named_on_all_ranks_and_nothing_is_written
        huggingface/pytorch-image-models#110, pytorch/pytorch#30718: A batch norm's statistics are each rank's own -> a checkpoint
        names them, and is no mixture of two ranks'.
    test_checkpoint.test_who_talks_rarely_goes_on_from_the_midst_of_a_round
        meta-pytorch/torchft#277: DiLoCo goes on from a checkpoint in the middle of a round -> as if it had not been interrupted,
        outer momentum and all.
    test_resume.test_a_schedule_made_before_resume_goes_on
        pytorch/torchtitan#4598, pytorch/pytorch#60265: A schedule of learning rates is made before a run goes on from a
        checkpoint -> the rates and losses of a run that was not interrupted.
    test_resume.test_resumed_is_uninterrupted
        deepspeedai/DeepSpeed#2898, deepspeedai/Megatron-DeepSpeed#439: A run under ZeRO-3 goes on with other ranks and another
        stage -> the losses and norms of the run that was never interrupted.
    test_kvstore_run.test_first_values_are_those_of_one_worker
        apache/mxnet#365, apache/mxnet#7893: Pull at once after init, which all workers call with values of their own -> one of
        the values, the same for all.
    test_kvstore_run.test_a_slow_worker_is_never_more_than_the_staleness_behind
        apache/mxnet#6078: Staleness of 1, and one worker slower than the other -> no pull is more than an iteration ahead.
    test_kvstore_run.test_rows_and_their_values_must_fit
        apache/mxnet#9190, apache/mxnet#9887: Rows are pulled into a tensor of another dtype, and into an expanded one -> refused,
        with the key.
    test_kvstore_failures.test_servers_are_killed_during_pushes
        dmlc/ps-lite#68, dmlc/parameter_server#32: A server is killed while workers train -> it is started anew, with every push
        that was acknowledged; nobody waits for ever.
    test_kvstore_failures.test_a_worker_that_saves_or_loads_for_all_is_killed
        Lightning-AI/pytorch-lightning#688, Lightning-AI/pytorch-lightning#19970: The worker that writes a checkpoint for all is
        killed there -> the next one writes it, and nothing else is left.
    test_kvstore_saving.test_what_was_saved_goes_on_to_the_bit
        apache/mxnet#15923, apache/mxnet#4638: Momentum on two servers, saved and loaded on others -> it goes on as if it had not
        been interrupted.
    test_kvstore_saving.test_who_finds_no_file_begins_anew
        pytorch/pytorch#77091, apache/mxnet#15923: Load, and where there is nothing yet, init -> the error is every worker's, and
        so they all init.
    test_feeding_loader.test_a_thousand_interruptions_and_changes_of_ranks_lose_and_repeat_nothing
        pytorch/pytorch#31771, kan-bayashi/ParallelWaveGAN#177: Two epochs of a shuffled loader, without a call of set_epoch ->
        each has every sample once over the ranks, in another order.
        huggingface/accelerate#2016, KempnerInstitute/KempnerForge#57, meta-pytorch/data#1437: A loader is interrupted twice, in
        its second epoch, at the very end of an epoch -> what would have come, and no sample twice.
    test_feeding_loader.test_the_end_of_an_epoch_is_as_it_is_said
        pytorch/pytorch#25162: An evaluation of 10 samples in batches of 4 on 3 ranks -> no sample twice, none left out.
    test_feeding_loader.test_processes_load_the_same_as_threads_and_dice_belong_to_samples
        pytorch/pytorch#5059, facebookresearch/fairseq#1383: Random numbers in the transforms of four workers -> each sample its
        own, however many workers there are, and others in the next epoch.
    test_predict_parts.test_operations_are_those_that_torch_counts
        bigscience-workshop/Megatron-DeepSpeed#283, NVIDIA/Megatron-LM#682, allenai/OLMo-core#478: Operations of a model with
        gated MLPs of an odd width and fewer heads of keys -> what torch counts.
    test_predict_parts.test_a_model_of_experts_has_the_operations_of_the_visits_and_empty_slots_take_their_time
        AI-Hypercomputer/maxtext#678, deepspeedai/Megatron-DeepSpeed#398: Operations of a mixture of experts, for MFU -> those of
        the experts that a token visits, whatever slots stay empty.
    test_topology.test_an_undirected_graph_is_refused
        mininet/mininet#71, networkx/networkx#598: Two links from one node to another -> refused: what both carry is one link's
        bandwidth.
    """
    for block in re.split(r"^(?=test_)", getdoc(elsewhere) or "", flags=re.MULTILINE)[1:]:
        test, *told = block.strip().split("\n    ")
        yield pytest.param(test, id=f"{' '.join(told)} [{test}]")


@pytest.mark.parametrize("test", [*elsewhere()])
def test_the_test_of_a_report_is_there(test: str) -> None:
    file, _, name = test.partition(".")
    assert f"\ndef {name}(" in (Path(__file__).parent / f"{file}.py").read_text()


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
