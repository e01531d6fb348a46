"""The collectives by MPI itself: `mpirun -n 5 python mpi_collectives.py jobs results`; see test_collectives_mpi.py.

`jobs` is a pickled list of dictionaries: ranks, collective, op, root, inputs (by rank, lists of arrays) and rooms (by
rank, the sizes of the outputs). `results` gets, for each job, the outputs by rank. No torch here: it loads slowly.
"""

import pickle
import sys
from typing import Any

import numpy as np


def perform(comm: Any, job: dict[str, Any], op: Any) -> list[np.ndarray]:
    """Make one call, and return this rank's outputs."""
    mine, root = job["inputs"][comm.rank], job["root"]
    dtype, sizes = job["inputs"][root][0].dtype, job["rooms"][comm.rank]
    given, out = np.concatenate([np.zeros(0, dtype), *mine]), np.zeros(sum(sizes), dtype)
    match job["collective"]:
        case "broadcast":
            out[:] = given
            comm.Bcast(out, root)
        case "scatter":
            comm.Scatter(given if comm.rank == root else None, out, root)
        case "reduce":
            comm.Reduce(given, out, op, root)
            out = out if comm.rank == root else given
        case "all_reduce":
            comm.Allreduce(given, out, op)
        case "gather":
            comm.Gather(given, out if comm.rank == root else None, root)
        case "all_gather" | "all_gather_into_tensor":
            comm.Allgatherv(given, [out, [len(theirs[0]) for theirs in job["inputs"]]])
        case "reduce_scatter":
            comm.Reduce_scatter(given, out, [len(part) for part in mine], op)
        case "reduce_scatter_tensor":
            comm.Reduce_scatter_block(given, out, op)
        case "all_to_all":
            comm.Alltoallv([given, [len(part) for part in mine]], [out, sizes])
    return np.split(out, np.cumsum(sizes)[:-1]) if sizes else []


def main(jobs_file: str, results_file: str) -> None:
    from mpi4py import MPI  # starts MPI, so not where pytest looks for doctests

    world, ops = MPI.COMM_WORLD, {name: getattr(MPI, name) for name in ("SUM", "MIN", "MAX", "BAND", "BOR", "BXOR")}
    ops["PRODUCT"] = MPI.PROD
    with open(jobs_file, "rb") as file:
        jobs = pickle.load(file)
    results = []
    for ranks in {job["ranks"]: None for job in jobs}:
        group = world.Split(0 if world.rank < ranks else MPI.UNDEFINED)
        outputs = [perform(group, job, ops[job["op"]]) for job in jobs if job["ranks"] == ranks] if group else []
        results.append(world.gather(outputs))
    if world.rank == 0:
        by_job = [list(outputs) for theirs in results for outputs in zip(*filter(None, theirs), strict=True)]
        with open(results_file, "wb") as file:
            pickle.dump(by_job, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
