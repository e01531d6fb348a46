"""All that the servers have, as one file of whole tensors, for a run with another number of servers, or for other programs.

    w, b             the values by their keys, in safetensors
    w.exp_avg        the optimizer's tensors, under torch's names
    header           in its metadata, as JSON: what `set_optimizer` was told, and which tensors are an optimizer's

A checkpoint of a server (see `checkpoint`) has all of its state, and is of use to that server alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from d2lps.comm.rank import describe
from d2lps.kvstore.core.events import Refused, Reply, Request
from d2lps.kvstore.core.placement import Part, join_parts, key_of

Ask = Callable[[list[tuple[Part, Request]]], Sequence[Reply]]  # asks servers, and waits
META = "d2lps"


@dataclass
class Saved:
    """What a file has."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)  # by key
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # the optimizer's: {"exp_avg": {"w": tensor}}
    options: dict[str, Any] | None = None  # None: of a file by another program, which says nothing of optimizers


@dataclass
class Inventory:
    """What one server has: its live workers, what `set_optimizer` was told, {part: [dtype, shape, names of moments]}."""

    server: int
    workers: list[int]
    options: dict[str, Any]
    parts: dict[str, tuple[str, list[int], list[str]]]

    def like(self, name: str) -> torch.Tensor:
        """A part's shape and dtype."""
        dtype, shape, _ = self.parts[name]
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def inventories(ask: Ask, servers: Sequence[int]) -> list[Inventory]:
    replies = ask([(Part(server, "", 0), Request("state")) for server in servers])
    texts = [bytes(reply.value.tolist()) for reply in replies if reply.value is not None]
    return [Inventory(server, **json.loads(text)) for server, text in zip(servers, texts, strict=True)]


def collect(ask: Ask, found: Sequence[Inventory]) -> Saved:
    """All tensors, each asked for by itself and put together from its parts; of copies, one."""
    places = {(moment, name): one.server for one in found for name in one.parts for moment in ("", *one.parts[name][2])}
    asked = [(Part(to, name, 0), Request("state", name, options={"moment": m} if m else {})) for (m, name), to in places.items()]
    by_moment: dict[str, dict[str, torch.Tensor]] = {}
    for (moment, name), reply in zip(places, ask(asked), strict=True):
        assert reply.value is not None
        by_moment.setdefault(moment, {})[name] = reply.value
    joined = {moment: join_parts(parts) for moment, parts in by_moment.items()}
    return Saved(joined.pop("", {}), joined, found[0].options)


def spread(ask: Ask, found: Sequence[Inventory], saved: Saved) -> None:
    """Give all servers what they had when it was saved: first the options, then values, then what belongs to these."""
    if saved.options is not None:
        ask([(Part(one.server, "", 0), Request("restore", options=saved.options)) for one in found])
    asked = []
    for one in found:
        for name in one.parts:
            for moment, tensors in ({"": saved.values} | saved.moments).items():
                key, first = key_of(name)[:2]
                if key in tensors:
                    part = _part(tensors[key], first, one.like(name))
                    asked.append((Part(one.server, name, 0), Request("restore", name, part, options={"moment": moment})))
    ask(asked)


def _part(tensor: torch.Tensor, first: int, like: torch.Tensor) -> torch.Tensor:
    """These rows; of a tensor without rows, such as a count of steps, all of it."""
    return tensor[first : first + len(like)] if tensor.dim() else tensor


def check(path: str | Path, saved: Saved, found: Sequence[Inventory]) -> list[str]:
    """The keys that the servers have not got yet; Refused if one that they have is another tensor."""
    there = join_parts({name: one.like(name) for one in found for name in one.parts})
    for key in saved.values.keys() & there.keys():
        if describe(saved.values[key]) != describe(there[key]):
            raise Refused(f"{path}: {key!r} is {describe(saved.values[key])}, and the servers have {describe(there[key])}")
    return [key for key in saved.values if key not in there]


def write(path: str | Path, saved: Saved) -> None:
    """The file is whole or not there, or what it was before: it appears by one rename, after all in it is on the disk."""
    path, tensors, state = Path(path), dict(saved.values), dict[str, list[str]]()
    for moment, by_key in saved.moments.items():
        for key, tensor in by_key.items():
            if (name := f"{key}.{moment}") in tensors:
                raise ValueError(f"{path}: {name!r} is both a key and the {moment!r} of {key!r}: name the key otherwise")
            tensors[name], state[name] = tensor, [key, moment]
    draft = path.with_name(f".{path.name}.draft")
    try:
        save_file(tensors, draft, {META: json.dumps({"options": saved.options, "state": state})})
    except SafetensorError as error:  # which tells no path
        raise OSError(f"cannot write {draft}: {error}") from error
    _persist(draft)
    os.rename(draft, path)
    _persist(path.parent)


def read(path: str | Path) -> Saved:
    """What `write` wrote; any other safetensors file is one of values. FileNotFoundError, ValueError."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no other way
            meta: Mapping[str, Any] = json.loads((file.metadata() or {}).get(META, "{}"))
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    saved = Saved(options=meta.get("options"))
    for name, (key, moment) in meta.get("state", {}).items():
        saved.moments.setdefault(moment, {})[key] = tensors.pop(name)
    saved.values = tensors
    return saved


def _persist(path: Path) -> None:
    """On the disk, not only on its way there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
