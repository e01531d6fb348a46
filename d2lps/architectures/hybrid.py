"""Layers shared by two, the depth by two, the batch by the rest: the model need not fit on one device."""

from pathlib import Path

import torch

from d2lps.architectures.job import Job
from d2lps.architectures.replica import Member, Record, beginning, busy
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.parallel.prediction.messages import Groups, carry_out
from d2lps.parallel.saving.checkpoint import Checkpoints
from d2lps.parallel.training.resume import resume, save_run
from d2lps.parallel.training.train import Trainer


def hybrid(comm: Communicator, job: Job) -> Record:
    """The plan `job.plan(comm.size)`: tensor and pipeline parallel inside, data parallel around.

    >>> d2lps.run(hybrid, 4, Job())[0].losses[0, 0]                                     # doctest: +SKIP
    4.573

    A described job is carried out message by message, as `predict` has it. Checkpoints are in pieces, which their owners write,
    and which ranks under another plan can read. Cost: see `Plan`. Source: Narayanan et al. 2021.
    """
    run = (Described if job.described else Trained)(comm, job)
    for _ in run.steps():
        run.step()
    return run.final()


class Trained(Member):
    """With real tensors: `train`'s steps."""

    def __init__(self, comm: Communicator, job: Job) -> None:
        super().__init__(comm, job)
        assert job.data is not None
        plan = job.plan(comm.size)
        self.trainer = Trainer(comm, job.transformer, plan, job.data, job.batch, job.optimizer, seed=job.seed)
        folder = Path(job.folder, "pieces")
        self.checkpoints = Checkpoints(comm, folder) if job.folder else None
        self.begin = resume(self.trainer, folder).step if beginning(comm, job) else 0

    def step(self) -> None:
        loss, _ = self.trainer.step()
        self.record.losses[self.trainer.done - 1, 0] = loss

    def save(self, done: int) -> None:
        if self.checkpoints is not None:
            save_run(self.trainer, self.checkpoints).wait()

    def final(self) -> Record:
        weights = self.trainer.model().parameters()
        self.record.weights = torch.cat([weight.detach().flatten() for weight in weights])
        return self.record


class Described(Member, Groups):
    """The messages of such steps, and the time that computing takes, without any content."""

    def __init__(self, comm: Communicator, job: Job) -> None:
        self.described = job.step_on(comm.topology.device(comm.node), job.plan(comm.size))
        Member.__init__(self, comm, job)
        Groups.__init__(self, comm, self.described, prices={})
        self.begin = beginning(comm, job)

    def step(self) -> None:
        carry_out(self.described, self)

    def compute(self, seconds: float, label: str = "compute") -> None:
        with busy(self.comm, seconds, label):
            pass

    def _send(self, comm: Communicator, axis: str, collective: str, nbytes: float) -> None:
        assert collective == "all_reduce"  # as without ZeRO, experts and sequence parallelism
        all_reduce(comm, torch.empty(round(nbytes / 2), dtype=torch.bfloat16, device="meta"))
