"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.balance import cut, rebalance
from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.pipeline import execute
from d2lps.parallel.priority import Scheduler
from d2lps.parallel.schedules import Action, gpipe, interleaved, one_f_one_b, picture, replay, zero_bubble
from d2lps.parallel.stand_in import StandIn
from d2lps.parallel.transformer import Transformer

__all__ = ["DataParallel", "DiLoCo", "DiLoCoWorker", "LocalSGD", "LossScaler", "Mesh", "MixedPrecision"]
__all__ += ["Scheduler", "Transformer", "buckets", "flatten", "local_steps", "wide_all_reduce"]
__all__ += [
    "Action",
    "StandIn",
    "cut",
    "execute",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "picture",
    "rebalance",
    "replay",
    "zero_bubble",
]
