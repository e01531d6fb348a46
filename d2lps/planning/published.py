"""What others have measured and published of large clusters: failures, power, prices. Each figure with its source."""

from typing import NamedTuple

HOUR, DAY = 3600.0, 86400.0

# ---- failures ---------------------------------------------------------------------------------------------------------


class Stops(NamedTuple):
    """So many unplanned stops of a job on so many devices, in so many seconds."""

    devices: int
    stops: float
    seconds: float

    @property
    def mtbf(self) -> float:
        """Seconds from stop to stop. `round(LLAMA3.mtbf / HOUR, 1) == 3.1`"""
        return self.seconds / self.stops

    @property
    def each(self) -> float:
        """Seconds from stop to stop that a single device would have."""
        return self.mtbf * self.devices


LLAMA3 = Stops(16_384, 419, 54 * DAY)  # Llama team 2024, section 3.3.4
# Kokolis et al. 2025: mean times to failure of jobs, measured on 8 and 1,024 devices, projected beyond.
KOKOLIS = {8: 47.7 * DAY, 1024: 7.9 * HOUR, 16_384: 1.8 * HOUR, 131_072: 14 * 60.0}

# ---- networks ---------------------------------------------------------------------------------------------------------

RADIX = 64  # ports of 400 Gb/s of a switch: NVIDIA QM9700
META_POD, META_PODS, META_OVERSUBSCRIPTION, META_RACK = 384, 8, 7, 2  # machines, pods; machines a rack. Llama team 2024, 3.3.1

# ---- power, in W ------------------------------------------------------------------------------------------------------

H100_WATTS = 700  # NVIDIA H100 SXM data sheet; Llama team 2024
MACHINE_WATTS = 10_200  # at most, eight H100 and all around them: NVIDIA DGX H100 data sheet
TRANSCEIVER_WATTS = 9  # at most, one end of 400 Gb/s on fiber: NVIDIA MMS4X00-NS400 specifications

# ---- storage and prices ------------------------------------------------------------------------------------------------

STORE_WRITES = 2e12  # bytes/s that the file system of Llama 3 sustains, 7e12 in bursts; 240 PB on 7,500 machines
GPU_HOUR = 2.0  # dollars for an hour of one device to rent, as DeepSeek-AI 2024 assume for an H800


def loss(parameters: float, tokens: float) -> float:
    """Of a language model after so many tokens, in nats a token: 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28.

    >>> round(loss(70e9, 1.4e12), 2)        # Chinchilla
    1.94

    Source: Hoffmann et al. 2022, equation 10; Besiroglu et al. 2024 find that other numbers fit the same data better.
    """
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28
