"""Servers in the middle: they have the weights and the optimizer, workers bring gradients and fetch weights."""

from d2lps.architectures.job import Job
from d2lps.architectures.replica import Model, Record
from d2lps.kvstore import KVWorker


def parameter_server(kv: KVWorker, job: Job) -> Record:
    """Each step: the gradient of this worker's share goes to the servers, which take the step, and the weights come back.

    >>> kvstore.run(parameter_server, 4, 2, Job())[0].losses[0, 0]                      # doctest: +SKIP
    4.573

    Shares are dealt out once: of a worker that dies, or has not come yet, the batch lacks its share.
    Cost a step, of p workers and s servers: n bytes to and n bytes from each worker; p n/s bytes into and out of each server.
    Source: Li et al. 2014; with rounds (bsp) as here, the sums are added up in the order of ranks.
    """
    model, count = Model(kv.comm, job), job.batch // kv.num_workers
    kv.set_optimizer("sgd", **job.hyper)
    kv.init("weights", model.weights)
    for step in range(kv.iteration, job.steps):
        kv.push("weights", model.gradient(step, kv.rank * count, count))
        kv.clock()
        kv.pull("weights", model.weights).wait()
        model.finished(step)
    return model.final()
