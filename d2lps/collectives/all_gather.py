"""All-gather: every rank's tensor, in a list on every rank."""

from itertools import accumulate

from torch import Tensor

from d2lps.arguments import named
from d2lps.collectives.arguments import Tensors, check_apart, check_fits, check_list, check_parts, collective, doublings, is_part
from d2lps.collectives.ring import Ring, all_gather_steps, play
from d2lps.comm import Communicator, flat


@collective("tensor_list", "algorithm")
def all_gather(comm: Communicator, tensor_list: Tensors, tensor: Tensor, algorithm: str = "ring") -> None:
    """Copy `tensor` of rank r into `tensor_list[r]` of every rank.

    >>> room = [torch.empty(1) for _ in range(3)]                                   # doctest: +SKIP
    >>> all_gather(comm, room, torch.tensor([float(comm.rank)]))                    # doctest: +SKIP
    >>> room                                            # [0.], [1.], [2.] on every rank     # doctest: +SKIP

    tensor_list: p tensors, n bytes together, of any sizes, the same on every rank; none shares memory with another, and `tensor`
    may be one of them, as a whole. algorithm: "ring" (p - 1 steps) or "bruck" (ceil(log2 p) steps, at the price of one more
    copy). Each rank sends (p - 1)/p n bytes in both.
    Source: Thakur, Rabenseifner, Gropp 2005; Bruck et al. 1997.
    """
    check_list(comm, "tensor_list", tensor_list)
    check_fits("tensor", tensor, f"tensor_list[{comm.rank}]", tensor_list[comm.rank])
    check_apart("tensor_list", tensor_list, "tensor", tensor)
    _all_gather(comm, tensor_list, tensor, algorithm)


@collective("output", "algorithm")
def all_gather_into_tensor(comm: Communicator, output: Tensor, input: Tensor, algorithm: str = "ring") -> None:
    """All-gather into one tensor: the ranks' inputs one after another, perhaps in place; steps and bytes as in `all_gather`.

    >>> all_gather_into_tensor(comm, output, torch.tensor([float(comm.rank)]))      # doctest: +SKIP
    >>> output                                          # tensor([0., 1., 2.]) on every rank     # doctest: +SKIP
    """
    check_parts(comm, "output", output, "input", input, "give")
    check_apart("output", output, "input", input, lambda whole, part: is_part(whole, part, comm.size))
    with flat(output) as data:
        _all_gather(comm, data.tensor_split(comm.size), input, algorithm)


def _all_gather(comm: Communicator, room: Tensors, tensor: Tensor, algorithm: str) -> None:
    named("algorithm", algorithm, {"ring": _ring, "bruck": _bruck})(comm, room, tensor)


def _ring(comm: Communicator, room: Tensors, tensor: Tensor) -> None:
    """Every rank passes to its right what it got last from its left, and begins with its own."""
    comm.copy(room[comm.rank], tensor)
    chunks = [room[-1], *room[:-1]]  # of a ring, rank r begins with chunk r + 1: let that be part r
    play(comm, "all-gather", comm.size, all_gather_steps(Ring.of(comm.rank, range(comm.size), chunks)))


def _bruck(comm: Communicator, room: Tensors, tensor: Tensor) -> None:
    """Every rank holds a run of parts that doubles: 1, 2, 4, ... from its own on; each step fetches as many again.

    Kept in that order, own part first, so that what is sent lies side by side; put in place by ranks at the end.
    """
    sizes = [room[(comm.rank + k) % comm.size].numel() for k in range(comm.size)]
    begin = [0, *accumulate(sizes)]  # part k, counted from this rank, lies in held[begin[k] : begin[k + 1]]
    held = tensor.new_empty(begin[-1])
    comm.copy(held[: sizes[0]], tensor)
    for step, count in enumerate(doublings(comm.size), 1):
        comm.step("all-gather {}", step)
        more = min(count, comm.size - count)
        fetched, dst, src = held[begin[count] : begin[count + more]], comm.rank - count, comm.rank + count
        comm.sendrecv(held[: begin[more]], dst % comm.size, fetched, src % comm.size)
    for k in range(comm.size):
        comm.copy(room[(comm.rank + k) % comm.size], held[begin[k] : begin[k + 1]])
