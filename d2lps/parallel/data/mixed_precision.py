"""Mixed precision: compute and send in 16 bits, add up and step in 32.

Three precisions, with the names that PyTorch's FSDP gives them: `param_dtype`, that of the weights which compute; `reduce_dtype`,
in which gradients travel and are added up; and FP32, in which the optimizer steps on masters, whose rounded copies the weights
are. A loss that is multiplied by a scale keeps small gradients above the smallest FP16 number.
Source: Micikevicius et al. 2018, "Mixed precision training".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from d2lps.collectives import all_reduce, all_to_all, broadcast
from d2lps.collectives.arguments import check_tensor, collective
from d2lps.comm import Communicator
from d2lps.comm import flat as flattened
from d2lps.comm.rank import describe
from d2lps.parallel.data.replicas import begin_alike, share_buffers
from d2lps.parallel.torch_hooks import Weakly, clears, dense, join

_DTYPES = {torch.float16, torch.bfloat16, torch.float32}


@dataclass
class LossScaler:
    """The loss scale as a staircase: half after an overflow, twice after `growth_interval` steps without one.

    >>> scaler = LossScaler(scale=8.0, growth_interval=2)
    >>> [scaler.update(overflow) for overflow in (False, False, True, False, False)]
    [8.0, 16.0, 8.0, 8.0, 16.0]

    A state machine that holds no tensor; it is the same on all ranks as long as all tell it the same. Factors and interval are
    those of `torch.amp.GradScaler`. least: OverflowError rather than a scale below it: what overflows at each scale is inf or NaN
    by itself. ValueError unless backoff_factor < 1 < growth_factor, and the others are above 0.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good: int = 0  # steps without an overflow since the scale has last changed
    least: float = 2.0**-24

    def __post_init__(self) -> None:
        if not 0 < self.backoff_factor < 1 < self.growth_factor or not self.scale > 0 or not self.growth_interval > 0:
            raise ValueError(f"{self}: one factor must shrink and one grow, the scale and the interval be above 0")

    def state_dict(self) -> dict[str, float]:
        """All of it, as torch's GradScaler has it: `scaler.load_state_dict(other.state_dict())` makes it the same."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(vars(LossScaler(**state)))  # type: ignore[arg-type]

    def update(self, overflow: bool) -> float:
        """Take note of a step, and return the scale of the next one."""
        self.good = 0 if overflow else self.good + 1
        if overflow and self.scale * self.backoff_factor < self.least:
            told = "what is still inf or NaN is so in the loss, the weights or the data"
            raise OverflowError(f"a gradient has overflowed though the loss scale is down to {self.scale:g}: {told}")
        if overflow:
            self.scale *= self.backoff_factor
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * self.growth_factor, 0
        return self.scale


class MixedPrecision:
    """A replica whose weights compute in 16 bits, and the FP32 masters on which its optimizer steps.

    >>> trainer = MixedPrecision(comm, model, lambda masters: torch.optim.AdamW(masters, 1e-3))         # doctest: +SKIP
    >>> for x, y in shard:                                                                              # doctest: +SKIP
    ...     trainer.backward(cross_entropy(model(x.bfloat16()).float(), y))
    ...     trainer.step()          # False where an overflow made all ranks skip it

    The model's FP32 weights and its buffers become rank 0's; then weights are made numbers of `param_dtype`, where they stand.
    reduce_dtype: what gradients are on the wire, by default what the weights are. main_grads: add micro-batches up in FP32, for 2
    bytes a parameter more. scaler: for FP16; without one nothing is scaled and no step skipped. max_norm: clip the mean gradient
    to this norm, once the scale is out.
    Bytes a parameter with Adam: 2 + 2 + 4 + 4 + 4. A step is one all-reduce of all gradients: 2(p - 1)/p n bytes a rank; n has a
    number for each weight, too, of how many ranks have a gradient of it: a weight of which none has one stays what it is.
    Who trains is asked anew in each forward pass of `model`: what is unfrozen or added, on all ranks alike and with equal values,
    gets masters, too. Buffers are rank 0's after each step, unless broadcast_buffers=False. `model.zero_grad()` is `drop`, too.
    TypeError for weights that are not FP32, ValueError for a dtype that is none of FP16, BF16 and FP32; RuntimeError in a step,
    if somebody has written into the weights.
    """

    def __init__(
        self, comm: Communicator, model: nn.Module, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        param_dtype: torch.dtype = torch.bfloat16, reduce_dtype: torch.dtype | None = None, main_grads: bool = False,
        scaler: LossScaler | None = None, max_norm: float | None = None, broadcast_buffers: bool = True,
    ) -> None:  # fmt: skip
        self.reduce_dtype = reduce_dtype or param_dtype
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r}: a gradient is clipped to a norm above 0; None clips nothing")
        if unknown := {param_dtype, self.reduce_dtype} - _DTYPES:
            raise ValueError(f"{unknown} is none of float16, bfloat16 and float32")
        if short := {name: weight.dtype for name, weight in model.named_parameters() if weight.dtype != torch.float32}:
            raise TypeError(f"masters are made from float32 weights, and some are not: {short}")
        self.comm, self.max_norm, self.skips = comm, max_norm, scaler is not None
        self.scaler = scaler or LossScaler(1.0)  # which never learns of a step then
        self.model, self.param_dtype, self.broadcast_buffers, self._make = model, param_dtype, broadcast_buffers, optimizer
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        if not self.weights:
            raise ValueError(f"{type(model).__name__} has no parameters that need gradients: there is nothing to train")
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        for tensor in (*frozen, *model.buffers()):
            broadcast(comm, tensor, src=0)
        whole = parameters_to_vector(self.weights).detach()
        broadcast(comm, whole, src=0)
        vector_to_parameters(whole, self.weights)
        self.masters = [weight.data for weight in self.weights]
        for weight in model.parameters():
            weight.data = weight.data.to(param_dtype)
        self._versions = [weight._version for weight in self.weights]
        self.holders = self.masters if main_grads else self.weights  # of the gradients, between backward and step
        self.optimizer = optimizer(self.masters)
        self._joined: dict[str, Tensor] = {}  # the masters of what has begun to train since the last step
        model.register_forward_pre_hook(Weakly(self._listen))
        clears(self.drop, model, self.optimizer)

    def _listen(self, *_: Any) -> None:
        """Who trains from now on? No rank waits for others here: it may be one that looks at the model by itself."""
        known = set(self.weights)
        new = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad and weight not in known}
        for name, weight in new.items():
            self._joined[name] = weight.data.float()
            weight.data = weight.data.to(self.param_dtype)
            self.weights.append(weight)
            self.masters.append(self._joined[name])
            self._versions.append(weight._version)
            join(self.optimizer, self._make([self._joined[name]]))

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch, times the scale, to those that there are."""
        self._listen()
        (loss.float() * self.scaler.scale).backward()  # in FP32: an FP16 loss times 65,536 is inf
        for weight, holder in zip(self.weights, self.holders, strict=True):
            if holder is not weight and weight.grad is not None:
                holder.grad = weight.grad.float() if holder.grad is None else holder.grad + weight.grad
                weight.grad = None

    def drop(self, set_to_none: bool = True) -> None:
        """Let go of all gradients since the last step, on all ranks: those of a batch that is not to count, or has failed."""
        for tensor in (*self.weights, *self.masters):
            tensor.grad = None

    zero_grad = drop  # as training loops call it

    def step(self) -> bool:
        """Step by the mean of all ranks' gradients and return True; after an overflow, do nothing on any rank and return False.

        What overflows on one rank is inf or nan in the sum, and all ranks have the same sum, to the bit: nobody needs to ask.
        """
        if [weight._version for weight in self.weights] != self._versions:
            told = "somebody has written into the model's weights, which the step would undo: they are copies of the masters"
            raise RuntimeError(f"rank {self.comm.rank}: {told}; load weights before MixedPrecision is made, or into its masters")
        joined, self._joined = self._joined, {}
        begin_alike(self.comm, joined)
        gradients = [None if holder.grad is None else dense(describe(holder), holder.grad) for holder in self.holders]
        parts = [torch.zeros_like(h) if part is None else part for h, part in zip(self.holders, gradients, strict=True)]
        there = parts[0].new_tensor([part is not None for part in gradients])
        total = torch.cat([part.flatten().to(self.reduce_dtype) for part in (*parts, there)])
        self.drop()
        all_reduce(self.comm, total)
        if self.broadcast_buffers:
            share_buffers(self.comm, self.model)
        total, there = total.split([len(total) - len(there), len(there)])
        mean = total.float() / (self.scaler.scale * self.comm.size)
        if self.skips:
            self.scaler.update(overflow := not bool(mean.isfinite().all()))
            if overflow:
                return False
        if self.max_norm is not None:
            mean *= (self.max_norm / (mean.norm() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        pieces = mean.split([master.numel() for master in self.masters])
        for master, piece, ranks in zip(self.masters, pieces, there.tolist(), strict=True):
            master.grad = piece.view_as(master) if ranks else None  # of zeros, momentum and decay would make a step
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data.copy_(master)  # rounded to the nearest
            master.grad = None
        return True


@collective("tensor")
def wide_all_reduce(comm: Communicator, tensor: Tensor) -> None:
    """Leave the sum of all ranks in `tensor`, whose elements travel as they are but are added up in FP32.

    >>> tensor = torch.full((4,), 1.0 if comm.rank else 256.0).bfloat16()                   # on 4 ranks    # doctest: +SKIP
    >>> wide_all_reduce(comm, tensor)       # 260, the bfloat16 next to 259, in all four places     # doctest: +SKIP

    Rank r hears block r of all ranks, adds it up, rounds once, and hands it to all. All ranks get the same bits. 2 steps, and
    2(p - 1)/p n bytes a rank, as many as a ring's; p blocks are held at once.
    `compress.all_reduce` in two stages, with a cast for a codec, gives the same where nothing overflows. It cuts off what does;
    here that becomes inf, as a loss scaler needs it. Source: the two stages are those of 1-bit Adam (Tang et al. 2021).
    """
    check_tensor("tensor", tensor)
    with flattened(tensor) as data:
        blocks = comm.chunks(data, comm.size)
        mine, others = blocks[comm.rank], [rank for rank in range(comm.size) if rank != comm.rank]
        heard = [torch.empty_like(mine) for _ in blocks]
        all_to_all(comm, heard, blocks, "direct")
        total = heard[0].float()
        for other in heard[1:]:
            comm.combine(total, other.float())
        comm.copy(mine, total.to(tensor.dtype))
        comm.step("all-gather")
        comm.exchange([(mine, rank) for rank in others], [(blocks[rank], rank) for rank in others])
