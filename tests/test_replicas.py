"""Whether replicas agree: what differs, on which rank, and since when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_strategies import simulated
from torch import nn

import d2lps
from d2lps import Communicator
from d2lps.comm import Mismatch
from d2lps.parallel import DataParallel, Replicas
from d2lps.parallel.data.replicas import Difference, differences, fingerprint


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20), st.integers(0, 19), st.integers(0, 31))
def test_one_bit_makes_another_fingerprint(words: list[int], place: int, bit: int) -> None:
    before = torch.tensor(words, dtype=torch.int32)
    after = before.clone()
    after[place % len(words)] ^= torch.tensor(1 << bit).to(torch.int32)
    assert fingerprint(before.view(torch.float32)) == fingerprint(before.clone().view(torch.float32))
    assert fingerprint(before.view(torch.float32)) != fingerprint(after.view(torch.float32))


def test_fingerprints_know_shapes_kinds_and_signs_of_zero() -> None:
    tensors: list[Any] = [None, torch.zeros(4), -torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]
    tensors += [torch.zeros(0), torch.tensor(0.0), torch.tensor(float("nan")), torch.zeros(4, device="meta")]
    assert len({fingerprint(tensor) for tensor in tensors}) == len(tensors)
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
    wide = torch.arange(12.0).view(3, 4)
    assert fingerprint(wide.T) == fingerprint(wide.T.contiguous())


def found_with(comm: Communicator, odd: dict[int, float]) -> list[tuple[str, list[int]]]:
    x = torch.ones(5) * (1 + odd.get(comm.rank, 0.0))
    found = differences(comm, {"w": x, "v": torch.ones(3)}, {"batch": torch.tensor(comm.rank // 2 if odd == {} else comm.rank)})
    return [(str(difference), difference.odd) for difference in found]


@pytest.mark.parametrize(
    ("ranks", "odd", "told"),
    [
        (5, {3: 1e-7}, [("w: rank 3 differs from ranks 0, 1, 2, 4", [3])]),
        (5, {3: 1.0, 0: 2.0}, [("w: ranks 0, 3 differ from ranks 1, 2, 4", [0, 3])]),
        (4, {3: 1.0, 0: 1.0}, [("w: ranks 0, 3 and ranks 1, 2 have different ones: no majority says which is right", [])]),
        (2, {1: 1.0}, [("w: rank 0 and rank 1 have different ones: no majority says which is right", [])]),
        (3, {}, [("batch: ranks 0, 1 have the same", [])]),
        (1, {0: 1.0}, []),
    ],
)
def test_a_majority_names_the_odd_ones(ranks: int, odd: dict[int, float], told: list[Any]) -> None:
    run = simulated(found_with, ranks, odd)
    assert list(run) == [told] * ranks
    assert run.trace.bytes_sent().max() == 8 * 3 * (ranks - 1)  # 8 bytes a tensor, to each of the others


def test_two_that_share_a_batch_twice() -> None:
    told = str(Difference("batch", [[0, 2], [1, 3]], wanted=True))
    assert told == "batch: ranks 0, 2 have the same and ranks 1, 3 have the same"


def test_ranks_that_name_other_tensors_are_told() -> None:
    with pytest.raises(Mismatch, match="the ranks disagree: rank 1"):
        simulated(lambda comm: differences(comm, {"a" if comm.rank != 1 else "b": torch.ones(1)}), 3)


def train(comm: Communicator, fault: str) -> str:
    """Five steps of four ranks; at step 3 something happens to rank 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    parallel, replicas = DataParallel(comm, model), Replicas(comm, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dice = torch.Generator().manual_seed(comm.rank)
    try:
        for step in range(5):
            hit = comm.rank == 2 and step == 3
            if fault == "weight" and hit:
                with torch.no_grad():
                    model[1].bias += 1e-6
            x = torch.randn(8, 4, generator=dice)
            if fault == "batch":
                dice.manual_seed(10 * step + comm.rank if step < 3 else comm.rank % 3)
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            replicas.check(unlike={"input": x})
            if fault == "gradient" and hit:
                assert model[0].weight.grad is not None
                model[0].weight.grad[1, 2] *= 1.001
            optimizer.step()
    except Mismatch as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("", "trained"),
        ("weight", "at step 3 (all was well at step 2) 1.bias: rank 2 differs from ranks 0, 1, 3"),
        ("gradient", "at step 4 (all was well at step 3) 0.weight: rank 2 differs from ranks 0, 1, 3"),
        ("batch", "at step 4 (all was well at step 3) input: ranks 0, 3 have the same"),
    ],
)
def test_replicas_tell_in_which_step_they_part(fault: str, told: str) -> None:
    assert list(simulated(train, 4, fault)) == [told] * 4


def test_so_it_does_on_processes() -> None:
    assert d2lps.run(train, 4, "gradient")[1].startswith("at step 4 (all was well at step 3) 0.weight: rank 2 differs")


def test_a_gradient_of_a_corrupted_sum_is_told_before_the_weights_that_it_spoils() -> None:
    def work(comm: Communicator) -> str:
        model = nn.BatchNorm1d(3)
        model.weight.grad = torch.ones(3)
        replicas = Replicas(comm, model)
        replicas.check(alike={"loss": 0.1}, unlike={"batch": comm.rank})
        if comm.rank == 1:
            model.weight.grad[0] = float("nan")
            model.running_mean.add_(1)  # type: ignore[union-attr, operator]
        with pytest.raises(Mismatch) as caught:
            replicas.check(alike={"loss": 0.3}, step=10)
        return str(caught.value)

    told = "at step 10 (all was well at step 0) gradient of weight: rank 1 differs from ranks 0, 2; and 1 more"
    assert list(simulated(work, 3)) == [told] * 3
