"""Checks of a reader's own functions: `d2lps_book.check.all_reduce(mine)` says passed, or the first thing that is wrong.

Each runs the function in the simulator, on several numbers of ranks and sizes, with values that reveal what went where.
"""

from d2lps_book.check.exercise import Verdict
from d2lps_book.check.exercises import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    contest,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = ["Verdict", "all_gather", "all_reduce", "all_to_all", "broadcast", "contest", "gather", "reduce", "reduce_scatter"]
__all__ += ["scatter"]
