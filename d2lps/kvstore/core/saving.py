"""All that the servers have, as one file of whole tensors, for a run with another number of servers, or for other programs.

    w, b             the values by their keys, in safetensors
    w.exp_avg        the optimizer's tensors, under torch's names
    header           in its metadata, as JSON: what `set_optimizer` was told, and the names of the optimizer's tensors

A checkpoint of a server (see `checkpoint`) has all of its state, and is of use to that server alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from d2lps.comm.rank import describe
from d2lps.kvstore.core.events import Refused, Reply, Request
from d2lps.kvstore.core.placement import Part, join_parts, key_of

Ask = Callable[[list[tuple[Part, Request]]], Sequence[Reply]]  # asks servers, and waits for their answers
Found = dict[int, dict[str, Any]]  # by server: its workers, its options, and {part: [dtype, shape, the optimizer's tensors]}
Tensors = dict[str, torch.Tensor]
META = "d2lps"


def look(ask: Ask, servers: Sequence[int]) -> Found:
    """What the servers have."""
    replies = ask([(Part(server, "", 0), Request("state")) for server in servers])
    said = zip(servers, replies, strict=True)
    return {server: json.loads(bytes(reply.value.tolist())) for server, reply in said if reply.value is not None}


def collect(ask: Ask, found: Found) -> tuple[Tensors, dict[str, Any]]:
    """All tensors, each asked for by itself and put together from its parts, of copies one; and the metadata."""
    places = {(name, m): s for s, one in found.items() for name, (*_, moments) in one["parts"].items() for m in ("", *moments)}
    asked = [(Part(server, name, 0), Request("state", name, options={"moment": m})) for (name, m), server in places.items()]
    parts: dict[str, Tensors] = {}
    for (name, moment), reply in zip(places, ask(asked), strict=True):
        parts.setdefault(moment, {})[name] = reply.value  # type: ignore[assignment]
    tensors: Tensors = {}
    for moment, named in parts.items():
        for key, tensor in join_parts(named).items():
            if _label(key, moment) in tensors:
                raise ValueError(f"{key!r} has a {moment!r}, and {_label(key, moment)!r} is a key: name it otherwise")
            tensors[_label(key, moment)] = tensor
    return tensors, {"options": next(iter(found.values()))["options"], "moments": sorted({*parts} - {""})}


def missing(found: Found, tensors: Tensors, meta: dict[str, Any]) -> list[str]:
    """The keys that the servers have not got yet; Refused if one that they have is another tensor."""
    there = join_parts({name: _like(*part) for one in found.values() for name, part in one["parts"].items()})
    for key in tensors.keys() & there.keys():
        if describe(tensors[key]) != describe(there[key]):
            raise Refused(f"{key!r} is {describe(tensors[key])} in the file, and {describe(there[key])} on the servers")
    moments = {_label(key, moment) for key in tensors for moment in meta["moments"]}
    return [key for key in tensors if key not in there and key not in moments]


def spread(ask: Ask, found: Found, tensors: Tensors, meta: dict[str, Any]) -> None:
    """Give all servers what they had when it was saved: first the options, then values, then what belongs to these."""
    if "options" in meta:
        ask([(Part(server, "", 0), Request("restore", options=meta["options"])) for server in found])
    asked = []
    for server, name in [(server, name) for server, one in found.items() for name in one["parts"]]:
        (key, first), rows = key_of(name)[:2], found[server]["parts"][name][1][:1]
        for moment in ("", *meta["moments"]):
            if (whole := tensors.get(_label(key, moment))) is not None:
                value = whole[first : first + rows[0]] if whole.dim() else whole  # a count of steps has no rows
                asked.append((Part(server, name, 0), Request("restore", name, value, options={"moment": moment})))
    ask(asked)


def write(path: str | Path, tensors: Tensors, meta: dict[str, Any]) -> None:
    """The file is whole or not there, or what it was before: it appears by one rename, after all in it is on the disk."""
    path = Path(path)
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"{path}: {empty[0]!r} is a meta tensor, which has no contents to be saved")
    draft = path.with_name(f".{path.name}.draft")
    try:
        save_file(tensors, draft, {META: json.dumps(meta)})
    except SafetensorError as error:  # which tells no path
        raise OSError(f"cannot write {draft}: {error}") from error
    with draft.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)


def read(path: str | Path) -> tuple[Tensors, dict[str, Any]]:
    """What `write` wrote; any other safetensors file is one of values. FileNotFoundError, ValueError."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no other way
            return tensors, {"moments": []} | json.loads((file.metadata() or {}).get(META, "{}"))
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _label(key: str, moment: str) -> str:
    return f"{key}.{moment}" if moment else key


def _like(dtype: str, shape: list[int], moments: list[str]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
