"""What is alike in all architectures: one rank's copy of the model, and what it notes of the steps that it has made.

The weights are one flat tensor, and so is a gradient: what an architecture does with them between two steps is all that it is.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from d2lps.architectures.job import AFTER, Job
from d2lps.collectives import all_reduce, broadcast
from d2lps.comm import Communicator
from d2lps.disk import drafted


@dataclass
class Record:
    """What a rank says at the end. losses: of each step, or of each part of a batch that this rank has computed, by
    (step, first sequence); ended: when each of its steps was over; weights: the last ones, unless they are only described."""

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    weights: Tensor | None = None
    stopped: bool = False  # before the job was done, for somebody who wants to come


class Member:
    """One rank of a job, and what it notes of the steps that it has made; a subclass has what a step is made of.

    begin: the step with which a job of collectives goes on (see `beginning`).
    """

    begin: int

    def __init__(self, comm: Communicator, job: Job) -> None:
        self.comm, self.job, self.record = comm, job, Record()

    def steps(self) -> Iterator[int]:
        """The steps still to be made; after each of them all ranks learn its loss, and whether somebody wants to come."""
        for step in range(self.begin, self.job.steps):
            yield step
            self.record.stopped = self._agreed(step)
            if self.record.stopped or (step + 1) % self.job.every == 0:
                self.save(step + 1)
                if self.comm.rank == 0:
                    note(self.job, saved=step + 1)
            if self.record.stopped:
                return

    def save(self, done: int) -> None:
        """Write a checkpoint after so many steps; here there is nothing to be written."""

    def finished(self, step: int, loss: float | None = None) -> None:
        """Note that a step is over, and its loss if all know it; who is to die now dies, by the signal that lets nobody clean up.

        A rank that died when somebody else had seen enough steps could have done all of its own by then.
        """
        self.record.ended[step] = self.comm.now()
        if self.comm.rank == 0:
            note(self.job, done=step + 1, losses=noted(self.job).get("losses", {}) | ({} if loss is None else {str(step): loss}))
        if self.comm.rank == self.job.dies and step + 1 >= AFTER:
            os.kill(os.getpid(), signal.SIGKILL)

    def final(self) -> Record:
        """All that there is to say."""
        return self.record

    def _agreed(self, step: int) -> bool:
        """All ranks learn the mean of their losses, and whether to stop before the next step: two numbers, summed by a tree."""
        losses, job, comm = self.record.losses, self.job, self.comm
        mine = [losses.pop(key) for key in [*losses] if key[0] == step]
        stop = comm.rank == 0 and step + 1 < job.steps and somebody_waits(comm, job)
        words = torch.tensor([sum(mine) / comm.size, float(stop)], dtype=torch.float64)
        with comm.about("loss, stop"):
            all_reduce(comm, words, algorithm="tree")
        loss = None if job.described else words[0].item()
        if loss is not None:
            losses[step, 0] = loss
        self.finished(step, loss)
        return bool(words[1])


class Model(Member):
    """The weights, flat, and the gradient at them of some sequences of a batch.

    >>> model = Model(comm, Job())                                                      # doctest: +SKIP
    >>> model.gradient(step=0, first=4, count=4).shape                                  # doctest: +SKIP
    torch.Size([9856])
    """

    def __init__(self, comm: Communicator, job: Job) -> None:
        super().__init__(comm, job)
        self.module = job.module()
        parameters = list(self.module.parameters())
        self.weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.flat = torch.zeros_like(self.weights)  # the gradient
        sizes = [parameter.numel() for parameter in parameters]
        for p, weights, gradient in zip(parameters, self.weights.split(sizes), self.flat.split(sizes), strict=True):
            p.data, p.grad = weights.view_as(p), gradient.view_as(p)

    def gradient(self, step: int, first: int, count: int) -> Tensor:
        """Of the mean loss of so many sequences of a step's batch. In a simulation it takes what `predict` says of the device."""
        topology = self.comm.topology
        seconds = self.job.seconds(topology.device(self.comm.node)) if topology else 0.0
        with busy(self.comm, seconds * count, "gradient"):
            if self.job.data is not None:
                self.flat.zero_()
                tokens, targets = self.job.data.batch(step * self.job.batch + first, count)
                loss = cross_entropy(self.module(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                self.record.losses[step, first] = loss.item()
        return self.flat

    def final(self) -> Record:
        self.record.weights = None if self.job.described else self.weights.clone()
        return self.record


def busy(comm: Communicator, seconds: float, label: str) -> AbstractContextManager[None]:
    """A block in which a simulated device computes, for so long if nothing slows it down; in other worlds it takes its time."""
    device = comm.topology.device(comm.node) if comm.topology else None
    return comm.compute(label, seconds * device.flops * device.efficiency if device else 0.0, 0)


class Replica(Model):
    """A model in a job whose ranks all have the same weights, and the same optimizer's state; checkpoints and changes with it.

    >>> replica = Replica(comm, job)                    # goes on from the last checkpoint      # doctest: +SKIP
    >>> for step in replica.steps():                                                            # doctest: +SKIP
    ...     gradient = replica.share(step)
    ...     all_reduce(comm, gradient, ReduceOp.AVG)
    ...     replica.update(gradient)

    The rank 0 writes checkpoints, and reads the one from which all go on; the others get it from there. In a simulation writing
    takes no time, since it can go on beside the training; the way of the state to all ranks does.
    """

    def __init__(self, comm: Communicator, job: Job) -> None:
        super().__init__(comm, job)
        self.moments = torch.zeros_like(self.weights)
        self.path, self.begin = Path(job.folder, "checkpoint.safetensors"), beginning(comm, job)
        if self.begin:
            self._load()

    def share(self, step: int) -> Tensor:
        """The gradient of this rank's share of the batch."""
        count = self.job.batch // self.comm.size
        return self.gradient(step, self.comm.rank * count, count)

    def update(self, gradient: Tensor) -> None:
        """SGD with momentum, as torch has it."""
        with self.comm.compute("optimizer", 0, 5 * gradient.nbytes):
            self.moments.mul_(self.job.momentum).add_(gradient)
            self.weights.sub_(self.moments, alpha=self.job.lr)

    def save(self, done: int) -> None:
        if self.comm.rank == 0 and self.job.folder and not self.job.described:
            with drafted(self.path) as draft:
                save_file({"weights": self.weights, "moments": self.moments}, draft)

    def _load(self) -> None:
        """Rank 0 has the file; weights and moments go to all."""
        if self.comm.rank == 0 and not self.job.described:
            state = load_file(self.path)
            self.weights.copy_(state["weights"])
            self.moments.copy_(state["moments"])
        with self.comm.about("weights, moments"):
            broadcast(self.comm, self.weights)
            broadcast(self.comm, self.moments)


def somebody_waits(comm: Communicator, job: Job) -> bool:
    """Whether there are ranks who want to come: a simulation has a time for that; on processes so many steps must be done."""
    return (comm.now() if comm.topology else noted(job).get("done", 0)) >= job.comes


# ---- what is known of a job outside of its ranks ------------------------------------------------------------------------------


def beginning(comm: Communicator, job: Job) -> int:
    """The step with which the job goes on: the one that its last checkpoint was made before; all ranks have to hear the same."""
    comm.barrier()  # so that nobody has noted anything since
    begin = noted(job).get("saved", 0)
    comm.barrier()
    return begin


def note(job: Job, **facts: Any) -> None:
    """Write down what shall be known even if all ranks die: how many steps are done, how many are saved."""
    if job.folder:
        draft = Path(job.folder, "progress.draft")
        draft.write_text(json.dumps(noted(job) | facts))
        draft.rename(draft.with_suffix(".json"))


def noted(job: Job) -> dict[str, Any]:
    """What was written down so far."""
    path = Path(job.folder, "progress.json")
    return dict(json.loads(path.read_text())) if job.folder and path.exists() else {}
