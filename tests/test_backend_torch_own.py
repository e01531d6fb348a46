"""PyTorch's own tests of collectives and of DDP, from the installed torch, on our backend.

They are written to be run by every rank of a job, and tell backends apart by an environment variable: here it says gloo, to
which ours is alike (CPU tensors, any tag, any order of sends and receives); or mpi, for those that torch runs on MPI alone,
as gloo cannot do them. The group that they run on is ours. What is not run is listed below, with the reason; besides, torch
itself skips those that train on GPUs and those that it knows to fail. `pytest -s` shows the outcome of each. In torch 2.13,
without a GPU, 115 of them are run: broadcast, scatter, gather, reduce, all-reduce, all-gather (also coalesced), all-to-all,
barriers, messages with and without tags, objects, smaller groups, futures, DDP on CPUs with and without hooks.
"""

import functools
import importlib.util
import os
import re
import sys
import tempfile
import time
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import d2lps
import d2lps.backend  # registers it
from d2lps import Communicator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch runs them on Linux")

RANKS = 4
IMITATED = ["gloo", "mpi"]
# Tests on CPU tensors that torch runs on MPI only, and those in smaller groups, for which it otherwise wants eight ranks.
AS_MPI = r"all_to_all|(?<!full)_group(_sum|_product|_min|_max)?$"

# Torch's name of a test, as a regular expression -> why it is not run here.
SKIPPED = {
    r"cuda|nccl|gpu|non_default_stream|high_priority": "needs NCCL, or a GPU for each rank",
    r"batch_isend_irecv_(op_err|mixed_backend_err)": "needs NCCL to be told apart from",
    r"SyncBatchNorm_process_group": "needs torchvision",
    r"get_backend": "asks for the name of the backend that is imitated",
    r"barrier_timeout": "waits for gloo's wording, in a default group of gloo",
    r"monitored_barrier": "gloo alone has a monitored_barrier; ours says so",
    r"any_source": "ours has no receive from any source, and says so",
}


def case_of(comm: Communicator, imitated: str, folder: str) -> Any:
    """Torch's tests as a class; what is left of their own way to start ranks is where these wait for one another."""
    os.environ.update(BACKEND=imitated, WORLD_SIZE=str(comm.size), TEMP_DIR=folder)
    Path(folder, "test_dir").mkdir(exist_ok=True)  # where some of them meet
    # Of expecttest these tests use nothing but that it is a TestCase.
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        sys.modules["expecttest"] = stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    importlib.reload(distributed_test)  # it looks at BACKEND when it is imported

    class OnOurs(distributed_test.DistributedTest._DistTestBase, TestCase):
        world_size, rank = comm.size, comm.rank

        def _barrier(self, *args, **options):  # type: ignore[no-untyped-def]
            dist.barrier()

    return OnOurs


def outcome(case: Any, name: str, comm: Communicator, folder: str) -> str:
    """One test on one rank, in a group made for it: "ok", why torch skips it, or a traceback."""
    import torch.distributed as dist

    store = Path(folder, f"{name}-{os.environ['BACKEND']}")
    place = {"init_method": f"file://{store}", "rank": comm.rank, "world_size": comm.size}
    try:
        dist.init_process_group("d2lps", timeout=timedelta(seconds=15), **place)
        test = case(name)
        test.setUp()
        getattr(test, name)()
        test.tearDown()
        return "ok"
    except (unittest.SkipTest, SystemExit) as reason:
        return f"skipped: {reason}"
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


Outcomes = dict[str, tuple[str, float]]  # by name, with the seconds that it took


def all_outcomes(comm: Communicator, folder: str) -> dict[str, Outcomes]:
    """Both backends imitated one after the other, for what all this imports takes longer than most of its tests."""
    return {imitated: outcomes_of(case_of(comm, imitated, folder), imitated, comm, folder) for imitated in IMITATED}


def outcomes_of(case: Any, imitated: str, comm: Communicator, folder: str) -> Outcomes:
    results = {}
    for name in chosen(dir(case), imitated):
        start = time.monotonic()
        results[name] = outcome(case, name, comm, folder), time.monotonic() - start
    return results


def chosen(names: list[str], imitated: str) -> list[str]:
    own = [name for name in names if name.startswith("test_") and not any(re.search(reason, name) for reason in SKIPPED)]
    return [name for name in own if bool(re.search(AS_MPI, name)) == (imitated == "mpi")]


@functools.cache
def outcomes() -> list[dict[str, Outcomes]]:
    with tempfile.TemporaryDirectory() as folder:
        return d2lps.run(all_outcomes, RANKS, folder, timeout=110).results


@pytest.mark.timeout(240)
@pytest.mark.parametrize("imitated", IMITATED)
def test_torchs_own_tests(imitated: str) -> None:
    ranks = [found[imitated] for found in outcomes()]
    print(*(f"{name}: {ranks[0][name][0][:80]} {ranks[0][name][1]:.2f} s" for name in ranks[0]), sep="\n")
    failed = {(name, rank): found[name][0] for rank, found in enumerate(ranks) for name in found}
    failed = {place: text for place, text in failed.items() if text != "ok" and not text.startswith("skipped")}
    assert [text for text, _ in ranks[0].values()].count("ok") >= 25  # not all of them skipped
    assert not failed, "\n".join(f"{name}, rank {rank}: {text}" for (name, rank), text in failed.items())
