"""Checkpoints of a run on many ranks, written beside its training and loaded under any other plan."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d2lps.collectives import all_gather, all_reduce
from d2lps.comm import Communicator, RankDied, RankHung, Work
from d2lps.cost.numbers import whole
from d2lps.disk import CheckpointDamaged, CheckpointMissing
from d2lps.launch import run
from d2lps.parallel.data.replicas import Difference, fingerprint, grouped
from d2lps.parallel.saving import saved
from d2lps.parallel.saving.pieces import Cut, Piece, copy_common, dtype_of, flaw, tuples
from d2lps.parallel.saving.saved import Manifest
from d2lps.result import Run

_KINDS = {kind.__name__: kind for kind in (CheckpointMissing, CheckpointDamaged, OSError, ValueError)}


class Checkpoints:
    """The checkpoints of a run, each a copy that is made at once and written in the background.

    >>> checkpoints = Checkpoints(comm, "run7")                                 # on every rank         # doctest: +SKIP
    >>> work = checkpoints.save(12, module_pieces(model), {"seen": 384})        # train on at once      # doctest: +SKIP
    >>> load(comm, "run7", module_pieces(model)).extra                          # later, on any ranks   # doctest: +SKIP
    {'seen': 384}

    directory: where all ranks see the same files, and no other run writes. keep: how many whole ones stay. How they lie there,
    see `saved`. may_differ: names of tensors of which ranks may hold unlike copies, as a batch norm's statistics in data
    parallelism, or all weights amid a round of local SGD: of those the lowest rank's is saved. `*` stands for anything, as in
    ["*.running_*"]. `stall`: seconds that the last `save` took from training, a wait for the save before it included;
    `written`: bytes that this rank copied for it and writes.
    Cost: what ranks hold together is written once, shared out among its holders; this rank's share is held a second time from
    the first save on. A save reads what others hold, too, exchanges some numbers, and where pieces are not those of the last
    save a table of them.
    """

    def __init__(self, comm: Communicator, directory: str | Path, keep: int = 2, may_differ: Iterable[str] = ()) -> None:
        self.comm, self.directory, self.keep = comm, Path(directory), whole("keep", keep)
        self.may_differ = [may_differ] if isinstance(may_differ, str) else [*may_differ]
        self.stall, self.written = 0.0, 0
        self._table: list[Any] | None = None  # of the last save: this rank's pieces,
        self._holders: Holders = {}  # who holds what of all ranks',
        self._tensors: dict[str, dict[str, Any]] = {}  # who of them writes it,
        self._copies: dict[str, Tensor] = {}  # and room for what this rank writes
        self._work: Work | None = None

    def save(self, step: int, pieces: Mapping[str, Piece], extra: Any = None) -> Work:
        """Copy this rank's share; the checkpoint is whole once the `Work` that writes it has been waited for.

        A save under way is waited for first, and what went wrong in it is raised here on all ranks: OSError, which says the
        rank that failed, as where a disk is full. The checkpoints before it are whole then, and training may go on. extra:
        what else belongs to this moment, the same on all ranks, as JSON has it. ValueError, with names, where the ranks' pieces
        do not make up whole tensors, and where copies that ranks hold are not alike to the bit; Mismatch for another step or
        extra on another rank.
        """
        began = self.comm.now()
        whole("step", step, least=0)  # another's folder could not be found again
        self.wait()
        said = json.dumps(extra, sort_keys=True)  # now: it may change while the rest is written
        self.comm.agree(f"save(step={step}, extra={said})")
        table = _table_of(pieces)
        if any(all_gather_object(self.comm, table != self._table)):
            self._plan(table, pieces)
        check_copies(self.comm, self._holders, pieces, self.may_differ)
        for name, copy in self._copies.items():
            copy.copy_(pieces[name].tensor.detach().view_as(copy))
        self._work = self.comm.start(self._write, step, said)
        self.stall = self.comm.now() - began
        return self._work

    def wait(self) -> None:
        """Return when the last save is whole; raise what went wrong in it."""
        work, self._work = self._work, None
        if work:
            work.wait()

    def _plan(self, table: list[Any], pieces: Mapping[str, Piece]) -> None:
        self._table, self._holders = None, holders_of(tables := all_gather_object(self.comm, table))
        self._tensors = share_out(tables, self.may_differ)
        self._copies = {name: pieces[name].empty() for name in _of_rank(self.comm.rank, self._tensors)}
        self.written = sum(copy.nbytes for copy in self._copies.values())
        self._table = table

    def _write(self, comm: Communicator, step: int, extra: str) -> None:
        """In a lane of its own: three rounds, each over when all ranks have done their part of it, or one has failed."""
        first = comm.rank == 0
        folder = Path(on_every_rank(comm, lambda: str(saved.begin(self.directory, step)) if first else "")[0])
        sums = on_every_rank(comm, lambda: saved.write(folder, comm.rank, self._copies))
        tensors = {
            name: about | {"pieces": [[rank, *cut, sums[rank][name]] for rank, *cut in about["pieces"]]}
            for name, about in self._tensors.items()
        }
        manifest = Manifest(folder, step, comm.size, json.loads(extra), tensors)
        on_every_rank(comm, lambda: saved.finish(manifest, self.keep) if first else None)


def save(
    comm: Communicator, directory: str | Path, step: int, pieces: Mapping[str, Piece], extra: Any = None, keep: int = 2,
    may_differ: Iterable[str] = (),
) -> None:  # fmt: skip
    """Return when a checkpoint is whole, all its bytes on the disk; see `Checkpoints`, and its `save`."""
    Checkpoints(comm, directory, keep, may_differ).save(step, pieces, extra).wait()


def load(
    comm: Communicator, directory: str | Path, pieces: Mapping[str, Piece] | Callable[[Manifest], Mapping[str, Piece]],
    step: int | None = None,
) -> Manifest:  # fmt: skip
    """Fill the pieces from the newest checkpoint, or one of that step, whatever ranks have written it and in what pieces.

    >>> load(comm, "run7", module_pieces(model)).step                           # doctest: +SKIP
    12

    pieces: or a function that makes them of the manifest, as `Zero.pieces` does. What a checkpoint has beyond them is left
    alone. Errors are raised on all ranks, with the names: CheckpointMissing; ValueError, before anything is changed, where a
    name is missing or a whole has another shape or dtype; CheckpointDamaged where a file is missing or not what was written:
    some pieces may be filled by then. Cost: each rank reads those pieces of which it needs something, whole.
    """
    folder = on_every_rank(comm, lambda: str(saved.look(directory, step).folder) if comm.rank == 0 else "")[0]
    found: list[tuple[Manifest, Mapping[str, Piece]]] = []

    def check() -> None:
        manifest = saved.read(Path(folder))
        found.append((manifest, pieces(manifest) if callable(pieces) else pieces))
        saved.check(*found[0])

    on_every_rank(comm, check)
    on_every_rank(comm, lambda: saved.fill(*found[0]))
    return found[0][0]


def keep_going(function: Callable[..., Any], ranks: int, *args: Any, times: int = 3, **options: Any) -> Run:
    """`d2lps.run`, and again, up to so many times, after a rank has died or hung: for a function that begins with a `load`.

    >>> keep_going(train_from_the_last_checkpoint, 4, "run7")                   # doctest: +SKIP

    What a rank raises of itself would be raised again, and is not caught. options: of `d2lps.run`.
    """
    for _ in range(times):
        try:
            return run(function, ranks, *args, **options)
        except (RankDied, RankHung):
            continue
    return run(function, ranks, *args, **options)


def gathered(comm: Communicator, pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """The whole tensors that the ranks have pieces of, on every rank, without a disk in between; by name.

    ValueError, with the name, where the pieces do not make up whole tensors, or copies are not alike. Cost: a table, fingerprints
    of what several hold, and an all-reduce of each tensor.
    """
    tensors = share_out(tables := all_gather_object(comm, _table_of(pieces)))
    check_copies(comm, holders_of(tables), pieces)
    mine, wholes = _of_rank(comm.rank, tensors), {}
    for name, about in tensors.items():
        wholes[name] = torch.zeros(about["shape"], dtype=getattr(torch, about["dtype"]), device=comm.device)
        if name in mine:
            copy_common(Piece(wholes[name], tuple(about["shape"])), pieces[name])
        all_reduce(comm, wholes[name])  # of one rank's number and zeros
    return wholes


def _table_of(pieces: Mapping[str, Piece]) -> list[Any]:
    return [[name, dtype_of(piece.tensor), list(piece.shape), *piece.cut] for name, piece in pieces.items()]


def _of_rank(rank: int, tensors: dict[str, dict[str, Any]]) -> set[str]:
    """Those of which this rank gives a piece."""
    return {name for name, about in tensors.items() if any(rank == giver for giver, *_ in about["pieces"])}


# ---- what ranks tell one another ------------------------------------------------------------------------------------------


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


# ---- who holds what, and who writes it ------------------------------------------------------------------------------------

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
