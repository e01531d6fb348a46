"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.priority import Scheduler

__all__ = ["DataParallel", "Scheduler", "buckets", "flatten"]
