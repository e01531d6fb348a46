"""Which algorithm, and which transport: said by the program with `use`, or around it by environment variables."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from d2lps import collectives
from d2lps.arguments import named
from d2lps.collectives.arguments import divide
from d2lps.comm import Communicator, ReduceOp, flat
from d2lps.comm.ops import check_op

Algorithm = str | Callable[..., object]
_TRANSPORTS = {name: name for name in ("auto", "shm", "gloo")}
_LIKE = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
_chosen: dict[str, Algorithm | None] = {}  # by collective; and the "transport"


def use(*, transport: str | None = None, **algorithms: Algorithm | None) -> None:
    """Choose, alike on every rank, how the collectives from now on are done; None means again as by default.

    >>> use(all_reduce="halving_doubling", broadcast="flat")            # doctest: +SKIP
    >>> use(all_reduce=my_ring)         # my_ring(comm, tensor) leaves the sum of all ranks in tensor     # doctest: +SKIP
    >>> use(transport="gloo")           # for the groups made from now on; or "shm", or "auto"            # doctest: +SKIP

    A function of (comm, tensor) gets a flat tensor, and sums: an average is its sum divided, minima and the like stay ours. One
    of (comm, tensor, op) gets every op, and for an average has to divide too. By default: shared memory's own all-reduce, and
    elsewhere "auto". The environment variables D2LPS_ALL_REDUCE and D2LPS_TRANSPORT choose where the program does not.
    """
    names = [name for name in collectives.__all__ if name not in _LIKE]
    for name, algorithm in algorithms.items():
        if name not in names:
            raise TypeError(f"there is no collective {name!r}; choose from {', '.join(names)}")
        if callable(algorithm) and name != "all_reduce":
            raise TypeError(f"{name}={algorithm!r}: only all_reduce takes a function; name an algorithm")
    _chosen.update(algorithms)
    if transport is not None:
        _chosen["transport"] = named("transport", transport, _TRANSPORTS)


def transport() -> str:
    """What new groups shall use."""
    return str(_chosen.get("transport") or named("transport", os.environ.get("D2LPS_TRANSPORT", "auto"), _TRANSPORTS))


def call(name: str, comm: Communicator, *arguments: Any) -> None:
    """`call("broadcast", comm, tensor, 0)`: the collective of that name, by the algorithm that was chosen."""
    algorithm = _chosen.get(_LIKE.get(name, name))
    options = {"algorithm": algorithm} if algorithm else {}
    getattr(collectives, name)(comm, *arguments, **options)


def all_reduce_dense(comm: Any, tensor: torch.Tensor, op: ReduceOp) -> None:
    """The same for an all-reduce, which may be a function of the reader's."""
    check_op(op, tensor.dtype)
    algorithm = _chosen.get("all_reduce") or os.environ.get("D2LPS_ALL_REDUCE") or comm.default
    if not callable(algorithm):
        collectives.all_reduce(comm, tensor, op, algorithm=algorithm)
    elif takes_op(algorithm):
        with comm.inside("all_reduce"), flat(tensor) as data:
            algorithm(comm, data, op)
    elif op == ReduceOp.SUM or op == ReduceOp.AVG:  # not `in`: turned round, the two are never equal
        with comm.inside("all_reduce"), flat(tensor) as data:
            algorithm(comm, data)
            divide(data, op, comm.size)
    else:
        collectives.all_reduce(comm, tensor, op, algorithm=comm.default)


def takes_op(function: Callable[..., object]) -> bool:
    """Whether the reader's function has a parameter for the op: `takes_op(lambda comm, tensor, op: None) is True`."""
    parameters = inspect.signature(function).parameters
    needed = [each for each in parameters.values() if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return len(needed) > 2 or "op" in parameters
