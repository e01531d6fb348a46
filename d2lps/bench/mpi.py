"""A rank of OpenMPI that is told what to measure: `mpirun -n 4 python mpi.py door`. No torch here: it loads slowly."""

import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client

COMMAND = ["mpirun", "--allow-run-as-root", "--oversubscribe"]


def timed(operation: Callable[[], object], barrier: Callable[[], object], repeats: int) -> tuple[float, float]:
    """When a rank began and when it ended, on the machine's clock, after all had come together."""
    operation()
    barrier()
    start = time.monotonic()
    for _ in range(repeats):
        operation()
    return start, time.monotonic()


def main(door: str) -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with Client(door) as line:
        while (order := line.recv()) is not None:
            _, nbytes, repeats = order
            array = np.ones(nbytes // 4, np.float32)
            array[:] = 0
            line.send(timed(lambda array=array: world.Allreduce(MPI.IN_PLACE, array), world.Barrier, repeats))  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1])
