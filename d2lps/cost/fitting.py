"""Alpha and beta of a machine: how the book measures a message everywhere, and how it fits the line.

>>> from d2lps import cost, run, simulate, topology
>>> sizes = [4, 40_000, 400_000]
>>> alone = simulate(cost.message_times, topology.star(4, 1e9, 5e-6), sizes)[0]
>>> alpha, beta = cost.fit(sizes, alone)
>>> print(f"{1e6 * alpha:.1f} us, {1e-9 / beta:.1f} GB/s")
10.0 us, 1.0 GB/s
"""

from collections.abc import Sequence

import numpy as np
import torch

from d2lps.comm import Communicator


def message_times(comm: Communicator, sizes: Sequence[int], crowd: bool = False, rounds: int = 21) -> list[float]:
    """Median seconds of one message, for each size in bytes; run it on two ranks or more.

    From rank 0 to rank 1, half of the time there and back, while the others are silent; with `crowd`, from every rank to its
    right neighbor, all at once. Each round tries all sizes, so that what disturbs the machine for a while disturbs all alike;
    a first round warms up and does not count. The slowest rank's median is returned to every rank.
    """
    # All tensors are made before: a rank that makes a large one keeps the core on which another would end its message.
    made = [(torch.zeros(n // 4, device=comm.device), torch.zeros(n // 4, device=comm.device)) for n in sizes]
    # The last size first, which is the largest as a rule: the caches that it leaves cold are of no use to a large one anyway.
    seconds = np.array([[_message(comm, *pair, crowd) for pair in made[::-1]] for _ in range(rounds + 1)])[:, ::-1]
    medians = torch.tensor(np.median(seconds[1:], axis=0))
    return _slowest(comm, medians).tolist()


def _message(comm: Communicator, out: torch.Tensor, room: torch.Tensor, crowd: bool) -> float:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.barrier()
    start = comm.now()
    if crowd:
        comm.sendrecv(out, right, room, left)
    elif comm.rank == 0:
        comm.send(out, 1)
        comm.recv(room, 1)
    elif comm.rank == 1:
        comm.recv(room, 0)
        comm.send(out, 0)
    return (comm.now() - start) / (1 if crowd else 2)


def _slowest(comm: Communicator, mine: torch.Tensor) -> torch.Tensor:
    """The largest of all ranks' values, by asking each neighbor in turn: a few bytes, once."""
    most, going, coming = mine.clone(), mine.to(comm.device), mine.to(comm.device).clone()
    for _ in range(comm.size - 1):
        comm.sendrecv(going, (comm.rank + 1) % comm.size, coming, (comm.rank - 1) % comm.size)
        going.copy_(coming)
        most = torch.maximum(most, coming.cpu())
    return most


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta) of the line that is wrong by the same share at small sizes and at large: relative least squares.

    >>> alpha, beta = fit([4, 4e6], [10e-6, 1010e-6])
    >>> round(alpha * 1e6, 3), round(beta * 1e9, 3)
    (9.999, 0.25)
    """
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return float(alpha), float(beta)
