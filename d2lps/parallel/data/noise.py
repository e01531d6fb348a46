"""The gradient noise scale: how large a batch is before more of it is wasted, from gradients that a training has anyway.

A gradient of b examples is the true one plus noise, E|g_b|^2 = |G|^2 + S / b, where S is the summed variance of the examples'
gradients. Every rank has one of its own b, and all have the mean, of p b: two equations for two unknowns.
Source: McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training", 2018, appendix A.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from d2lps.arguments import whole
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator
from d2lps.comm.rank import describe


def squares(gradients: Iterable[Tensor]) -> float:
    """The squared length of all of them together, summed in double precision.

    >>> squares([torch.tensor([1.0, 2.0]), torch.tensor([[2.0]])])
    9.0
    """
    return float(sum(gradient.detach().double().square().sum() for gradient in gradients))


def estimate(small: float, large: float, batch: int, ranks: int) -> tuple[float, float]:
    """|G|^2 and S, both unbiased, of which S / |G|^2 is the noise scale.

    >>> estimate(small=5.0, large=2.0, batch=8, ranks=4)    # 1 + 32/8 and 1 + 32/(4 * 8)
    (1.0, 32.0)

    small: the mean over ranks of |g|^2, of `batch` examples each; large: |the mean of the ranks' g|^2. An estimate of a single
    step may be far off, and of |G|^2 even be negative. ValueError for one rank: there is no second equation.
    """
    if whole("ranks", ranks) == 1:
        raise ValueError("ranks=1: the noise shows where gradients of different examples differ; take two micro-batches or ranks")
    noise = whole("batch", batch) * ranks / (ranks - 1) * (small - large)
    return large - noise / (batch * ranks), noise


class NoiseScale:
    """Watches a data-parallel training, and tells the batch, in examples, beyond which more ranks help little.

    >>> noise = NoiseScale(comm, model.parameters(), batch=32)          # of each rank          # doctest: +SKIP
    >>> for x, y in batches:                                            # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()            # a DataParallel, DDP, or one's own mean of gradients
    ...     noise.update()
    ...     optimizer.step()
    >>> noise.scale                                                     # doctest: +SKIP
    410.3

    Hooks see each rank's gradient before it is averaged; `update` looks at the mean. The loss must be a mean over the rank's
    examples. smooth: how much of the running means a step keeps: |G|^2 and S are averaged before one is divided by the other,
    since a mean of quotients would be far off. Cost: an all-reduce of 8 bytes a step, and reading the gradients twice.
    Parameters that are unfrozen count from the second step on in which they train, frozen ones no more.
    RuntimeError if no backward pass, or more than one, has come since the last update.
    """

    def __init__(self, comm: Communicator, parameters: Iterable[nn.Parameter], batch: int, smooth: float = 0.95) -> None:
        estimate(1.0, 1.0, batch, comm.size)
        if not 0 <= smooth < 1:
            raise ValueError(f"smooth={smooth!r}: what a running mean keeps in a step, from 0 up and below 1")
        self.comm, self.batch, self.smooth = comm, batch, smooth
        self.parameters = list(parameters)
        self._heard = set[int]()  # whose gradients have come through a hook of ours
        self.steps, self._gradient, self._noise = 0, 0.0, 0.0
        self._local: dict[int, float] = {}
        self._listen()

    def _listen(self) -> None:
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad and number not in self._heard:
                parameter.register_hook(partial(self._see, number))
                self._heard.add(number)

    def _see(self, number: int, gradient: Tensor) -> None:
        if number in self._local:
            raise RuntimeError("a second backward pass since the last update: call update after each")
        self._local[number] = squares([gradient])

    def update(self) -> None:
        """After a backward pass, when every `grad` is the mean of all ranks' and nobody has clipped it."""
        if not self._local:
            raise RuntimeError("no backward pass since the last update")
        for number in self._local:
            if (parameter := self.parameters[number]).grad is None:
                told = f"parameter {number}, {describe(parameter)}, has no gradient any more"
                raise RuntimeError(f"{told}: the mean is looked for there, and Zero and DataParallel's optimizer take it away")
        all_reduce(self.comm, small := torch.tensor([sum(self._local.values())], dtype=torch.float64))
        self._local = {}
        heard = (parameter for number, parameter in enumerate(self.parameters) if number in self._heard)
        large = squares(parameter.grad for parameter in heard if parameter.requires_grad and parameter.grad is not None)
        self.add(float(small) / self.comm.size, large)
        self._listen()

    def add(self, small: float, large: float) -> None:
        """The squares of a step, as `estimate` wants them."""
        gradient, noise = estimate(small, large, self.batch, self.comm.size)
        self.steps += 1
        self._gradient = self.smooth * self._gradient + (1 - self.smooth) * gradient
        self._noise = self.smooth * self._noise + (1 - self.smooth) * noise

    def state_dict(self) -> dict[str, float]:
        """The running means, and of how many steps."""
        return {"steps": self.steps, "gradient": self._gradient, "noise": self._noise}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.steps, self._gradient, self._noise = int(state["steps"]), state["gradient"], state["noise"]

    @property
    def gradient(self) -> float:
        """|G|^2, the running mean."""
        return self._gradient / (1 - self.smooth**self.steps) if self.steps else float("nan")

    @property
    def noise(self) -> float:
        """S, the running mean."""
        return self._noise / (1 - self.smooth**self.steps) if self.steps else float("nan")

    @property
    def scale(self) -> float:
        """S / |G|^2, in examples: a batch of so many has as much noise as signal. Infinite while |G|^2 seems to be 0 or less."""
        return self.noise / self.gradient if not self.gradient <= 0 else float("inf")
