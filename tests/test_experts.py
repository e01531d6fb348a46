"""A mixture of experts: sorted into slots against the plainest loop, and shared out among ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

import d2lps
from d2lps import Communicator
from d2lps.collectives import all_reduce
from d2lps.parallel import Experts, Mesh, Transformer, expert_parallel
from d2lps.parallel.experts import set_share
from d2lps.parallel.shard import shard_of
from d2lps.topology import star

INF = float("inf")


def sizes(**more: Any) -> Transformer:
    return Transformer(**{"layers": 1, "hidden": 6, "heads": 1, "vocab": 7, "sequence": 10, "experts": 8, "top_k": 2} | more)


def made(**more: Any) -> Experts:
    torch.manual_seed(0)
    experts = Experts(sizes(**more)).double()
    nn.init.normal_(experts.router.weight)  # so that some experts are asked for by many
    return experts


def examples(rank: int, batch: int = 2, sequence: int = 10) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(batch, sequence, 6, dtype=torch.float64)


def one_by_one(experts: Experts, x: Tensor) -> tuple[Tensor, int]:
    """The same, a token at a time: GShard's first choices of all before the second ones; and how many were dropped."""
    out, dropped = torch.zeros_like(x), 0
    for b, sequence in enumerate(x):
        probabilities = torch.softmax(sequence @ experts.router.weight.T, -1)
        free = [experts.slots(len(sequence))] * experts.experts
        ranked = probabilities.argsort(-1, descending=True)[:, : experts.top_k]
        for k in range(experts.top_k):
            for t, token in enumerate(sequence):
                e = ranked[t, k]
                free[e] -= 1
                if free[e] < 0:
                    dropped += 1
                    continue
                weight = probabilities[t, e] / (probabilities[t, ranked[t]].sum() if experts.top_k > 1 else 1)
                up = linear(token, experts.up[e].T, experts.up_bias[e])
                opened = gelu(up)
                if experts.gate is not None:
                    opened = silu(linear(token, experts.gate[e].T, experts.gate_bias[e])) * up  # type: ignore[index]
                out[b, t] = out[b, t] + weight * linear(opened, experts.down[e].T, experts.down_bias[e])
    return out, dropped


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("capacity", [0.5, 1.0, INF])
def test_sorted_is_one_by_one(capacity: float, top_k: int, gated: bool) -> None:
    experts, x = made(capacity=capacity, top_k=top_k, gated=gated), examples(0)
    experts.balance = 0.0
    right, dropped = one_by_one(experts, x)
    out = experts(x)
    assert torch.allclose(out, right, rtol=1e-12, atol=1e-14)
    assert experts.dropped == dropped and (dropped > 0) == (capacity < INF)
    assert experts.load.sum() == top_k * x.shape[0] * x.shape[1]
    parameters = list(experts.parameters())
    for found, wanted in zip(torch.autograd.grad(out.sin().sum(), parameters),
                             torch.autograd.grad(right.sin().sum(), parameters), strict=True):  # fmt: skip
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_what_a_token_gets_does_not_depend_on_its_batch() -> None:
    experts, x = made(capacity=0.5), examples(0, batch=3)
    assert torch.allclose(experts(x)[1:2], experts(x[1:2]), rtol=1e-12)


def test_the_gradient_of_the_balance_loss_joins_in() -> None:
    experts, x = made(balance=0.3), examples(0)
    set_share(experts, 0.25)
    found = torch.autograd.grad(experts(x).sum() / 4, experts.router.weight)
    experts.balance = 0.0
    probabilities = torch.softmax(experts.router(x), -1)
    asked = torch.stack([torch.bincount(row.topk(2).indices.flatten(), minlength=8) for row in probabilities]).double() / 20
    balance = 0.3 * 8 * (asked * probabilities.mean(1)).sum(1).mean()
    right = torch.autograd.grad((experts(x).sum() + balance) / 4, experts.router.weight)
    assert torch.allclose(found[0], right[0], rtol=1e-10, atol=1e-14)


def test_balance_of_experts_that_are_asked_alike() -> None:
    experts = made(experts=2, top_k=2, balance=0.3)
    experts(examples(0))
    assert abs(experts.balance_loss - 0.3) < 1e-12


def gradients(model: Experts, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def apart(comm: Communicator, dp: int, ep: int, capacity: float) -> list[Tensor]:
    """The gradients of all, averaged as they should be, whole again."""
    mesh, model = Mesh(comm, dp=dp, ep=ep), made(capacity=capacity, balance=0.5)
    expert_parallel(mesh.ep, model)
    gradients(model, examples(comm.rank))
    found = []
    for parameter in model.parameters():
        piece = shard_of(parameter)
        all_reduce(mesh.edp if piece else mesh.data, parameter.grad, d2lps.ReduceOp.AVG)
        pieces = [torch.empty_like(parameter.grad) for _ in range(mesh.ep.size if piece else 1)]
        d2lps.collectives.all_gather(mesh.ep, pieces, parameter.grad) if piece else pieces[0].copy_(parameter.grad)
        found.append(torch.cat(pieces))
    return found


def together(ranks: int, capacity: float) -> list[Tensor]:
    """One process, which has all experts, and each rank's sequences in its batch."""
    return gradients(made(capacity=capacity, balance=0.5), torch.cat([examples(rank) for rank in range(ranks)]))


def off(found: list[Tensor], right: list[Tensor]) -> float:
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("capacity", [0.5, INF])
@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 2), (3, 1), (4, 2), (4, 4), (8, 8), (8, 4)])
def test_shared_out_among_ranks(dp: int, ep: int, capacity: float) -> None:
    right = together(dp, capacity)
    for found in d2lps.simulate(apart, star(dp, 1e9), dp, ep, capacity):
        assert off(found, right) < 1e-12


def test_on_processes() -> None:
    for found in d2lps.run(apart, 4, 4, 2, 0.5):
        assert off(found, together(4, 0.5)) < 1e-12


def test_bytes_by_the_formula() -> None:
    """Each way (e - 1)/e x tokens x top_k x hidden elements, by capacity: there and back, forward and backward."""

    def both(comm: Communicator) -> None:
        with torch.device("meta"):
            model = expert_parallel(comm, Experts(sizes(capacity=1.0, sequence=16)))
            model(torch.empty(3, 16, 6, requires_grad=True)).sum().backward()

    for ranks in (1, 2, 4, 8):
        way = (ranks - 1) / ranks * 3 * 16 * 2 * 6 * 4
        assert d2lps.simulate(both, star(ranks, 1e9), device="meta").trace.bytes_sent().tolist() == [4 * way] * ranks


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="8 experts can't be shared out evenly among 3 ranks"):
        d2lps.simulate(lambda comm: expert_parallel(comm, made()), star(3, 1e9))
    with pytest.raises(ValueError, match="top_k=9 must be from 1 to experts=8"):
        sizes(top_k=9)
    for capacity in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"capacity={capacity} must be above 0"):
            sizes(capacity=capacity)


def test_all_experts_chosen_is_their_weighted_mean() -> None:
    experts, x = made(top_k=8, capacity=1.0), examples(0).mT.contiguous().mT
    weights = torch.softmax(experts.router(x), -1)
    each = gelu(torch.einsum("bth,ehf->btef", x, experts.up) + experts.up_bias)
    each = torch.einsum("btef,efh->bteh", each, experts.down) + experts.down_bias
    assert torch.allclose(experts(x), (weights.unsqueeze(-1) * each).sum(2), rtol=1e-10) and experts.dropped == 0


def test_what_is_frozen_stays_so() -> None:
    def work(comm: Communicator) -> list[bool]:
        model = made()
        model.up.requires_grad_(False)
        return [parameter.requires_grad for parameter in expert_parallel(comm, model).parameters()]

    assert d2lps.simulate(work, star(2, 1e9)) == [[name != "up" for name, _ in made().named_parameters()]] * 2
