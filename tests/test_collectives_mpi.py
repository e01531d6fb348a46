"""The same calls by an MPI that others wrote and millions of jobs have tested: do we agree?

Needs mpirun and mpi4py (`pip install -e .[mpi]`). One mpirun makes all calls; it takes seconds to start.
"""

import importlib.util
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import REDUCING, ROOTED, Call, answers, difference, inputs, perform, rooms_for

import d2lps

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed"),
]

COLLECTIVES = {
    "broadcast": "tree",
    "scatter": "tree",
    "reduce": "tree",
    "all_reduce": "ring",
    "gather": "tree",
    "all_gather": "bruck",
    "all_gather_into_tensor": "ring",
    "reduce_scatter": "ring",
    "reduce_scatter_tensor": "pairwise",
    "all_to_all": "pairwise",
}
RANKS = [1, 2, 3, 5]
BITS, NUMBERS = ["BAND", "BOR", "BXOR"], ["SUM", "PRODUCT", "MIN", "MAX"]


def calls(collective: str, ranks: int) -> list[Call]:
    """Each op and dtype that MPI has too, and each root; uneven lists where MPI takes them."""
    algorithm, found = COLLECTIVES[collective], []
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64):
        ops = NUMBERS + BITS * (not dtype.is_floating_point) if collective in REDUCING else ["SUM"]
        found += [Call(collective, algorithm, op, dtype, n=33, uneven=True, layout=3) for op in ops]
    roots = range(ranks) if collective in ROOTED else [0]
    return found + [Call(collective, algorithm, root=root, n=n) for root in roots for n in (0, 1, 1001)]


@pytest.fixture(scope="module")
def mpis(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[list[list[np.ndarray]]]]:
    """What MPI gives: for each collective and number of ranks, the outputs by call and rank."""
    wanted = {(collective, ranks): calls(collective, ranks) for ranks in RANKS for collective in COLLECTIVES}
    jobs = [job(call, ranks) for (_, ranks), theirs in wanted.items() for call in theirs]
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    script = Path(__file__).with_name("mpi_collectives.py")
    # Open MPI's vector instructions saturate sums of uint8 (200 + 100 is 255, ompi issue 8045); its plain loops wrap around.
    options = ["--allow-run-as-root", "--oversubscribe", "--mca", "op", "^avx", "-n", str(max(RANKS))]
    command = ["mpirun", *options, sys.executable, str(script), str(folder / "jobs"), str(folder / "results")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    outputs = iter(pickle.loads((folder / "results").read_bytes()))
    return {key: [next(outputs) for _ in theirs] for key, theirs in wanted.items()}


def job(call: Call, ranks: int) -> dict[str, object]:
    given = [[tensor.numpy() for tensor in inputs(call, rank, ranks)] for rank in range(ranks)]
    [rooms] = rooms_for([call], ranks)
    return {"ranks": ranks, "collective": call.collective, "op": call.op, "root": call.root, "inputs": given, "rooms": rooms}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gives_what_mpi_gives(
    mpis: dict[tuple[str, int], list[list[list[np.ndarray]]]], collective: str, ranks: int
) -> None:
    wanted = calls(collective, ranks)
    run = d2lps.run(perform, ranks, wanted, rooms_for(wanted, ranks))
    for index, call in enumerate(wanted):
        for rank, tolerances in enumerate(answers(call, ranks)):
            theirs, ours = mpis[collective, ranks][index][rank], run[rank][index].output
            assert len(theirs) == len(ours)
            for array, tensor, (_, tolerance) in zip(theirs, ours, tolerances, strict=True):
                # Both are rounded, each in its own order, so they may be twice as far from each other.
                told = difference(tensor, (array.astype(np.longdouble) if tensor.is_floating_point() else array, 2 * tolerance))
                assert not told, f"{call}: rank {rank} of {ranks}: {told}"
