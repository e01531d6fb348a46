"""A contest: the reader's all-reduce against the ring, on a machine of their choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from d2lps.check.exercise import Verdict
from d2lps.check.exercises import all_reduce as check_all_reduce
from d2lps.collectives import all_reduce
from d2lps.simulator import simulate
from d2lps.topology import Topology


def contest(function: Callable[..., Any], topology: Topology, nbytes: int = 160_000_000) -> Verdict:
    """Time `function(comm, tensor)` beside the ring all-reduce in the simulator; who has a wrong sum does not compete.

    >>> from d2lps.topology import hgx_h100
    >>> contest(lambda comm, tensor: all_reduce(comm, tensor, algorithm="ring"), hgx_h100())
    passed: 8 ranks of HGX H100, 160 MB: 0.670 ms, ring 0.670 ms, 1.00 times as fast
    """
    verdict = check_all_reduce(function)
    if not verdict:
        return verdict
    ranks = f"{len(topology.devices)} rank{'s' if len(topology.devices) > 1 else ''} of {topology.name}"
    if trouble := _wrong_sum(function, topology):
        return Verdict(False, f"with {ranks}, {trouble}")
    mine, ring = _time(function, topology, nbytes), _time(all_reduce, topology, nbytes)
    times = f"{mine * 1e3:.3f} ms, ring {ring * 1e3:.3f} ms"
    return Verdict(True, f"{ranks}, {nbytes / 1e6:g} MB: {times}" + (f", {ring / mine:.2f} times as fast" if mine else ""))


def _wrong_sum(function: Callable[..., Any], topology: Topology) -> str:
    """What a function does only with more ranks than the check has, on more than one machine perhaps, must be right too."""

    def work(comm: Any) -> torch.Tensor:
        tensor = _numbers(comm.rank, comm.size)
        function(comm, tensor)
        return tensor

    run = simulate(work, topology, trace=False)
    total = sum((_numbers(rank, len(run)) for rank in range(len(run))), start=torch.tensor(0))
    for rank, tensor in enumerate(run):
        if not torch.equal(tensor, total):
            element = int((tensor != total).nonzero()[0])
            return f"rank {rank}, element {element}: {tensor[element]}, and the sum is {total[element]}"
    return ""


def _numbers(rank: int, ranks: int) -> torch.Tensor:
    """Some for every rank, and some over."""
    return torch.randint(10**9, (2 * ranks + 1,), generator=torch.Generator().manual_seed(rank))


def _time(function: Callable[..., Any], topology: Topology, nbytes: int) -> float:
    def work(comm: Any) -> None:
        function(comm, torch.empty(nbytes // 4, device=comm.device))

    return simulate(work, topology, device="meta", trace=False).time
