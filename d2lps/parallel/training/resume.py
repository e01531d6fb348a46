"""What a training run is besides its weights, and how it goes on from a checkpoint, under any plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from d2lps.comm import Work
from d2lps.parallel.saving.checkpoint import Checkpoints, load
from d2lps.parallel.saving.pieces import Piece
from d2lps.parallel.saving.saved import Manifest
from d2lps.parallel.training.train import Trainer


def save_run(trainer: Trainer, checkpoints: Checkpoints) -> Work:
    """Save what this rank has of a run, in the background.

    Beside the weights (of BF16 ones the FP32 masters) and the optimizer's tensors that is how many steps are done, from which
    its place in the data follows; what it drops is a function of that and the seed, so that there are no generators to save.
    """
    return checkpoints.save(trainer.done, _pieces(trainer), _about(trainer) | {"losses": trainer.losses, "norms": trainer.norms})


def resume(trainer: Trainer, directory: str | Path, step: int | None = None) -> Manifest:
    """Let a trainer that has not stepped go on from the newest checkpoint, or that of a step, whatever plan has saved it.

    >>> trainer = Trainer(comm, transformer, Plan(dp=4, zero=3), data, 8, adam)             # doctest: +SKIP
    >>> resume(trainer, "run7").step, trainer.done                                          # doctest: +SKIP
    (12, 12)

    Under the plan that has saved it, what follows is what would have followed, to the bit; under another the state is the same
    to the bit, and sums are added up in another order. The optimizer's options, such as its learning rate, are those of then.
    ValueError, with the names, on all ranks and before anything is changed, for another model, optimizer, batch or seed; else as
    `load`.
    """

    def pieces(manifest: Manifest) -> dict[str, Piece]:
        about, extra = _about(trainer), manifest.extra
        if not isinstance(extra, dict) or about.keys() - extra.keys():
            raise ValueError(f"{manifest.folder} is not what save_run saves: it does not say {', '.join(about)}")
        for name, ours in about.items():
            if name != "options" and extra[name] != ours:
                raise ValueError(f"{manifest.folder}: {name} was {extra[name]}, and is {ours} here")
        return _pieces(trainer, manifest)

    manifest = load(trainer.comm, directory, pieces, step)
    trainer.done, trainer.losses, trainer.norms = manifest.step, manifest.extra["losses"], manifest.extra["norms"]
    for zero in trainer.zeros:
        for group, options in zip(zero.optimizer.param_groups, manifest.extra["options"], strict=True):
            group.update(options)
        zero.refresh()
    return manifest


def _pieces(trainer: Trainer, manifest: Manifest | None = None) -> dict[str, Piece]:
    return {name: piece for zero in trainer.zeros for name, piece in zero.pieces(manifest).items()}


def _about(trainer: Trainer) -> dict[str, Any]:
    """What must be alike for a run to be the same run, and what the optimizer was told."""
    optimizer, groups = type(trainer.zeros[0].optimizer).__name__, trainer.zeros[0].optimizer.param_groups
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    same = {"model": asdict(trainer.transformer), "optimizer": optimizer, "batch": trainer.batch, "seed": trainer.place.seed}
    return same | {"options": options}
