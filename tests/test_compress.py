"""Codecs against what they promise: bytes, errors, and that what was sent and what is left are all that was given."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import digits
from torch import Tensor

import d2lps
from d2lps import collectives, compress, cost
from d2lps.comm import Communicator
from d2lps.compress import Codec, ErrorFeedback
from d2lps.topology import star

NAMES = ["half", "bfloat16", "fp8", "e5m2", "int8", "int4", "one_bit", "top_k", "random_k", "power_sgd"]
OWN: dict[str, Callable[[], Codec]] = {
    "e5m2": lambda: compress.fp8("e5m2", block=16),
    "int8": lambda: compress.int8(block=16), "int4": lambda: compress.int4(block=7),
    "top_k": lambda: compress.top_k(0.1), "random_k": lambda: compress.random_k(0.1),
}  # fmt: skip
RANKS = [1, 2, 3, 5, 8]
STAGED = ["two_stage", "all_gather"]


def made(name: str) -> Codec:
    codec: Codec = (OWN.get(name) or getattr(compress, name))()
    return codec


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- one codec --------------------------------------------------------------------------------------------------------


def promised(name: str, count: int) -> int:
    """Bytes of `count` elements of float32 that are no matrix."""
    k = min(count, max(1, round(0.1 * count)))
    return {
        "half": 2 * count, "bfloat16": 2 * count, "fp8": count + 4 * (count > 0), "e5m2": count + 4 * math.ceil(count / 16),
        "int8": count + 4 * math.ceil(count / 16), "int4": math.ceil(count / 2) + 4 * math.ceil(count / 7),
        "one_bit": math.ceil(count / 8) + 4, "top_k": 8 * k, "random_k": 4 * k, "power_sgd": 4 * count,
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(0, 300))
@settings(max_examples=20, deadline=None)
def test_bytes_are_as_promised_on_meta_tensors_too(name: str, count: int) -> None:
    codec, data = made(name), numbers(count, (count,), torch.float32)
    sent, blank = codec.encode(data), codec.encode(data.to("meta"))
    assert sent.nbytes == blank.nbytes == promised(name, count) and sent.dtype == blank.dtype and sent.dim() == blank.dim() == 1
    decoded, empty = codec.decode(sent, data.to("meta")), codec.decode(blank, data)
    assert (decoded.shape, decoded.dtype, decoded.device.type) == (data.shape, data.dtype, "cpu") and empty.is_meta
    assert torch.equal(codec.encode(data), sent), "pure"
    for wrong in (torch.cat([sent, sent[:1]]) if count else sent.new_zeros(9), sent.to(torch.int64)):
        with pytest.raises(ValueError, match=f"not {wrong.numel()} of {wrong.dtype}"):
            codec.decode(wrong, data)


def bounds(name: str, data: Tensor) -> Tensor:
    """How far off each element may be."""
    size, tiny = data.abs(), 2.0**-126
    blocks = data.abs().flatten()
    if name in ("half", "bfloat16"):
        bits, least = (11, 2.0**-25) if name == "half" else (8, 2.0**-134)
        return (size * 2.0**-bits).clamp(min=least) + (size - 65504).clamp(min=0) * (name == "half")
    length = {"fp8": len(blocks), "e5m2": 16, "int8": 16, "int4": 7}[name]
    most = torch.cat([block.amax().expand(len(block)) for block in blocks.split(max(1, length))]) if len(blocks) else blocks
    formats = {"fp8": (4, 2.0**-9, 448), "e5m2": (3, 2.0**-16, 57344), "int8": (0, 1, 127), "int4": (0, 1, 7)}
    bits, smallest, largest = formats[name]
    rounding = torch.maximum(size * 2.0**-bits, most / largest * smallest / 2) if bits else most / largest
    return rounding * (1 + 1e-5) + tiny * largest


WIDE = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


@pytest.mark.parametrize("name", ["half", "bfloat16", "fp8", "e5m2", "int8", "int4"])
@given(values=WIDE)
@settings(max_examples=60, deadline=None)
def test_no_element_is_off_by_more_than_its_bound(name: str, values: list[float]) -> None:
    codec, data = made(name), torch.tensor(values)
    error = (codec.decode(codec.encode(data), data).double() - data.double()).abs()
    assert bool((error <= bounds(name, data.double())).all()), (error, bounds(name, data.double()))


@given(values=WIDE)
@settings(max_examples=60, deadline=None)
def test_what_the_others_lose_is_no_more_than_what_was_there(values: list[float]) -> None:
    data = torch.tensor(values, dtype=torch.float64)
    mean = data.abs().mean()
    signs = made("one_bit").decode(made("one_bit").encode(data), data)
    assert torch.equal(data >= 0, signs >= 0) or mean.float() == 0  # scales travel as float32
    torch.testing.assert_close(signs.abs(), mean.float().double().expand(len(data)))
    for name in ("top_k", "random_k"):
        kept = made(name).decode(made(name).encode(data), data)
        assert bool(((kept == data) | (kept == 0)).all()) and int(kept.count_nonzero()) <= max(1, round(0.1 * len(data)))
    largest = made("top_k").decode(made("top_k").encode(data), data)
    assert largest.abs().sum() >= data.abs().sum() * (largest.abs() > 0).sum() / len(data) * (1 - 1e-12)


def test_rounding_by_chance_is_right_on_average() -> None:
    data = numbers(0, (50,))
    for codec in (compress.int8(16), compress.int4(16), compress.int4(16, seed=1)):
        turns = torch.stack([codec.decode(codec.encode(data, turn), data) for turn in range(2000)])
        step = (turns - data).abs().amax()
        assert bool(((turns.mean(0) - data).abs() < step / 8).all()) and not torch.equal(turns[0], turns[1])


def test_places_of_random_k_come_round() -> None:
    codec, data = compress.random_k(0.1, seed=3), torch.ones(40)
    often = sum(codec.decode(codec.encode(data, turn), data, turn) for turn in range(400))
    assert isinstance(often, Tensor) and often.min() > 15 and often.max() < 75 and often.sum() == 1600


def test_power_sgd_finds_a_matrix_of_low_rank_and_the_best_one_with_time() -> None:
    low = numbers(0, (30, 3)) @ numbers(1, (3, 20))
    torch.testing.assert_close(compress.power_sgd(3).decode(compress.power_sgd(3).encode(low), low), low)
    matrix, codec = numbers(2, (30, 20)), compress.power_sgd(2)
    u, s, v = torch.linalg.svd(matrix)
    q: Tensor | None = None
    for _ in range(300):
        q = codec.encode(matrix, q=q)[60:].view(20, 2)  # type: ignore[call-arg]
    found = codec.decode(codec.encode(matrix, q=q), matrix)  # type: ignore[call-arg]
    torch.testing.assert_close(found, u[:, :2] @ s[:2].diag() @ v[:2], rtol=1e-4, atol=1e-4)
    assert codec.encode(torch.zeros(30, 20)).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_what_would_spoil_the_rest_is_refused_and_nothing_overflows(name: str) -> None:
    codec, huge = made(name), torch.tensor([[3e38, -3e38, 1e5, 0.0]] * 20)
    if name != "power_sgd":  # whose product of large numbers is as large as a matrix product is
        assert codec.decode(codec.encode(huge), huge).isfinite().all()
    for bad in (math.inf, math.nan):
        data = torch.tensor([[1.0, bad] + [0.0] * 8] * 10)
        if name in ("half", "bfloat16"):  # those who scale a loss look for it
            assert codec.decode(codec.encode(data), data).isfinite().logical_not().equal(data.isfinite().logical_not())
        elif name not in ("top_k", "random_k"):
            with pytest.raises(ValueError, match=rf"'tensor' has {bad} at \[0(, 1)?\]|has {bad} at \[1\]"):
                codec.encode(data)
        feedback = ErrorFeedback(codec)
        with pytest.raises(ValueError, match=f"'w' has {bad} at"):
            feedback.encode("w", data)
        assert not feedback.left and not feedback.turns


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: compress.fp8("e3m4"), "format='e3m4'"), (lambda: compress.int8(0), "block=0"),
        (lambda: compress.top_k(0), "fraction=0"), (lambda: compress.random_k(1.5), "fraction=1.5"),
        (lambda: compress.power_sgd(0), "rank=0"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(make: Callable[[], Codec], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("tensor", "codec", "error", "says"),
    [
        (torch.ones(2), compress.int8, TypeError, "codec=<function int8 .*> is none: one is made by a call"),
        (torch.ones(2), "int8", TypeError, "codec='int8' is none"), (torch.ones(2), None, TypeError, "codec=None is none"),
        ([], compress.half(), ValueError, r"tensor=\[\]: there is nothing to sum"),
        ([torch.ones(2), None], compress.half(), TypeError, "tensor must be a torch.Tensor, not NoneType"),
        (3.0, compress.half(), TypeError, "not float: 3.0"),
        (torch.ones(2).bool(), compress.top_k(0.5), TypeError, "takes floats or integers, not torch.bool"),
        (torch.ones(2) * 1j, compress.half(), TypeError, "takes floats or integers, not torch.complex64"),
        (torch.ones(1).expand(2), compress.half(), ValueError, "was expanded"),
    ],
)  # fmt: skip
def test_what_is_no_codec_or_no_tensor_is_refused(tensor: Any, codec: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        d2lps.simulate(lambda comm: compress.all_reduce(comm, tensor, codec), star(2, 1e9))


# ---- what was sent, and what is left ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sent_and_what_is_left_are_all_that_was_given(name: str) -> None:
    feedback, shape = ErrorFeedback(made(name)), (13, 11)
    given_, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for turn in range(10):
        given_ += (data := numbers(turn, shape))
        sent += feedback.codec.decode(feedback.encode("w", data), data, turn)
    torch.testing.assert_close(sent + feedback.left["w"].view(shape), given_, rtol=1e-12, atol=1e-12)


def summed(comm: Communicator, codec: Codec, shape: tuple[int, ...], algorithm: str | None, dtype: torch.dtype) -> list[Tensor]:
    """Four turns: what was given, what came, and what is left, of this rank; and of the chunk that it owns."""
    feedback = ErrorFeedback(codec)
    whole = torch.zeros(2, *shape, dtype=dtype)
    for turn in range(4):
        data = numbers(10 * comm.rank + turn, shape)
        data = data.to(dtype) if dtype == torch.float64 else data.mul(100).round().to(dtype)
        whole[0] += data
        compress.all_reduce(comm, data, feedback, "w", algorithm=algorithm)
        whole[1] += data
    return [*whole, feedback.left["w"].view(shape), feedback.second.get("w", torch.zeros(0))]


def check_all_there(run: Any, close: Callable[[Tensor, Tensor], None]) -> None:
    given_, left = sum(found[0] for found in run), sum(found[2] for found in run)
    if second := [found[3] for found in run if found[3].numel()]:
        left = left + torch.cat(second).view(left.shape)
    close(run[0][1] + left, given_)
    assert all(torch.equal(found[1], run[0][1]) for found in run), "the same on all ranks"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", [None, *STAGED])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_between_ranks(name: str, algorithm: str | None, ranks: int) -> None:
    shape = (13, 11) if name == "power_sgd" else (37,)
    run = d2lps.simulate(summed, star(ranks, 1e9), made(name), shape, algorithm, torch.float64, trace=False)
    # What is rounded where it is added up is nobody's residual.
    off = 1e-12 if algorithm or name not in ("half", "bfloat16") else 2.0 ** -(11 if name == "half" else 8) * ranks
    check_all_there(run, partial(torch.testing.assert_close, rtol=off, atol=20 * off))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", ["top_k", "random_k"])
@pytest.mark.parametrize("algorithm", [None, *STAGED])
def test_of_integers_nothing_is_lost_to_the_bit(name: str, algorithm: str | None, dtype: torch.dtype) -> None:
    run = d2lps.simulate(summed, star(5, 1e9), made(name), (37,), algorithm, dtype, trace=False)
    assert run[0][1].dtype == dtype

    def same(one: Tensor, other: Tensor) -> None:
        assert torch.equal(one, other)

    check_all_there(run, same)


# ---- who adds up ------------------------------------------------------------------------------------------------------


def several(comm: Communicator, codec: Codec, algorithm: str | None) -> list[Tensor]:
    """Three tensors in one call, two turns, without feedback."""
    tensors = [numbers(comm.rank + 7 * index, shape) for index, shape in enumerate([(9, 8), (5,), (4, 3, 5)])]
    for turn in range(2):
        compress.all_reduce(comm, tensors, codec, turn=turn, algorithm=algorithm)
    return tensors


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", [name for name in NAMES if made(name).linear])
def test_every_all_reduce_adds_up_linear_codes(name: str, ranks: int) -> None:
    first: list[Tensor] = []
    for algorithm in ("ring", "flat", "tree", "double_tree", "halving_doubling", "blockwise"):
        run = d2lps.simulate(several, star(ranks, 1e9), made(name), algorithm, trace=False)
        first = first or run[0]
        off = {"half": 0.02, "bfloat16": 0.2}.get(name, 1e-9)
        for found in run:
            torch.testing.assert_close(found, first, rtol=off, atol=off)
            assert all(map(torch.equal, found, run[0]))


def test_others_say_that_they_cannot_be_added_up() -> None:
    with pytest.raises(ValueError, match=r"algorithm='tree' adds up codes, which OneBit\(\) forbids"):
        d2lps.simulate(several, star(2, 1e9), made("one_bit"), "tree")


@pytest.mark.parametrize("algorithm", ["two_stage", "all_gather", None])
def test_options_that_nobody_takes_are_refused(algorithm: str | None) -> None:
    def work(comm: Communicator) -> None:
        compress.all_reduce(comm, torch.ones(4), compress.one_bit(), algorithm=algorithm, chunk=4)

    with pytest.raises(TypeError, match="options chunk are of no algorithm that takes codes in stages"):
        d2lps.simulate(work, star(2, 1e9))


def test_power_sgd_leaves_a_matrix_of_integers_as_it_is() -> None:
    def work(comm: Communicator) -> list[list[int]]:
        compress.all_reduce(comm, data := torch.arange(24).view(4, 6) + comm.rank, compress.power_sgd(1))
        return data.tolist()

    assert d2lps.simulate(work, star(2, 1e9)) == [(2 * torch.arange(24).view(4, 6) + 1).tolist()] * 2


def test_sums_of_half_stay_finite() -> None:
    def work(comm: Communicator) -> Tensor:
        compress.all_reduce(comm, data := torch.tensor([6e4, -6e4, 1.0]), compress.half())
        return data

    for ranks in (2, 3, 8):
        found = d2lps.simulate(work, star(ranks, 1e9))[0]
        assert found.isfinite().all() and found[0] > 3e4 and found[2] == ranks


WAYS = [("half", None), ("int8", None), ("top_k", None), ("one_bit", "all_gather"), ("power_sgd", None)]


@pytest.mark.parametrize(("name", "algorithm"), [("half", "native"), *WAYS[1:]])
def test_real_ranks_do_the_same(name: str, algorithm: str | None) -> None:
    real = d2lps.run(summed, 3, made(name), (13, 11), algorithm, torch.float64)
    same = None if algorithm == "native" else algorithm
    simulated = d2lps.simulate(summed, star(3, 1e9), made(name), (13, 11), same, torch.float64)
    for found, expected in zip(real, simulated, strict=True):
        off = 2e-2 if name == "half" else 1e-9
        torch.testing.assert_close(found, expected, rtol=off, atol=off)


@pytest.mark.parametrize("ranks", [2, 5, 16])
@pytest.mark.parametrize(("name", "algorithm"), WAYS)
def test_time_is_that_of_the_formula(name: str, algorithm: str | None, ranks: int) -> None:
    """As many bytes as promised cross the wire, and meta tensors give the same ones."""
    shape, alpha, beta = (ranks * 16, 32), 1e-6, 1e-9
    count = shape[0] * shape[1]

    def work(comm: Communicator) -> None:
        compress.all_reduce(comm, torch.ones(shape, device=comm.device), made(name), algorithm=algorithm)

    wires = star(ranks, 1 / beta, alpha / 2)
    times = [d2lps.simulate(work, wires, device=device, trace=False).time for device in ("meta", "cpu")]
    if name in ("half", "power_sgd"):
        rounds = [2 * count] if name == "half" else [4 * 2 * shape[0], 4 * 2 * shape[1]]
        expected = sum(cost.all_reduce("ring", nbytes, ranks, alpha, beta) for nbytes in rounds)
    elif algorithm:
        expected = cost.all_gather("ring", promised(name, count) * ranks, ranks, alpha, beta)
    else:
        code = promised(name, count // ranks) * ranks
        expected = cost.all_to_all("pairwise", code, ranks, alpha, beta) + cost.all_gather("ring", code, ranks, alpha, beta)
    assert times == pytest.approx([expected] * len(times), rel=0.02)


def test_top_k_gathered_by_all_is_beaten_by_a_ring_from_1000_ranks_on() -> None:
    """0.1% of the elements in pairs of 8 bytes, against a ring of FP32, which no latency holds up.

    A ring of 1,000 ranks is two million messages: where both lines cross there is told by the formulas, and where they cross with
    a hundred ranks, of 1%, by the ring and the all-gather themselves, too.
    """
    count, beta = 1_024_000, 1e-9

    def sparse(comm: Communicator) -> None:
        compress.all_reduce(comm, torch.empty(count, device="meta"), compress.top_k(0.01), algorithm="all_gather")

    def dense(comm: Communicator) -> None:
        collectives.all_reduce(comm, torch.empty(count, device="meta"), algorithm="ring")

    for ranks, fraction in ((999, 0.001), (1001, 0.001), (96, 0.01), (104, 0.01)):
        nbytes = compress.top_k(fraction).encode(torch.empty(count, device="meta")).nbytes * ranks
        told = [cost.all_gather("ring", nbytes, ranks, 0, beta), cost.all_reduce("ring", 4 * count, ranks, 0, beta)]
        assert (told[0] < told[1]) == (ranks * fraction < 1)
        if fraction == 0.01:
            times = [d2lps.simulate(work, star(ranks, 1 / beta), device="meta", trace=False).time for work in (sparse, dense)]
            assert times == pytest.approx(told, rel=0.01)


# ---- training ---------------------------------------------------------------------------------------------------------


def trained(comm: Communicator, codec: Codec | None, steps: int) -> float:
    """The loss of a small network on all of scikit-learn's digits, after a few steps on a shard of them each."""
    images, labels = digits()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    feedback = ErrorFeedback(codec) if codec else None
    for step in range(steps):
        mine = torch.arange(comm.rank, 32 * comm.size, comm.size).add(step * 32 * comm.size) % len(labels)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        if feedback is None:
            for gradient in gradients:
                collectives.all_reduce(comm, gradient)
        else:
            compress.all_reduce(comm, gradients, feedback)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.3 / comm.size * gradient
    return torch.nn.functional.cross_entropy(model(images), labels).item()


OFF = {"half": 0.01, "fp8": 0.01, "int4": 0.01, "one_bit": 0.05, "top_k": 0.05, "random_k": 0.15, "power_sgd": 0.1}
PLAIN: list[float] = []


@pytest.mark.parametrize("name", OFF)
def test_training_comes_as_far(name: str) -> None:
    """After 120 steps on 4 ranks, within so much of the loss without compression, which is a tenth of that at the start."""
    PLAIN[:] = PLAIN or [d2lps.simulate(trained, star(4, 1e9), None, 120, trace=False)[0]]
    loss = d2lps.simulate(trained, star(4, 1e9), made(name), 120, trace=False)[0]
    assert PLAIN[0] < 0.3 and abs(loss / PLAIN[0] - 1) < OFF[name]


# ---- several names ----------------------------------------------------------------------------------------------------


def in_company(comm: Communicator, codec: Codec, algorithm: str | None) -> tuple[list[Tensor], list[Tensor]]:
    """Three tensors, sent in other company each time: what came, and what this rank has given, less what it has kept."""
    feedback, shapes = ErrorFeedback(codec), {"a": (5, 3), "b": (7,), "c": (4, 2)}
    came, given_ = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()} for _ in range(2))
    for turn, groups in enumerate([["abc"], ["cba"], ["ab", "c"], ["a", "cb"], ["bac"]]):
        feedback.unit = 2.0 ** (turn % 3)
        for names in groups:
            tensors = [numbers(10 * comm.rank + turn, shapes[name]) for name in names]
            for name, tensor in zip(names, tensors, strict=True):
                given_[name] += tensor
                tensor *= feedback.unit
            compress.all_reduce(comm, tensors, feedback, [*names], algorithm=algorithm)
            for name, tensor in zip(names, tensors, strict=True):
                came[name] += tensor / feedback.unit
    for name, mine in given_.items():
        mine -= feedback.left[name].view(mine.shape)
        if (second := feedback.second.get(name)) is not None:
            mine.view(-1)[feedback.starts[name] :][: len(second)] -= second
    return [*came.values()], [*given_.values()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["top_k", "one_bit", "int8", "power_sgd", "random_k"])
def test_what_is_kept_of_a_tensor_follows_it_into_other_company(name: str, ranks: int) -> None:
    codec = made(name)
    algorithms: list[str | None] = [None, "all_gather", *(["two_stage"] if codec.linear else [])]
    for algorithm in algorithms:
        run = d2lps.simulate(in_company, star(ranks, 1e9), codec, algorithm)
        for number, came in enumerate(run[0][0]):
            torch.testing.assert_close(came, sum(rank[1][number] for rank in run), rtol=1e-9, atol=1e-9)


def test_so_it_does_on_processes() -> None:
    run = d2lps.run(in_company, 3, compress.one_bit(), None)
    for number, came in enumerate(run[0][0]):
        torch.testing.assert_close(came, sum(rank[1][number] for rank in run), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_names_of_which_no_tensor_knows_its_own_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="one for all 2 tensors together, or one for each, no two of them alike"):
        d2lps.simulate(lambda comm: compress.all_reduce(comm, torch.ones(2, 2).unbind(), compress.half(), names), star(2, 1e9))


def test_tensors_that_share_memory_are_refused_by_name() -> None:
    """The sum of the one was written over the other's: of top_k, a zero over what had come."""
    cuts: list[Callable[[torch.Tensor], list[torch.Tensor]]] = [lambda row: [row, row.view(2, 2)], lambda row: [row[1:], row[:2]]]
    for cut in cuts:
        with pytest.raises(ValueError, match=r"tensor\[0\], float32.*, and tensor\[1\], float32.*, share memory: both are"):
            d2lps.simulate(lambda comm, cut=cut: compress.all_reduce(comm, cut(torch.ones(4)), compress.top_k(0.5)), star(2, 1e9))
    for total in d2lps.simulate(_columns, star(2, 1e9)):
        assert torch.equal(total, torch.full((3, 2), 2.0))


def _columns(comm: d2lps.Communicator) -> torch.Tensor:
    """What lies side by side is right."""
    compress.all_reduce(comm, (matrix := torch.ones(3, 2)).unbind(1), compress.half())
    return matrix
