"""Checkpoints of a run on many ranks, written beside its training and loaded under any other plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from d2lps.arguments import whole
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, RankDied, RankHung, Work
from d2lps.launch import run
from d2lps.parallel.saving import saved
from d2lps.parallel.saving.agreement import Holders, all_gather_object, check_copies, holders_of, on_every_rank, share_out
from d2lps.parallel.saving.pieces import Piece, copy_common, dtype_of
from d2lps.parallel.saving.saved import Manifest
from d2lps.parallel.saving.states import Rooms, States, state_pieces
from d2lps.result import Run


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

    def save(self, step: int, pieces: Mapping[str, Piece], extra: Any = None, states: States = MappingProxyType({})) -> Work:
        """Copy this rank's share; the checkpoint is whole once the `Work` that writes it has been waited for.

        A save under way is waited for first, and what went wrong in it is raised here on all ranks: OSError, which says the
        rank that failed, as where a disk is full. The checkpoints before it are whole then, and training may go on.
        extra: what else belongs to this moment, the same on all ranks, as JSON has it. states: by name, what has a `state_dict`,
        as optimizers, schedules and `DiLoCo` have; where it is each rank's own, as many ranks can load it.
        ValueError, with names, where the ranks' pieces do not make up whole tensors, and where copies that ranks hold are not
        alike to the bit; Mismatch for another step or extra on another rank.
        """
        began = self.comm.now()
        whole("step", step, least=0)  # another's folder could not be found again
        self.wait()
        said = json.dumps(extra, sort_keys=True)  # now: it may change while the rest is written
        self.comm.agree(f"save(step={step}, extra={said}, states={sorted(states)})")
        found, told = state_pieces(self.comm, states)
        table = _table_of(pieces := {**pieces, **found})
        if any(all_gather_object(self.comm, table != self._table)):
            self._plan(table, pieces)
        check_copies(self.comm, self._holders, pieces, self.may_differ)
        for name, copy in self._copies.items():
            copy.copy_(pieces[name].tensor.detach().view_as(copy))
        self._work = self.comm.start(self._write, step, said, told)
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

    def _write(self, comm: Communicator, step: int, extra: str, states: dict[str, list[Any]]) -> None:
        """In a lane of its own: three rounds, each over when all ranks have done their part of it, or one has failed."""
        first = comm.rank == 0
        folder = Path(on_every_rank(comm, lambda: str(saved.begin(self.directory, step)) if first else "")[0])
        sums = on_every_rank(comm, lambda: saved.write(folder, comm.rank, self._copies))
        tensors = {
            name: about | {"pieces": [[rank, *cut, sums[rank][name]] for rank, *cut in about["pieces"]]}
            for name, about in self._tensors.items()
        }
        manifest = Manifest(folder, step, comm.size, json.loads(extra), tensors, states)
        on_every_rank(comm, lambda: saved.finish(manifest, self.keep) if first else None)


def save(
    comm: Communicator, directory: str | Path, step: int, pieces: Mapping[str, Piece], extra: Any = None, keep: int = 2,
    may_differ: Iterable[str] = (), states: States = MappingProxyType({}),
) -> None:  # fmt: skip
    """Return when a checkpoint is whole, all its bytes on the disk; see `Checkpoints`, and its `save`."""
    Checkpoints(comm, directory, keep, may_differ).save(step, pieces, extra, states).wait()


def load(
    comm: Communicator, directory: str | Path, pieces: Mapping[str, Piece] | Callable[[Manifest], Mapping[str, Piece]],
    step: int | None = None, states: States = MappingProxyType({}),
) -> Manifest:  # fmt: skip
    """Fill the pieces from the newest checkpoint, or one of that step, whatever ranks have written it and in what pieces.

    >>> load(comm, "run7", module_pieces(model)).step                           # doctest: +SKIP
    12

    pieces: or a function that makes them of the manifest, as `Zero.pieces` does. states: as in `Checkpoints.save`, to each of
    which its `load_state_dict` is called, at the end. What a checkpoint has beyond them is left
    alone. Errors are raised on all ranks, with the names: CheckpointMissing; ValueError, before anything is changed, where a
    name is missing or a whole has another shape or dtype; CheckpointDamaged where a file is missing or not what was written:
    some pieces may be filled by then. Cost: each rank reads those pieces of which it needs something, whole.
    """
    folder = on_every_rank(comm, lambda: str(saved.look(directory, step).folder) if comm.rank == 0 else "")[0]
    found: list[tuple[Manifest, Mapping[str, Piece]]] = []
    rooms: list[Rooms] = []

    def check() -> None:
        manifest = saved.read(Path(folder))
        wanted = pieces(manifest) if callable(pieces) else pieces
        rooms.append(Rooms(manifest, comm, states))
        found.append((manifest, {**wanted, **rooms[0].pieces}))
        saved.check(*found[0])

    on_every_rank(comm, check)
    on_every_rank(comm, lambda: saved.fill(*found[0]))
    on_every_rank(comm, lambda: rooms[0].hand_over())
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
