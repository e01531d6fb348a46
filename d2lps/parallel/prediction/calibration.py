"""What neither a plan nor a data sheet says: how near the software comes to what the machine could do."""

from dataclasses import dataclass

from d2lps.topology.device import is_number
from d2lps.topology.published import MEMORY_REACHED


@dataclass(frozen=True)
class Calibration:
    """The state of one software on one kind of device.

    efficiency: the share of a device's `flops` that its matrix products reach. overhead: seconds that a layer's pass of one
    micro-batch takes besides, a backward pass twice as many (launches, Python). These two `calibrate` fits. memory: the share
    of its memory bandwidth that other operations reach. fused_attention: scores are never written to memory (FlashAttention).
    wide_gradients: in 16-bit training gradients are kept, and travel, in 32 bits, as Megatron-LM does.

    >>> Calibration(efficiency=0.7).memory
    0.8

    By default it is Megatron-LM of 2022 on A100: what `calibrate` makes of two rows, 22B and 1T with all recomputed, of table 5
    of Korthikanti et al. 2022.
    """

    efficiency: float = 0.83
    overhead: float = 0.0007
    memory: float = MEMORY_REACHED
    fused_attention: bool = False
    wide_gradients: bool = False

    def __post_init__(self) -> None:
        for name in ("efficiency", "memory"):
            if not (is_number(value := getattr(self, name)) and 0 < value <= 1):
                raise ValueError(f"{name}={value!r} is not a share: above 0, and at most 1")
        if not is_number(self.overhead):
            raise ValueError(f"overhead={self.overhead!r} is not a number of seconds from 0 up")
