"""What communication costs by the alpha-beta model: a message of n bytes takes alpha + n beta seconds.

Everywhere p = `ranks`, n = `nbytes`, alpha = seconds that a message takes however short it is (latency), beta = seconds
per byte (1 / bandwidth), L = ceil(log2 p), and gamma = seconds that a rank takes to combine a byte with another, where it
matters. Ranks send and receive at the same time, all at the same speed; nothing else uses the network.

>>> from d2lps import cost
>>> cost.all_reduce("ring", nbytes=160e6, ranks=4, alpha=0, beta=1 / 16e9)
0.015
>>> cost.choose(nbytes=8, ranks=4, alpha=1e-6, beta=1e-9).algorithm
'halving_doubling'
"""

from d2lps.cost.choice import ALPHA, BETA, Choice, choose
from d2lps.cost.fitting import fit, message_times
from d2lps.cost.moving import all_gather, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter
from d2lps.cost.numbers import algbw, busbw
from d2lps.cost.reducing import (
    all_reduce,
    best_chunks,
    blockwise,
    double_tree,
    flat,
    flat_together,
    halving_doubling,
    hierarchical,
    in_switch,
    recursive_doubling,
    ring,
    through_host,
    tree,
    two_rings,
)
from d2lps.cost.servers import byteps, colocated_servers, one_server, parameter_servers

__all__ = ["ALPHA", "BETA", "Choice", "algbw", "all_gather", "all_reduce", "all_to_all", "best_chunks", "blockwise"]
__all__ += ["broadcast", "busbw", "byteps", "choose", "colocated_servers", "double_tree", "fit", "flat", "flat_together"]
__all__ += ["gather", "halving_doubling", "hierarchical", "in_switch", "message_times", "one_server", "parameter_servers"]
__all__ += ["recursive_doubling", "reduce", "reduce_scatter", "ring", "scatter", "through_host", "tree", "two_rings"]
