"""Workers and servers of the store, under any launcher: the first ranks are workers, the last ones servers.

    torchrun --nproc-per-node 6 store.py weights.safetensors --servers 2
    RANK=4 WORLD_SIZE=6 MASTER_ADDR=workers-0 MASTER_PORT=29500 python store.py ...         one of them: a pod, for instance

Servers in such a job keep what they have in memory: a launcher starts no single rank again. So the workers save it now and then,
and a job that is started anew goes on from that file, with any number of servers.
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from d2lps import kvstore


def worker(kv: kvstore.KVWorker, path: Path, steps: int) -> float:
    """Softmax regression on the digits: 650 weights."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images, labels = images[kv.rank :: kv.num_workers].float() / 16, labels[kv.rank :: kv.num_workers]
    weights, bias = torch.zeros(64, 10, requires_grad=True), torch.zeros(10, requires_grad=True)
    if path.exists():
        kv.load(path)
    for key, value in {"weights": weights, "bias": bias}.items():
        kv.init(key, value.detach())  # of a key that is there already, this is what the servers have
        kv.pull(key, value.detach()).wait()
    kv.set_optimizer("sgd", lr=0.5)
    for _ in range(steps):
        loss = cross_entropy(images @ weights + bias, labels)
        gradients = torch.autograd.grad(loss, [weights, bias])
        for key, gradient in zip(("weights", "bias"), gradients, strict=True):
            kv.push(key, gradient)
        kv.clock()
        kv.pull("weights", weights.detach()).wait()
        kv.pull("bias", bias.detach()).wait()
    kv.save(path)
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if not {"RANK", "WORLD_SIZE"} <= {*os.environ}:
        parser.error("no launcher has set RANK and WORLD_SIZE: start this with torchrun")
    if not 0 < given.servers < int(os.environ["WORLD_SIZE"]):
        parser.error(f"--servers must be from 1 to {os.environ['WORLD_SIZE']} - 1, not {given.servers}")
    workers = int(os.environ["WORLD_SIZE"]) - given.servers
    losses = kvstore.run(worker, workers, given.servers, given.path, given.steps)
    if os.environ["RANK"] == "0":
        print(f"{workers} workers, {given.servers} servers, mean loss {sum(losses) / workers:.3f}")
