"""What ranks tell one another for a checkpoint: what one can't do, all hear of; who holds which pieces, and who writes them."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from d2lps.collectives import all_gather
from d2lps.comm import Communicator
from d2lps.disk import CheckpointDamaged, CheckpointMissing
from d2lps.parallel.data.replicas import Difference, fingerprint, grouped
from d2lps.parallel.saving.pieces import Cut, Piece, flaw, tuples

_KINDS = {kind.__name__: kind for kind in (CheckpointMissing, CheckpointDamaged, OSError, ValueError)}


def all_gather_object(comm: Communicator, word: Any) -> list[Any]:
    """Every rank's `word`, by rank, as torch's function of this name; what JSON has. Two all-gathers, of lengths and of texts."""
    text = torch.frombuffer(bytearray(json.dumps(word).encode()), dtype=torch.uint8).to(comm.device)
    lengths = list(torch.zeros(comm.size, 1, dtype=torch.long, device=comm.device))
    all_gather(comm, lengths, torch.full_like(lengths[0], len(text)))
    room = [text.new_empty(int(length)) for length in lengths]
    all_gather(comm, room, text)
    return [json.loads(bytes(said.tolist())) for said in room]


def on_every_rank(comm: Communicator, function: Callable[[], Any]) -> list[Any]:
    """What the function returns on every rank, by rank; where it fails on some, all ranks raise that."""
    mine, cause = [None, "", ""], None
    try:
        mine[0] = function()
    except Exception as error:
        cause, kind = error, next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        mine[1:] = kind, f"rank {comm.rank}: {error}" if kind else f"rank {comm.rank}: {error!r}"
    told = all_gather_object(comm, mine)
    if failed := [(kind, words) for _, kind, words in told if words]:
        raise _KINDS.get(failed[0][0], RuntimeError)("; ".join(words for _, words in failed)) from cause
    return [result for result, _, _ in told]


Holders = dict[tuple[str, Cut], list[int]]


def holders_of(tables: list[list[Any]]) -> Holders:
    """The ranks that have each piece, from all ranks' tables.

    >>> holders_of([[["w", "float32", [4], [[0, 4]], 0, 4]]] * 2)
    {('w', (((0, 4),), 0, 4)): [0, 1]}
    """
    holders = defaultdict(list)
    for rank, table in enumerate(tables):
        for name, _, _, box, start, stop in table:
            holders[name, (tuples(box), start, stop)].append(rank)
    return dict(holders)


def check_copies(comm: Communicator, holders: Holders, pieces: Mapping[str, Piece], may_differ: Iterable[str] = ()) -> None:
    """ValueError, on all ranks, with the names, where ranks that hold the same piece have other bits of it."""
    several = {key: ranks for key, ranks in holders.items() if len(ranks) > 1 and not _among(key[0], may_differ)}
    if not several:
        return
    mine = {name: fingerprint(pieces[name].tensor) for (name, _), ranks in several.items() if comm.rank in ranks}
    marks, found = all_gather_object(comm, mine), []
    for (name, _), ranks in several.items():
        if len(groups := grouped((rank, marks[rank][name]) for rank in ranks)) > 1:
            found.append(Difference(name, [[comm.members[rank] for rank in group] for group in groups]))
    if found:
        first = pieces.get(name := found[0].name)
        norms = all_gather_object(comm, None if first is None else float(first.tensor.detach().double().norm()))
        told = ", ".join(f"{norm:.9g} on rank {rank}" for rank, norm in zip(comm.members, norms, strict=True) if norm is not None)
        more = "" if len(found) == 1 else f"; and {len(found) - 1} more: {', '.join(other.name for other in found[1:9])}"
        how = "make copies alike, or say in may_differ=[...] of which tensors the lowest rank's is to be saved"
        raise ValueError(f"{found[0]} (of norm {told}){more}; {how}")


def _among(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def share_out(tables: list[list[Any]], may_differ: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Who writes what, from all ranks' tables: of a piece that several hold, whoever of them has least to write so far.

    >>> share_out([[["w", "float32", [4], [[0, 4]], 0, 4]]] * 2)["w"]["pieces"]
    [[0, [[0, 4]], 0, 4]]

    Large pieces first; of what may differ, the lowest rank's. ValueError, with the name, where ranks differ about a whole, or
    have not all of it, or have some twice.
    """
    wholes: dict[str, dict[str, Any]] = {}
    for rank, table in enumerate(tables):
        for name, dtype, shape, *_ in table:
            whole = wholes.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            if (whole["dtype"], whole["shape"]) != (dtype, shape):
                raise ValueError(f"{name!r} is {whole['dtype']}{whole['shape']}, and {dtype}{shape} on rank {rank}")
    holders, busy = holders_of(tables), [0] * len(tables)
    nbytes = {key: (key[1][2] - key[1][1]) * getattr(torch, wholes[key[0]]["dtype"]).itemsize for key in holders}
    for key in sorted((key for key in holders if nbytes[key]), key=nbytes.__getitem__, reverse=True):
        name, (box, start, stop) = key
        rank = holders[key][0] if _among(name, may_differ) else min(holders[key], key=busy.__getitem__)
        busy[rank] += nbytes[key]
        wholes[name]["pieces"].append([rank, [list(ends) for ends in box], start, stop])
    for name, whole in wholes.items():
        if told := flaw(whole["shape"], [(tuples(box), start, stop) for _, box, start, stop in whole["pieces"]]):
            raise ValueError(f"{name!r}, {whole['dtype']}{whole['shape']}: {told}")
    return wholes
