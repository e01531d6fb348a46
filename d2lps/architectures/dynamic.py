"""The ring, or a tree, or everyone to everyone: whichever the network makes the best of just now."""

from d2lps.adaptive import AdaptiveAllReduce, Controller
from d2lps.architectures.job import Job
from d2lps.architectures.replica import Record, Replica
from d2lps.comm import Communicator, ReduceOp

BUCKETS = 4  # a new topology is tried on one of them first


def dynamic(comm: Communicator, job: Job) -> Record:
    """Gradients are averaged over a logical topology that is chosen anew, by what the last steps took.

    >>> d2lps.run(dynamic, 4, Job())[0].losses[0, 0]                                    # doctest: +SKIP
    4.573

    It learns from steps that end: of a cable that carries less, not of one that carries nothing. Cost: see `adaptive`.
    """
    replica = Replica(comm, job)
    summing = AdaptiveAllReduce(comm, Controller(horizon=job.steps, every=1))
    for step in replica.steps():
        gradient = replica.share(step)
        with comm.about("grads"):
            summing.step(list(gradient.chunk(BUCKETS)), ReduceOp.AVG)
        replica.update(gradient)
    return replica.final()
