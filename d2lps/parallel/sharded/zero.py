"""Data-parallel training without redundancy: each rank keeps a share of the state, and fetches the rest when it needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from d2lps.arguments import whole
from d2lps.collectives import broadcast
from d2lps.comm import Communicator, Event
from d2lps.parallel.data.replicas import begin_alike, fingerprint, share_buffers
from d2lps.parallel.saving.pieces import Piece, lasting, optimizer_pieces, piece_of
from d2lps.parallel.saving.saved import Manifest
from d2lps.parallel.shard import guard
from d2lps.parallel.sharded.owners import together
from d2lps.parallel.sharded.units import Unit
from d2lps.parallel.torch_hooks import Weakly, clears, dense, for_shards, join, spread_overflow, when_ready


class Zero:
    """Data parallelism in which rank r of p owns a p-th of the optimizer's state, of the gradients, of the weights.

    >>> zero = Zero(comm, model, partial(torch.optim.Adam, lr=1e-3), stage=2)       # rank 0's weights      # doctest: +SKIP
    >>> loss(model(my_part_of_the_batch)).backward()            # doctest: +SKIP
    >>> zero.step()                                             # doctest: +SKIP

    | stage | sharded | what happens |
    |---|---|---|
    | 1 | optimizer | one reduce-scatter of all gradients, a step on the shard, one all-gather of the weights |
    | 2 | and gradients | a reduce-scatter for each unit, when the backward pass has all of its gradients; the rest as in 1 |
    | 3 | and weights | an all-gather for each unit before its forward, and before its backward pass; freed after each |

    A unit is a direct child of `module`, or one of a ModuleList in it; parameters that several children share are a unit of
    their own, and are there for all of them. In stage 3 weights are there in their unit's passes alone: elsewhere they are NaN,
    and what is to outlive a pass must be a copy (`w.detach().clone()`). All ranks call the units in the same order.
    Frozen parameters stay whole. Who trains is asked anew in each forward pass of `module`: what is unfrozen or added, on all
    ranks alike and with equal values, gets units of its own; a whole unit may be frozen again. Buffers are rank 0's after a step,
    unless broadcast_buffers=False. `shards`, flat, one for each unit, are what `optimizer(shards)` steps on: so one that looks at
    each tensor by itself (LAMB, Adafactor) is not for them. Gradients are in the shards' once `reduce` has returned, the means
    over all ranks; a parameter's own `.grad` stays None. `module.zero_grad()` is `drop`, too. A torch.amp.GradScaler is given the
    Zero itself: `scaler.step(zero)`. What has an attribute `partial` is summed over that group first (see tensor/layers.py).

    group: so many consecutive ranks share the state, and such groups hold copies: FSDP2's two-dimensional mesh, or hybrid
    sharding. param_dtype: that of weights and gradients, the shards staying what the weights were, as FP32 masters, in which,
    with main_grads, passes are added up. parameters: those that it looks after, by default all that train. overlap: reductions go
    on beside the backward pass, one behind the other, and the next unit is fetched meanwhile. While one unit's whole gradient is
    made, at most one other is still to be reduced: a third one waits until there is room.
    Errors: ValueError for a stage, or a group, that is none, and an optimizer that can't step on shards; Mismatch for models that
    are not alike; RuntimeError with the names of parameters that a backward pass has left out, or comes to unannounced, as their
    module was not called, or returned something else than tensors, lists, tuples and dicts (or torch's own, if it notices); of
    copies of shards that are written into, and what is frozen while others of its unit train; after a failed backward pass.
    Cost a step, of n bytes of weights: 1 and 2 send 2(p - 1)/p n bytes a rank, as an all-reduce does; 3 sends 3(p - 1)/p n.
    Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
    """

    _kept = 0  # in how many blocks that keep all weights this is
    _stepping = False  # whether it is zero.step that calls the optimizer's
    _passing = False  # whether a backward pass goes on, or has failed

    def __init__(
        self, comm: Communicator, module: nn.Module, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        stage: int, group: int | None = None, param_dtype: torch.dtype | None = None, overlap: bool = False,
        parameters: Iterable[nn.Parameter] | None = None, broadcast_buffers: bool = True, main_grads: bool = True,
    ) -> None:  # fmt: skip
        if stage not in (1, 2, 3):
            raise ValueError(f"stage={stage!r} is none of 1 (shards the optimizer), 2 (gradients, too) and 3 (weights, too)")
        size = whole("group", comm.size if group is None else group)
        if comm.size % size:
            raise ValueError(f"group={group} must divide the {comm.size} ranks, so many of which share the state")
        self.comm, self.stage, self.overlap, self.module = comm, stage, overlap, module
        self._chosen = None if parameters is None else set(parameters)
        self.units, self.shards = list[Unit](), list[nn.Parameter]()
        if not (trained := self._newcomers()):
            raise ValueError(f"{type(module).__name__} has no parameters that need gradients: there is no state to share")
        shapes = [(name, list(p.shape)) for name, p in trained.items()]
        comm.agree(f"Zero({stage=}, {group=}, {param_dtype=}, {overlap=}, {main_grads=}) of {len(shapes)}, {shapes}")
        self._elsewhere = set() if self._chosen is None else {*module.parameters()} - self._chosen  # what others look after
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor not in self._elsewhere:
                broadcast(comm, tensor)
        groups = comm.split(comm.rank // size), comm.split(comm.rank % size)
        self.sharing, self.replicas = cast(Any, groups)  #: those that own one copy of the state, those that own this shard
        self._make, self._buffers, self._how = optimizer, broadcast_buffers, (stage < 3, param_dtype, overlap, main_grads)
        self._in_backward: set[Unit] = set()  # whose weights are there for a backward pass
        self._last: Event | None = None  # when the last reduction that has been started is over,
        self._reducing: list[Unit] = []  # and whose have been, and not yet waited for
        self.synchronize, self._counted = True, 0  #: as `no_sync` sets it, for who can't be in a block
        self._prints: dict[str, Tensor] = {}  # of what has begun to train since the last reduction
        self._share(trained)
        self.optimizer = for_shards(optimizer(self.shards), self.shards)
        self.optimizer.register_step_pre_hook(self._check_step)
        module.register_forward_pre_hook(Weakly(self._listen))
        clears(self.drop, module, self.optimizer)

    # ---- who trains -----------------------------------------------------------------------------------------------

    def _newcomers(self) -> dict[str, nn.Parameter]:
        """What trains now, and is in no unit."""
        known = {p for unit in self.units for p in unit.parameters}
        ours = ((name, p) for name, p in self.module.named_parameters() if self._chosen is None or p in self._chosen)
        return {name: p for name, p in ours if p.requires_grad and p not in known}

    def _share(self, named: dict[str, nn.Parameter]) -> list[Unit]:
        """Make units of parameters that all ranks have alike."""
        parts = together(self.module, named) if self.stage > 1 else [((self.module,), named)]
        units = [Unit(self.sharing, members, *self._how) for _, members in parts]
        for place, (unit, (owners, _)) in enumerate(zip(units, parts, strict=True), len(self.units)):
            for number, p in enumerate(unit.parameters):
                when_ready(p, self._add, place, number)
            for part in owners if self.stage == 3 else ():
                guard(part)
                part.register_forward_pre_hook(lambda _, __, unit=unit: self._fetch(unit, 1))
                part.register_forward_hook(lambda _, __, output, unit=unit: self._leave(unit, output))
        self.units += units
        self.shards += [unit.shard for unit in units]
        return units

    def _listen(self, *_: Any) -> None:
        """A forward pass begins, in which, but for stage 3, a rank may be alone: what is new is compared in `reduce`."""
        if torch.is_grad_enabled() and (named := self._newcomers()):
            self._prints |= {name: torch.tensor(fingerprint(p)) for name, p in named.items()}
            for unit in self._share(named):
                join(self.optimizer, self._make([unit.shard]))
                self._fetch(unit, 1)  # in this very pass, for which a hook of the module itself comes too late

    def _check_trained(self) -> None:
        if late := ", ".join(name for name, p in self._newcomers().items() if p.grad is not None):
            raise RuntimeError(f"rank {self.comm.rank}: {late} has begun to train without a forward pass of the whole module")
        if frozen := ", ".join(name for unit in self.units for name in unit.frozen()):
            told = "freeze a whole unit (a child, in stage 1 all), or freeze before Zero is made"
            raise RuntimeError(f"rank {self.comm.rank}: {frozen} has been frozen, and others of its flat tensor have not: {told}")
        prints, self._prints = self._prints, {}
        begin_alike(self.comm, prints)

    # ---- stage 3: weights come and go -----------------------------------------------------------------------------

    def _fetch(self, unit: Unit, towards: int) -> None:
        """A unit's weights are needed now; those of its neighbor, with `overlap`, next."""
        unit.gather()
        unit.wait()
        following = self.units.index(unit) + towards
        if self.overlap and 0 <= following < len(self.units):
            self.units[following].gather()

    def _leave(self, unit: Unit, output: Any) -> None:
        """A forward pass has left the unit. If a backward pass is to come, its first gradient fetches the weights again."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and torch.is_grad_enabled():
            register_multi_grad_hook(outputs, lambda _: self._enter(unit), mode="any")
        if unit not in self._in_backward and not self._kept:  # else it is a recomputation: the backward pass follows at once
            unit.free()

    def _enter(self, unit: Unit) -> None:
        self._in_backward.add(unit)
        self._fetch(unit, -1)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights are there in the block, to be looked at or saved: RuntimeError if stage 3's have been written into."""
        for unit in self.units:
            unit.gather()
            unit.wait()
        self._kept += 1
        try:
            yield
            for unit in self.units:
                unit.check_written(self.comm.rank)
        finally:
            self._kept -= 1
            for unit in self.units:
                self._free(unit)

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _add(self, place: int, number: int, parameter: nn.Parameter) -> None:
        """In the midst of the backward pass: a parameter's gradient is complete."""
        if not self._passing:
            self._passing, engine = True, cast(Any, Variable._execution_engine)
            engine.queue_callback(self._passed)
        unit, gradient, parameter.grad = self.units[place], parameter.grad, None
        assert gradient is not None
        dense(unit.names[number], gradient)
        if self.stage == 3 and unit not in self._in_backward and not self._kept:  # it may have used what was not there
            how = "its module must be called, and return tensors, or lists, tuples and dicts of them: else nobody sees when"
            raise RuntimeError(f"{unit.names[number]}: a backward pass has come to it unannounced; {how} it is needed")
        # Who is alone, in the first pass, keeps what there is anyway: there is no room to be gained.
        if unit.gradient is None and (self.sharing.size > 1 or unit in self._reducing or unit.reduced is not None):
            while len(self._reducing) > 1:
                self._reducing.pop(0).settle()
        if unit.add(number, gradient, more=not self.synchronize):  # after the last one, nothing in this pass will use the weights
            if self.stage > 1 and self.synchronize:
                self._reduce(unit)
            self._free(unit)

    def _passed(self) -> None:
        """A backward pass has come to its end."""
        self._passing = False

    def _reduce(self, unit: Unit) -> None:
        self._last = unit.reduce(self.replicas, self._last)
        self._reducing = [other for other in self._reducing if other is not unit] + [unit]

    def _free(self, unit: Unit) -> None:
        self._in_backward.discard(unit)
        if not self._kept:
            unit.free()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block add up on each rank, which holds whole gradients for that; the next `reduce` averages.

        Without it, passes add up as well, in the shards: no memory for whole gradients, and a reduction for each pass.
        """
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    def reduce(self) -> None:
        """The backward passes are over: the shards have the mean gradients."""
        if self._passing:
            told = "a backward pass has failed, and left a part of its gradients"
            raise RuntimeError(f"rank {self.comm.rank}: {told}: drop() lets go of all since the last step")
        self._check_trained()
        for unit in self.units:
            unit.check_written(self.comm.rank)
        if left := ", ".join(name for unit in self.units for name in unit.left_out(self.stage == 1)):
            raise RuntimeError(f"rank {self.comm.rank}: a backward pass has left out {left}: the loss must depend on them")
        for unit in self.units:
            if unit.gradient is not None:
                self._reduce(unit)
            self._free(unit)
        for unit in self.units:
            unit.settle()
            unit.hand_over()
        self._last, self._reducing = None, []

    def drop(self, set_to_none: bool = True) -> None:
        """Let go of all gradients since the last step, on all ranks: those of a batch that is not to count, or has failed."""
        for unit in self.units:
            unit.drop()
            self._free(unit)
        self._last, self._reducing, self._passing = None, [], False

    zero_grad = drop  # as training loops call it

    def step(self) -> None:
        """Reduce if that is still to be done, step on the shards, and give all ranks the new weights; gradients are gone then."""
        self.reduce()
        self._stepping = True
        self.optimizer.step()
        self._stepping = False
        for shard in self.shards[self._counted :]:
            state = [leaf for leaf in self.optimizer.state.get(shard, {}).values() if isinstance(leaf, Tensor) and leaf.dim()]
            self.comm.hold(sum(tensor.nbytes for tensor in state), "optimizer")
        self._counted = len(self.shards)
        self.refresh()
        if self._buffers:
            share_buffers(self.comm, self.module)

    def _check_step(self, *_: Any) -> None:
        if not self._stepping:
            told = "its optimizer's step alone would neither reduce gradients nor give all ranks the new weights"
            raise RuntimeError(f"call zero.step(), or a GradScaler's step(zero): {told}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """What a torch.amp.GradScaler looks at: the reduced gradients; one that is inf or NaN on some rank is so on all ranks."""
        self.reduce()
        spread_overflow(self.comm, [shard.grad for shard in self.shards if shard.grad is not None])
        return self.optimizer.param_groups

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def pieces(self, manifest: Manifest | None = None) -> dict[str, Piece]:
        """What this rank has of the module and of the optimizer's state, to be saved; or, with a manifest, to be loaded."""
        held = {unit.shard: unit.pieces() for unit in self.units}
        others = self._elsewhere.union(*(unit.parameters for unit in self.units))
        found = {name: piece_of(tensor) for name, tensor in lasting(self.module) if tensor not in others}  # frozen, and buffers
        found |= {name: piece for pieces in held.values() for name, piece in pieces.items()}
        return found | optimizer_pieces(self.optimizer, held, manifest and manifest.tensors)

    def refresh(self) -> None:
        """The shards have been changed, by a step or a load: all ranks get the weights."""
        for unit in self.units:
            self._in_backward.discard(unit)
            unit.stepped()
            if self._kept:
                unit.gather()
                unit.wait()
