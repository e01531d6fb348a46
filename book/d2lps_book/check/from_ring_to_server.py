"""Checks of the exercises of *From ring to server*."""

from typing import Any

import torch

from d2lps import kvstore, topology
from d2lps.comm import RankHung
from d2lps_book.check.exercise import Function, Wrong, among, answered, judged, plural
from d2lps_book.check.tools import near, parts, refuse

_BANDWIDTH = 12.5e9  # bytes/s of a port
_N = 100_000_000  # bytes of the gradient in runs that are timed
_SLACK = 1.001


@answered
def by_hand(three: Any, six: Any, colocated: Any) -> str:
    """Check `three, six, colocated`, each (MB that a worker's port sends, MB that a server's port sends, ms)."""
    local = "; on one machine, what a worker pushes to its own server never reaches the port, nor what it pulls from there"
    for name, given, worker, server, ms, more in (
        ("three servers", three, 90, 180, 28.8, ""), ("six servers", six, 90, 90, 14.4, ""),
        ("colocated", colocated, 75, 75, 12, local),
    ):  # fmt: skip
        parts(
            name, given,
            ("a worker sends", worker, f"A gradient leaves a worker once, in as many parts as there are servers{more}"),
            ("a server sends", server, f"A server's port sends its part of the model once for each of six workers{more}"),
            ("ms", ms, f"All of it through the busiest port, first in and then out, at 12.5 MB a ms{more}"),
        )
    return "three servers 28.8 ms, six 14.4, and 12 with no machine more"


# ---- push and pull at once ------------------------------------------------------------------------------------------------


@judged
def in_pieces(function: Function) -> str:
    """Check `function(kv, gradient, weights, pieces)`: the sum of all, by so many independent keys, iteration after iteration."""
    for workers, numel, pieces in (1, 5, 2), (2, 7, 7), (3, 10, 3), (4, 12, 1):
        _sums_in_pieces(function, workers, numel, pieces)
    for workers, pieces in (4, 1), (4, 4), (2, 8), (4, 32):
        run = _by_pieces(function, workers, _N // 4, pieces, device="meta", trace=False)
        took, goal = max(seconds for *_, seconds in run), (1 + 1 / pieces) * workers * _N / _BANDWIDTH
        if took > _SLACK * goal:
            raise Wrong(
                f"{workers} workers, {pieces} pieces of 100 MB together: {1e3 * took:.1f} ms, and {1e3 * goal:.1f} are possible: "
                "can the first piece come back while the others are still being pushed?"
            )
    return f"the sums of two iterations; 32 pieces take {1e3 * took:.0f} ms, where one takes 64"


def _by_pieces(function: Function, workers: int, numel: int, pieces: int, rounds: int = 1, **how: Any) -> kvstore.StoreRun:
    """Each worker's (weights after each iteration, how many it has ended, seconds)."""

    def job(kv: Any) -> tuple[list[torch.Tensor], int, float]:
        weights, seen = torch.zeros(numel, device=kv.comm.device), []
        for key, part in enumerate(weights.tensor_split(pieces)):
            kv.init(key, part)
        kv.barrier()
        start = kv.comm.now()
        for _ in range(rounds):
            gradient = torch.arange(1.0, numel + 1).to(kv.comm.device) * 10**kv.rank
            function(kv, gradient, weights, pieces)
            seen.append(weights.clone())
        return seen, kv.iteration, kv.comm.now() - start

    return kvstore.simulate(job, topology.star(workers + 1, _BANDWIDTH), workers, 1, **how)


def _sums_in_pieces(function: Function, workers: int, numel: int, pieces: int) -> None:
    run = _by_pieces(function, workers, numel, pieces, rounds=2)
    where = f"{plural(workers, 'worker')}, {numel} elements, {plural(pieces, 'piece')}"
    asked = run.servers[0].requests
    refuse((asked["init"] > workers * pieces, f"{where}: init is called in every iteration, and the keys are there already"))
    pushed = (asked["push"] + asked["pushpull"]) / workers / 2
    for rank, (seen, ended, _) in enumerate(run):
        for iteration, weights in enumerate(seen, 1):
            wanted = iteration * (10**workers - 1) // 9 * torch.arange(1.0, numel + 1)
            if not torch.equal(weights, wanted):
                early = ", and pulled after clock()? A pull brings what its worker has ended by then" if asked["pull"] else "?"
                raise Wrong(f"{where}, iteration {iteration}: rank {rank} has {weights.tolist()} when your function returns, and "
                            f"not {wanted.tolist()}{'' if weights.any() else f'; has it waited{early}'}")  # fmt: skip
        refuse((ended != 2, f"{where}: rank {rank} has called clock() {ended} times in two iterations; each must end once"))
    if pushed != pieces:
        raise Wrong(f"{where}: a worker pushes {pushed:g} times in an iteration, once for each of {pieces} keys is wanted")


# ---- all devices at work --------------------------------------------------------------------------------------------------


def _trained(function: Function, machines: int, devices: int, *args: Any, **how: Any) -> kvstore.StoreRun:
    """On the devices of some of four machines with one port each; the CPUs of the others serve."""
    cluster = topology.multi_node(topology.pcie_tree(devices, 32e9), 4, _BANDWIDTH, latency=5e-6, ports="node")
    workers, homes = cluster.devices[: machines * devices], cluster.hosts[machines:]
    return kvstore.simulate(function, cluster, workers, homes, devices, *args, **how)


@judged
def blocks(function: Function) -> str:
    """Check `function(kv, devices, X, Y, rate)`: all devices get what one process gets, with as few bytes, as soon as can be."""
    for machines, devices, rate in (2, 1, 0.5), (3, 2, 0.5), (2, 4, 0.25):
        X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(devices)), torch.arange(16.0)
        where = f"{machines} machines of {plural(devices, 'device')}"
        try:
            run = _trained(function, machines, devices, X, Y, rate, log=True)
        except RankHung as error:
            raise Wrong(f"{where}: all wait for the servers. (A pushpull is answered when every worker has pushed that key, a "
                        "pull when every worker has ended its iteration.)") from error  # fmt: skip
        for rank, weights in enumerate(run):
            if not isinstance(weights, torch.Tensor) or weights.shape != (8,):
                raise Wrong(f"{where}: rank {rank} returns {weights!r}, not the 8 weights")
            if not torch.allclose(weights, wanted := rate * X.T @ Y / 16, atol=1e-5):
                raise Wrong(f"{where}, rate {rate}: rank {rank} has {_beside(weights, wanted)}")
        values = [getattr(event, "value", None) for server in run.servers for _, event in server.log if _pushes(event)]
        pushed = sum(value.nbytes for value in values if value is not None) / X[0].nbytes
        refuse((not pushed, f"{where}: the weights are right, but nothing was pushed to the servers"))
        refuse((pushed > machines, f"{where}: {pushed:g} gradients are pushed, where {machines} machines have {machines} sums"))
    big = [torch.empty(*shape, device="meta") for shape in ((8, _N // 4), (8,))]
    took = 1e3 * _trained(function, 2, 4, *big, 0.5, device="meta", trace=False).time
    if took > 29:
        raise Wrong(f"100 MB take {took:.1f} ms, and 28.8 are possible, of which init needs 8: does a device wait for bytes that "
                    "are another's?")  # fmt: skip
    return f"the weights of one process, two gradients through the servers' ports, {took:.1f} ms for 100 MB with init"


def _beside(weights: torch.Tensor, wanted: torch.Tensor) -> str:
    """Weights that are wrong, in words: a factor, if that is all; else the first that differs.

    >>> _beside(torch.tensor([-2.0, -4.0]), torch.tensor([1.0, 2.0])), _beside(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]))
    ('-2 times the weights of one process', 'weight 1 at 3, and one process has 2')
    """
    factor = float(weights @ wanted / (wanted @ wanted))
    if torch.allclose(weights, factor * wanted, atol=1e-5):
        return f"{factor:.3g} times the weights of one process"
    k = int((weights - wanted).abs().gt(1e-5).nonzero()[0])
    return f"weight {k} at {weights[k]:.4g}, and one process has {wanted[k]:.4g}"


def _pushes(event: Any) -> bool:
    return isinstance(event, kvstore.Request) and event.op in ("push", "pushpull")


# ---- racks, ports, sums ---------------------------------------------------------------------------------------------------


@answered
def racks(plain: Any, tree: Any) -> str:
    """Check `plain, tree`, each (gradients that cross the link down to the servers' rack, ms of the iteration)."""
    for name, given, crossed, ms, steps in (
        ("without the tree", plain, 8, 128, "what goes down the link must also come back up, as models"),
        ("with the tree", tree, 2, 80, "four parts follow one another: into the speaker, down, up, out of the speaker"),
    ):
        parts(name, given, ("gradients that go down", crossed, "How many machines push across racks?"),
              ("ms", ms, f"A gradient takes 8 ms on a link, and {steps}"))  # fmt: skip
    return "8 and 2 gradients, 128 and 80 ms"


@judged
def places(function: Function) -> str:
    """Check `function(speeds)`: a list of servers, each as often as it should have shares, so that all are busy equally long."""
    for speeds in [1], [1, 1], [3, 1], [1, 2], [4, 2, 6], [2, 3, 5]:
        chosen = function(list(speeds))
        if not isinstance(chosen, list | tuple) or {*chosen} - {*range(len(speeds))} or not chosen:
            raise Wrong(f"speeds {speeds}: {chosen!r} is no list of servers 0 to {len(speeds) - 1}")
        counts = [[*chosen].count(server) for server in range(len(speeds))]
        port = 2 * 4 * 0.096e12 / _BANDWIDTH * max(speeds)  # ms: four workers' 96 MB, in and out of a port of speed 1
        took, best = port * max(c / v for c, v in zip(counts, speeds, strict=True)) / len(chosen), port / sum(speeds)
        if took > _SLACK * best:
            shares = ", ".join(f"{c} for speed {v}" for c, v in zip(counts, speeds, strict=True))
            raise Wrong(f"speeds {speeds}: {took:.1f} ms, and {best:.1f} are possible; shares are {shares}")
    return "all ports are busy for equally long; with speeds 3 and 1 half of the time is saved"


@answered
def sum_or_mean(rate: Any, factor: Any) -> str:
    """Check `rate, factor`: the rate with which the sum of four workers is the mean at 1/2; how much too large it is for 16."""
    near("rate", rate, 0.125, "A sum of four gradients is four times their mean; the step is the rate times that")
    near("factor", factor, 4, "With 16 workers the sum is 16 times the mean, and the rate was made for 4 times")
    return "1/8, and four times too large with sixteen workers"


# ---- a median -------------------------------------------------------------------------------------------------------------


@judged
def median(function: Function) -> str:
    """Check `function(comm, tensor)`: every rank's tensor ends as the median of all, with the ring's bytes."""
    for ranks, numel in (1, 4), (3, 6), (3, 7), (5, 20), (5, 3), (7, 25):
        run = among(ranks, _median_job, function, numel)
        given = torch.stack([_numbers(rank, numel) for rank in range(ranks)])
        for rank, got in enumerate(run):
            off = (got != (wanted := given.median(0).values)).nonzero()
            if len(off):
                k, idle = int(off[0]), "; the tensor is as it was, and the result belongs in it" * torch.equal(got, given[rank])
                raise Wrong(f"{ranks} ranks, {numel} elements: rank {rank}, element {k} is {got[k]:g}; the median of "
                            f"{given[:, k].tolist()} is {wanted[k]:g}{idle}")  # fmt: skip
    for ranks in 5, 7:
        run = among(ranks, _median_job, function, 35_000)
        through = max(run.trace.bytes_sent().max(), run.trace.bytes_received().max()) / 140_000
        if through > _SLACK * (least := 2 * (ranks - 1) / ranks):
            raise Wrong(f"{ranks} ranks: right, but {through:.2f} gradients go through some rank's port, and the ring needs "
                        f"{least:.2f}: must every rank see all of every other's?")  # fmt: skip
    return "the median of 1, 3, 5 and 7 ranks, with exactly the bytes of a ring"


def _numbers(rank: int, numel: int) -> torch.Tensor:
    """Whole numbers of either sign, and a million in one place of ten."""
    dice = torch.Generator().manual_seed(rank)
    return torch.where(torch.rand(numel, generator=dice) < 0.1, 1e6, torch.randint(-99, 100, (numel,), generator=dice) * 1.0)


def _median_job(comm: Any, function: Function, numel: int) -> torch.Tensor:
    function(comm, tensor := _numbers(comm.rank, numel))
    return tensor
