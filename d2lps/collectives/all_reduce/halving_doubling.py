"""All-reduce by halves: as few bytes as the ring, in as few steps as a tree."""

from torch import Tensor

from d2lps.collectives.arguments import divide, doublings
from d2lps.comm import Communicator, ReduceOp


def halving_doubling(comm: Communicator, data: Tensor, op: ReduceOp) -> None:
    """Exchange halves with a partner and keep the sum of one, again and again; then all the way back.

    For p a power of two, 2 log2 p steps; each rank sends 2(p - 1)/p n bytes; time 2 log2 p alpha + 2(p - 1)/p n beta.
    Else the ranks above the power of two q below p hand their data to a partner first and get the result last:
    2 log2 q + 2 steps, time (2 log2 q + 2) alpha + (2(q - 1)/q + 2) n beta.
    With n beta = 10 ms: 15 ms for 4 ranks, 35 ms for 5. Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005.
    """
    core = 1 << (comm.size.bit_length() - 1)  # the ranks below the largest power of two
    if comm.rank >= core:
        comm.step("fold in")
        comm.send(data, comm.rank - core)
        comm.step("fold out")
        comm.recv(data, comm.rank - core)
        return
    scratch = data.new_empty(data.shape)
    folded = comm.rank + core < comm.size
    if folded:
        comm.step("fold in")
        comm.recv(scratch, comm.rank + core)
        comm.combine(data, scratch, op)
    _halve_and_double(comm, data, scratch, op, core)
    if folded:
        comm.step("fold out")
        comm.send(data, comm.rank + core)


def _halve_and_double(comm: Communicator, data: Tensor, scratch: Tensor, op: ReduceOp, core: int) -> None:
    """The first and largest halves go to the nearest rank, where links are fast."""
    kept, room, halves = data, scratch, []
    for distance in doublings(core):
        comm.step("halving, distance {}", distance)
        parts, mine = comm.chunks(kept, 2), int(comm.rank & distance > 0)  # which half this rank keeps: of two, 0 or 1
        kept, given, room = parts[mine], parts[1 - mine], comm.chunks(room, 2)[mine]
        comm.sendrecv(given, comm.rank ^ distance, room, comm.rank ^ distance)
        comm.combine(kept, room, op)
        halves.append((distance, kept, given))
    divide(kept, op, comm.size)
    for distance, kept, given in reversed(halves):
        comm.step("doubling, distance {}", distance)
        comm.sendrecv(kept, comm.rank ^ distance, given, comm.rank ^ distance)
