"""All-to-all: every rank has something for every rank."""

from d2lps.arguments import named
from d2lps.collectives.arguments import Tensors, check_apart, check_fits, check_list, collective, only
from d2lps.comm import Communicator


@collective("algorithm")
def all_to_all(comm: Communicator, output_list: Tensors, input_list: Tensors, algorithm: str = "pairwise") -> None:
    """Copy `input_list[j]` of rank i into `output_list[i]` of rank j: a transpose across ranks.

    >>> inputs = [torch.tensor([10.0 * comm.rank + r]) for r in range(2)]           # doctest: +SKIP
    >>> all_to_all(comm, outputs, inputs)       # [0.], [10.] on rank 0; [1.], [11.] on rank 1     # doctest: +SKIP

    The lists hold p tensors, n bytes together, of any sizes as long as both ends of a message agree. Outputs share memory neither
    with one another nor with inputs, but that what stays on its rank may lie where it is to go. algorithm:
    "direct" (1 step: all messages are posted at once and share the links) or "pairwise" (p - 1 steps: each rank sends
    to one and receives from one at a time). Each rank sends (p - 1)/p n bytes in both.
    Source: Thakur, Rabenseifner, Gropp 2005.
    """
    check_list(comm, "output_list", output_list)
    check_list(comm, "input_list", input_list)
    check_fits(f"output_list[{comm.rank}]", output_list[comm.rank], f"input_list[{comm.rank}]", input_list[comm.rank])
    chosen = named("algorithm", algorithm, {"direct": _direct, "pairwise": _pairwise})
    check_apart("output_list", output_list, "input_list", input_list, only(output_list[comm.rank], input_list[comm.rank]))
    comm.copy(output_list[comm.rank], input_list[comm.rank])
    chosen(comm, output_list, input_list)


def _direct(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    """Post everything, then wait for everything."""
    comm.step("all-to-all")
    others = [(comm.rank + k) % comm.size for k in range(1, comm.size)]
    comm.exchange([(inputs[dst], dst) for dst in others], [(outputs[src], src) for src in others])


def _pairwise(comm: Communicator, outputs: Tensors, inputs: Tensors) -> None:
    """In step k, send to the k-th rank to the right and receive from the k-th to the left."""
    for step in range(1, comm.size):
        comm.step("all-to-all {}/{}", step, comm.size - 1)
        dst, src = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.sendrecv(inputs[dst], dst, outputs[src], src)
