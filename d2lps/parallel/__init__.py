"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.checkpoint import Checkpoints, keep_going
from d2lps.parallel.clip import clip_by_global_norm
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.pieces import Piece, generator_pieces, module_pieces, optimizer_pieces
from d2lps.parallel.priority import Scheduler
from d2lps.parallel.transformer import Transformer
from d2lps.parallel.zero import Zero

__all__ = ["DataParallel", "DiLoCo", "DiLoCoWorker", "LocalSGD", "LossScaler", "Mesh", "MixedPrecision"]
__all__ += ["Scheduler", "Transformer", "Zero", "buckets", "clip_by_global_norm", "flatten", "local_steps", "wide_all_reduce"]
__all__ += ["Checkpoints", "Piece", "generator_pieces", "keep_going", "module_pieces", "optimizer_pieces"]
