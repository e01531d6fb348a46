"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.data import text
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.noise import NoiseScale
from d2lps.parallel.plan import Plan
from d2lps.parallel.priority import Scheduler
from d2lps.parallel.replicas import Replicas
from d2lps.parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding, sum_partial, tensor_parallel, vocab_cross_entropy
from d2lps.parallel.train import Trainer, train
from d2lps.parallel.transformer import Transformer

__all__ = ["ColumnLinear", "DataParallel", "DiLoCo", "DiLoCoWorker", "LocalSGD", "LossScaler", "Mesh", "MixedPrecision"]
__all__ += ["NoiseScale", "Plan", "Replicas", "RowLinear", "Scheduler", "Trainer", "Transformer", "VocabEmbedding", "buckets"]
__all__ += ["flatten", "local_steps", "sum_partial", "tensor_parallel", "text", "train", "vocab_cross_entropy"]
__all__ += ["wide_all_reduce"]
