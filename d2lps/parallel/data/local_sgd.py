"""Sending less often: each worker trains alone for H steps, and only then do they talk.

| class | what travels every H steps | what becomes of it |
|---|---|---|
| LocalSGD | the weights | their mean is everybody's |
| DiLoCo | how far the weights have come, the delta | an outer optimizer moves the shared weights by the mean of the deltas |
| DiLoCoWorker | the same, to a parameter server | the outer optimizer is the server's |

Data parallelism sends n bytes a step, these n / H. The inner optimizer is your own, unchanged, and each worker's state of it
stays where it is. Sources: Stich, "Local SGD converges fast and communicates little", 2019; Douillard et al., "DiLoCo", 2023,
and "Streaming DiLoCo", 2025, as torchft.local_sgd has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from d2lps import compress
from d2lps.arguments import whole
from d2lps.collectives.all_reduce import all_reduce
from d2lps.comm import Communicator, ReduceOp, Work
from d2lps.compress import Codec, ErrorFeedback
from d2lps.compress.codec import counting, flat
from d2lps.parallel.data.replicas import fingerprint

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # DiLoCo's outer SGD


class LocalSGD:
    """Every H steps the mean of all ranks' weights.

    >>> local = LocalSGD(comm, model.parameters(), every=50)        # doctest: +SKIP
    >>> for x, y in batches:                                        # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()
    ...     optimizer.step()
    ...     local.step()

    parameters: tensors of floats, alike on all ranks. An optimizer's momentum stays each rank's own, unless its buffers are
    among them. Cost: an all-reduce of n bytes every H steps. ValueError.
    """

    def __init__(self, comm: Communicator, parameters: Iterable[torch.Tensor], every: int, algorithm: str = "ring") -> None:
        self.comm, self.parameters, self.algorithm = comm, _floats(parameters), algorithm
        self.every, self.steps = whole("every", every), 0

    def step(self) -> bool:
        """After each step of the inner optimizer; whether this was one that ends in a mean."""
        self.steps += 1
        if self.steps % self.every:
            return False
        self.average()
        return True

    def state_dict(self) -> dict[str, int]:
        """Where in a round it is. Amid one the weights are each rank's own, too: then the model's state belongs to it."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    def average(self) -> None:
        """Now, as after the last steps of a training: every rank calls it."""
        weights = flat(self.parameters)
        all_reduce(self.comm, weights, ReduceOp.AVG, self.algorithm)
        write(self.parameters, weights)


class DiLoCo:
    """Every H steps an outer optimizer moves the shared weights by the mean of the deltas: where all began, minus where each is.

    >>> inner = torch.optim.AdamW(model.parameters())                           # doctest: +SKIP
    >>> diloco = DiLoCo(comm, model.parameters(), every=50)                     # doctest: +SKIP
    >>> inner.register_step_post_hook(lambda *_: diloco.step())                 # or call it yourself   # doctest: +SKIP

    With outer={"lr": 1.0} the shared weights are the mean of the weights, as in `LocalSGD`.

    outer: of torch.optim.SGD. fragments: the model in so many parts of equal size, one of which is sent every H / fragments
    steps: each still every H, and n / fragments bytes at once. delay: a part's deltas are taken so many steps before they are
    due, and travel under the steps between (`comm.start`); keep: how much a rank keeps then of its own weights, which have gone
    on meanwhile, from 0 to 1, the rest being the shared ones. codec: how deltas travel, of `d2lps.compress`, or an ErrorFeedback
    of one. algorithm: of the all-reduce.

    All ranks must begin with the same weights (else Mismatch: broadcast rank 0's), and make as many rounds; what a rank does
    after the last one is its own. `shared` holds the shared weights, flat. Cost: an all-reduce of n bytes every H steps; in
    memory two copies of the weights, shared and momentum, and two more in a round. Also ValueError.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Iterable[torch.Tensor],
        every: int,
        outer: Mapping[str, Any] = NESTEROV,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
        codec: Codec | ErrorFeedback | None = None,
        algorithm: str | None = None,
    ) -> None:
        self.comm, self.parameters, self.codec, self.algorithm = comm, _floats(parameters), codec, algorithm
        self.shared, self.steps, self.keep = flat(self.parameters), 0, keep
        self.period = _period(whole("every", every), whole("fragments", fragments), delay, self.shared.numel())
        if not 0 <= keep <= 1 or (keep and not delay):
            raise ValueError(f"keep={keep}: a part of the weights, from 0 to 1, and there must be a delay")
        if codec is not None:
            counting(codec)  # TypeError now, rather than after H steps
        self.fragments, self.delay = self.shared.tensor_split(fragments), delay
        self.outer = [torch.optim.SGD([fragment], **outer) for fragment in self.fragments]
        self.pending: tuple[int, torch.Tensor, Work | None] | None = None
        comm.agree(f"DiLoCo(every={every}, fragments={fragments}, delay={delay}) of weights {fingerprint(self.shared)}")

    def step(self) -> bool:
        """After each step of the inner optimizer; whether the shared weights, or a fragment of them, have moved."""
        self.steps += 1
        due, early = divmod(self.steps + self.delay, self.period)
        if early == 0:
            self._send((due - 1) % len(self.fragments))
        if self.pending is None or self.steps % self.period:
            return False
        self._apply()
        return True

    def state_dict(self) -> dict[str, Any]:
        """The shared weights, what outer optimizer and codec keep, and where in a round it is; what travels is waited for.

        A rank's weights and inner optimizer have states of their own: states={"model": model, "inner": inner, "outer": diloco}.
        """
        if self.pending and self.pending[2]:
            self.pending[2].wait()
            self.pending = *self.pending[:2], None
        codec = self.codec.state_dict() if isinstance(self.codec, ErrorFeedback) else None
        outer, pending = [sgd.state_dict() for sgd in self.outer], self.pending and self.pending[:2]
        return {"steps": self.steps, "shared": self.shared, "pending": pending, "outer": outer, "codec": codec}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError where it is of other weights, fragments or codec."""
        ours = len(self.shared), len(self.outer), isinstance(self.codec, ErrorFeedback)
        if (theirs := (len(state["shared"]), len(state["outer"]), state["codec"] is not None)) != ours:
            told = "is of {} weights in {} fragments, error feedback: {}"
            raise ValueError(f"the state {told.format(*theirs)}; this {told.format(*ours)}")
        self.shared.copy_(state["shared"])
        self.steps, self.pending = state["steps"], state["pending"] and (*state["pending"], None)
        for sgd, other in zip(self.outer, state["outer"], strict=True):
            sgd.load_state_dict(other)
        if isinstance(self.codec, ErrorFeedback):
            self.codec.load_state_dict(state["codec"])

    def _send(self, number: int) -> None:
        """Let the mean of the deltas of a fragment be made, beside what comes next if there is a delay."""
        delta = self.fragments[number] - self._part(flat(self.parameters), number)
        args = delta, self.codec, self.algorithm, f"fragment {number}", self.steps
        if self.delay:
            self.pending = number, delta, self.comm.start(average_deltas, *args)
        else:
            average_deltas(self.comm, *args)
            self.pending = number, delta, None

    def _apply(self) -> None:
        """Move a fragment of the shared weights, and this rank to it."""
        assert self.pending is not None
        (number, delta, work), self.pending = self.pending, None
        if work is not None:
            work.wait()
        self.fragments[number].grad = delta
        self.outer[number].step()
        self.fragments[number].grad = None  # n bytes that are not needed for the next H steps
        weights = flat(self.parameters)
        self._part(weights, number).lerp_(self.fragments[number], 1 - self.keep)
        write(self.parameters, weights)

    def _part(self, weights: torch.Tensor, number: int) -> torch.Tensor:
        return weights.tensor_split(len(self.fragments))[number]


def average_deltas(
    comm: Communicator, delta: torch.Tensor, codec: Codec | ErrorFeedback | None, algorithm: str | None, name: str, turn: int
) -> None:
    """Leave the mean of all ranks' `delta` in it, as far as the codec lets it through."""
    if codec is None:
        all_reduce(comm, delta, algorithm=algorithm or "ring")
    else:
        compress.all_reduce(comm, delta, codec, name, turn=turn, algorithm=algorithm)
    delta /= comm.size


class DiLoCoWorker:
    """DiLoCo on a parameter server: pull, H steps, push the delta; the outer optimizer is the server's.

    >>> def worker(kv):                                                         # doctest: +SKIP
    ...     diloco = DiLoCoWorker(kv, model.parameters(), every=50)
    ...     for x, y in batches:
    ...         ...                                 # a step of the inner optimizer
    ...         diloco.step()
    >>> d2lps.kvstore.run(worker, 4, 1, consistency="bsp")                      # or "asp"    # doctest: +SKIP

    Under bsp a round has everybody's deltas, and its mean moves the weights; under asp each delta does as it arrives, by its
    share, 1 / workers. every: may differ from worker to worker. outer: of `optimizer`, for
    kv.set_optimizer: "sgd", or under asp "delayed_nesterov". All begin with the first worker's weights; one that ends is not
    waited for. Cost: n bytes to the servers, fewer after kv.compress, and n back, every H steps. ValueError, Refused.
    """

    def __init__(
        self,
        kv: Any,
        parameters: Iterable[torch.Tensor],
        every: int,
        outer: Mapping[str, Any] = NESTEROV,
        optimizer: str = "sgd",
        key: str = "weights",
    ) -> None:
        self.kv, self.parameters, self.key = kv, _floats(parameters), key
        self.every, self.steps = whole("every", every), 0  # steps since the last pull
        self.start = flat(self.parameters)
        kv.init(key, self.start)
        kv.set_optimizer(optimizer, **outer)
        self._pull()

    def step(self) -> bool:
        """After each step of the inner optimizer; whether the delta went to the servers, and new weights came."""
        self.steps += 1
        if self.steps < self.every:
            return False
        pushed = self.kv.push(self.key, self.start - flat(self.parameters))
        self.kv.clock()
        pushed.wait()
        self._pull()
        return True

    def _pull(self) -> None:
        self.kv.pull(self.key, self.start).wait()
        write(self.parameters, self.start)
        self.steps = 0


# ---- many tensors as one ----------------------------------------------------------------------------------------------


@torch.no_grad()
def write(parameters: Sequence[torch.Tensor], weights: torch.Tensor) -> None:
    """Put back what `flat` gave."""
    parts = weights.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view(parameter.shape))


def _floats(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`[*parameters]`, if they can have a mean."""
    found = list(parameters)
    for number, tensor in enumerate(found):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            what = tensor.dtype if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ValueError(f"parameters[{number}] is {what}: tensors of floating-point numbers have a mean")
    if not found:
        raise ValueError("parameters: there are none; a generator such as model.parameters() is empty once it has been read")
    return found


def _period(every: int, fragments: int, delay: int, weights: int) -> int:
    """How many steps there are from one fragment to the next."""
    if every % fragments or fragments > weights:
        raise ValueError(f"fragments={fragments}: must divide every={every}, and be at most the {weights} weights")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < every // fragments:
        raise ValueError(f"delay={delay!r}: from 0 up, and shorter than the {every // fragments} steps to the next fragment")
    return every // fragments
