"""One training script for every launcher: as many ranks as it is started with, the same losses with each number of them.

    python train.py runs/a                                      one process
    torchrun --nproc-per-node 4 train.py runs/a                 four, here; or elastic, on several machines
    srun python train.py runs/a                                 in a job of Slurm

It goes on from the newest checkpoint in the folder, whatever number of ranks has written that. Told to end (SIGTERM, or the
SIGUSR1 that Slurm's --signal sends ahead of the end), it finishes its step, saves, and leaves with status 75: try again later.
"""

import argparse
import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

import d2lps
from d2lps.collectives import all_reduce
from d2lps.comm import Communicator, ReduceOp
from d2lps.disk import CheckpointMissing
from d2lps.parallel import Checkpoints, Plan, Trainer, Transformer, resume, save_run, text

MODEL = Transformer(layers=2, hidden=32, heads=4, vocab=96, sequence=64)
BATCH = 24  # sequences a step, of all ranks together: 1, 2, 3, 4, 6, 8 or 12 of them have equal shares
AGAIN = 75  # EX_TEMPFAIL of sysexits.h

told_to_end = False


def note(signum: int, frame: object) -> None:
    """A handler does no more than this: the step under way still has its messages to exchange."""
    global told_to_end
    told_to_end = True


def anybody_told(comm: Communicator) -> bool:
    """All ranks stop after the same step, though they may be told at different moments, or only one of them."""
    told = torch.tensor(int(told_to_end))
    all_reduce(comm, told, ReduceOp.MAX)
    return bool(told)


def work(comm: Communicator, folder: Path, steps: int, every: int) -> bool:
    """Train until all steps are done, or somebody says stop; whether all are done."""
    trainer = Trainer(comm, MODEL, Plan(dp=comm.size, precision="fp32"), text(64), BATCH, partial(torch.optim.AdamW, lr=3e-3))
    checkpoints = Checkpoints(comm, folder)
    with contextlib.suppress(CheckpointMissing):  # a first start
        resume(trainer, folder)
    say(comm, f"world size {comm.size}, from step {trainer.done}")
    while trainer.done < steps:
        loss, _ = trainer.step()
        say(comm, f"step {trainer.done} loss {loss:.3f}")
        stop = anybody_told(comm)
        if stop or trainer.done % every == 0 or trainer.done == steps:
            save_run(trainer, checkpoints)
        if stop:
            break
    checkpoints.wait()
    return trainer.done == steps


def say(comm: Communicator, words: str) -> None:
    if comm.rank == 0:
        print(words, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    given = parser.parse_args()
    if given.every < 1:
        parser.error(f"--every must be at least 1, not {given.every}")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    # What torchrun sets, srun says in other words; without either this is a job of one rank.
    job = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS"}
    for name, default in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, os.environ.get(job.get(name, ""), default))
    torch.set_num_threads(1)
    done = d2lps.run(work, int(os.environ["WORLD_SIZE"]), given.folder, given.steps, given.every, backend="gloo")
    sys.exit(0 if all(done) else AGAIN)
