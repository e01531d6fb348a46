"""d2lps.simulate: virtual time that a person can work out, and results that real processes give too."""

import contextlib
import gc
import itertools
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import greenlet
import oracles
import pytest
import torch
import torch.utils.checkpoint
from oracles import Call, perform, rooms_for

import d2lps
from d2lps import Communicator, Mismatch, RankDied
from d2lps.collectives import all_gather, all_reduce
from d2lps.simulator import Kill, Model, simulate
from d2lps.topology import Device, dgx1, fat_tree, pcie_tree, ring, star

MB = 1_000_000


def message(nbytes: int, device: Any = "meta") -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def pass_on(comm: Communicator, nbytes: int = 1000) -> float:
    """Rank 0 sends to rank 1; when was each done?"""
    if comm.rank == 0:
        comm.send(message(nbytes, comm.device), 1)
    elif comm.rank == 1:
        comm.recv(message(nbytes, comm.device), 0)
    return comm.now()


def reduce_ones(comm: Communicator, elements: int = 12, algorithm: str = "ring") -> torch.Tensor:
    tensor = torch.arange(float(elements), device=comm.device) + comm.rank
    all_reduce(comm, tensor, algorithm=algorithm)
    return tensor


# ---- time -------------------------------------------------------------------------------------------------------------


def test_a_message_takes_the_latency_of_its_links_and_its_bytes_over_their_bandwidth() -> None:
    run = simulate(pass_on, star(2, bandwidth=1e9, latency=1e-6), 4000)
    assert run.time == pytest.approx(2e-6 + 4e-6)
    assert run[0] == run[1] == run.time  # rendezvous: both are done when it has arrived


@pytest.mark.parametrize(("ranks", "seconds"), [(8, 0.224028), (16, 0.240060)])
def test_the_ring_takes_as_long_as_simgrid_says(ranks: int, seconds: float) -> None:
    # SimGrid 3.32: 160 MB on one full-duplex switch, 10 Gb/s and 1 us a link.
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.empty(40_000_000, device=comm.device), algorithm="ring")

    for trace in (True, False):
        assert simulate(work, star(ranks, 1.25e9, 1e-6), device="meta", trace=trace).time == pytest.approx(seconds, rel=1e-5)


def test_messages_that_share_a_link_share_its_bandwidth() -> None:
    def work(comm: Communicator) -> float:
        if comm.rank:
            comm.send(message(comm.rank * 100 * MB, comm.device), 0)
        else:
            for received in [comm.irecv(message(src * 100 * MB, comm.device), src) for src in (1, 2)]:
                received.wait()
        return comm.now()

    # Half the link each for 0.2 s; then the second has 100 MB left and the link to itself.
    assert simulate(work, star(3, 1e9), device="meta") == pytest.approx([0.3, 0.2, 0.3])


def test_both_directions_of_a_link_are_independent() -> None:
    def work(comm: Communicator) -> None:
        out, into = message(100 * MB, comm.device), message(100 * MB, comm.device)
        comm.sendrecv(out, 1 - comm.rank, into, 1 - comm.rank)

    assert simulate(work, star(2, 1e9), device="meta").time == pytest.approx(0.1)


def test_chunks_that_are_not_equal_take_as_long_as_the_longest_in_each_step() -> None:
    def work(comm: Communicator) -> None:
        all_reduce(comm, torch.empty(10, device=comm.device), algorithm="ring")

    # 10 elements among 4 ranks are 3, 3, 2, 2: in each of the 6 steps somebody sends 3, 12 bytes.
    assert simulate(work, star(4, bandwidth=4.0), device="meta").time == pytest.approx(6 * 12 / 4)


def test_sleep_moves_virtual_time_and_nothing_else() -> None:
    def work(comm: Communicator) -> list[float]:
        before = comm.now()
        comm.sleep(3600.0 * (comm.rank + 1))
        return [before, comm.now()]

    run = simulate(work, star(2, 1e9))
    assert run == [[0.0, 3600.0], [0.0, 7200.0]] and run.time == 7200.0


def test_an_empty_message_pays_the_latency_only() -> None:
    assert simulate(pass_on, star(2, 1.0, 0.25), 0).time == 0.5


# ---- placement ----------------------------------------------------------------------------------------------------------


def test_by_default_a_rank_lives_on_every_device() -> None:
    def where(comm: Communicator) -> tuple[Any, int, str]:
        return comm.node, comm.size, comm.topology.name

    machine = pcie_tree(3)
    assert simulate(where, machine) == [(gpu, 3, "pcie_tree(3)") for gpu in ("gpu0", "gpu1", "gpu2")]
    assert simulate(where, machine, ranks=2) == [(gpu, 2, "pcie_tree(3)") for gpu in ("gpu0", "gpu1")]


def test_ranks_live_where_they_are_put_be_it_on_the_host() -> None:
    machine = pcie_tree(4, bandwidth=1e6, latency=0.0).slowed(("cpu", "pcie"), 10)
    nodes = [*machine.devices, *machine.hosts]
    assert simulate(lambda comm: comm.node, machine, ranks=nodes) == nodes
    assert simulate(pass_on, machine, 1000, ranks=["gpu3", "cpu"]).time == pytest.approx(0.01)
    assert simulate(pass_on, machine, 1000, ranks=["gpu3", "gpu1"]).time == pytest.approx(0.001)


def test_messages_between_ranks_on_one_node_are_free() -> None:
    for model in (Model(), Model(per_message=1.0), Model(eager=math.inf, per_message=1.0)):
        run = simulate(pass_on, star(2, 1e9, 1.0), 10**9, ranks=["gpu1", "gpu1"], device="meta", model=model)
        assert run.time == 0.0
    assert simulate(reduce_ones, star(1, 1e9), ranks=["gpu0"] * 3)[0].tolist() == [3.0 * n + 3 for n in range(12)]


def test_even_a_switch_can_have_a_rank() -> None:
    assert simulate(pass_on, star(2, 1e6), 1000, ranks=["gpu0", "switch"]).time == pytest.approx(0.001)


# ---- the same results as real processes -------------------------------------------------------------------------------

# The simulator has no all-reduce of its own, and "auto" is one of the others.
ALGORITHMS = {name: [one for one in known if one not in ("native", "auto")] for name, known in oracles.ALGORITHMS.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_collective_gives_the_bits_that_real_processes_give(ranks: int) -> None:
    kinds = [("SUM", torch.float32), ("AVG", torch.bfloat16), ("SUM", torch.int64), ("MAX", torch.float16)]
    wanted = [
        Call(name, algorithm, op if "reduce" in name else "SUM", dtype, root=ranks // 2, n=n, uneven=n == 64, layout=n % 4)
        for name, algorithms in ALGORITHMS.items()
        for algorithm in algorithms
        for (op, dtype), n in zip(kinds, (1001, 64, 7, 64), strict=True)
    ]
    if ranks > 1:
        equal = ("broadcast", "scatter", "reduce", "gather")  # all of a rooted collective's tensors are
        wanted = [call for call in wanted if not (call.collective in equal and call.uneven)]
    rooms = rooms_for(wanted, ranks)
    real = d2lps.run(perform, ranks, wanted, rooms, backend="gloo")
    # On one node, as the processes are: "hierarchical" asks who shares a machine.
    simulated = simulate(perform, star(1, 1e9), wanted, rooms, ranks=["gpu0"] * ranks)
    for call, *outcomes in zip(wanted, *real, *simulated, strict=True):
        assert not any(outcome.complaint for outcome in outcomes), call
        for one, other in zip(outcomes[:ranks], outcomes[ranks:], strict=True):
            assert all(map(torch.equal, one.output, other.output)), call


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("topology", [pcie_tree(8), dgx1(), fat_tree(4)], ids=lambda topology: topology.name)
def test_all_reduce_is_right_on_every_network(topology: Any, algorithm: str) -> None:
    n = len(topology.devices)
    results = simulate(reduce_ones, topology, 1001, algorithm)
    assert all(result.tolist() == [n * (x + (n - 1) / 2) for x in range(1001)] for result in results)


ERRORS = """
import torch, d2lps

def fail():
    try:
        torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        assert "must match" in str(error)

def work(comm):
    comm.barrier()
    fail()
    for _ in range(3):
        d2lps.collectives.all_reduce(comm, torch.ones(1000, device=comm.device))
        fail()
    return comm.rank

for device, trace in (("cpu", True), ("meta", False)):
    assert d2lps.simulate(work, d2lps.topology.star(3, 1e9), device=device, trace=trace) == [0, 1, 2]
"""


def test_an_error_of_torch_after_a_wait_is_an_error_and_not_a_crash() -> None:
    ended = subprocess.run([sys.executable, "-c", ERRORS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_nested_functions_of_d2lps_work_inside_a_rank() -> None:
    def outer(comm: Communicator) -> float:
        inside = simulate(pass_on, star(2, 1e3), 1000).time
        comm.sleep(inside)
        return comm.now()

    assert simulate(outer, star(2, 1e9)) == [1.0, 1.0]


# ---- torch's modes: each rank's own -----------------------------------------------------------------------------------


def test_a_rank_starts_with_gradients_whoever_waits_where() -> None:
    def work(comm: Communicator) -> bool:
        grad = torch.is_grad_enabled()
        with torch.no_grad():
            comm.barrier()  # rank 0 waits in here while the others start
        return grad and torch.is_grad_enabled()

    with torch.no_grad():  # as those of a real run, whose caller's mode is nothing to them
        assert simulate(work, star(3, 1e9)) == [True] * 3
        assert not torch.is_grad_enabled()


MODES: dict[str, tuple[Callable[[], Any], Callable[[], bool]]] = {
    "no_grad": (torch.no_grad, lambda: not torch.is_grad_enabled()),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "device": (lambda: torch.device("meta"), lambda: torch.empty(0).is_meta),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_come_and_go_with_their_rank(mode: str) -> None:
    def work(comm: Communicator) -> list[bool]:
        enter, inside = MODES[mode]
        seen = []
        for step in range(6):
            if (comm.rank + step) % 3:
                with enter():
                    comm.sleep(0.1 * (comm.rank + 1))
                    comm.barrier() if step == 4 else None
                    seen.append(inside())
            else:
                comm.sleep(0.15)
                comm.barrier() if step == 4 else None
                seen.append(not inside())
            seen.append(not inside())
        return seen

    assert simulate(work, star(3, 1e9)) == [[True] * 12] * 3
    assert not MODES[mode][1]()


def test_what_was_made_in_inference_mode_is_summed_and_sent_as_everything() -> None:
    def work(comm: Communicator) -> list[float]:
        with torch.inference_mode():
            tensor = torch.ones(3)
            all_reduce(comm, tensor)
        comm.sendrecv(tensor + comm.rank, (comm.rank + 1) % 3, tensor, (comm.rank - 1) % 3)
        all_reduce(comm, tensor)
        return tensor.tolist()

    assert simulate(work, star(3, 1e9)) == d2lps.run(work, 3) == [[12.0] * 3] * 3


def test_what_autocast_has_converted_is_forgotten_when_the_weights_change() -> None:
    def work(comm: Communicator) -> list[float]:
        weight, outputs = torch.ones(1, 1, requires_grad=True), []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append((torch.ones(1, 1) @ weight).item())
                comm.sleep(1.0 + comm.rank / 7)  # others are inside, too, at any time
            with torch.no_grad():
                weight += 1
        return outputs

    assert simulate(work, star(3, 1e9)) == [[1.0, 2.0, 3.0]] * 3


# ---- training, with messages inside the backward pass ---------------------------------------------------------------------


def drawn(comm: Communicator) -> list[Any]:
    """Random numbers, a rank's own and those alike on all, with waits between them, and in a backward pass."""
    found: list[Any] = [torch.rand(1, generator=comm.generator).item(), torch.rand(1).item()]
    comm.barrier()
    found.append(torch.nn.Linear(4, 4).weight.sum().item())
    all_reduce(comm, torch.ones(4))
    found += torch.randperm(8).tolist()
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda gradient: all_reduce(comm, gradient.clone()) or gradient * torch.rand(4))
    weight.sum().backward()
    found += weight.grad.tolist()  # type: ignore[union-attr]
    comm.barrier()
    return [*found, torch.rand(1).item()]


def test_more_ranks_wait_in_hooks_than_torch_lets_backward_passes_nest() -> None:
    def work(comm: Communicator) -> float:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: comm.barrier())
        (comm.rank * x).backward()
        return x.grad.item()  # type: ignore[union-attr]

    assert simulate(work, star(70, 1e9)) == list(range(70))  # torch would hand the 61st to another thread


def test_every_hook_runs_for_its_own_rank_at_its_own_time() -> None:
    def work(comm: Communicator) -> list[tuple[int, float]]:
        seen = []
        x = torch.ones(3, requires_grad=True)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            comm.sleep(0.5 + comm.rank)
            seen.append((int(grad[0].item()), comm.now()))
            return grad

        x.register_hook(hook)
        ((comm.rank + 2) * x).sum().backward()
        return seen

    assert simulate(work, star(4, 1e9)) == [[(rank + 2, 0.5 + rank)] for rank in range(4)]


class SumOverRanks(torch.autograd.Function):
    """Tensor parallel: add up what the ranks have, forward; hand the gradient back, summed too."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
        ctx.comm = comm
        all_reduce(comm, total := tensor.clone())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        all_reduce(ctx.comm, total := gradient.clone())
        return None, total


def test_functions_that_communicate_forward_and_backward() -> None:
    def work(comm: Communicator) -> list[float]:
        x = torch.tensor([1.0 + comm.rank], requires_grad=True)
        inner = SumOverRanks.apply(comm, x * x)
        SumOverRanks.apply(comm, inner * (comm.rank + 1)).backward()
        again = torch.autograd.grad(SumOverRanks.apply(comm, x**3), x, create_graph=True)[0]
        (second,) = torch.autograd.grad(again.sum(), x)
        return [x.grad.item(), again.item(), second.item()]  # type: ignore[union-attr]

    run = simulate(work, star(3, 1e9))
    assert run == d2lps.run(work, 3, backend="gloo")
    # x.grad: 3 ranks of gradient 1, times rank + 1, summed over ranks, times 2x
    assert run[1] == [3 * 6 * 2 * 2.0, 3 * 3 * 2.0**2, 3 * 6 * 2.0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_forward_again_inside_backward(reentrant: bool) -> None:
    def work(comm: Communicator) -> list[float]:
        x = torch.tensor([0.5 + comm.rank], requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(lambda t: SumOverRanks.apply(comm, t.sin()), x, use_reentrant=reentrant)
        (y * (comm.rank + 1)).sum().backward()
        return [y.item(), x.grad.item()]  # type: ignore[union-attr]

    sines = sum(math.sin(0.5 + rank) for rank in range(3))
    wanted = [[sines, 6 * math.cos(0.5 + rank)] for rank in range(3)]
    assert simulate(work, star(3, 1e9)).results == [pytest.approx(one) for one in wanted]


def test_an_error_inside_a_hook_is_raised_with_its_rank_and_time_and_leaves_no_thread() -> None:
    def work(comm: Communicator) -> None:
        x = torch.ones(1, requires_grad=True)

        def hook(grad: torch.Tensor) -> None:
            comm.sleep(0.125)
            comm.barrier()
            if comm.rank == 1:
                raise LookupError("in the hook")
            comm.barrier()

        x.register_hook(hook)
        x.sum().backward()

    threads = threading.active_count()
    with pytest.raises(LookupError, match="in the hook") as caught:
        simulate(work, star(3, 1e9))
    assert caught.value.__notes__ == ["raised by rank 1 of 3, at 0.125 s of virtual time"]
    assert threading.active_count() == threads


def test_a_deadlock_inside_a_hook_names_the_hooks_line() -> None:
    def work(comm: Communicator) -> None:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: comm.recv(torch.zeros(1), 1 - comm.rank))
        x.sum().backward()

    threads = threading.active_count()
    with pytest.raises(d2lps.Deadlock, match="rank 0 -> rank 1 -> rank 0") as caught:
        simulate(work, star(2, 1e9))
    assert str(caught.value).count("x.register_hook(lambda grad: comm.recv") == 2
    assert threading.active_count() == threads


# ---- the model: eager messages, costs -----------------------------------------------------------------------------------


def test_a_buffered_send_is_done_at_once_and_carries_a_copy() -> None:
    def work(comm: Communicator) -> tuple[float, list[float]]:
        tensor = torch.full((2,), 1.0)
        if comm.rank == 0:
            comm.send(tensor, 1)
            done = comm.now()
            tensor.fill_(2.0)  # too late to change what was sent
            return done, tensor.tolist()
        comm.sleep(1.0)
        comm.recv(tensor, 0)
        return comm.now(), tensor.tolist()

    run = simulate(work, star(2, 8.0, 0.125), model=Model(eager=8))
    assert run == [(0.0, [2.0, 2.0]), (1.25, [1.0, 1.0])]  # it left at once: 2 latencies and 8 bytes at 8 B/s
    assert simulate(work, star(2, 8.0, 0.125), model=Model(eager=7))[0] == (2.25, [2.0, 2.0])  # a byte too long


def test_a_buffered_message_that_is_already_here_is_received_at_once() -> None:
    def work(comm: Communicator) -> float:
        if comm.rank == 1:
            comm.sleep(5.0)
        return pass_on(comm, 8)

    assert simulate(work, star(2, 8.0, 0.125), model=Model(eager=8)) == [0.0, 5.0]


def test_short_and_long_messages_of_one_stream_stay_in_order() -> None:
    def work(comm: Communicator) -> list[int]:
        sizes, seen = [1, 9, 2, 8, 9, 3], []
        if comm.rank == 0:
            for sent in [comm.isend(torch.full((n,), n, dtype=torch.uint8), 1) for n in sizes]:
                sent.wait()
        else:
            comm.sleep(0.5)
            for n in sizes:
                comm.recv(into := torch.zeros(n, dtype=torch.uint8), 0)
                seen.append(int(into[-1]))
        return seen

    assert simulate(work, star(2, 8.0), model=Model(eager=8))[1] == [1, 9, 2, 8, 9, 3]


@pytest.mark.parametrize("eager", [0, 16, math.inf])
def test_collectives_are_right_under_every_send_mode(eager: float) -> None:
    wanted = [Call(name, algorithm, n=7, root=1) for name in ALGORITHMS for algorithm in ALGORITHMS[name]]
    cluster, rooms = star(5, 1e9, 1e-6), rooms_for(wanted, 5)
    usual, other = (simulate(perform, cluster, wanted, rooms, model=model) for model in (Model(), Model(eager=eager)))
    for one, two in zip(itertools.chain(*usual), itertools.chain(*other), strict=True):
        assert not two.complaint and all(map(torch.equal, one.output, two.output))


def test_a_message_costs_what_the_model_says() -> None:
    assert simulate(pass_on, star(2, 1e3), 1000, model=Model(per_message=0.25)).time == pytest.approx(1.25)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("trace", [True, False])
def test_combining_costs_what_the_model_says(device: str, trace: bool) -> None:
    def work(comm: Communicator) -> None:
        comm.combine(torch.zeros(25, device=comm.device), torch.zeros(25, device=comm.device))

    assert simulate(work, star(2, 1e9), device=device, model=Model(per_combined_byte=0.01), trace=trace).time == 1.0


def test_the_ring_pays_for_messages_and_additions() -> None:
    # 4 ranks, chunks of 1000 B at 1 MB/s: 6 steps of 1 ms and 1/4 s each, 3 additions of 1/2 s.
    model = Model(per_message=0.25, per_combined_byte=0.5e-3)
    assert simulate(reduce_ones, star(4, 1e6), 1000, model=model).time == pytest.approx(6 * 0.251 + 3 * 0.5)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"eager": -1}, "eager=-1 is not a number from 0 up"),
        ({"eager": "big"}, "eager='big' is not a number from 0 up"),
        ({"per_message": float("nan")}, "per_message=nan is not a number from 0 up"),
        ({"per_message": math.inf}, "per_message is infinite: nothing would ever happen"),
        ({"per_combined_byte": True}, "per_combined_byte=True is not a number from 0 up"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Model(**wrong)


# ---- meta tensors -------------------------------------------------------------------------------------------------------


def test_700_gigabytes_cost_nothing() -> None:
    def work(comm: Communicator) -> tuple[str, torch.Size]:
        gradients = torch.empty(175_000_000_000, device=comm.device)
        all_reduce(comm, gradients)
        return gradients.device.type, gradients.shape

    run = simulate(work, star(8, 50e9), device="meta")
    assert run[0] == ("meta", torch.Size([175_000_000_000]))
    assert run.time == pytest.approx(2 * 7 / 8 * 700e9 / 50e9)


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_time_does_not_depend_on_whether_there_is_content_or_a_trace(algorithm: str) -> None:
    times = [
        simulate(reduce_ones, star(6, 1e6, 1e-3), 1000, algorithm, device=device, trace=trace).time
        for device in ("cpu", "meta")
        for trace in (True, False)
    ]
    assert len(set(times)) == 1


# ---- groups -------------------------------------------------------------------------------------------------------------


def test_a_barrier_takes_no_time_but_waits_for_all_of_its_group() -> None:
    def work(comm: Communicator) -> tuple[float, float, Any, bool]:
        row = comm.split(comm.rank // 3)
        assert row is not None
        comm.sleep(comm.rank / 4)
        row.barrier()
        alone = comm.now()
        comm.barrier()
        return alone, comm.now(), row.node, row.generator is comm.generator

    run = simulate(work, star(5, 1e9, 1.0))
    assert run == [(seconds, 1.0, f"gpu{rank}", True) for rank, seconds in enumerate([0.5, 0.5, 0.5, 1.0, 1.0])]


# ---- the trace ----------------------------------------------------------------------------------------------------------


def test_results_time_and_trace() -> None:
    cluster = star(4, 1e6, 1e-3)
    run = simulate(reduce_ones, cluster, 1000)
    assert isinstance(run, d2lps.Run) and len(run) == 4 and run.trace.ranks == 4
    assert run.trace.topology is cluster and run.trace.nodes == cluster.devices
    assert len(run.trace) == 4 * 6 and run.trace.rounds == 6 and run.trace.messages["nbytes"].sum() == 4 * 6 * 1000
    assert run.trace.messages["end"].max() == pytest.approx(run.time)


def test_a_trace_is_that_of_a_real_run_but_for_its_times() -> None:
    simulated, real = simulate(reduce_ones, star(3, 1e9)).trace, d2lps.run(reduce_ones, 3, backend="gloo", trace=True).trace
    columns = ("src", "dst", "tag", "nbytes", "src_offset", "src_length", "dst_offset", "dst_length", "src_seq", "dst_seq")

    def rows(trace: d2lps.Trace) -> list[tuple[Any, ...]]:
        steps = [trace.steps[step] for step in trace.messages["step"]]
        return sorted(zip(steps, *(trace.messages[name].tolist() for name in columns), strict=True))

    assert rows(simulated) == rows(real)
    assert [(b.rank, b.name, b.nbytes) for b in simulated.buffers] == [(b.rank, b.name, b.nbytes) for b in real.buffers]


def test_without_a_trace_there_is_none() -> None:
    with pytest.raises(ValueError, match="this run left no trace"):
        _ = simulate(pass_on, star(2, 1e9), trace=False).trace


def test_utilization_is_the_share_of_what_a_link_could_have_carried() -> None:
    cluster = pcie_tree(2, bandwidth=1e6, latency=0.0).slowed(("cpu", "pcie"), 4)
    trace = simulate(pass_on, cluster, 1000, ranks=["gpu1", "cpu"]).trace
    assert trace.utilization() == pytest.approx({("gpu1", "pcie"): 0.25, ("pcie", "cpu"): 1.0})


def test_the_ring_fills_every_link_of_a_ring_in_one_direction() -> None:
    trace = simulate(reduce_ones, ring(4, 1e6), 1000).trace
    assert trace.bytes_on_links() == {(f"gpu{r}", f"gpu{(r + 1) % 4}"): 6000 for r in range(4)}
    assert trace.utilization() == pytest.approx({(f"gpu{r}", f"gpu{(r + 1) % 4}"): 1.0 for r in range(4)})


def test_a_real_run_has_no_links() -> None:
    trace = d2lps.run(reduce_ones, 2, backend="gloo", trace=True).trace
    with pytest.raises(ValueError, match="only a simulated run knows its links"):
        trace.bytes_on_links()


# ---- mistakes -----------------------------------------------------------------------------------------------------------

CLUSTER = star(3, 1e9)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: simulate(pass_on, CLUSTER, ranks=4), ValueError, r"ranks=4, but star\(3\) has 3 devices"),
        (lambda: simulate(pass_on, CLUSTER, ranks=0), ValueError, r"ranks=0, but star\(3\) has 3 devices"),
        (lambda: simulate(pass_on, CLUSTER, ranks=["gpu0", "tpu"]), ValueError, r"ranks must name nodes of star\(3\); \['tpu'\]"),
        (lambda: simulate(pass_on, CLUSTER, ranks=[]), ValueError, "an empty list"),
        (lambda: simulate(pass_on, 4), TypeError, "simulate needs a Topology, not 4"),  # type: ignore[arg-type]
        (lambda: simulate("pass_on", CLUSTER), TypeError, "simulate needs a function"),  # type: ignore[arg-type]
        (lambda: simulate(pass_on, CLUSTER, device="cuda"), ValueError, "device='cuda' is unknown: choose 'cpu' or 'meta'"),
        (lambda: simulate(lambda comm: comm.sleep(-1), CLUSTER), ValueError, "seconds=-1 is not a number from 0 up"),
        (lambda: simulate(lambda comm: comm.sleep(math.nan), CLUSTER), ValueError, "seconds=nan is not a number from 0 up"),
        (lambda: simulate(lambda comm: comm.send(torch.ones(1), comm.rank), CLUSTER), ValueError, "is this rank itself"),
        (lambda: simulate(reduce_ones, CLUSTER, 3, "native"), ValueError, "algorithm='native' is the all-reduce of gloo or NCCL"),
        (lambda: simulate(pass_on, star(3, 1e9).without("switch")), ValueError, r"star\(3\) has no route from 'gpu0' to 'gpu1'"),
    ],
)
def test_a_mistake_is_named(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_an_error_in_a_lane_of_a_lane_is_why_nothing_happens_any_more() -> None:
    def inner(comm: Communicator) -> None:
        raise LookupError("the cause")

    def outer(comm: Communicator) -> None:
        comm.start(inner)
        comm.recv(torch.ones(1), 1 - comm.rank)

    with pytest.raises(LookupError, match="the cause"):
        simulate(lambda comm: comm.start(outer).wait(), star(2, 1e9))


def test_of_an_exchange_that_is_refused_nothing_is_left() -> None:
    def work(comm: Communicator) -> list[float]:
        room, column = torch.zeros(2), torch.zeros(2, 2)[:, 0]
        with pytest.raises(ValueError, match="src=7 is not a rank"):
            comm.exchange([], [(column, 1 - comm.rank), (room, 7)])
        column.fill_(5.0)
        comm.sendrecv(torch.ones(2), 1 - comm.rank, room, 1 - comm.rank)
        return column.tolist()

    for run in (simulate(work, star(2, 1e9)), d2lps.run(work, 2, trace=True)):
        assert run == [[5.0, 5.0]] * 2 and run.trace.unmatched == 0


def test_a_message_that_does_not_fit_is_named() -> None:
    def work(comm: Communicator, into: torch.Tensor) -> None:
        comm.send(torch.zeros(3), 1, tag=5) if comm.rank == 0 else comm.recv(into, 0, tag=5)

    for model in (Model(), Model(eager=math.inf)):
        for into, expects in ((torch.zeros(4), "float32[4]"), (torch.zeros(3, dtype=torch.int32), "int32[3]")):
            with pytest.raises(Mismatch) as caught:
                simulate(work, star(2, 1e9), into, model=model)
            said = f"message from rank 0 to rank 1, tag 5: the sender sends float32[3], the receiver expects {expects}"
            assert str(caught.value) == said


def test_a_tensor_with_contents_among_those_without_is_named() -> None:
    def swap(comm: Communicator) -> None:
        mine = torch.ones(4, device="cpu" if comm.rank == 1 else comm.device)
        comm.sendrecv(mine, 1 - comm.rank, mine.clone(), 1 - comm.rank)

    def add(comm: Communicator) -> None:
        all_reduce(comm, torch.ones(4, device="cpu" if comm.rank == 1 else comm.device))

    def gather(comm: Communicator) -> None:
        all_gather(comm, [torch.ones(4) for _ in range(comm.size)], torch.ones(4, device=comm.device))

    between = r"message from rank 0 to rank 1, tag 0: the sender sends float32\[[24]\] on meta, the receiver expects .* on cpu|"
    between += r"message from rank 1 to rank 0, tag 0: the sender sends float32\[[24]\] on cpu, the receiver expects .* on meta"
    for model, trace in itertools.product((Model(), Model(eager=math.inf)), (True, False)):
        for work in (swap, add):
            with pytest.raises(Mismatch, match=between):
                simulate(work, star(2, 1e9), device="meta", model=model, trace=trace)
    with pytest.raises(ValueError, match=r"tensor is on meta but tensor_list\[0\] is on cpu: only one of them has contents"):
        simulate(gather, star(2, 1e9), device="meta")


# ---- nothing is left --------------------------------------------------------------------------------------------------


def fails(comm: Communicator) -> None:
    torch.manual_seed(5)
    torch.rand(3)
    random.random()
    with torch.no_grad():
        comm.barrier()
        if comm.rank == 1:
            raise LookupError("gone")
        comm.barrier()


def hangs(comm: Communicator) -> None:
    with torch.inference_mode():
        comm.recv(torch.zeros(1), (comm.rank + 1) % comm.size)


def living_greenlets() -> int:
    """Besides the thread's own, which the collector sees from some time on only."""
    gc.collect()
    here = greenlet.getcurrent()
    return sum(type(thing) is greenlet.greenlet and bool(thing) and thing is not here for thing in gc.get_objects())


@pytest.mark.parametrize("program", [pass_on, fails, hangs, drawn])
def test_nothing_is_left_behind(program: Callable[..., Any]) -> None:
    torch.manual_seed(123)
    state, greenlets, threads = torch.get_rng_state(), living_greenlets(), threading.active_count()
    engine = torch.autograd.Variable._execution_engine
    with contextlib.suppress(LookupError, d2lps.Deadlock):
        simulate(program, CLUSTER)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert gc.isenabled() and living_greenlets() == greenlets
    assert threading.active_count() == threads and torch.autograd.Variable._execution_engine is engine


def test_who_hangs_can_still_clean_up(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        try:
            comm.recv(torch.zeros(1), 1 - comm.rank)
        finally:
            (tmp_path / str(comm.rank)).touch()

    with pytest.raises(d2lps.Deadlock):
        simulate(work, star(2, 1e9))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_switched_off_collector_stays_off() -> None:
    gc.disable()
    try:
        simulate(pass_on, CLUSTER)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_simulations_in_two_threads_do_not_meet() -> None:
    def seconds(elements: int) -> float:
        return simulate(reduce_ones, star(4, 1e6), elements).time

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(seconds, (1000, 2000))) == pytest.approx([0.006, 0.012])


# ---- as real processes do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_random_numbers_are_those_of_real_processes(ranks: int) -> None:
    simulated, real = list(simulate(drawn, star(ranks, 1e9))), list(d2lps.run(drawn, ranks))
    assert simulated == real and all(numbers[1:] == simulated[0][1:] for numbers in simulated)
    assert len({numbers[0] for numbers in simulated}) == ranks


def draws_beside(comm: Communicator) -> list[float]:
    """One after the other, the rank and what it starts draw from the same numbers."""
    seen: list[float] = torch.rand(comm.rank).tolist()

    def draw(beside: Communicator) -> None:
        seen.append(torch.rand(1).item())

    for _ in range(3):
        comm.start(draw).wait()
        comm.barrier()
        seen += torch.rand(1).tolist()

    def fail(beside: Communicator) -> None:
        draw(beside)
        raise LookupError("gone")

    with contextlib.suppress(LookupError):
        comm.start(fail).wait()
    return seen + torch.rand(1).tolist()


def test_what_a_rank_starts_draws_on_from_its_numbers() -> None:
    assert list(simulate(draws_beside, star(3, 1e9))) == list(d2lps.run(draws_beside, 3))


def test_a_dtype_that_a_rank_has_made_the_default_is_no_longer_afterwards() -> None:
    simulate(lambda comm: torch.set_default_dtype(torch.float64), star(1, 1e9))
    assert torch.get_default_dtype() is torch.float32


def test_the_default_device_is_a_ranks_own() -> None:
    def work(comm: Communicator) -> str:
        if comm.rank:
            torch.set_default_device("meta")
        comm.barrier()
        return torch.ones(1).device.type

    with torch.device("meta"):  # the caller's, as a real run has it
        assert simulate(work, star(3, 1e9)) == d2lps.run(work, 3) == ["cpu", "meta", "meta"]
        assert torch.ones(1).is_meta
    assert torch.ones(1).device == torch.get_default_device() == torch.device("cpu")


def test_a_rank_that_exits_does_not_end_the_caller() -> None:
    with pytest.raises(d2lps.RankFailed, match="rank 1 of 2 raised SystemExit: 3"):
        simulate(lambda comm: sys.exit(3) if comm.rank else comm.barrier(), star(2, 1e9))


def sends_odd_shapes(comm: Communicator) -> list[float]:
    w = torch.nn.Parameter(torch.ones(3, 3))
    turned = (w * 2).t()
    loss, column, room = (turned * turned).sum(), torch.ones(3, 3)[:, 0], torch.zeros(2, 3)
    before = column._version
    if comm.rank == 0:
        comm.send(torch.ones(1, 3).expand(2, 3), 1)
        comm.send(turned.detach(), 1)
        comm.send(column, 1)
    else:
        comm.recv(room, 0)
        comm.recv(torch.zeros(3, 3), 0)
        comm.recv(torch.zeros(3), 0)
    loss.backward()
    return [w.grad.sum().item(), column._version - before, room.sum().item()]  # type: ignore[union-attr]


def test_what_is_sent_is_left_alone() -> None:
    assert list(simulate(sends_odd_shapes, star(2, 1e9))) == list(d2lps.run(sends_odd_shapes, 2)) == [[72, 0, 0], [72, 0, 6]]


# ---- faults that end --------------------------------------------------------------------------------------------------


def test_a_node_that_comes_back_holds_nothing() -> None:
    def work(comm: Communicator) -> float:
        comm.hold(600, "weights")
        comm.sleep(1.0)
        return comm.memory.held["weights"]

    run = simulate(work, star(2, 1e9, device=Device(1e12, 1000, 1e12)), faults=[Kill("gpu0", 0.5, 0.6)])
    assert list(run) == [600, 600] and run.time == 1.6
    spans = run.trace.spans
    held = (spans["rank"] == 0) & (spans["nbytes"] == 600)
    assert (spans["start"][held].tolist()[0], spans["end"][held].tolist()[0]) == (0, 0.5)


def test_two_kills_at_once_are_one_death(capsys: pytest.CaptureFixture[str]) -> None:
    def work(comm: Communicator) -> list[float]:
        start = comm.now()
        print("begun")
        comm.sleep(1.0)
        return [start, torch.rand(1, generator=comm.generator).item()]

    alive = simulate(work, star(1, 1e9))[0][1]
    for faults in ([Kill("gpu0", 0.5, 3.0), Kill("gpu0", 1.0, 2.0)], [Kill("gpu0", 0.5, 1.0), Kill("gpu0", 1.0, 3.0)]):
        capsys.readouterr()
        run = simulate(work, star(1, 1e9), faults=faults)
        assert run[0] == [3.0, alive] and run.time == 4.0
        assert capsys.readouterr().out == 2 * "begun\n"  # not where one death ends as the next begins


def test_a_message_is_lost_with_whom_it_was_for_even_if_that_one_is_back() -> None:
    def work(comm: Communicator) -> str:
        tensor = torch.ones(2)
        if comm.rank == 0:
            coming = comm.irecv(tensor, 1)
            comm.sleep(1.0)
            with pytest.raises(RankDied, match="rank 1 has died: 'gpu1' was killed"):
                while not coming.test():
                    comm.sleep(0.5)
            return "told"
        comm.sleep(2.0)
        return "back"

    assert simulate(work, star(2, 1e9), faults=[Kill("gpu1", 0.25, 0.5)]) == ["told", "back"]


def test_who_had_returned_does_not_begin_anew() -> None:
    run = simulate(pass_on, star(2, 1e9), 1000, faults=[Kill("gpu0", 10.0, 11.0)])
    assert run.time == 1e-6 and run[0] == 1e-6
