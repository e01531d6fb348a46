"""Tensor parallelism against one process, and its collectives against DTensor's, which torch's CommDebugMode counts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_strategies import simulated
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import d2lps
import d2lps.backend
from d2lps import Communicator
from d2lps.parallel import ColumnLinear, RowLinear, Transformer, sum_partial, tensor_parallel, vocab_cross_entropy
from d2lps.parallel.shard import cut, shard_of
from d2lps.parallel.tensor.f_and_g import gather, scatter
from d2lps.parallel.tensor.layers import VocabEmbedding
from d2lps_book.sharded_product import collectives_of, layer_collectives

SMALL = Transformer(layers=2, hidden=48, heads=24, vocab=96, sequence=24)
KINDS = {
    "plain": SMALL,
    "tied": replace(SMALL, tied=True),
    "gated": replace(SMALL, gated=True, ffn=72),
    "shared heads": replace(SMALL, kv_heads=2),
    "all at once": replace(SMALL, kv_heads=8, gated=True, tied=True, ffn=72),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(params=[False, True], ids=["whole", "sequence"])
def sequence(request: pytest.FixtureRequest) -> bool:
    """Whether sequences are shared out too."""
    return bool(request.param)


def text(sizes: Transformer) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(sizes.vocab, (3, sizes.sequence + 1), generator=torch.Generator().manual_seed(5))
    return drawn[:, :-1], drawn[:, 1:]


def alone(sizes: Transformer, dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
    """The loss, and the gradients by name, of one process."""
    model = sizes.module(seed=1, dtype=dtype)
    tokens, targets = text(sizes)
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


Found = tuple[float, float]


def step(comm: Communicator, sizes: Transformer, dtype: torch.dtype, sequence: bool, algorithm: str = "ring") -> Found:
    """The loss of this rank, and how far its gradients are from one process's, as a part of the largest."""
    model = tensor_parallel(comm, sizes.module(seed=1, dtype=dtype), sequence, algorithm=algorithm)
    tokens, targets = text(sizes)
    loss = vocab_cross_entropy(comm, model(tokens), targets, algorithm)
    loss.backward()
    sum_partial(model)
    _, expected = alone(sizes, dtype)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    return loss.item(), max(away(parameter, expected[name]) for name, parameter in model.named_parameters()) / largest


def away(parameter: Tensor, whole: Tensor) -> float:
    shard = shard_of(parameter)
    mine = whole if shard is None else cut(shard.comm, whole, shard.dim)
    assert parameter.grad is not None and parameter.grad.shape == mine.shape
    return (parameter.grad - mine).abs().max().item()


@pytest.mark.parametrize(("kind", "ranks"), [(kind, 4) for kind in KINDS] + [("all at once", ranks) for ranks in (1, 2, 3, 8)])
def test_as_one_process(kind: str, ranks: int, sequence: bool) -> None:
    sizes = KINDS[kind] if ranks != 3 else replace(KINDS[kind], kv_heads=12)
    for loss, error in simulated(step, ranks, sizes, torch.float64, sequence):
        assert loss == pytest.approx(alone(sizes, torch.float64)[0], rel=1e-12)
        assert error < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_on_processes(sequence: bool, dtype: torch.dtype) -> None:
    for ranks in (2, 4):
        errors = [error for _, error in d2lps.run(step, ranks, KINDS["all at once"], dtype, sequence)]
        assert max(errors) < TOLERANCE[dtype]


# ---- what is sent -----------------------------------------------------------------------------------------------------


def collectives(run: d2lps.Run, rank: int = 0) -> Counter[str]:
    """How many collectives of each kind and way a rank took part in: those of a ring have a first step each."""
    messages, steps = run.trace.messages, run.trace.steps
    names = [steps[step] for step in messages["step"][messages["src"] == rank]]
    firsts = [name.rpartition(": ") for name in names if re.search(r" 1/\d+$", name)]
    # An all-reduce by a ring is a reduce-scatter and an all-gather.
    kinds = ((_kind(about), step) for about, _, step in firsts)
    return Counter(kind for kind, step in kinds if not ("all-reduce" in kind and step.startswith("all-gather")))


def _kind(about: str) -> str:
    """`_kind("grad x[B, T, D]{tp} → grad x[B, T_tp, D]") == "tp reduce-scatter backward"`."""
    before, after = about.split(" → ")
    summed = "reduce-scatter" if "T_" in after else "all-reduce"
    return f"tp {summed if '}' in before else 'all-gather'} {'backward' if about.startswith('grad ') else 'forward'}"


def test_a_block_communicates_twice_each_way(sequence: bool) -> None:
    sizes = replace(SMALL, gated=True)
    x = torch.randn(2, sizes.sequence, sizes.hidden, generator=torch.Generator().manual_seed(2))

    def block(comm: Communicator) -> None:
        model = tensor_parallel(comm, sizes.module()[1:2], sequence)  # a slice: a pipeline's stage
        mine = cut(comm, x, 1) if sequence else x.clone()
        model(mine.requires_grad_()).square().sum().backward()

    run = simulated(block, 4, trace=True)
    twice = ["all-gather", "reduce-scatter"] if sequence else ["all-reduce"]
    assert collectives(run) == {f"tp {kind} {way}": 2 for kind in twice for way in ("forward", "backward")}
    # Four all-reduces of x by a ring, or as many pairs of halves of one: the same bytes.
    assert run.trace.bytes_sent().tolist() == [4 * 2 * 3 * x.nbytes // 4] * 4


@pytest.fixture(scope="module")
def dtensor() -> d2lps.Run:
    """A block under torch's own tensor parallelism, without and with sequence parallel: what it counts, and its gradients."""
    return d2lps.run(by_dtensor, 4)


BLOCK = replace(SMALL, layers=1, hidden=32, heads=4)


def activations() -> Tensor:
    return torch.randn(2, BLOCK.sequence, BLOCK.hidden, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def through(comm: Communicator, model: nn.Module, sequence: bool) -> tuple[Tensor, Tensor]:
    mine = (cut(comm, activations(), 1) if sequence else activations()).requires_grad_()
    return mine, model(mine).square().sum()


def by_dtensor(comm: Communicator) -> list[Any]:
    """Of each way of it: collectives forward, backward, and the gradients by name."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, parallel
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    d2lps.backend.group(comm)
    mesh, found = init_device_mesh("cpu", (comm.size,)), []
    for between in (Replicate(), Shard(1)):
        enter = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        leave = RowwiseParallel(output_layouts=between)
        plan: dict[str, Any] = {"attention": enter, "mlp": enter, "attention.out": leave, "mlp.down": leave}
        plan |= {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "mlp.up")}
        if between == Shard(1):
            plan |= {"norm1": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(use_local_output=True)}
        model: Any = BLOCK.module(1, torch.float64)[1]
        del model.dropout  # CommDebugMode loses its way in a module that is called twice
        model.dropout = lambda x: x
        model = parallel.parallelize_module(model, mesh, plan)
        with CommDebugMode() as forward:
            _, loss = through(comm, model, between == Shard(1))
        with CommDebugMode() as backward:
            loss.backward()
        whole = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()}
        counts = [{str(k).split(".")[-1]: n for k, n in mode.get_comm_counts().items()} for mode in (forward, backward)]
        found.append((*counts, whole))
    return found


def test_as_dtensor(dtensor: d2lps.Run, sequence: bool) -> None:
    forward, backward, gradients = dtensor[0][sequence]
    kinds = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2} if sequence else {"all_reduce": 2}
    assert forward == backward == kinds  # as ours; see above

    def work(comm: Communicator) -> float:
        model = tensor_parallel(comm, BLOCK.module(1, torch.float64)[1], sequence)
        through(comm, model, sequence)[1].backward()
        sum_partial(model)
        return max(away(parameter, gradients[name]) for name, parameter in model.named_parameters())

    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert max(simulated(work, 4)) < 1e-10 * largest


# ---- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "native"])
def test_any_algorithm_adds_up(algorithm: str) -> None:
    errors = d2lps.run(step, 2, SMALL, torch.float64, False, algorithm)
    assert max(error for _, error in errors) < 1e-10


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_layers_by_themselves(ranks: int) -> None:
    """What is gathered after columns, or cut before rows, is what a plain layer gives."""
    torch.manual_seed(3)
    layer, x = nn.Linear(120, 240, dtype=torch.float64), torch.randn(7, 120, dtype=torch.float64)
    y = layer(x.requires_grad_())
    y.square().sum().backward()
    expected = y.detach(), x.grad, layer.weight.grad, layer.bias.grad  # which a gradient of a tensor that is sent is not

    def work(comm: Communicator) -> None:
        for mine in (ColumnLinear(comm, layer), RowLinear(comm, layer)):
            own = x.detach().clone().requires_grad_()
            y = gather(comm, mine(own)) if isinstance(mine, ColumnLinear) else mine(scatter(comm, own))
            y.square().sum().backward()
            found = y.detach(), own.grad, mine.weight.grad, mine.bias.grad
            shards = None, None, shard_of(mine.weight), shard_of(mine.bias)
            for one, whole, shard in zip(found, expected, shards, strict=True):
                torch.testing.assert_close(one, cut(comm, whole, shard.dim) if shard else whole)

    simulated(work, ranks)


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_what_is_frozen_stays_frozen(kind: Any) -> None:
    def work(comm: Communicator) -> dict[str, bool]:
        layer = nn.Linear(4, 4)
        layer.bias.requires_grad_(False)
        return {name: parameter.requires_grad for name, parameter in kind(comm, layer).named_parameters()}

    assert simulated(work, 2) == [{"weight": True, "bias": False}] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_loss_of_a_cut_vocabulary(ranks: int, dtype: torch.dtype) -> None:
    """Large logits need the maximum of all ranks; a target is on one of them."""
    random = torch.Generator().manual_seed(ranks)
    logits = (100 * torch.randn(4, 6, 30, generator=random)).to(dtype)
    targets = torch.randint(30, (4, 6), generator=random)
    wanted = logits.clone().requires_grad_()
    loss = cross_entropy(wanted.double().flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    gradient, expected = wanted.grad, loss.item()
    assert gradient is not None

    def work(comm: Communicator) -> None:
        mine = cut(comm, logits, -1).requires_grad_()
        loss = vocab_cross_entropy(comm, mine, targets)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-10 if dtype == torch.float64 else 1e-5)
        torch.testing.assert_close(mine.grad, cut(comm, gradient, -1))

    run = simulated(work, ranks, trace=True)
    assert run.trace.bytes_sent().max() <= 2 * 3 * targets.numel() * 8  # three numbers a target, not thirty


def test_a_tied_head_stays_tied() -> None:
    def work(comm: Communicator) -> tuple[bool, bool]:
        whole: Any = tensor_parallel(comm, KINDS["tied"].module())
        slices: list[Any] = [tensor_parallel(comm, KINDS["tied"].module()[part]) for part in (slice(0, 1), slice(-1, None))]
        return whole.embed.tokens.weight is whole.head.linear.weight, isinstance(slices[1][0].linear, ColumnLinear)

    assert simulated(work, 2) == [(True, True)] * 2


def test_dropout_is_alike_where_tensors_are(sequence: bool) -> None:
    sizes = replace(SMALL, dropout=0.5)

    def work(comm: Communicator, seed: int) -> Tensor:
        model: Any = tensor_parallel(comm, sizes.module(), sequence, seed)
        return model.block0.dropout(torch.ones(2, sizes.sequence // (comm.size if sequence else 1), sizes.hidden))

    one, other = simulated(work, 2, 7)
    again, another = simulated(work, 2, 7), simulated(work, 2, 8)
    assert torch.equal(one, other) != sequence and torch.equal(one, again[0])
    assert not any(torch.equal(one, mask) or torch.equal(other, mask) for mask in another)


def test_shared_heads_lie_on_several_ranks() -> None:
    def work(comm: Communicator) -> Any:
        model: Any = tensor_parallel(comm, KINDS["shared heads"].module())
        key = model.block0.attention.key
        return list(key.weight.shape), key.weight.shard.comm.rank, key.weight.partial.members

    assert simulated(work, 4) == [([2, 48], 0, [0, 1]), ([2, 48], 0, [0, 1]), ([2, 48], 1, [2, 3]), ([2, 48], 1, [2, 3])]


# ---- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ranks", "told"),
    [
        (SMALL, 5, r"embed: vocab=96 can't be shared out equally among 5 ranks"),
        (replace(SMALL, vocab=100), 5, r"block0.attention: heads=24 can't be shared out equally among 5 ranks"),
        (replace(SMALL, kv_heads=3), 2, r"block0.attention: kv_heads=3 can't be shared out equally among 2 ranks"),
        (replace(SMALL, ffn=99), 2, r"block0.mlp: ffn=99 can't be shared out equally among 2 ranks"),
    ],
)
def test_sizes_that_do_not_divide(sizes: Transformer, ranks: int, told: str) -> None:
    def work(comm: Communicator) -> None:
        model: Any = sizes.module()
        try:
            tensor_parallel(comm, model)
        finally:
            assert isinstance(model.embed.tokens, nn.Embedding)  # nothing has been exchanged

    with pytest.raises(ValueError, match=told):
        simulated(work, ranks)


def test_a_sequence_that_does_not_divide() -> None:
    def work(comm: Communicator) -> None:
        tensor_parallel(comm, SMALL.module(), sequence=True)(torch.zeros(1, 23, dtype=torch.long))

    with pytest.raises(ValueError, match=r"dimension -2 of \(1, 23, 48\) can't be cut into 2 equal pieces"):
        simulated(work, 2)


def test_targets_that_are_no_tokens() -> None:
    with pytest.raises(ValueError, match="targets from 3 to 12 are not all among the 12 tokens of 2 ranks with 6 each"):
        simulated(lambda comm: vocab_cross_entropy(comm, torch.zeros(2, 6), torch.tensor([3, 12])), 2)


def test_tokens_that_are_none_and_options_that_are_not_carried_out() -> None:
    with pytest.raises(ValueError, match="tokens from 3 to 12 are not all among the 12 tokens of 2 ranks with 6 each"):
        simulated(lambda comm: VocabEmbedding(comm, nn.Embedding(12, 4))(torch.tensor([3, 12])), 2)
    for option, value in (("padding_idx", 0), ("max_norm", 1.0), ("scale_grad_by_freq", True), ("sparse", True)):
        with pytest.raises(ValueError, match=f"nn.Embedding with {option}={value}: "):
            simulated(lambda comm, given: VocabEmbedding(comm, nn.Embedding(12, 4, **given)), 2, {option: value})


# ---- the four rules ---------------------------------------------------------------------------------------------------

COLUMN, ROW = "A[B, T, D] W[D, F_Y] -> C[B, T, F_Y]", "A[B, T, D_Y] W[D_Y, F] -> C[B, T, F]"
GATHERED = "A[B, T, D] W[D, F_Y] -> C[B, T, F]"
PREDICTED = {  # of a layer: what it sends forward, and backward
    COLUMN: ("", "all-reduce of dA over Y"),
    ROW: ("all-reduce of C over Y", ""),
    "A[B, T_Y, D] W[D, F_Y] -> C[B, T, F_Y]": ("all-gather of A over Y", "reduce-scatter of dA over Y"),
    "A[B, T, D_Y] W[D_Y, F] -> C[B, T_Y, F]": ("reduce-scatter of C over Y", "all-gather of dC over Y"),
    "A[B_X, D] W[D, F] -> C[B_X, F]": ("", "all-reduce of dW over X"),
    "A[B_X, D] W[D_X, F] -> C[B_X, F]": ("all-gather of W over X", "reduce-scatter of dW over X"),
    "A[B_X, D] W[D, F_Y] -> C[B_X, F_Y]": ("", "all-reduce of dA over Y, all-reduce of dW over X"),
    GATHERED: ("all-gather of C over Y", "all-reduce of dA over Y"),
    "A[B_X, D] W[D, F_Y] -> C[B, F]": (
        "all-gather of C over X, all-gather of C over Y", "all-reduce of dA over Y, all-reduce of dW over X",
    ),
}


@pytest.mark.parametrize("product", PREDICTED)
def test_rules(product: str) -> None:
    assert tuple(", ".join(map(str, way)) for way in layer_collectives(product)) == PREDICTED[product]


def test_what_is_not_kept_is_gathered_again() -> None:
    told = [str(move) for move in layer_collectives("A[B_X, D] W[D_X, F] -> C[B_X, F]", keep=False)[1]]
    assert told == ["all-gather of W over X", "reduce-scatter of dW over X"]


def test_rules_predict_what_a_trace_counts(sequence: bool) -> None:
    up, down = (COLUMN, ROW) if not sequence else list(PREDICTED)[2:4]

    def work(comm: Communicator) -> None:
        block: Any = BLOCK.module(1, torch.float64)[1]
        model = tensor_parallel(comm, block.mlp, sequence)
        through(comm, model, sequence)[1].backward()

    ways = zip(layer_collectives(up), layer_collectives(down), strict=True)
    predicted = Counter(f"tp {move.kind} {way}" for way, both in zip(("forward", "backward"), ways, strict=True)
                        for moves in both for move in moves)  # fmt: skip
    assert collectives(simulated(work, 4, trace=True)) == predicted


def test_rules_predict_what_a_gathered_output_needs() -> None:
    def work(comm: Communicator) -> None:
        gather(comm, ColumnLinear(comm, nn.Linear(8, 12))(torch.ones(2, 3, 8, requires_grad=True))).square().sum().backward()

    ways = zip(("forward", "backward"), layer_collectives(GATHERED), strict=True)
    assert collectives(simulated(work, 4, trace=True)) == {f"tp {move.kind} {way}": 1 for way, (move,) in ways}


@pytest.mark.parametrize(
    ("product", "told"),
    [
        ("A[B_X, D_X] W[D, F] -> C[B, F]", r"A\[B_X, D_X\] is cut twice along the same axis"),
        ("A[B, D] W[D, F] -> C[B, G]", "C has the dimension G, which neither of the factors has"),
        ("A[B, D] W[D, F]", "is not a product like"),
    ],
)
def test_what_is_no_product(product: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        collectives_of(product)
