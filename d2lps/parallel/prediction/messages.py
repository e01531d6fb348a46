"""The same program message by message: every rank of a plan in the simulator, nothing priced beforehand.

It takes seconds for 16 ranks, and would take days for 3,072: it is what prices are held against where both can be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch

from d2lps.comm import Communicator, Event
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.pipeline.p2p import Mail, awaited
from d2lps.parallel.pipeline.schedules import after, placed, traffic
from d2lps.parallel.prediction.prices import Price, Prices
from d2lps.parallel.prediction.program import Job, Rank
from d2lps.result import Run
from d2lps.simulator import simulate
from d2lps.topology import Topology


def by_messages(job: Job, cluster: Topology) -> Run:
    """Every rank's step in the simulator; its `.time` is what a prediction's should be, and its trace shows each message."""
    prices = Prices(job.plan, cluster)
    priced = {asked: prices.price(*asked) for asked in job.asks}
    nodes = cluster.devices[: job.plan.ranks]
    return simulate(_live, prices.reached, job, priced, ranks=nodes, device="meta")


class Groups:
    """A `World` of messages: each axis is a communicator. prices: of each collective along an axis, whose way it goes."""

    def __init__(self, comm: Communicator, job: Job, prices: Mapping[tuple[str, str], Price]) -> None:
        plan, self.comm, self.prices = job.plan, comm, prices
        mesh = Mesh(comm, plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)
        shards = (plan.zero_group or mesh.data.size) if plan.zero else mesh.data.size
        self.pp = mesh.pp
        self.groups: dict[str, Any] = {"tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep, "edp": mesh.edp}
        self.groups["dp"] = mesh.data.split(mesh.data.rank // shards, axis="dp")
        self.groups["replicas"] = mesh.data.split(mesh.data.rank % shards, axis="dp")
        self.groups["ends"] = mesh.pp.split(0 if mesh.pp.rank in (0, mesh.pp.size - 1) else None)

    def compute(self, seconds: float, label: str = "compute") -> None:
        self.comm.sleep(seconds, label)

    def collective(self, axis: str, collective: str, nbytes: float) -> None:
        self._send(self.groups[axis], axis, collective, nbytes)

    def start(self, axis: str, collective: str, nbytes: float, behind: Any = None) -> Any:
        over = Event()

        def in_turn(comm: Communicator) -> None:
            if behind is not None:
                comm.wait(behind)
            self._send(comm, axis, collective, nbytes)
            comm.signal(over)

        self.groups[axis].start(in_turn)
        return over

    def wait(self, started: Any) -> None:
        if started is not None:
            self.comm.wait(started)

    def _send(self, comm: Communicator, axis: str, collective: str, nbytes: float) -> None:
        if comm.size > 1:
            self.prices[axis, collective].run(comm, round(nbytes))


def _live(comm: Communicator, job: Job, prices: Mapping[tuple[str, str], Price]) -> None:
    carry_out(job, Groups(comm, job, prices))


def carry_out(job: Job, world: Groups) -> None:
    """This rank's step, as `execute` does it: a receive is posted an action ahead, sends are waited for at the end."""
    rows = tuple(map(tuple, job.plan.order(job.batch)))
    (home, _), pp = placed(rows), world.pp
    rank, mail = Rank(job, world, pp.rank, {}), Mail(pp, traffic(rows))
    made = torch.empty(round(job.message) // 4, dtype=torch.float32, device=world.comm.device)

    for action, then in zip_longest(rows[pp.rank], rows[pp.rank][1:]):
        if (need := awaited(action, len(home))) is not None:
            mail.get(need, home[need.stage])
        if then is not None and (soon := awaited(then, len(home))) is not None:
            mail.expect(soon, home[soon.stage])
        rank.act(action)
        if after(action) in home:
            mail.send(action, made, home[after(action)])
    mail.finish()
    rank.finish()
