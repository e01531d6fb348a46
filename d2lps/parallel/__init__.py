"""How a model is trained on many devices: one mechanism a file, each a few calls on a communicator."""

from d2lps.parallel.local_sgd import DiLoCo, DiLoCoWorker, LocalSGD, local_steps

__all__ = ["DiLoCo", "DiLoCoWorker", "LocalSGD", "local_steps"]
