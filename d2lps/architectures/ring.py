"""All ranks alike: each has the model and a share of the batch, and gradients are averaged round a ring."""

from d2lps.architectures.job import Job
from d2lps.architectures.replica import Record, Replica
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp


def ring(comm: Communicator, job: Job) -> Record:
    """Decentralized data parallelism: nobody is special, everybody waits for everybody.

    >>> d2lps.run(ring, 4, Job())[0].losses[0, 0]                                       # doctest: +SKIP
    4.573

    Cost a step: 2(p - 1)/p n bytes a rank, on each link between neighbors; 2(p - 1) latencies.
    Source: Patarasuk and Yuan 2009.
    """
    replica = Replica(comm, job)
    for step in replica.steps():
        gradient = replica.share(step)
        with comm.about("grads"):
            all_reduce(comm, gradient, ReduceOp.AVG, algorithm="ring")
        replica.update(gradient)
    return replica.final()
