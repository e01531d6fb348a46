"""What a worker of the store sees over TCP, whatever stands between: the time of a push with the pull that follows it.

Of many, the fastest: whatever else the machine does can only add to it.
"""

import time

import torch

from d2lps import kvstore


def laps(kv: kvstore.KVWorker, key: str, numel: int, count: int) -> float:
    value, weights = torch.ones(numel), torch.zeros(numel)
    kv.init(key, weights)
    taken = []
    for _ in range(count):
        start = time.monotonic()
        kv.pushpull(key, value, weights).wait()
        taken.append(time.monotonic() - start)
    return 1e3 * min(taken)


def worker(kv: kvstore.KVWorker) -> tuple[float, float]:
    return laps(kv, "small", 1, 1000), laps(kv, "large", 1_000_000, 60)


if __name__ == "__main__":
    small, large = kvstore.run(worker, 1, 1, address="tcp", consistency="asp")[0]
    print(f"{small:.2f} ms for 4 bytes, {large:.1f} ms for 4 MB")
