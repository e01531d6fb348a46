"""What one accelerator can do, and how long it needs for a piece of work."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Device:
    """
    flops: floating-point operations per second at most. memory: bytes. memory_bandwidth: bytes per second at most.
    efficiency: the share of `flops` that programs reach, above 0 and at most 1. launch: seconds that each operation
    costs before it begins.

    >>> Device(flops=312e12, memory=80e9, memory_bandwidth=2039e9).memory / 1e9
    80.0
    """

    flops: float
    memory: float
    memory_bandwidth: float
    efficiency: float = 1.0
    launch: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "memory_bandwidth", "efficiency"):
            if not (is_number(value := getattr(self, name)) and value):
                raise ValueError(f"{name}={value!r} is not a number above 0")
        if self.efficiency > 1:
            raise ValueError(f"efficiency={self.efficiency!r} is above 1: it is a share of flops={self.flops!r}")
        if not is_number(self.launch):
            raise ValueError(f"launch={self.launch!r} is not a number from 0 up")

    def time_of(self, flops: float, bytes: float, operations: int = 1) -> float:
        """Seconds for a piece of work by the roofline: whichever takes longer, computing or moving, after the launches.

        >>> device = Device(flops=100e12, memory=80e9, memory_bandwidth=2e12, efficiency=0.5, launch=5e-6)
        >>> device.time_of(flops=1e9, bytes=2e9, operations=2)      # 10 us to launch, 1 ms to move; computing takes 20 us
        0.00101
        >>> device.time_of(flops=1e12, bytes=2e9, operations=0)     # 20 ms at half of 100 TFLOP/s
        0.02

        flops: operations to compute; bytes: read and written; operations: how many are launched one after another.
        ValueError if one of them is negative. Source: Williams, Waterman, Patterson 2009.
        """
        for name, value in (("flops", flops), ("bytes", bytes), ("operations", operations)):
            if not is_number(value):
                raise ValueError(f"{name}={value!r} is not a number from 0 up")
        computing, moving = flops / (self.flops * self.efficiency), bytes / self.memory_bandwidth
        return operations * self.launch + max(computing, moving)


def is_number(value: Any) -> bool:
    """A finite number from 0 up; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf
