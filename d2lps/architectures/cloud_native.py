"""All state in a store that outlives workers; these have none, and may come and go."""

from torch import Tensor

from d2lps.architectures import leases as leases  # whose operations are asked for here
from d2lps.architectures.job import Job
from d2lps.architectures.replica import Model, Record
from d2lps.kvstore import KVWorker, Request


def cloud_native(kv: KVWorker, job: Job) -> Record:
    """Lease a part of the batch, compute its gradient, bring it; until all steps are done.

    >>> kvstore.run(cloud_native, 4, 2, Job(), consistency="asp", durability="replica")[0].losses[0, 0]    # doctest: +SKIP
    4.573

    A part that a worker takes to its grave is leased again. Parts count once and in their own order, so that weights are the
    same to the bit, however many workers there were, and whoever has died. The price is a gradient a part, not a worker.
    Cost a step, of m parts, p workers and s servers: n bytes out a part, n bytes in a worker; m n/s into each server.
    """
    batch, step = Batch(kv, job), -1
    while (leased := batch.lease())[0] < job.steps:
        if leased[0] != step:
            batch.fetch(leased[0])
            if step >= 0:
                batch.model.finished(step)
        step, part = leased
        batch.bring(step, part, batch.model.gradient(step, part * job.part, job.part))
    batch.fetch(job.steps)
    batch.model.finished(job.steps - 1)
    return batch.model.final()


class Batch:
    """A worker's view of the store: who works on which part is the affair of one server, the first that has a part of the key.

    It hears of a gradient last: what it takes for complete is complete on all servers, which end it when they hear
    of the next step.
    """

    def __init__(self, kv: KVWorker, job: Job) -> None:
        self.kv, self.model = kv, Model(kv.comm, job)
        kv.set_optimizer("sgd", **job.hyper)
        kv.init("weights", self.model.weights)
        self.parts = kv.placement.parts["weights"]
        ask = [(part, Request("share", part.name, options={"parts": job.parts})) for part in self.parts]
        kv.ask("share", "weights", ask)

    def lease(self) -> tuple[int, ...]:
        """(step, part), as soon as there is a part that nobody has."""
        home = self.parts[0]
        return self.kv.ask("lease", "weights", [(home, Request("lease", home.name))])[0].owner

    def fetch(self, step: int) -> None:
        """The weights of that step."""
        asked = [(part, Request("fetch", part.name, options={"step": step})) for part in self.parts]
        self.kv.fetch("fetch", "weights", asked, [part.of(self.model.weights) for part in self.parts]).wait()

    def bring(self, step: int, part: int, gradient: Tensor) -> None:
        """To the home last, when all others have it."""
        for last, some in ((False, self.parts[1:]), (True, self.parts[:1])):
            told = {"step": step, "part": part, "last": last}
            self.kv.ask("bring", "weights", [(p, Request("bring", p.name, p.of(gradient), options=told)) for p in some])
