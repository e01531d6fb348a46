"""When compression pays, on the shaped hosts of test_shaped_hosts: what the chapter *Compression* shows.

    python tests/compression_on_hosts.py 20 100 500 2500        # as root; for each so many Mb/s, seconds by codec

Four hosts, one process each, sum a gradient of 4 MB; of five exchanges the fastest, since whatever else this machine does can
only add to it. "alone" is what encoding and decoding take alone, by all four at once: they share this machine's cores.
"worked" is the processors' time of all four together: for the exchange, for the codec alone, and for the all-reduce of 8 KB.
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import test_shaped_hosts as box
import torch

import d2lps
from d2lps import Communicator, collectives, compress

NUMEL, HOSTS, REPEATS = 1 << 20, 4, 5
CODECS = {
    "FP32": None, "FP16": compress.half(), "int8": compress.int8(), "1 bit": compress.one_bit(), "top 1%": compress.top_k(0.01),
    "PowerSGD 2": compress.power_sgd(2),
}  # fmt: skip


def exchange(comm: Communicator, gradient: torch.Tensor, codec: compress.Codec | None) -> None:
    if codec is None:
        collectives.all_reduce(comm, gradient)
    else:
        compress.all_reduce(comm, gradient, compress.ErrorFeedback(codec))


def timed(
    comm: Communicator, codec: compress.Codec | None, clock: Callable[[], float] | None = None, numel: int = NUMEL
) -> list[float]:
    """Seconds of each exchange, by the world's clock or another."""
    laps, now = [], clock or comm.now
    for _ in range(REPEATS):
        gradient = torch.randn(1024, numel // 1024, generator=comm.generator)
        comm.barrier()
        start = now()
        exchange(comm, gradient, codec)
        laps.append(now() - start)
    return laps


def alone(comm: Communicator, codec: compress.Codec | None) -> list[float]:
    """The same on a group of one, four times at once: the codec without the link. (In two stages a rank decodes two tensors.)"""
    return timed(comm.split(comm.rank), codec)


def worked(comm: Communicator, codec: compress.Codec | None) -> list[float]:
    """This rank's processor time of each exchange: who waits for a core, or for a message, does not count."""
    return timed(comm, codec, time.process_time)


def worked_alone(comm: Communicator, codec: compress.Codec | None) -> list[float]:
    return worked(comm.split(comm.rank), codec)


def worked_small(comm: Communicator) -> list[float]:
    return timed(comm, None, time.process_time, 2048)


def job(rank: int, host: str) -> dict[str, dict[str, float]]:
    """One rank's process, on its host."""
    box.become(rank, HOSTS, host, 29700)
    told: dict[str, dict[str, float]] = {}
    for what, over in ((timed, max), (alone, max), (worked, sum), (worked_alone, sum)):
        told[what.__name__] = {name: least(d2lps.run(what, HOSTS, codec).results, over) for name, codec in CODECS.items()}
    return told | {worked_small.__name__: {"FP32": least(d2lps.run(worked_small, HOSTS).results, sum)}}


def least(laps: list[list[float]], over: Callable[[Iterable[float]], float]) -> float:
    """Of the exchanges, the one of least; each is as long as its last rank took, or as much work as that of all ranks."""
    return round(min(map(over, zip(*laps, strict=True))), 4)


if __name__ == "__main__" and sys.argv[1] == "hosts":
    box.forked(partial(job, rank, host) for rank, host in enumerate(sys.argv[2:]))
elif __name__ == "__main__":
    for megabits in sys.argv[1:]:
        # 5 ms of the link at a time, or one large frame; a queue of 40 ms.
        box.on_hosts(__file__, HOSTS, f"tbf rate {megabits}mbit burst {max(16, int(megabits) * 5 // 8)}kb latency 40ms")
