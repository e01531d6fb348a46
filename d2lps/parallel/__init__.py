"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.checkpoint import Checkpoints, keep_going
from d2lps.parallel.clip import clip_by_global_norm
from d2lps.parallel.data import text
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.noise import NoiseScale
from d2lps.parallel.pieces import Piece, generator_pieces, module_pieces, optimizer_pieces
from d2lps.parallel.plan import Plan
from d2lps.parallel.priority import Scheduler
from d2lps.parallel.replicas import Replicas
from d2lps.parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding, sum_partial, tensor_parallel, vocab_cross_entropy
from d2lps.parallel.train import Trainer, train
from d2lps.parallel.transformer import Transformer
from d2lps.parallel.zero import Zero

__all__ = ["Checkpoints", "ColumnLinear", "DataParallel", "DiLoCo", "DiLoCoWorker", "LocalSGD", "LossScaler", "Mesh"]
__all__ += ["MixedPrecision", "NoiseScale", "Piece", "Plan", "Replicas", "RowLinear", "Scheduler", "Trainer", "Transformer"]
__all__ += ["VocabEmbedding", "Zero", "buckets", "clip_by_global_norm", "flatten", "generator_pieces", "keep_going"]
__all__ += ["local_steps", "module_pieces", "optimizer_pieces", "sum_partial", "tensor_parallel", "text", "train"]
__all__ += ["vocab_cross_entropy", "wide_all_reduce"]
