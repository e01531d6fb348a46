"""Codecs against what they promise: bytes, errors, and that what was sent and what is left are all that was given."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import d2lps
from d2lps import collectives, compress, cost
from d2lps.comm import Communicator
from d2lps.compress import Codec, ErrorFeedback
from d2lps.topology import star

NAMES = ["half", "bfloat16", "fp8", "e5m2", "int8", "int4", "one_bit", "top_k", "random_k", "power_sgd"]
OWN: dict[str, Callable[[], Codec]] = {
    "e5m2": lambda: compress.fp8("e5m2", block=16), "int8": lambda: compress.int8(block=16), "int4": lambda: compress.int4(block=7),
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
    bits, smallest, largest = {"fp8": (4, 2.0**-9, 448), "e5m2": (3, 2.0**-16, 57344), "int8": (0, 1, 127), "int4": (0, 1, 7)}[name]
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
    assert torch.equal(signs >= 0, data >= 0) or mean == 0
    torch.testing.assert_close(signs.abs(), mean.float().double().expand(len(data)))
    for name in ("top_k", "random_k"):
        kept = made(name).decode(made(name).encode(data), data)
        assert bool(((kept == data) | (kept == 0)).all()) and int((kept != 0).sum()) <= max(1, round(0.1 * len(data)))
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
    assert isinstance(often, Tensor) and 15 < often.min() and often.max() < 75 and often.sum() == 1600


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
        (lambda: compress.fp8("e3m4"), "format='e3m4'"), (lambda: compress.int8(0), "block=0"), (lambda: compress.top_k(0), "fraction=0"),
        (lambda: compress.random_k(1.5), "fraction=1.5"), (lambda: compress.power_sgd(0), "rank=0"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(make: Callable[[], Codec], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


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
        data = numbers(10 * comm.rank + turn, shape).mul(100).round().to(dtype) if not dtype.is_floating_point else None
        data = numbers(10 * comm.rank + turn, shape, dtype) if data is None else data
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
    run = d2lps.simulate(summed, star(5, 1e9), made(name), (37,), algorithm, torch.int64, trace=False)
    assert run[0][1].dtype == torch.int64

    def same(one: Tensor, other: Tensor) -> None:
        assert torch.equal(one, other)

    check_all_there(run, same)
