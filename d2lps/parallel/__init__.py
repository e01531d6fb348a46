"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.context import context_parallel, ring_attention, zigzag
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.experts import Experts, expert_parallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.priority import Scheduler
from d2lps.parallel.transformer import Transformer

__all__ = ["DataParallel", "DiLoCo", "DiLoCoWorker", "LocalSGD", "LossScaler", "Mesh", "MixedPrecision"]
__all__ += ["Experts", "context_parallel", "expert_parallel", "ring_attention", "zigzag"]
__all__ += ["Scheduler", "Transformer", "buckets", "flatten", "local_steps", "wide_all_reduce"]
