"""The vocabulary of communication: a Communicator, its Work, and what goes wrong."""

from d2lps.comm.communicator import Communicator
from d2lps.comm.errors import Deadlock, Mismatch, OutOfMemory, RankDied, RankFailed, RankHung
from d2lps.comm.ops import ReduceOp
from d2lps.comm.staging import flat
from d2lps.comm.work import Event, Work

__all__ = ["Communicator", "Event", "ReduceOp", "Work", "flat"]
__all__ += ["Deadlock", "Mismatch", "OutOfMemory", "RankDied", "RankFailed", "RankHung"]
