"""Checks of the exercises of *Aggregating gradients*."""

from typing import Any

import torch

from d2lps.topology import pcie_tree
from d2lps_book.check.exercise import Function, Wrong, among, answered, judged, plural
from d2lps_book.check.exercises import all_reduce
from d2lps_book.check.tools import number, own, played, refuse, right

__all__ = ["all_reduce", "by_hand", "by_owner", "cable", "pipelined", "statistics"]

_N = 160_000_000  # bytes, as in the chapter
_MACHINE = pcie_tree(4, 16e9, 0)


@answered
def by_hand(one_gpu: float, cpu: float, blockwise: float) -> str:
    """Check the answers: 8 GPUs with links of 32 GB/s, gradients of 1.6 GB; milliseconds of each plan."""
    number(one_gpu, 700, "ms", "on one GPU, how many gradients pass its link on their way in, and how many on their way out?")
    number(cpu, 800, "ms", "on the CPU, which has no gradient of its own, how many pass its link in each phase?")
    number(blockwise, 87.5, "ms", "blockwise, how long is a block, and how many of them does each GPU take in?")
    return "the factor between the first plan and the third is p, here 8"


@answered
def cable(bandwidth: float) -> str:
    """Check the answer: the bandwidth in GB/s from which on the cable between two switches costs blockwise nothing."""
    least = 64 / 3
    if isinstance(bandwidth, int | float) and 0 < bandwidth < 0.99 * least:
        raise Wrong(f"with a cable of {bandwidth:g} GB/s blockwise takes {320 / bandwidth:.1f} ms; around one switch it took 15")
    number(bandwidth, least, "GB/s", "blockwise takes 15 ms with that, but with a slower cable as well")
    return "four blocks cross the cable in each phase, in the time in which three pass a GPU's own link"


@judged
def pipelined(function: Function) -> str:
    """Check `function(comm, tensor, k)`: rank 0 adds up everything, in k chunks; a sum leaves while the next chunk comes in."""
    function = own(function)
    for k in (1, 2, 5):
        right(all_reduce, lambda comm, tensor, k=k: function(comm, tensor, k))
    once = played(function, _MACHINE, _N, 1).time
    for k in (2, 4, 16):
        run = played(function, _MACHINE, _N, k)
        took_in = run.trace.bytes_received()[0] / _N
        short = f"with {k} chunks, rank 0 takes in {took_in:.2f} n: it should add up the gradients of all others, 3 n"
        late = (f"160 MB take {run.time * 1e3:.1f} ms in {k} chunks, and {once * 1e3:.1f} ms in one: a chunk's sum should be on "
                "its way out while the next chunk comes in; post both before you wait for either")  # fmt: skip
        refuse((abs(took_in - 3) > 0.01, short), (run.time > 0.03001 * (1 + 1 / k), late))
    return f"160 MB take {once * 1e3:.1f} ms in one chunk, {run.time * 1e3:.1f} ms in {k}, and rank 0 still adds up everything"


@judged
def by_owner(function: Function) -> str:
    """Check `function(comm, tensors)`: each tensor has an owner, who adds it up and sends the sum back to all."""
    function = own(function)
    for many in (1, 5):
        right(all_reduce, lambda comm, tensor, many=many: function(comm, tensor.tensor_split(many)))
    for p in (2, 4, 5):
        trace = among(p, lambda comm, p=p: function(comm, [torch.ones(30) for _ in range(2 * p)])).trace
        case, sent = f"with {p} ranks and {2 * p} equal tensors", trace.bytes_sent()
        parts, many = [int(m) for m in trace.messages["nbytes"] if m % 120][:1], sent.sum() / 120
        unequal = f"rank {sent.argmax()} sends {sent.max() / sent.mean():.1f} times as much as the ranks do on average"
        refuse(
            (parts, f"{case}, a message has {parts} bytes, and a tensor 120: tensors should stay whole"),
            (sent.max() > 1.01 * sent.mean(), f"{case}, {unequal}: let it own as many tensors as the others"),
            (many > 4 * p * (p - 1), f"{case}, {many:g} tensors are sent: each has to go to its owner, and its sum back to all"),
            (trace.rounds > 2, f"{case}, there are {trace.rounds} steps: let all messages of a phase be under way at once"),
        )
    return "tensors stay whole, all ranks own as many, and there are two steps, whatever the number of ranks"


@judged
def statistics(function: Function) -> str:
    """Check `function(comm, mine)`: each column's smallest and largest value, and the deviation of all, on every rank."""
    for p in (2, 1, 3, 8):  # two unequal ranks first: the mean of the ranks' deviations is wrong there, and right for one
        sent = []
        for rows in (3, 60):
            generator = torch.Generator().manual_seed(p)
            parts = [torch.rand(rows + 2 * r, 4, generator=generator, dtype=torch.float64) * (1 + r) - r for r in range(p)]
            run = among(p, lambda comm, parts=parts: function(comm, parts[comm.rank].clone()))
            for rank, got in enumerate(run):
                _statistics(got, torch.cat(parts), f"with {plural(p, 'rank')}, rank {rank}")
            sent.append(int(run.trace.bytes_sent().sum()))
        more = f"with {p} ranks, more data make {sent[1] / max(sent[0], 1):.0f} times the bytes: send what sums the data up"
        refuse((sent[1] > sent[0], more))
    return "exact extremes, the deviation of all the data, and no more bytes for more data"


def _statistics(got: Any, data: torch.Tensor, who: str) -> None:
    three = isinstance(got, tuple | list) and len(got) == 3
    wanted = "the smallest values, the largest values, the deviation"
    refuse((not three, f"{who} returns {got!r}; three things are wanted on every rank, in this order: {wanted}"))
    low, high, deviation = (torch.as_tensor(each, dtype=torch.float64) for each in got)
    spread, columns = data.std(correction=0).item(), f"one for each of the {data.shape[1]} columns"
    why = "the ranks have different means, and different numbers of values"
    if torch.isclose(deviation, data.std(), rtol=1e-6).all():
        why = "torch's `std` divides by one value fewer than there are, unless it is told correction=0"
    refuse(
        (low.shape != data[0].shape, f"{who}: the smallest values should be {columns}, and are {low.tolist()}"),
        (high.shape != data[0].shape, f"{who}: the largest values should be {columns}, and are {high.tolist()}"),
        (not torch.equal(low, data.min(0).values), f"{who}: the smallest values are not those of all ranks' data"),
        (not torch.equal(high, data.max(0).values), f"{who}: the largest values are not those of all ranks' data"),
        (deviation.numel() != 1, f"{who}: the deviation of all values is one number, not {deviation.numel()}"),
        (not (abs(deviation - spread) <= 1e-6 * spread).all(),
         f"{who}: a deviation of {deviation.sum():.4f}, and that of all the data is {spread:.4f}; {why}"),
    )  # fmt: skip
