"""What autograd keeps of a forward pass for the backward pass, counted as it is kept and let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks

from d2lps.comm import Communicator


class Kept(saved_tensors_hooks):
    """What autograd saves in the block: the memory of its tensors, each once; `alive`, how many of them it still has.

    >>> kept, x = Kept(set()), torch.ones(10, requires_grad=True)
    >>> with kept:
    ...     y = x.exp().sin()
    >>> kept.nbytes, kept.alive                 # the result of exp, for both of them
    (40, 2)
    >>> y.sum().backward(); kept.alive
    0

    besides: storages that are not counted, such as `weights_of` a module; nor are those that others have `counted`. RuntimeError,
    as torch's own, if what is saved has changed by the time it is needed; but not of `besides`, as ZeRO 3's weights come and go.
    """

    release: Callable[[], None]

    def __init__(self, besides: set[int], counted: Iterable[int] = ()) -> None:
        super().__init__(self._pack, Saved.unpack)
        self.besides, self.counted, self.sizes, self.alive = besides, set(counted), dict[int, int](), 0

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.besides | self.counted:
            self.sizes[storage._cdata] = storage.nbytes()

    def _pack(self, tensor: Tensor) -> Saved:
        self.count(tensor)
        return Saved(self, tensor)


class Saved:
    """A tensor in autograd's hands, that says when it is let go. It may go at any time: so it only counts."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.kept, self.version = kept, tensor._version
        self.tensor = tensor.detach()  # a result that its own node held would keep itself, and never go
        kept.alive += 1

    def unpack(self) -> Tensor:
        """torch leaves to hooks what it does without them: to check that nobody has written into the tensor meanwhile."""
        tensor, version = self.tensor, self.tensor._version
        if version != self.version and tensor.untyped_storage()._cdata not in self.kept.besides:
            what = f"{tensor.dtype} {list(tensor.shape)}, is at version {version}; expected version {self.version}"
            raise RuntimeError(f"what the backward pass needs has been modified by an inplace operation: {what}")
        return tensor

    def __del__(self) -> None:
        self.kept.alive -= 1


def weights_of(*modules: nn.Module) -> set[int]:
    """The storages in which parameters lie when they are used: those of ZeRO 3 come and go, and are `lent` a place."""
    return {getattr(p, "lent", p).untyped_storage()._cdata for module in modules for p in module.parameters()}


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
        self.kept: list[Kept] = []  # by children that have been forward and not yet backward, once for each time
        self.within: list[tuple[nn.Module, Kept]] = []  # by those whose forward passes go on
        for name, child in module.named_children():
            child.register_forward_pre_hook(self._begin)
            child.register_forward_hook(partial(self._end, name), always_call=True)  # a caller may catch what a child raises

    @property
    def nbytes(self) -> int:
        """So many are held now."""
        return sum(kept.nbytes for kept in self.kept)

    def sweep(self, *_: Any) -> None:
        """Give back what autograd no longer keeps. Done after each child's backward pass, and at the end of the whole."""
        for kept in [kept for kept in self.kept if not kept.alive]:
            self.kept.remove(kept)
            kept.release()

    def _begin(self, child: nn.Module, inputs: Any) -> None:
        self.sweep()
        if torch.is_grad_enabled():
            known = [*self.kept, *(kept for _, kept in self.within)]
            self.within.append((child, Kept(weights_of(self.module), set().union(*(kept.sizes for kept in known)))))
            self.within[-1][1].__enter__()

    def _end(self, name: str, child: nn.Module, inputs: Any, output: Any) -> None:
        if not self.within or self.within[-1][0] is not child:
            return
        _, kept = self.within.pop()
        kept.__exit__(None, None, None)
        if output is None:  # it has failed: there will be no backward pass
            return
        kept.release = self.comm.hold(kept.nbytes, f"activations {name}")
        self.kept.append(kept)
        for tensor in _needing_gradients(inputs):
            tensor.register_hook(self._passed)  # its gradient is there when all of the child's backward pass is done

    def _passed(self, gradient: Tensor) -> None:
        engine: Any = Variable._execution_engine
        engine.queue_callback(self.sweep)
        self.sweep()


def _needing_gradients(inputs: Any) -> Iterator[Tensor]:
    return (tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad)
