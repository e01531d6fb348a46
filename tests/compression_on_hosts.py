"""When compression pays, on the shaped hosts of test_shaped_hosts: what the chapter *Compression* shows.

    python tests/compression_on_hosts.py 20 100 500 2500        # as root; for each so many Mb/s, seconds by codec

Four hosts, one process each, sum a gradient of 4 MB; of five exchanges the fastest, since whatever else this machine does can
only add to it. "codec" is what encoding and decoding take alone, by all four at once: they share this machine's cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def job(rank: int, hosts: list[str], port: int) -> None:
    """One rank's process, on its host; the first one prints."""
    box.enter(hosts[rank])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(HOSTS), "MASTER_ADDR": box.address(0), "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    torch.set_num_threads(1)
    for name, codec in CODECS.items():
        measured = {what.__name__: d2lps.run(what, HOSTS, codec).results for what in (timed, alone)}
        if rank == 0:
            least = {what: round(min(max(laps) for laps in zip(*all, strict=True)), 4) for what, all in measured.items()}
            print(json.dumps({name: least}), flush=True)


def main(hosts: list[str]) -> None:
    children = []
    for rank in range(HOSTS):
        children.append(os.fork())
        if not children[-1]:
            job(rank, hosts, 29700)
            os._exit(0)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


if __name__ == "__main__" and sys.argv[1] == "hosts":
    main(sys.argv[2:])
elif __name__ == "__main__":
    for megabits in sys.argv[1:]:
        # 5 ms of the link at a time, or one large frame; a queue of 40 ms.
        box.SHAPE = f"tbf rate {megabits}mbit burst {max(16, int(megabits) * 5 // 8)}kb latency 40ms"
        print(box.SHAPE, flush=True)
        with box.shaped_hosts(HOSTS) as shaped:
            environment = os.environ | {"PYTHONPATH": str(box.ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            subprocess.run([sys.executable, __file__, "hosts", *shaped], env=environment, check=True, timeout=600)
