"""What a training run is besides its weights, and how it goes on from a checkpoint, under any plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from d2lps.comm import Work
from d2lps.parallel.saving.agreement import on_every_rank
from d2lps.parallel.saving.checkpoint import Checkpoints, load
from d2lps.parallel.saving.pieces import Piece
from d2lps.parallel.saving.saved import Manifest
from d2lps.parallel.saving.states import States
from d2lps.parallel.training.train import Trainer


def save_run(trainer: Trainer, checkpoints: Checkpoints, states: States = MappingProxyType({})) -> Work:
    """Save what this rank has of a run, in the background.

    Beside the weights (of BF16 ones the FP32 masters) and the optimizer's tensors that is how many steps are done, from which
    its place in the data follows; what it drops is a function of that and the seed, so that there are no generators to save.
    states: by name, what else has a state_dict, a learning-rate schedule for one: `resume` wants the same names. ValueError where
    optimizers of one run have other options, since the state of a run has one of each.
    """
    on_every_rank(trainer.comm, lambda: _check_options(trainer))
    extra = _about(trainer) | {"losses": trainer.losses, "norms": trainer.norms}
    return checkpoints.save(trainer.done, _pieces(trainer), extra, states)


def resume(
    trainer: Trainer, directory: str | Path, step: int | None = None, states: States = MappingProxyType({})
) -> Manifest:
    """Let a trainer that has not stepped go on from the newest checkpoint, or that of a step, whatever plan has saved it.

    >>> trainer = Trainer(comm, transformer, Plan(dp=4, zero=3), data, 8, adam)             # doctest: +SKIP
    >>> resume(trainer, "run7").step, trainer.done                                          # doctest: +SKIP
    (12, 12)

    Under the plan that has saved it, what follows is what would have followed, to the bit; under another the state is the same
    to the bit, and sums are added up in another order. The optimizer's options, such as its learning rate, are those of then.
    A schedule that was made of an optimizer before is among the `states`, or would begin at the first rate's multiples again.
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
        _check_schedules(trainer, states)
        return _pieces(trainer, manifest)

    manifest = load(trainer.comm, directory, pieces, step, states)
    trainer.done, trainer.losses, trainer.norms = manifest.step, manifest.extra["losses"], manifest.extra["norms"]
    for zero in trainer.zeros:
        for group, options in zip(zero.optimizer.param_groups, manifest.extra["options"], strict=True):
            _set(group, options)
        zero.refresh()
    return manifest


def _pieces(trainer: Trainer, manifest: Manifest | None = None) -> dict[str, Piece]:
    return {name: piece for zero in trainer.zeros for name, piece in zero.pieces(manifest).items()}


def _about(trainer: Trainer) -> dict[str, Any]:
    """What must be alike for a run to be the same run, and what the optimizer was told."""
    optimizer = trainer.zeros[0].optimizer
    name, options = type(optimizer).__name__, _options(optimizer)
    same = {"model": asdict(trainer.transformer), "optimizer": name, "batch": trainer.batch, "seed": trainer.place.seed}
    return same | {"options": options}


# ---- an optimizer's options ------------------------------------------------------------------------------------------------


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What it was told, by group of parameters, as JSON has it: a rate that is a tensor is its number."""
    return [{name: _plain(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else [*map(_plain, value)] if isinstance(value, tuple | list) else value


def _set(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Tensors stay what they are, and get the number: whoever has compiled or captured a step reads it there."""
    for name, value in options.items():
        if isinstance(there := group.get(name), Tensor):
            there.fill_(value)
        else:
            group[name] = value


def _check_options(trainer: Trainer) -> None:
    first, *others = (_options(zero.optimizer) for zero in trainer.zeros)
    for number, other in enumerate(others, 1):
        if other != first:
            raise ValueError(f"zeros[{number}].optimizer has the options {other}, and zeros[0]'s {first}: a run saves one set")


def _check_schedules(trainer: Trainer, states: States) -> None:
    """A schedule marks the optimizer that it sets the rates of, as torch has it: each group has an `initial_lr` then."""
    known = [getattr(state, "optimizer", None) for state in states.values()]
    for number, zero in enumerate(trainer.zeros):
        if "initial_lr" in zero.optimizer.param_groups[0] and not any(zero.optimizer is one for one in known):
            told = "has a learning-rate schedule that knows nothing of the steps that are done"
            how = "give it to save_run and resume in states={...}, or make it after resume, with last_epoch=trainer.done - 1"
            raise ValueError(f"zeros[{number}].optimizer {told}: {how}")
