"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.mixed_precision import LossScaler, MixedPrecision, wide_all_reduce

__all__ = ["LossScaler", "MixedPrecision", "wide_all_reduce"]
