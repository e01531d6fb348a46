"""What a simulation charges besides the network: nothing, unless it is told to."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """
    eager: messages up to so many bytes are buffered: their send is complete at once, whoever receives them and when.
        0, the default, is rendezvous throughout: no send is complete before its receive is posted. `math.inf` buffers
        all that have any bytes. Programs that deadlock under rendezvous may pass when buffered, until a message grows.
    per_message: seconds that a message takes besides its links' latency.
    per_combined_byte: seconds that a rank is busy for each byte that `comm.combine` reads of what arrived.

    >>> Model(eager=8192, per_message=5e-6)
    Model(eager=8192, per_message=5e-06, per_combined_byte=0.0)
    """

    eager: float = 0
    per_message: float = 0.0
    per_combined_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("eager", "per_message", "per_combined_byte"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= math.inf or value != value:
                raise ValueError(f"{name}={value!r} is not a number from 0 up")
        for name in ("per_message", "per_combined_byte"):
            if getattr(self, name) == math.inf:
                raise ValueError(f"{name} is infinite: nothing would ever happen")
