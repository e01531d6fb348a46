"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator.

A folder for each thing that ranks can share: a batch (`data`), the state of training (`sharded`), a layer (`tensor`), the layers
(`pipeline`); a sequence (`context.py`) and experts (`experts.py`) fit into a file. `transformer.py` is the model that all of them
work on, `mesh.py` the groups that they are given, `training` all of them together, `saving` what outlives a run.
"""

from d2lps.parallel.activations import activations
from d2lps.parallel.context import context_parallel, ring_attention, zigzag
from d2lps.parallel.data.buckets import Scheduler, buckets, flatten
from d2lps.parallel.data.data_parallel import DataParallel
from d2lps.parallel.data.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD
from d2lps.parallel.data.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce
from d2lps.parallel.data.noise import NoiseScale
from d2lps.parallel.data.replicas import Replicas
from d2lps.parallel.experts import Experts, expert_parallel
from d2lps.parallel.mesh import Mesh
from d2lps.parallel.pipeline.balance import cut, rebalance
from d2lps.parallel.pipeline.execute import StandIn, execute
from d2lps.parallel.pipeline.schedules import Action, gpipe, interleaved, one_f_one_b, picture, replay, zero_bubble
from d2lps.parallel.prediction.calibrate import calibrate, measured
from d2lps.parallel.prediction.predict import Prediction, predict
from d2lps.parallel.prediction.program import Calibration
from d2lps.parallel.prediction.search import Ranking, search
from d2lps.parallel.saving.checkpoint import Checkpoints, keep_going
from d2lps.parallel.saving.pieces import Piece, module_pieces, optimizer_pieces
from d2lps.parallel.sharded.clip import clip_by_global_norm
from d2lps.parallel.sharded.zero import Zero
from d2lps.parallel.tensor.layers import ColumnLinear, RowLinear, VocabEmbedding, vocab_cross_entropy
from d2lps.parallel.tensor.parallelize import sum_partial, tensor_parallel
from d2lps.parallel.training.plan import Plan
from d2lps.parallel.training.resume import resume, save_run
from d2lps.parallel.training.text import text
from d2lps.parallel.training.train import Trainer, train
from d2lps.parallel.transformer import Transformer

__all__ = ["Action", "Calibration", "Checkpoints", "ColumnLinear", "DataParallel", "DiLoCo", "DiLoCoWorker", "Experts"]
__all__ += ["LocalSGD", "LossScaler", "Mesh", "MixedPrecision", "NoiseScale", "Piece", "Plan", "Prediction", "Ranking"]
__all__ += ["Replicas", "RowLinear", "Scheduler", "StandIn", "Trainer", "Transformer", "VocabEmbedding", "Zero"]
__all__ += ["activations", "buckets", "calibrate", "clip_by_global_norm", "context_parallel", "cut", "execute"]
__all__ += ["expert_parallel", "flatten", "gpipe", "interleaved", "keep_going"]
__all__ += ["measured", "module_pieces", "one_f_one_b", "optimizer_pieces", "picture", "predict", "rebalance", "replay"]
__all__ += ["resume", "ring_attention", "save_run", "search", "sum_partial", "tensor_parallel", "text", "train"]
__all__ += ["vocab_cross_entropy", "wide_all_reduce", "zero_bubble", "zigzag"]
