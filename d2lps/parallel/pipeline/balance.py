"""Which layers a pipeline's stages get, and what is done when one of the stages slows down in the middle of a run.

A pipeline goes at the pace of its slowest stage. A cut is a list of ranges, the layers of each stage in turn, one stage a rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from d2lps.arguments import whole
from d2lps.collectives import all_gather_into_tensor
from d2lps.comm import Communicator
from d2lps.parallel.pipeline.schedules import Schedule, one_f_one_b, replay  # noqa: F401  (one_f_one_b: for the example)
from d2lps.parallel.saving.pieces import state_tensors

Cut = Sequence[range]


def cut(
    costs: Sequence[float], stages: int, slow: Sequence[float] | None = None, tie: Callable[[int, range], float] | None = None
) -> list[range]:
    """The stages of a chain of layers of these costs, so that the slowest takes as little as it can.

    >>> cut([1, 1, 1, 1, 1, 3], stages=3)
    [range(0, 2), range(2, 5), range(5, 6)]
    >>> cut([1, 1, 1, 1, 1, 1], stages=3, slow=[1, 2, 1])       # the stage in the middle takes twice as long
    [range(0, 2), range(2, 3), range(3, 6)]

    costs: seconds of each layer, of anything that adds up. slow: how many times as long each stage takes. tie: of the cuts that
    are as good, that with the least sum of tie(stage, layers) of what dynamic programming looks at; by default squares of costs.
    ValueError with the numbers if there are more stages than layers: each needs one.
    Cost: stages x layers^2 / 2 comparisons. Source: the linear partition problem (Skiena, The Algorithm Design Manual).
    """
    layers, factors = len(costs), [1.0] * stages if slow is None else list(slow)
    if whole("stages", stages) > layers:
        raise ValueError(f"stages={stages}, but there are only {layers} layers: each stage needs one")
    if len(factors) != stages:
        raise ValueError(f"slow has {len(factors)} numbers for {stages} stages")
    before = [0.0, *accumulate(costs)]

    @cache
    def best(stage: int, end: int) -> tuple[float, float, int]:
        """Of the stages up to this one, on the layers before `end`: the slowest's time, the ties, where this one begins."""
        choices = []
        for begin in range(stage, end) if stage else (0,):
            time = factors[stage] * (before[end] - before[begin])
            worst, ties, _ = best(stage - 1, begin) if stage else (0.0, 0.0, 0)
            ties += time**2 if tie is None else tie(stage, range(begin, end))
            choices.append((max(worst, time), ties, begin))
        return min(choices)

    ends = [layers]
    for stage in reversed(range(stages)):
        ends.append(best(stage, ends[-1])[2])
    return [range(*pair) for pair in pairwise(reversed(ends))]


@dataclass(frozen=True)
class Change:
    """Another cut: moves are (layer, from rank, to rank); before, after: seconds a step; seconds: what moving takes."""

    cut: list[range]
    moves: list[tuple[int, int, int]]
    before: float
    after: float
    seconds: float

    @property
    def pays_after(self) -> float:
        """Steps from which on the run is ahead of one that has not changed; inf if it never is."""
        gain = self.before - self.after
        return math.ceil(self.seconds / gain) if gain > 0 else math.inf


def rebalance(
    costs: Sequence[float], old: Cut, slow: Sequence[float], nbytes: Sequence[float], bandwidth: float, schedule: Schedule
) -> Change:
    """What changes if stages turn out to take `slow` times as long as they should.

    >>> change = rebalance([3] * 8, cut([3] * 8, 4), [1, 1, 2, 1], [100] * 8, bandwidth=4, schedule=one_f_one_b(4, 8))
    >>> change.cut, change.moves
    ([range(0, 2), range(2, 4), range(4, 5), range(5, 8)], [(5, 2, 3)])
    >>> change.before, change.after, change.seconds, change.pays_after
    (110.0, 90.0, 25.0, 2)

    costs: seconds of each layer for one micro-batch, a third of it forward. nbytes: what each layer has to take along: weights
    and the optimizer's state, 16 bytes a parameter in mixed precision with Adam. bandwidth: bytes per second of a rank's link,
    one way; links work at once. Of the cuts with the least slowest stage it is one that moves few bytes.
    """
    home = {layer: stage for stage, layers in enumerate(old) for layer in layers}

    def arriving(stage: int, layers: range) -> float:
        return sum(nbytes[layer] for layer in layers if home[layer] != stage)

    new = cut(costs, len(old), slow, arriving)
    moves = [(layer, home[layer], stage) for stage, layers in enumerate(new) for layer in layers if home[layer] != stage]
    loads = [sum(nbytes[layer] for layer, *ends in moves if ends[side] == rank) for side in (0, 1) for rank in range(len(old))]
    before, after = (_step(costs, layers, slow, schedule) for layers in (old, new))
    return Change(new, moves, before, after, max(loads) / bandwidth)


def _step(costs: Sequence[float], layers: Cut, slow: Sequence[float], schedule: Schedule) -> float:
    times = [factor * sum(costs[layer] for layer in part) for part, factor in zip(layers, slow, strict=True)]
    return replay(schedule, [time / 3 for time in times], [2 * time / 3 for time in times]).time


def slowness(comm: Communicator, seconds: float, expected: float) -> list[float]:
    """What every rank's stage takes beside what it should, which each tells the others: [1.0, 1.0, 2.0, 1.0].

    Costs an all-gather of one number.
    """
    everybody = torch.empty(comm.size, dtype=torch.double)
    all_gather_into_tensor(comm, everybody, torch.tensor([seconds / expected], dtype=torch.double))
    return everybody.tolist()


def move(
    comm: Communicator, layers: dict[int, nn.Module], old: Cut, new: Cut, make: Callable[[int], nn.Module], optimizer: Optimizer
) -> None:
    """Hand layers over from where the old cut has them to where the new one does, with what the optimizer knows of them.

    >>> move(comm, layers, old, change.cut, lambda layer: sizes.module()[layer], adam)     # between two steps  # doctest: +SKIP

    layers: the modules that this rank has, by their number, changed in place. make: gives a module like a layer, into which
    the weights are then written. optimizer: of all these layers' parameters, in one group, changed in place too; gradients stay.
    Cost: for each layer its bytes (weights, and what the optimizer holds), and one message that says how many.
    ValueError, before anything is sent, for an optimizer that has several groups, or keeps something else than tensors.
    """
    if len(optimizer.param_groups) > 1:
        raise ValueError(f"the optimizer has {len(optimizer.param_groups)} groups of parameters: layers move within one")
    home = {layer: stage for stage, part in enumerate(old) for layer in part}
    for parameter in (p for layer in layers.values() for p in layer.parameters()):
        state_tensors(optimizer, optimizer.state.get(parameter, {}))  # before anything is sent
    under_way = []
    for stage, part in enumerate(new):
        for layer in part:
            if home[layer] == comm.rank != stage:
                packed = _packed(layers.pop(layer), optimizer)
                for message in (torch.tensor([packed.numel()]), packed):
                    under_way.append((comm.isend(message, stage), message))
    for layer in new[comm.rank]:
        if home[layer] != comm.rank:
            comm.recv(length := torch.zeros(1, dtype=torch.long), home[layer])
            comm.recv(packed := torch.empty(int(length), dtype=torch.uint8), home[layer])
            layers[layer] = _unpacked(packed, make(layer), optimizer)
    for work, _ in under_way:
        work.wait()
    optimizer.param_groups[0]["params"] = [p for layer in sorted(layers) for p in layers[layer].parameters()]


def _packed(layer: nn.Module, optimizer: Optimizer) -> Tensor:
    """Its weights and buffers, and the optimizer's numbers for them, as bytes."""
    tensors = {f"weight {name}": tensor.contiguous() for name, tensor in layer.state_dict().items()}
    for name, parameter in layer.named_parameters():
        known = optimizer.state.pop(parameter, {})
        tensors |= {f"{key} {name}": value.contiguous() for key, value in state_tensors(optimizer, known).items()}
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def _unpacked(packed: Tensor, layer: nn.Module, optimizer: Optimizer) -> nn.Module:
    tensors = {tuple(name.split(" ")): tensor for name, tensor in load(packed.numpy().tobytes()).items()}
    layer.load_state_dict({name: tensor for (key, name), tensor in tensors.items() if key == "weight"})
    for name, parameter in layer.named_parameters():
        known = {key: tensor for (key, owner), tensor in tensors.items() if owner == name and key != "weight"}
        if known:
            optimizer.state[parameter] = known
    return layer
