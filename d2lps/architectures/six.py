"""The six by name, and how many ranks of those that are there each can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2lps.architectures.cloud_native import cloud_native
from d2lps.architectures.dynamic import dynamic
from d2lps.architectures.hierarchical import hierarchical
from d2lps.architectures.hybrid import hybrid
from d2lps.architectures.job import Job
from d2lps.architectures.parameter_server import parameter_server
from d2lps.architectures.ring import ring

Architecture = Callable[..., Any]
# Functions of a communicator, whose ranks wait for one another; and of a store, whose workers wait for servers.
COLLECTIVE: dict[str, Architecture] = {"ring": ring, "hybrid": hybrid, "hierarchical": hierarchical, "dynamic": dynamic}
STORED: dict[str, Architecture] = {"parameter server": parameter_server, "cloud-native": cloud_native}
CONSISTENCY = {"parameter server": "bsp", "cloud-native": "asp"}
ARCHITECTURES: dict[str, Architecture] = {"parameter server": parameter_server} | COLLECTIVE | {"cloud-native": cloud_native}


def count(architecture: str, job: Job, ranks: int) -> int:
    """With how many of so many ranks the job begins: the batch must be shared out evenly, but for leases."""
    if architecture == "cloud-native":
        return ranks
    return job.plan(ranks).ranks if architecture == "hybrid" else job.fits(ranks)
