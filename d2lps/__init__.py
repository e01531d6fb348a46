"""d2lps: the algorithms of distributed deep learning, written once as plain functions of a communicator.

>>> import d2lps
>>> d2lps.run(lambda comm: f"rank {comm.rank} of {comm.size}", ranks=2)     # doctest: +SKIP
Run(['rank 0 of 2', 'rank 1 of 2'])
"""

import importlib
from typing import Any

from d2lps import aggregate, backend, collectives, compress, cost, gossip, kvstore, topology
from d2lps.comm import Communicator, Deadlock, Event, Mismatch, OutOfMemory, RankDied, RankFailed, RankHung, ReduceOp, Work
from d2lps.figures import style
from d2lps.launch import run
from d2lps.result import Run
from d2lps.simulator import Cut, Kill, Model, Narrow, Slow, simulate
from d2lps.topology import Device, Topology
from d2lps.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "Communicator", "Cut", "Deadlock", "Device", "Event", "Kill", "Mismatch", "Model", "Narrow", "OutOfMemory", "RankDied",
    "RankFailed", "RankHung", "ReduceOp", "Run", "Slow", "Topology", "Trace", "Work", "aggregate", "backend", "collectives",
    "compress", "cost", "gossip", "kvstore", "run", "simulate", "style", "topology",
]


def __getattr__(name: str) -> Any:
    """What few programs need is imported when it is first asked for: `d2lps.architectures`, `watch` and others."""
    if name in ("adaptive", "architectures", "feeding", "parallel", "planning", "watch", "widgets"):
        return importlib.import_module(f"d2lps.{name}")
    raise AttributeError(f"module 'd2lps' has no attribute {name!r}")
