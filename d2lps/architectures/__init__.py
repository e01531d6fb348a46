"""Six ways to put a training job together, on one job."""

from d2lps.architectures.job import LARGE, Job

__all__ = ["LARGE", "Job"]
