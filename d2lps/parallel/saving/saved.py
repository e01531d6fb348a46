"""A checkpoint of a run on many ranks as it lies on the disk.

    directory/step-12.3/rank-0.safetensors      pieces, in a format that many programs read and none executes
                        rank-1.safetensors      of what several ranks hold alike, one writes
                        manifest.json           what is in which file, and a checksum of each piece
    directory/step-16.4/...                     the save after that; the last one that is whole is the newest

A folder without a manifest is no checkpoint: it is being written, or whoever wrote it was killed. The manifest appears by one
rename, after all the rest is on the disk.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from d2lps import disk
from d2lps.comm.staging import stage
from d2lps.disk import CheckpointDamaged, CheckpointMissing
from d2lps.parallel.saving.pieces import Piece, copy_common, dtype_of, overlap, tuples

_NAME = "manifest.json"


class Manifest(NamedTuple):
    """What a checkpoint says of itself; tensors: {name: {"dtype", "shape", "pieces": [[rank, box, start, stop, checksum]]}}."""

    folder: Path
    step: int
    ranks: int  #: how many wrote it
    extra: Any  #: what `save` was given
    tensors: dict[str, dict[str, Any]]
    states: dict[str, list[Any]] = {}  #: of what had a state_dict, all but its tensors, by rank; or once, where all had the same


def look(directory: str | Path, step: int | None = None) -> Manifest:
    """What the newest checkpoint has, or the newest of that step; CheckpointMissing, CheckpointDamaged.

    It never falls back to an older one by itself: ask for that by its step.
    """
    found = _whole(Path(directory))
    steps = {int(path.stem.removeprefix("step-")): path for path in found.values()}
    if not found or (step is not None and step not in steps):
        told = "" if step is None else f"of step {step} "
        raise CheckpointMissing(f"no checkpoint {told}in {directory}: it has steps {list(steps)}")
    return read(list(found.values())[-1] if step is None else steps[step])


def read(folder: Path) -> Manifest:
    """The manifest of one checkpoint."""
    path = folder / _NAME
    try:
        checksum, content = path.read_text().splitlines()
        if int(checksum) != crc32(content.encode()):
            raise ValueError("its checksum is another")
        return Manifest(folder=folder, **json.loads(content))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


def check(manifest: Manifest, pieces: Mapping[str, Piece]) -> None:
    """ValueError, with the names, if these pieces are not of tensors that it has."""
    wrong = []
    for name, piece in pieces.items():
        have, want = manifest.tensors.get(name), f"{dtype_of(piece.tensor)}{list(piece.shape)}"
        if have is None:
            wrong.append(f"{name!r} is not in it")
        elif (there := f"{have['dtype']}{have['shape']}") != want:
            wrong.append(f"{name!r} is {there} in it, and {want} here")
        elif not piece.tensor.is_contiguous():
            wrong.append(f"{name!r} does not lie in one run here")
    if wrong:
        raise ValueError(f"{manifest.folder}: {'; '.join(wrong)}")


def fill(manifest: Manifest, pieces: Mapping[str, Piece]) -> None:
    """Go through the files of which these pieces need something; CheckpointDamaged."""
    needed, filled = defaultdict[int, list[Any]](list), Counter[str]()
    for name, piece in pieces.items():
        for rank, box, start, stop, checksum in manifest.tensors[name]["pieces"]:
            if overlap(piece.cut, cut := (tuples(box), start, stop)):
                needed[rank].append((name, cut, checksum))
    for rank, wanted in needed.items():
        path = _file(manifest.folder, rank)
        try:
            with safe_open(path, "pt") as file:
                for name, cut, checksum in wanted:
                    tensor = file.get_tensor(name)
                    if checksum != _sum(tensor) or tensor.dtype != pieces[name].tensor.dtype:
                        raise ValueError(f"{name!r} is not what was written")
                    filled[name] += copy_common(pieces[name], Piece(tensor, pieces[name].shape, *cut))
        except Exception as error:  # the format's own, of many kinds
            raise CheckpointDamaged(f"{path}: {error}") from error
    if short := [name for name, piece in pieces.items() if filled[name] != piece.tensor.numel()]:
        raise CheckpointDamaged(f"{manifest.folder / _NAME}: it lacks elements of {short}")


# ---- writing ---------------------------------------------------------------------------------------------------------------


def begin(directory: Path, step: int) -> Path:
    """Sweep away what was never finished, and make a folder for what comes after all that there is."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in _folders(directory).values():
        if not (path / _NAME).exists():
            shutil.rmtree(path)
    folder = directory / f"step-{step}.{max(_whole(directory), default=-1) + 1}"
    folder.mkdir()
    disk.persist_path(directory)
    return folder


def write(folder: Path, rank: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    """One rank's file, if it has anything to write; its checksums."""
    if tensors:
        path = _file(folder, rank)
        try:
            save_file(tensors, path)
        except Exception as error:  # the format's own, which tells no path
            raise OSError(f"cannot write {path}: {error}") from error
        disk.persist_path(path)
    return {name: _sum(tensor) for name, tensor in tensors.items()}


def finish(manifest: Manifest, keep: int) -> None:
    """Make it whole; then, and not before, let go of all but the last `keep`."""
    content = json.dumps({name: value for name, value in manifest._asdict().items() if name != "folder"})
    disk.persist_path(manifest.folder)
    draft = manifest.folder / f".{_NAME}.draft"
    draft.write_text(f"{crc32(content.encode())}\n{content}\n")
    disk.settle(draft, manifest.folder / _NAME)
    for old in list(_whole(manifest.folder.parent).values())[:-keep]:
        (old / _NAME).unlink()
        disk.persist_path(old)
        shutil.rmtree(old)


def _whole(directory: Path) -> dict[int, Path]:
    """The checkpoints, in the order in which they were saved, by their numbers in it."""
    return {number: path for number, path in _folders(directory).items() if (path / _NAME).exists()}


def _folders(directory: Path) -> dict[int, Path]:
    """Those that `begin` has made, whole or not; what else lies there is somebody else's."""
    named = ((re.fullmatch(r"step-\d+\.(\d+)", path.name), path) for path in directory.glob("step-*.*"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


def _sum(tensor: Tensor) -> int:
    return crc32(stage(tensor, torch.device("cpu")).view(torch.uint8).numpy().data)
