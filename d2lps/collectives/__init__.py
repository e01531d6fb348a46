"""The eight collectives, each from send and receive alone, with torch.distributed's names and meanings.

One file a collective, its algorithms in it from the plain one to the good one. Like torch, a collective writes into
the tensors that it is given, and every rank of the group calls it with arguments that fit the others'.
In the docstrings p is the number of ranks and n the bytes of the whole tensor; a step is a message that had to wait for
the one before, so p - 1 steps cost p - 1 latencies; bytes are what the busiest rank sends.
"""

from d2lps.collectives.all_gather import all_gather, all_gather_into_tensor
from d2lps.collectives.all_reduce import all_reduce
from d2lps.collectives.all_to_all import all_to_all
from d2lps.collectives.broadcast import broadcast
from d2lps.collectives.gather import gather
from d2lps.collectives.reduce import reduce
from d2lps.collectives.reduce_scatter import reduce_scatter, reduce_scatter_tensor
from d2lps.collectives.scatter import scatter

__all__ = ["all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "broadcast", "gather", "reduce"]
__all__ += ["reduce_scatter", "reduce_scatter_tensor", "scatter"]
