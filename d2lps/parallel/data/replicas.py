"""Do replicas agree? Ranks compare fingerprints of what must be the same on all of them, and of what must not."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from d2lps.collectives import all_gather_into_tensor, broadcast
from d2lps.comm import Communicator, Mismatch
from d2lps.parallel.shard import here


def fingerprint(tensor: Tensor | None) -> int:
    """64 bits that two tensors share if all their bits are the same, and else (but for one case in 2**64) not; None has 0.

    >>> x = torch.tensor([1.0, 2.0, 4.0])
    >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.flip(0))
    (True, False)

    Exact: no tolerance, 0.0 is not -0.0, and NaN is itself. All meta tensors of a size are alike. Hashed are the sums of the
    rows, and of the columns, of a square of the tensor's words, whole numbers that lose nothing: what has changed shows in both,
    unless it cancels out in both, which takes four changes that fit. Reads n bytes twice, about as long as a copy takes.
    """
    if tensor is None:
        return 0
    plain = torch.empty(0) if tensor.is_meta else tensor.detach().contiguous().reshape(-1)
    digest = blake2b(f"{tensor.dtype}{list(tensor.shape)}{tensor.is_meta}".encode(), digest_size=8)
    for part in _sums(plain.view(torch.uint8)):
        digest.update(part.cpu().numpy().data)
    return int.from_bytes(digest.digest(), signed=True)


def _sums(data: Tensor) -> Iterator[Tensor]:
    """Of bytes: the sums of the rows and of the columns of a square of 8 bytes a word, and what is left beside it."""
    side = isqrt(len(data) // 8)
    square, beside = data.tensor_split([8 * side * side])
    words = (square.clone() if square.storage_offset() % 8 else square).view(torch.int64).view(side, side)
    yield from (words.sum(1), words.sum(0), beside.clone())  # numpy holds on to what it is shown: ZeRO 3 could not free that


@dataclass(frozen=True)
class Difference:
    """What ranks have of one tensor: in groups that have the same, the largest first; ranks by their numbers in the run."""

    name: str
    groups: list[list[int]]
    wanted: bool = False  # whether all should have had different ones

    @property
    def odd(self) -> list[int]:
        """The ranks outvoted by the others; none if no majority is right."""
        largest, rest = self.groups[0], [rank for group in self.groups[1:] for rank in group]
        return [] if self.wanted or len(largest) <= len(rest) else sorted(rest)

    def __str__(self) -> str:
        if self.wanted:
            told = [f"{_ranks(group)} have the same" for group in self.groups if len(group) > 1]
        elif self.odd:
            told = [f"{_ranks(self.odd)} differ{'s' if len(self.odd) == 1 else ''} from {_ranks(self.groups[0])}"]
        else:
            told = [" and ".join(map(_ranks, self.groups)) + " have different ones: no majority says which is right"]
        return f"{self.name}: {' and '.join(told)}"


def differences(
    comm: Communicator, alike: Mapping[str, Tensor | None], unlike: Mapping[str, Tensor | None] | None = None
) -> list[Difference]:
    """What breaks the rule that all ranks have `alike` in common, to the bit, and that no two of them have the same `unlike`.

    >>> found = differences(comm, alike=dict(model.named_parameters()), unlike={"batch": x})     # doctest: +SKIP
    >>> print(*found, sep="; ")                             # the same on every rank             # doctest: +SKIP
    0.weight: rank 2 differs from ranks 0, 1, 3; batch: ranks 1, 3 have the same

    Mismatch if the ranks name different tensors; ValueError for a parameter that is not `here`. Cost: an all-gather of 8 bytes a
    tensor; time to read them all (see `fingerprint`).
    """
    tensors = {**alike, **(unlike or {})}
    comm.agree(f"differences({list(alike)}, {list(unlike or {})})")
    marks = [fingerprint(here(name, tensor)) for name, tensor in tensors.items()]
    mine = torch.tensor(marks, dtype=torch.int64, device=comm.device)
    everybody = mine.new_empty(comm.size * len(mine))
    all_gather_into_tensor(comm, everybody, mine)
    found = []
    for name, prints in zip(tensors, everybody.view(comm.size, -1).T.tolist(), strict=True):
        groups = grouped(zip(comm.members, prints, strict=True))
        if len(groups) != (1 if name in alike else comm.size):
            found.append(Difference(name, groups, wanted=name not in alike))
    return found


def grouped(marks: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """Who has the same, the largest group first: `grouped([(0, "a"), (1, "b"), (2, "b")]) == [[1, 2], [0]]`."""
    ranks = defaultdict(list)
    for rank, mark in marks:
        ranks[mark].append(rank)
    return sorted(ranks.values(), key=lambda group: (-len(group), group))


def begin_alike(comm: Communicator, trained: Mapping[str, Tensor]) -> None:
    """Mismatch, on all ranks, where what begins to train is not the same on all of them."""
    if trained and (found := differences(comm, trained)):
        raise Mismatch(f"{found[0]}; what begins to train must be equal on all ranks, as after d2lps.collectives.broadcast")


def share_buffers(comm: Communicator, module: nn.Module) -> None:
    """A module's buffers, such as a batch norm's statistics, become rank 0's: a message for each dtype among them."""
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        together.setdefault((buffer.dtype, buffer.device), []).append(buffer.data)
    for buffers in together.values():
        broadcast(comm, whole := torch.cat([buffer.flatten() for buffer in buffers]))
        for buffer, part in zip(buffers, whole.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


class Replicas:
    """Watches a module's replicas: parameters, buffers and gradients, and whatever else is to be alike, or not.

    >>> replicas = Replicas(comm, model)                                            # doctest: +SKIP
    >>> replicas.check(alike={"loss": mean_loss}, unlike={"batch": x})              # after the gradients' mean  # doctest: +SKIP
    Mismatch: at step 7 (all was well at step 6) gradient of 0.weight: rank 2 differs from ranks 0, 1, 3; and 5 more

    With two ranks it can say that they differ, not which of them is wrong: a majority names the odd one. What comes first in a
    step is told first: inputs, then gradients, then weights. buffers, gradients: whether to look at them; a batch norm's
    statistics, for one, are rank 0's after a step, and each rank's own in the next forward pass. Cost: see `differences`.
    """

    def __init__(self, comm: Communicator, module: nn.Module, buffers: bool = True, gradients: bool = True) -> None:
        self.comm, self.module, self.buffers, self.gradients = comm, module, buffers, gradients
        self.steps = 0  #: how often all was compared
        self.well: int | None = None  #: when all was well for the last time

    def check(
        self, alike: Mapping[str, Any] | None = None, unlike: Mapping[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Raise Mismatch, on every rank and with the same words, unless the replicas agree; step: its number, else counted."""
        step = self.steps if step is None else step
        self.steps = step + 1
        parameters = list(self.module.named_parameters())
        same = _tensors(alike)
        if self.gradients:
            same |= {f"gradient of {name}": parameter.grad for name, parameter in parameters if parameter.requires_grad}
        same |= dict(parameters) | (dict(self.module.named_buffers()) if self.buffers else {})
        found = differences(self.comm, same, _tensors(unlike))
        if found:
            found.sort(key=lambda difference: not difference.wanted)
            before = "" if self.well is None else f" (all was well at step {self.well})"
            more = "" if len(found) == 1 else f"; and {len(found) - 1} more"
            raise Mismatch(f"at step {step}{before} {found[0]}{more}")
        self.well = step


def _tensors(values: Mapping[str, Any] | None) -> dict[str, Tensor | None]:
    """Numbers as tensors, without rounding."""
    found = dict(values or {})
    return {name: torch.tensor(x, dtype=torch.float64) if isinstance(x, int | float) else x for name, x in found.items()}


def _ranks(group: list[int]) -> str:
    return f"rank{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}"
