"""When compression pays, on the shaped hosts of test_shaped_hosts: what the chapter *Compression* shows.

    python tests/compression_on_hosts.py 20 100 500 2500        # as root; for each so many Mb/s, seconds by codec

Four hosts, one process each, sum a gradient of 4 MB; of five exchanges the fastest, since whatever else this machine does can
only add to it. "alone" is what encoding and decoding take alone, by all four at once: they share this machine's cores.
"""

import sys
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


def timed(comm: Communicator, codec: compress.Codec | None) -> list[float]:
    """Seconds of each exchange."""
    laps = []
    for _ in range(REPEATS):
        gradient = torch.randn(1024, NUMEL // 1024, generator=comm.generator)
        comm.barrier()
        start = comm.now()
        exchange(comm, gradient, codec)
        laps.append(comm.now() - start)
    return laps


def alone(comm: Communicator, codec: compress.Codec | None) -> list[float]:
    """The same on a group of one, four times at once: the codec without the link. (In two stages a rank decodes two tensors.)"""
    return timed(comm.split(comm.rank), codec)


def job(rank: int, host: str) -> dict[str, dict[str, float]]:
    """One rank's process, on its host."""
    box.become(rank, HOSTS, host, 29700)
    runs = {name: [d2lps.run(what, HOSTS, codec).results for what in (timed, alone)] for name, codec in CODECS.items()}
    return {what: {name: least(run[index]) for name, run in runs.items()} for index, what in enumerate(("together", "alone"))}


def least(laps: list[list[float]]) -> float:
    """Of the exchanges, the fastest, each as long as its last rank took."""
    return round(min(map(max, zip(*laps, strict=True))), 4)


if __name__ == "__main__" and sys.argv[1] == "hosts":
    box.forked(partial(job, rank, host) for rank, host in enumerate(sys.argv[2:]))
elif __name__ == "__main__":
    for megabits in sys.argv[1:]:
        # 5 ms of the link at a time, or one large frame; a queue of 40 ms.
        box.on_hosts(__file__, HOSTS, f"tbf rate {megabits}mbit burst {max(16, int(megabits) * 5 // 8)}kb latency 40ms")
