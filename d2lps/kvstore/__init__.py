"""The parameter server: keys and values on servers, and workers that push and pull."""

from d2lps.kvstore.chaos import Cluster
from d2lps.kvstore.compression import register_codec
from d2lps.kvstore.events import Lost, Membership, Refused, Reply, Request
from d2lps.kvstore.monitor import Monitor
from d2lps.kvstore.optimizers import register_optimizer
from d2lps.kvstore.placement import Placement
from d2lps.kvstore.processes import ProcessesRun, run
from d2lps.kvstore.report import ServerReport, StoreRun
from d2lps.kvstore.server import Server
from d2lps.kvstore.simulated import simulate
from d2lps.kvstore.worker import KVWorker

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
    "register_codec",
    "register_optimizer",
    "run",
    "simulate",
]
