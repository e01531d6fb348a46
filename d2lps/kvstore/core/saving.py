"""All that the servers have, as one file of whole tensors, for a run with another number of servers, or for other programs.

    w, b             the values by their keys, in safetensors
    w.exp_avg        the optimizer's tensors, under torch's names
    header           in its metadata, as JSON: what `set_optimizer` was told, the names of the optimizer's tensors, and which
                     keys were everywhere

The state in a server's log (see `durable`) has all that it knows, and is of use to that server alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from d2lps import disk
from d2lps.comm import Mismatch
from d2lps.comm.rank import describe
from d2lps.kvstore.core.events import Refused, Reply, Request
from d2lps.kvstore.core.placement import Part, join_parts, key_of

Ask = Callable[[list[tuple[Part, Request]]], Sequence[Reply]]  # asks servers, and waits for their answers
Tensors = dict[str, torch.Tensor]
META, DONE = "d2lps", "done"
# What an error of one worker is on all: these, or else a RuntimeError that names it.
KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (
    Refused, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError, OSError,
    Mismatch, ValueError, TypeError, MemoryError,
)}  # fmt: skip
RESERVED = {"__metadata__": "safetensors keeps for itself", "": "stands for all that a server has, where it is asked"}


class Held(msgspec.Struct):
    """What a server has of a key. moments: the names of the optimizer's tensors. begun: pushes of a round that is not over."""

    dtype: str
    shape: list[int]
    moments: list[str]
    begun: bool


class Contents(msgspec.Struct):
    """All that a server has, by parts of keys, and whom it hears. open: whether an iteration has begun."""

    workers: list[int]
    options: dict[str, Any]
    parts: dict[str, Held]
    open: bool


Found = dict[int, Contents]  # by server


def look(ask: Ask, servers: Sequence[int]) -> Found:
    """What the servers have."""
    replies = ask([(Part(server, "", 0), Request("state")) for server in servers])
    said = [msgspec.json.decode(bytes(reply.value.tolist()), type=Contents) for reply in replies if reply.value is not None]
    return dict(zip(servers, said, strict=True))


def collect(ask: Ask, found: Found) -> tuple[Tensors, dict[str, Any]]:
    """All tensors, each asked for by itself and put together from its parts, of copies one; and the metadata. ValueError."""
    places = {(name, m): s for s, one in found.items() for name, held in one.parts.items() for m in ("", *held.moments)}
    moments = sorted({moment for _, moment in places} - {""})
    _check_names({key_of(name)[0] for name, _ in places}, moments)
    asked = [(Part(server, name, 0), Request("state", name, options={"moment": m})) for (name, m), server in places.items()]
    parts: dict[str, Tensors] = {}
    for (name, moment), reply in zip(places, ask(asked), strict=True):
        parts.setdefault(moment, {})[name] = reply.value  # type: ignore[assignment]
    tensors: Tensors = {}
    for moment, named in parts.items():
        for key, tensor in join_parts(_completed(named, parts[""])).items():
            tensors[_label(key, moment)] = tensor
    everywhere = sorted({key_of(part.name)[0] for part, _ in asked if part.copied})
    return tensors, {"options": found[min(found)].options, "moments": moments, "everywhere": everywhere}


def _check_names(keys: set[str], moments: Sequence[str]) -> None:
    """Whether each tensor can be told from the others by its name, even if a key has none of these moments yet."""
    for key in sorted(keys & RESERVED.keys()):
        raise ValueError(f"{key!r} is a key, and a name that {RESERVED[key]}: name it otherwise")
    taken = {*keys}
    for key, moment in product(sorted(keys), moments):
        if (name := _label(key, moment)) in taken:
            raise ValueError(f"{key!r} has a {moment!r}, and {name!r} is a key or another one's state: name it otherwise")
        taken.add(name)


def _completed(moments: Tensors, values: Tensors) -> Tensors:
    """A moment of all parts of those keys of which some part has it. Of a part that no row was pushed to it is zeros."""
    begun = {key_of(name)[0] for name, moment in moments.items() if moment.dim()}
    absent = [name for name in values if name not in moments and key_of(name)[0] in begun]
    return moments | {name: torch.zeros_like(values[name]) for name in absent}


def missing(found: Found, tensors: Tensors, meta: dict[str, Any]) -> list[str]:
    """The keys that the servers have not got yet; Refused if one that they have is another tensor, or a moment does not fit."""
    parts, there = {name: held for one in found.values() for name, held in one.parts.items()}, dict[str, str]()
    for name in sorted(parts, key=lambda name: key_of(name)[1]):  # the last block says how many rows there are
        (key, _, last), held = key_of(name), parts[name]
        if held.begun and key in tensors:
            raise Refused(f"{key!r} has pushes of a round that is not over: all workers' clock() comes first")
        there[key] = f"{held.dtype}{held.shape if last is None else [last, *held.shape[1:]]}"
    for key in tensors.keys() & there.keys():
        if describe(tensors[key]) != there[key]:
            raise Refused(f"{key!r} is {describe(tensors[key])} in the file, and {there[key]} on the servers")
    moments = {_label(key, moment): key for key, moment in product(tensors, meta["moments"])}
    for name in moments.keys() & tensors.keys():
        value, moment = tensors[moments[name]], tensors[name]
        if moment.dim() and describe(moment) != describe(value):  # a count of steps is one number
            raise Refused(f"{name!r} is {describe(moment)} in the file, and {moments[name]!r} {describe(value)}")
    return [key for key in tensors if key not in there and key not in moments]


def instruct(ask: Ask, servers: Sequence[int], meta: dict[str, Any]) -> None:
    """Tell all servers what `set_optimizer` had told them when it was saved; Refused where that cannot be here."""
    if "options" in meta:
        ask([(Part(server, "", 0), Request("restore", options=meta["options"])) for server in servers])


def spread(ask: Ask, found: Found, tensors: Tensors, meta: dict[str, Any]) -> None:
    """Give all servers the values that they had, and then what belongs to these."""
    asked = []
    for server, name in [(server, name) for server, one in found.items() for name in one.parts]:
        (key, first), rows = key_of(name)[:2], found[server].parts[name].shape[:1]
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
    with disk.drafted(path) as draft:
        try:
            save_file(tensors, draft, {META: json.dumps(meta)})
        except SafetensorError as error:  # which tells no path
            raise OSError(f"cannot write {draft}: {error}") from error


def read(path: str | Path) -> tuple[Tensors, dict[str, Any]]:
    """What `write` wrote; any other safetensors file is one of values. FileNotFoundError, ValueError."""
    Path(path).open("rb").close()  # whose errors name the path
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no other way
            return tensors, {"moments": [], "everywhere": []} | json.loads((file.metadata() or {}).get(META, "{}"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _label(key: str, moment: str) -> str:
    return f"{key}.{moment}" if moment else key


# ---- what one worker does for all -----------------------------------------------------------------------------------------


def attempt(rank: int, do: Callable[[], None]) -> tuple[str, Exception | None]:
    """What a worker is to say to all of what it does for them: that it is done, or what went wrong, and that.

    >>> attempt(0, lambda: None)
    ('done', None)
    >>> attempt(0, lambda: open("/none"))[0]
    '[0, "FileNotFoundError", [2, "No such file or directory", "/none", null, null]]'
    """
    try:
        do()
    except Exception as error:
        kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in KINDS), "")
        args: list[Any] = [str(error) if kind else f"{type(error).__name__}: {error}"]
        if isinstance(error, OSError) and error.errno is not None:
            args = [error.errno, error.strerror, *(name and str(name) for name in (error.filename, None, error.filename2))]
        return json.dumps([rank, kind, [arg[:1000] if isinstance(arg, str) else arg for arg in args]]), error
    return DONE, None


def hear(said: str, cause: Exception | None) -> None:
    """Raise what went wrong, if it did, on every worker alike. cause: where it did, the error itself."""
    if said != DONE:
        rank, kind, args = json.loads(said)
        error = KINDS.get(kind, RuntimeError)(*args)
        error.add_note(f"worker {rank} has raised it, which did this for all")
        raise error from cause
