"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.balance import cut, rebalance
from d2lps.parallel.buckets import buckets, flatten
from d2lps.parallel.checkpoint import Checkpoints, keep_going
from d2lps.parallel.clip import clip_by_global_norm
from d2lps.parallel.context import context_parallel, ring_attention, zigzag
from d2lps.parallel.data import text
from d2lps.parallel.data_parallel import DataParallel
from d2lps.parallel.experts import Experts, expert_parallel
from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.noise import NoiseScale
from d2lps.parallel.pieces import Piece, generator_pieces, module_pieces, optimizer_pieces
from d2lps.parallel.pipeline import execute
from d2lps.parallel.plan import Plan
from d2lps.parallel.priority import Scheduler
from d2lps.parallel.replicas import Replicas
from d2lps.parallel.schedules import Action, gpipe, interleaved, one_f_one_b, picture, replay, zero_bubble
from d2lps.parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding, sum_partial, tensor_parallel, vocab_cross_entropy
from d2lps.parallel.train import Trainer, train
from d2lps.parallel.transformer import Transformer
from d2lps.parallel.zero import Zero

__all__ = ["Action", "Checkpoints", "ColumnLinear", "DataParallel", "DiLoCo", "DiLoCoWorker", "Experts", "LocalSGD"]
__all__ += ["LossScaler", "Mesh", "MixedPrecision", "NoiseScale", "Piece", "Plan", "Replicas", "RowLinear", "Scheduler"]
__all__ += ["Trainer", "Transformer", "VocabEmbedding", "Zero", "buckets", "clip_by_global_norm", "context_parallel", "cut"]
__all__ += ["execute", "expert_parallel", "flatten", "generator_pieces", "gpipe", "interleaved", "keep_going", "local_steps"]
__all__ += ["module_pieces", "one_f_one_b", "optimizer_pieces", "picture", "rebalance", "replay", "ring_attention"]
__all__ += ["sum_partial", "tensor_parallel", "text", "train", "vocab_cross_entropy", "wide_all_reduce", "zero_bubble"]
__all__ += ["zigzag"]
