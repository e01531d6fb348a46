"""Ring attention, against torch's own attention of the whole sequence in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import d2lps
from d2lps import Communicator
from d2lps.parallel import Transformer, context_parallel, ring_attention, zigzag
from d2lps.parallel.context import _span, folded, in_turn, local
from d2lps.parallel.transformer import causal
from d2lps.topology import Device, star

PLACES = {"folded": folded, "in_turn": in_turn}
BATCH, HEADS, KV_HEADS, SEQUENCE, SIZE = 2, 4, 2, 48, 3


def given(dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS) -> list[Tensor]:
    """Query, key, value, and the gradient of the output; the keys' scores differ by so much that a row's maximum moves."""
    torch.manual_seed(1)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    query, *rest = [torch.randn(BATCH, number, SEQUENCE, SIZE, dtype=torch.float64) for number in heads]
    return [tensor.to(dtype) for tensor in (20 * query, *rest)]


def attend(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    *inputs, grad = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def ring(comm: Communicator, place: str, dtype: torch.dtype = torch.float64, kv_heads: int = KV_HEADS) -> list[Tensor]:
    mine = [local(comm, tensor, 2, PLACES[place]) for tensor in given(dtype, kv_heads)]
    return attend(lambda *inputs: ring_attention(comm, *inputs, place=PLACES[place]), mine)


def whole(parts: Any, place: str) -> list[Tensor]:
    """What the ranks have, put together again."""
    where = torch.cat([PLACES[place](len(parts), rank, SEQUENCE) for rank in range(len(parts))]).argsort()
    return [torch.cat(pieces, 2)[:, :, where] for pieces in zip(*parts, strict=True)]


def off(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    differences = [float((one - other).abs().max()) for one, other in zip(found, right, strict=True)]
    return max(differences) / max(float(other.abs().max()) for other in right)


@pytest.fixture(scope="module")
def right() -> list[Tensor]:
    return attend(causal, given())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_it_is_attention_of_the_whole_sequence(right: list[Tensor], ranks: int, place: str) -> None:
    assert off(whole(d2lps.simulate(ring, star(ranks, 1e9), place), place), right) < 1e-13


def test_on_processes(right: list[Tensor]) -> None:
    assert off(whole(d2lps.run(ring, 4, "folded"), "folded"), right) < 1e-13


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_groups_of_heads(kv_heads: int) -> None:
    right = attend(causal, given(kv_heads=kv_heads))
    assert off(whole(d2lps.simulate(ring, star(3, 1e9), "folded", torch.float64, kv_heads), "folded"), right) < 1e-13


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fewer_bits(dtype: torch.dtype, most: float) -> None:
    """The sums are kept in 32: as near to the exact ones as attention in one process is."""
    found = whole(d2lps.simulate(ring, star(4, 1e9), "folded", dtype), "folded")
    assert {tensor.dtype for tensor in found} == {dtype}
    assert off([tensor.double() for tensor in found], attend(causal, [tensor.double() for tensor in given(dtype)])) < most


def test_bytes_by_the_formula() -> None:
    """Forward c - 1 blocks of keys and values, backward c - 1 and c of their gradients."""

    def both(comm: Communicator) -> None:
        heads = (HEADS, KV_HEADS, KV_HEADS)
        inputs = [torch.empty(BATCH, number, SEQUENCE // comm.size, SIZE, device="meta", requires_grad=True) for number in heads]
        ring_attention(comm, *inputs).sum().backward()

    for ranks in (1, 2, 4, 8):
        block = 2 * BATCH * (SEQUENCE // ranks) * KV_HEADS * SIZE * 4
        sent = d2lps.simulate(both, star(ranks, 1e9), device="meta").trace.bytes_sent()
        assert sent.tolist() == [(3 * ranks - 2) * block if ranks > 1 else 0] * ranks


def test_all_have_the_same_work_only_where_it_is_folded() -> None:
    """In blocks, of which a rank's own one is computed as a whole; that this is what takes the time, the next test sees."""

    def blocks(place: Any) -> list[float]:
        spans = [[_span(place, 4, rank, source, SEQUENCE) for source in range(4)] for rank in range(4)]
        return [sum((12 - first) * last for first, last, _ in row) / 12**2 for row in spans]

    assert blocks(folded) == [1 + 3 / 2] * 4
    assert blocks(in_turn) == [1, 2, 3, 4]


@pytest.mark.parametrize(("flops", "seconds"), [(1e12, 0.04 + 3 * 0.02), (1e18, 3 * 0.01)])
def test_the_next_block_is_on_its_way_while_this_one_is_computed(flops: float, seconds: float) -> None:
    """Messages of 10 ms: nothing is waited for where half a block takes 20 ms, and all where it takes no time."""

    def work(comm: Communicator) -> None:
        inputs = [torch.empty(1, 1, 1_000, 10_000, device="meta") for _ in range(3)]  # 80 MB of keys and values
        with comm.compute("attention"):
            ring_attention(comm, *inputs)

    machine = star(4, 8e9, device=Device(flops=flops, memory=1e12, memory_bandwidth=1e18))
    assert d2lps.simulate(work, machine, device="meta").time == pytest.approx(seconds, rel=5e-3)


def backwards(ranks: int, rank: int, sequence: int) -> Tensor:
    return in_turn(ranks, ranks - 1 - rank, sequence).flip(0)


def test_dealt_out_like_cards_and_not_contiguous() -> None:
    """A placement of a reader's own; rows of which the memory is in another order."""

    def striped(ranks: int, rank: int, sequence: int) -> Tensor:
        return torch.arange(rank, sequence, ranks)

    def work(comm: Communicator) -> Tensor:
        mine = [local(comm, tensor, 2, striped).mT.contiguous().mT for tensor in given()[:3]]
        return ring_attention(comm, *mine, place=striped)

    found = torch.stack(list(d2lps.simulate(work, star(4, 1e9))), 3).flatten(2, 3)
    assert off([found], [causal(*given()[:3])]) < 1e-13


def test_autocast_does_not_round_scores() -> None:
    """Or the backward pass, which nothing casts, would compute others again."""

    def work(comm: Communicator, cast: bool) -> list[Tensor]:
        mine = [local(comm, tensor, 2) for tensor in given(torch.bfloat16)]
        return attend(torch.autocast("cpu", torch.bfloat16, enabled=cast)(partial(ring_attention, comm)), mine)

    cast, plain = (d2lps.simulate(work, star(2, 1e9), cast)[0] for cast in (True, False))
    assert all(map(torch.equal, cast, plain))


def test_a_gradient_of_the_gradient_is_refused() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        d2lps.simulate(twice, star(2, 1e9))


def twice(comm: Communicator) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in torch.ones(3, 1, 1, 4, 2))
    slope = torch.autograd.grad(ring_attention(comm, query, key, value).sum(), key, create_graph=True)[0]
    slope.square().sum().backward()


def test_positions() -> None:
    assert d2lps.simulate(lambda comm: zigzag(comm, 8).tolist(), star(2, 1e9)) == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda comm: zigzag(comm, 12), "a sequence of 12 can't be cut into 2 x 4"),
        (lambda comm: in_turn(comm.size, comm.rank, 6), "a sequence of 6 can't be cut into 4"),
        (lambda comm: ring_attention(comm, *(torch.ones(1, heads, 4, 2) for heads in (4, 3, 3))), r"\[1, 3, 4, 2\]"),
        (lambda comm: ring_attention(comm, *(torch.ones(1, 2, 3, 2) for _ in range(3))), "of 12 can't be cut into 2 x 4"),
        (lambda comm: ring_attention(comm, *(torch.ones(batch, 1, 8, 2) for batch in (2, 1, 1))), r"\[2, 1, 8, 2\]"),
        (lambda comm: ring_attention(comm, *torch.ones(3, 1, 1, 0, 2)), "none of them 0"),
        (lambda comm: ring_attention(comm, *torch.ones(3, 1, 2, 2)), "batch, heads, positions, size"),
        (lambda comm: ring_attention(comm, *torch.ones(3, 1, 1, 2, 2), place=backwards), r"\[7, 6\]: they must be in rising"),
        (lambda comm: context_parallel(comm, SIZES.module())(torch.zeros(1, 1, dtype=torch.long)), "1 tokens .* has 4 positions"),
    ],
)
def test_what_does_not_fit(work: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        d2lps.simulate(work, star(4, 1e9))


MIXED = {"experts": 3, "top_k": 2, "capacity": float("inf"), "balance": 0.5}
SIZES = Transformer(2, hidden=12, heads=4, vocab=11, sequence=16, kv_heads=2, **MIXED)  # type: ignore[arg-type]


def gradients(comm: Communicator | None, sizes: Transformer, recompute: bool = False) -> list[Tensor]:
    """Of the mean loss of two sequences. recompute: blocks' forward passes happen again, messages too, in the backward pass."""
    model = sizes.module(seed=0, dtype=torch.float64)
    for block in (model.block0, model.block1) if recompute else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    torch.manual_seed(2)
    text = torch.randint(sizes.vocab, (2, sizes.sequence + 1))
    tokens, targets = text[:, :-1], text[:, 1:]
    if comm:
        context_parallel(comm, model)
        tokens, targets = local(comm, tokens), local(comm, targets)
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient in gradients if comm else ():
        d2lps.collectives.all_reduce(comm, gradient, d2lps.ReduceOp.AVG)
    return gradients  # type: ignore[return-value]


def test_a_transformer_with_experts() -> None:
    right = gradients(None, SIZES)
    for ranks, recompute in ((2, False), (4, False), (4, True)):
        for found in d2lps.simulate(gradients, star(ranks, 1e9), SIZES, recompute):
            assert off(found, right) < 1e-12
