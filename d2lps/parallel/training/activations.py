"""What autograd keeps of a forward pass for the backward pass, counted as it is kept and let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from d2lps.comm import Communicator


def activations(comm: Communicator, module: nn.Module) -> Activations:
    """Count, in the account of this rank's device, what each child of a module keeps from its forward to its backward pass.

    >>> activations(comm, model)        # from here on, in a trace: "activations block2", so many bytes      # doctest: +SKIP

    Counted is the memory of the tensors that autograd saves: each once, by the child that saves it first; parameters are not
    counted. It is given back when autograd has let go of all of it. Children that recompute save their inputs alone, where the
    recomputing is done within the child. OutOfMemory, with who holds what, at the end of the forward pass that is too much.
    """
    return Activations(comm, module)


class Activations:
    def __init__(self, comm: Communicator, module: nn.Module) -> None:
        self.comm, self.module = comm, module
        self.kept: list[Unit] = []  # children that have been forward and not yet backward, once for each time
        self.storages: set[int] = set()  # what those keep
        for name, child in module.named_children():
            child.register_forward_pre_hook(partial(self._begin, name))
            child.register_forward_hook(self._end)

    @property
    def nbytes(self) -> int:
        """So many are held now."""
        return sum(unit.nbytes for unit in self.kept)

    def sweep(self, *_: Any) -> None:
        """Give back what autograd no longer keeps. Done after each child's backward pass, and at the end of the whole."""
        for unit in [unit for unit in self.kept if not unit.alive]:
            self.kept.remove(unit)
            self.storages -= unit.storages
            unit.release()

    def _begin(self, name: str, child: nn.Module, inputs: Any) -> None:
        self.sweep()
        if torch.is_grad_enabled():
            self.kept.append(Unit(name, self.storages, self.module))

    def _end(self, child: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            unit = self.kept[-1]
            unit.close()
            unit.release = self.comm.hold(unit.nbytes, f"activations {unit.name}")
            for tensor in _needing_gradients(inputs):
                tensor.register_hook(self._passed)  # its gradient is there when all of the child's backward pass is done

    def _passed(self, gradient: Tensor) -> None:
        engine: Any = Variable._execution_engine
        engine.queue_callback(self.sweep)
        self.sweep()


class Unit:
    """One forward pass of one child. alive: how many tensors autograd keeps of it."""

    release: Callable[[], None]

    def __init__(self, name: str, known: set[int], module: nn.Module) -> None:
        self.name, self.known, self.module, self.storages = name, known, module, set[int]()
        self.alive = self.nbytes = 0
        stack = ExitStack()
        stack.enter_context(saved_tensors_hooks(self._pack, lambda saved: saved.tensor))
        self.close = stack.close

    @cached_property
    def weights(self) -> set[int]:
        """Once the first tensor is saved: by then the parameters are where they are used."""
        return {parameter.untyped_storage()._cdata for parameter in self.module.parameters()}

    def _pack(self, tensor: Tensor) -> Saved:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known and storage._cdata not in self.weights:
            self.known.add(storage._cdata)
            self.storages.add(storage._cdata)
            self.nbytes += storage.nbytes()
        return Saved(self, tensor)


class Saved:
    """A tensor in autograd's hands, that says when it is let go. It may go at any time: so it only counts."""

    def __init__(self, unit: Unit, tensor: Tensor) -> None:
        self.unit, self.tensor = unit, tensor
        unit.alive += 1

    def __del__(self) -> None:
        self.unit.alive -= 1


def _needing_gradients(inputs: Any) -> Iterator[Tensor]:
    return (tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad)
