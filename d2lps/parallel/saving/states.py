"""Whatever else has a state, and a `state_dict`, in a checkpoint: its tensors as pieces, all else as JSON.

What all ranks have alike is written once, and any number of ranks may load it; what is each rank's own, as many as wrote it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from d2lps.comm import Communicator
from d2lps.parallel.data.replicas import fingerprint
from d2lps.parallel.saving.agreement import on_every_rank
from d2lps.parallel.saving.pieces import Piece
from d2lps.parallel.saving.saved import Manifest


class Stateful(Protocol):
    """An optimizer, a learning-rate schedule, a `LossScaler`, a `DiLoCo`, a module: torch's own name for these two calls."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


States = Mapping[str, Stateful]
_KINDS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "dict": dict, "Counter": Counter}


def packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON has it; its tensors go into `tensors`, by name.

    >>> packed({"step": 3, 7: torch.zeros(2)}, "adam", tensors := {})
    {'dict': [['step', 3], [7, {'tensor': ['adam/7', True]}]]}
    >>> tensors
    {'adam/7': tensor([0., 0.])}

    ValueError, with the name, for what is none of tensors, numbers, texts, None, and lists, tuples and dicts of them.
    """
    if isinstance(value, Tensor):
        if tensors.setdefault(name, value) is not value:
            raise ValueError(f"{name} is the name of two tensors")
        return {"tensor": [name, value.device.type == "cpu"]}
    if isinstance(value, Mapping):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {kind: [[packed(key, name, {}), packed(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [packed(item, f"{name}/{number}", tensors) for number, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name} is {value!r}: saved are tensors, numbers, texts, None, and lists, tuples and dicts of them")


def unpacked(said: Any, tensor: Callable[[str, bool], Tensor]) -> Any:
    """What `packed` was given; tensor: finds one by its name, and whether it was in the CPU's memory."""
    if not isinstance(said, dict):
        return said
    [(kind, content)] = said.items()
    if kind == "tensor":
        return tensor(*content)
    if kind in ("list", "tuple"):
        return _KINDS[kind](unpacked(item, tensor) for item in content)
    return _KINDS[kind]({unpacked(key, tensor): unpacked(item, tensor) for key, item in content})


def state_pieces(comm: Communicator, states: States) -> tuple[dict[str, Piece], dict[str, list[Any]]]:
    """Of each state, its tensors as pieces, and what else there is, by rank; of one rank alone, where all have the same.

    A tensor that is this rank's own is a whole by itself, `left/w@3` on rank 3. Cost: fingerprints, and an all-gather a state.
    """
    pieces: dict[str, Piece] = {}
    told: dict[str, list[Any]] = {}
    for name, state in states.items():
        tensors: dict[str, Tensor] = {}
        everybody = on_every_rank(comm, partial(_marked, name, state, tensors))
        alike = all(one == everybody[0] for one in everybody)
        told[name] = [said for said, _ in everybody[: 1 if alike else None]]
        for full, tensor in tensors.items():
            same = len({marks.get(full) for _, marks in everybody}) == 1
            pieces[full if same else f"{full}@{comm.rank}"] = Piece(tensor.detach().contiguous(), tuple(tensor.shape))
    return pieces, told


def _marked(name: str, state: Stateful, tensors: dict[str, Tensor]) -> list[Any]:
    said = packed(state.state_dict(), name, tensors)
    return [said, {full: fingerprint(tensor) for full, tensor in tensors.items()}]


class Rooms:
    """Of the states in a checkpoint, those that are asked for: room for their tensors, to be filled, and then given to them.

    ValueError, with the name, for a state that it does not have, or that is of so many ranks, each its own, and not of these.
    """

    def __init__(self, manifest: Manifest, comm: Communicator, states: States) -> None:
        self.manifest, self.comm, self.states = manifest, comm, states
        self.pieces: dict[str, Piece] = {}
        self.found = {name: unpacked(self._said(name), self._room) for name in states}

    def _said(self, name: str) -> Any:
        if (by_rank := self.manifest.states.get(name)) is None:
            raise ValueError(f"{self.manifest.folder} has no state {name!r}: it has {list(self.manifest.states)}")
        if len(by_rank) not in (1, self.comm.size):
            told = f"the state {name!r} is of {len(by_rank)} ranks, each has its own"
            raise ValueError(f"{self.manifest.folder}: {told}, and there are {self.comm.size}")
        return by_rank[self.comm.rank % len(by_rank)]

    def _room(self, full: str, on_cpu: bool) -> Tensor:
        full = full if full in self.manifest.tensors else f"{full}@{self.comm.rank}"
        about = self.manifest.tensors[full]
        device = torch.device("cpu") if on_cpu else self.comm.device
        room = torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device=device)
        self.pieces[full] = Piece(room, tuple(about["shape"]))
        return room

    def hand_over(self) -> None:
        """They are filled."""
        for name, state in self.states.items():
            state.load_state_dict(self.found[name])
