"""Layers shared by two, the depth by two, the batch by the rest: the model need not fit on one device."""

from pathlib import Path

from d2lps.architectures.job import Job
from d2lps.architectures.replica import Model, Record, agreed, note, noted
from d2lps.comm import Communicator
from d2lps.parallel.prediction.messages import Groups, live
from d2lps.parallel.prediction.prices import Prices
from d2lps.parallel.saving.checkpoint import Checkpoints
from d2lps.parallel.training.resume import resume, save_run
from d2lps.parallel.training.train import Trainer


def hybrid(comm: Communicator, job: Job) -> Record:
    """The plan `job.plan(comm.size)`: tensor and pipeline parallel inside, data parallel around.

    >>> d2lps.run(hybrid, 4, Job())[0].losses[0, 0]                                     # doctest: +SKIP
    4.573

    A described job is carried out message by message, as `predict` has it. Checkpoints are in pieces, written by their owners.
    """
    run = Described(comm, job) if job.described else Trained(comm, job)
    while run.done < job.steps:
        run.step()
        if agreed(run, run.done - 1):
            run.record.stopped = run.done < job.steps
            run.save()
            break
        if run.done % job.every == 0:
            run.save()
    return run.final()
