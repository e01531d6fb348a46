"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.priority import Scheduler

__all__ = ["DataParallel", "DiLoCo", "DiLoCoWorker", "LocalSGD", "LossScaler", "MixedPrecision", "Scheduler", "buckets"]
__all__ += ["flatten", "local_steps", "wide_all_reduce"]
