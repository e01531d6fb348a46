"""The parameter server: keys and values on servers, and workers that push and pull."""

from d2lps.kvstore.core.events import Lost, Membership, Refused, Reply, Request
from d2lps.kvstore.core.optimizers import register_optimizer
from d2lps.kvstore.core.placement import Placement
from d2lps.kvstore.core.report import ServerReport, StoreRun
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.core.worker import KVWorker
from d2lps.kvstore.launch.chaos import Cluster
from d2lps.kvstore.launch.processes import ProcessesRun, run
from d2lps.kvstore.network.monitor import Monitor
from d2lps.kvstore.simulation.simulated import simulate

__all__ = [
    "Cluster",
    "KVWorker",
    "Lost",
    "Membership",
    "Monitor",
    "Placement",
    "ProcessesRun",
    "Refused",
    "Reply",
    "Request",
    "Server",
    "ServerReport",
    "StoreRun",
    "register_optimizer",
    "run",
    "simulate",
]
