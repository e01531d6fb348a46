"""Checkpoints: all tensors and what belongs to them at one moment, in files that are whole or not there.

    folder/step-000000000012/        a checkpoint: it appears by one rename, after all in it is on the disk
        server-0.safetensors         named tensors, in a format that many programs read and none executes
        manifest.json                metadata, and the length and checksum of every file
    folder/.step-000000000013.draft  one that is being written, or was given up: the next `begin` sweeps it away

Several servers may each write a file into one draft; who is told of every file's checksum commits it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from d2lps.kvstore.events import Request
from d2lps.kvstore.log import checksum, persist_path, write_all

MANIFEST = "manifest.json"
PIECE = 1 << 20  # bytes of a file that are read at a time


class CheckpointMissing(FileNotFoundError):
    """There is no such checkpoint."""


class CheckpointDamaged(RuntimeError):
    """A checkpoint is there, but a file of it is missing or not what was written; the message names it."""


class Checkpoint(NamedTuple):
    """What `load` gives: {"server-0": {"w": tensor}}, and the metadata."""

    step: int
    files: dict[str, dict[str, torch.Tensor]]
    meta: dict[str, Any]


# ---- writing --------------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path, step: int, files: Mapping[str, Mapping[str, torch.Tensor]], meta: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a whole checkpoint from one process, and delete all but the last `keep`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, 12, {"server-0": {"w": torch.ones(2)}}, {"clock": 3}).name
    'step-000000000012'
    >>> load(folder).files["server-0"]["w"], load(folder).meta
    (tensor([1., 1.]), {'clock': 3})

    meta: as JSON has it, so the keys of dictionaries are strings. FileExistsError if the step has a checkpoint already.
    """
    draft = begin(folder, step)
    return commit(draft, {name: write(draft, name, tensors) for name, tensors in files.items()}, meta, keep)


def begin(folder: str | Path, step: int) -> Path:
    """An empty draft of the checkpoint of this step; drafts of others, which somebody gave up, go."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if _path(folder, step).exists():
        raise FileExistsError(f"step {step} has a checkpoint already: {_path(folder, step)}")
    for left in folder.glob(".step-*"):
        shutil.rmtree(left)
    draft = folder / f".{_path(folder, step).name}.draft"
    draft.mkdir()
    return draft


def write(draft: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write one file of a draft, and return its length and checksum for the manifest; n bytes are written and read once."""
    path, own, seen = draft / f"{name}.safetensors", {}, set()
    for key, tensor in tensors.items():
        own[key] = tensor.detach().cpu().contiguous()
        memory = own[key].untyped_storage().data_ptr()
        if memory in seen:  # the format has no two tensors in one place
            own[key] = own[key].clone()
        seen.add(memory)
    save_file(own, path)
    persist_path(path)
    return _measure(path)


def commit(draft: Path, files: Mapping[str, Mapping[str, int]], meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Make a draft the newest checkpoint at one stroke, and delete all but the last `keep`."""
    if keep < 1:
        raise ValueError(f"at least the newest checkpoint is kept: keep={keep}")
    text = json.dumps({"files": files, "meta": meta}, sort_keys=True)
    manifest = json.dumps({"checksum": checksum(text.encode()), "content": text})
    file = os.open(draft / MANIFEST, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        write_all(file, [memoryview(manifest.encode())])
    finally:
        os.close(file)
    persist_path(draft / MANIFEST)
    persist_path(draft)  # the names in it
    final = draft.with_name(draft.name.removeprefix(".").removesuffix(".draft"))
    os.rename(draft, final)
    persist_path(final.parent)
    for step in steps(final.parent)[:-keep]:
        old = _path(final.parent, step)
        os.rename(old, old.with_name(f".{old.name}.old"))  # a half deleted checkpoint must not look like one
        shutil.rmtree(old.with_name(f".{old.name}.old"))
    return final


# ---- reading --------------------------------------------------------------------------------------------------------------


def steps(folder: str | Path) -> list[int]:
    """The steps that have a checkpoint in this folder, the newest last."""
    numbers = [path.name.removeprefix("step-") for path in Path(folder).glob("step-*")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def load(folder: str | Path, step: int | None = None) -> Checkpoint:
    """Read and check a checkpoint, by default the newest; CheckpointMissing, CheckpointDamaged.

    It never falls back to an older one by itself: the log before the newest may be gone.
    """
    found = steps(folder)
    if not found or (step is not None and step not in found):
        raise CheckpointMissing(f"no checkpoint {'' if step is None else f'of step {step} '}in {folder}: it has steps {found}")
    step = found[-1] if step is None else step
    path = _path(Path(folder), step)
    content = _manifest(path / MANIFEST)
    for name, written in content["files"].items():
        file = path / f"{name}.safetensors"
        there = _measure(file) if file.exists() else "nothing"
        if there != written:
            raise CheckpointDamaged(f"{file}: {written} was written, and {there} is there")
    files = {name: load_file(path / f"{name}.safetensors") for name in content["files"]}
    return Checkpoint(step, files, content["meta"])


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
        if checksum(manifest["content"].encode()) == manifest["checksum"]:
            return json.loads(manifest["content"])
        reason = "its checksum is another"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = repr(error)
    raise CheckpointDamaged(f"{path}: {reason}")


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}"


def _measure(path: Path) -> dict[str, int]:
    """The length and the crc32 of a file."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = checksum(piece, start=value)
        return {"bytes": file.tell(), "crc32": value}


# ---- a server's state as tensors and JSON ---------------------------------------------------------------------------------


def flatten(state: Any, tensors: dict[str, torch.Tensor] | None = None, path: str = "") -> tuple[dict[str, torch.Tensor], Any]:
    """Dictionaries, lists, tuples, numbers, strings, tensors and Requests as named tensors, and the rest as JSON has it.

    >>> flatten({"clocks": {0: 3}, "values": {"w": torch.ones(2)}})[0]
    {'0/values/w': tensor([1., 1.])}
    >>> unflatten(*flatten({"clocks": {0: 3}, "values": {"w": torch.ones(2)}}))
    {'clocks': {0: 3}, 'values': {'w': tensor([1., 1.])}}
    """
    found: dict[str, torch.Tensor] = {} if tensors is None else tensors
    if isinstance(state, torch.Tensor):
        name = f"{len(found)}{path}".encode("ascii", "backslashreplace").decode()
        found[name] = state
        return found, {"tensor": name}
    if isinstance(state, Request):
        return found, {"request": flatten(vars(state), found, f"{path}/{state.op}")[1]}
    if isinstance(state, Mapping):
        return found, {"dict": [[key, flatten(value, found, f"{path}/{key}")[1]] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        return found, {type(state).__name__: [flatten(value, found, path)[1] for value in state]}
    return found, state


def unflatten(tensors: Mapping[str, torch.Tensor], plain: Any) -> Any:
    """The state that `flatten` took apart."""
    if not isinstance(plain, dict):
        return plain
    [(kind, content)] = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "request":
        return Request(**unflatten(tensors, content))
    if kind == "dict":
        return {key: unflatten(tensors, value) for key, value in content}
    values = [unflatten(tensors, value) for value in content]
    return values if kind == "list" else tuple(values)
