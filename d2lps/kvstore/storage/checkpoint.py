"""Checkpoints: all tensors and what belongs to them at one moment, in a file that is whole or not there.

    folder/step-000000000012.safetensors    named tensors, in a format that many programs read and none executes; in its header
                                            the metadata in JSON, and a checksum of all
    folder/.step-000000000013.safetensors.draft-.../    one that is being written; given up, it goes at once (see `drafted`)

A checkpoint appears by one rename, after all in it is on the disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from d2lps import disk
from d2lps.disk import CheckpointDamaged, CheckpointMissing
from d2lps.kvstore.core.events import Request
from d2lps.kvstore.storage.frame import bytes_of
from d2lps.kvstore.storage.log import checksum


class Checkpoint(NamedTuple):
    """What `load` gives: {"w": tensor}, and the metadata."""

    step: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


def save(folder: str | Path, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint, in place of one of the same step, and delete all but the last `keep`; n bytes go to the disk once.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> save(folder, 12, {"w": torch.ones(2)}, {"clock": 3}).name
    'step-000000000012.safetensors'
    >>> load(folder).tensors["w"], load(folder).meta
    (tensor([1., 1.]), {'clock': 3})

    meta: as JSON has it, so the keys of dictionaries are strings. An OSError, as of a full disk, leaves the old ones as they are.
    """
    if keep < 1:
        raise ValueError(f"at least the newest checkpoint is kept: keep={keep}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    final = _path(folder, step)
    for left in folder.glob(".step-*"):  # whatever has stopped the last writer has stopped all of the machine
        shutil.rmtree(left, ignore_errors=True)
    own, first = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, dict[int, str]()
    for name, tensor in own.items():
        if first.setdefault(tensor.untyped_storage().data_ptr(), name) != name:
            own[name] = tensor.clone()  # the format has no two tensors in one place
    content = json.dumps({"step": step, "meta": meta}, sort_keys=True)
    with disk.drafted(final) as draft:
        try:
            save_file(own, draft, {"content": content, "checksum": str(_sum(own, content))})
        except SafetensorError as error:  # which tells no path
            raise OSError(f"cannot write {draft}: {error}") from error
    for old in steps(folder)[:-keep]:
        _path(folder, old).unlink()
    return final


def steps(folder: str | Path) -> list[int]:
    """The steps that have a checkpoint in this folder, the newest last."""
    numbers = [path.stem.removeprefix("step-") for path in Path(folder).glob("step-*.safetensors")]
    return sorted(int(number) for number in numbers if number.isdecimal())


def load(folder: str | Path, step: int | None = None) -> Checkpoint:
    """Read and check a checkpoint, by default the newest; CheckpointMissing, CheckpointDamaged.

    It never falls back to an older one by itself: the log before the newest may be gone.
    """
    found = steps(folder)
    if not found or (step is not None and step not in found):
        raise CheckpointMissing(f"no checkpoint {'' if step is None else f'of step {step} '}in {folder}: it has steps {found}")
    path = _path(Path(folder), found[-1] if step is None else step)
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it has no other way
        right = said["checksum"] == str(_sum(tensors, said["content"]))
    except Exception as error:  # the format's own, of many kinds
        raise CheckpointDamaged(f"{path}: {error!r}") from error
    if not right:
        raise CheckpointDamaged(f"{path}: its checksum is another")
    content = json.loads(said["content"])
    return Checkpoint(content["step"], tensors, content["meta"])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}.safetensors"


def _sum(tensors: Mapping[str, torch.Tensor], content: str) -> int:
    """The crc32 of all that a checkpoint says."""
    value = checksum(content.encode())
    for name, tensor in sorted(tensors.items()):
        value = checksum(f"{name}{tensor.dtype}{list(tensor.shape)}".encode(), bytes_of(tensor), start=value)
    return value


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
        return found, {"request": flatten(asdict(state), found, f"{path}/{state.op}")[1]}
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
