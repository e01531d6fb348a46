"""The checks of *Compression*: wrong answers are refused in words that say why."""

from typing import Any

import pytest
import torch
from solutions import refused, solution

from d2lps import ReduceOp, compress, simulate
from d2lps.collectives import all_reduce
from d2lps.topology import star
from d2lps_book.check import compression as check

# ---- pairs --------------------------------------------------------------------------------------------------------------


def encode(gradient: torch.Tensor, k: int) -> torch.Tensor:
    places = gradient.abs().topk(k).indices
    return torch.stack([places.int(), gradient[places].view(torch.int32)])


def decode(sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(like.shape)
    out[sent[0].long()] = sent[1].view(torch.float32)
    return out


def places_as_floats(gradient: torch.Tensor, k: int) -> torch.Tensor:
    places = gradient.abs().topk(k).indices
    return torch.stack([places.float(), gradient[places]]).view(torch.int32)


def decode_floats(sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out, pairs = torch.zeros(like.shape), sent.view(torch.float32)
    out[pairs[0].long().clamp(max=like.numel() - 1)] = pairs[1]
    return out


def signed(gradient: torch.Tensor, k: int) -> torch.Tensor:
    places = gradient.topk(k).indices
    return torch.stack([places.int(), gradient[places].view(torch.int32)])


def long_places(gradient: torch.Tensor, k: int) -> torch.Tensor:
    places = gradient.abs().topk(k).indices
    return torch.cat([places, gradient[places].view(torch.int32)])


def in_place(gradient: torch.Tensor, k: int) -> torch.Tensor:
    sent = encode(gradient, k)
    gradient[sent[0].long()] = 0
    return sent


def test_pairs() -> None:
    own = solution("ex-compression-pairs")
    assert check.pairs(own["encode"], own["decode"])
    refused(check.pairs(places_as_floats, decode_floats), "in which dtype does a place travel")
    refused(check.pairs(signed, decode), "largest by size, with their signs")
    refused(check.pairs(long_places, lambda sent, like: torch.zeros(like.shape)), "bytes are sent; a place and a number")
    refused(check.pairs(in_place, decode), "the gradient itself was changed")
    refused(check.pairs(encode, lambda sent, like: decode(sent, torch.empty(like.numel() + 1))), "it has the shape")
    refused(check.pairs(encode, lambda sent, like: None if like.is_meta else sent), "decode gives nothing back")
    refused(check.pairs(encode, lambda sent, like: [sent]), "decode gives a list, and a tensor is wanted")
    refused(check.pairs(encode, lambda sent, like: torch.zeros_like(like)), "on meta, without content", "take its shape alone")
    refused(check.pairs(lambda g, k: (encode(g, k)[0], g), decode), "encode gives a tuple, and one tensor is wanted")
    refused(check.pairs(lambda g, k: encode(g.abs(), k), decode), "the places are right, but signs are lost")


def test_pairs_refuses_what_the_two_remember() -> None:
    remembered = []

    def on_the_side(gradient: torch.Tensor, k: int) -> torch.Tensor:
        remembered.append(encode(gradient, k))
        return torch.zeros(2, k, dtype=torch.int32)

    refused(check.pairs(on_the_side, lambda sent, like: decode(remembered[-1], like)), "largest by size")


# ---- kept ---------------------------------------------------------------------------------------------------------------


class Feedback:
    """What the exercise's program is, and others like it."""

    def __init__(self, lossy: Any) -> None:
        self.lossy, self.left = lossy, dict[str, Any]()

    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        owed = gradient + self.left.get(name, 0.0)
        sent = self.lossy(owed)
        self.left[name] = self.rest(gradient, owed, sent)
        return sent

    def rest(self, gradient: torch.Tensor, owed: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return owed - sent


class Forgets(Feedback):
    def rest(self, gradient: torch.Tensor, owed: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return gradient - sent


class Nothing(Feedback):
    def rest(self, gradient: torch.Tensor, owed: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(sent)


class Half(Feedback):
    def rest(self, gradient: torch.Tensor, owed: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return (owed - sent) / 2


class Single(Feedback):
    def rest(self, gradient: torch.Tensor, owed: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return (owed - sent).float().double()


class OneForAll(Feedback):
    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return super().__call__(str(len(gradient)), gradient)


class InPlace(Feedback):
    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        gradient += self.left.get(name, 0.0)
        sent = self.lossy(gradient)
        self.left[name] = gradient - sent
        return sent


class Silent(Feedback):
    def __call__(self, name: str, gradient: torch.Tensor) -> Any:
        super().__call__(name, gradient)


class OneForAllShapes(Feedback):
    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return super().__call__("", gradient)


@pytest.mark.parametrize(("wrong", "word"), [
    (Forgets, "owed is all that came under this name"), (Nothing, "less all that was sent"), (Half, "owed is"),
    (Single, "does not send lossy(what is owed)"), (Silent, "gives back None, and what is sent is wanted"),
    (OneForAllShapes, "does it add what is left of another name"), (OneForAll, "'v' of ['w', 'v', 'b']"),
    (InPlace, "has changed"),
], ids=lambda case: case.__name__ if isinstance(case, type) else "")  # fmt: skip
def test_kept_refuses(wrong: Any, word: str) -> None:
    assert check.kept(Feedback)
    refused(check.kept(wrong), word)


class Librarys(Feedback):
    def __init__(self, lossy: Any) -> None:
        self.feedback = compress.ErrorFeedback(lossy)


def test_the_librarys_own_are_refused() -> None:
    refused(check.kept(Librarys), "the exercise is to do without")
    refused(
        check.same_places(lambda comm, g, k, step: compress.all_reduce(comm, g, compress.random_k(k / len(g)), turn=step)),
        "without",
    )
    refused(check.power_round(lambda comm, matrix, q: compress.all_reduce(comm, matrix, compress.power_sgd(2))), "without")


# ---- random places ------------------------------------------------------------------------------------------------------


def at(comm: Any, gradient: torch.Tensor, places: torch.Tensor) -> None:
    values = gradient[places]
    all_reduce(comm, values)
    gradient.zero_()
    gradient[places] = values


def own_places(comm: Any, gradient: torch.Tensor, k: int, step: int) -> None:
    at(comm, gradient, torch.randperm(len(gradient), generator=comm.generator)[:k])


def first_places(comm: Any, gradient: torch.Tensor, k: int, step: int) -> None:
    at(comm, gradient, torch.arange(k))


def with_the_rest(comm: Any, gradient: torch.Tensor, k: int, step: int) -> None:
    places = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(step))[:k]
    values = gradient[places]
    all_reduce(comm, values)
    gradient[places] = values


def drawn_twice(comm: Any, gradient: torch.Tensor, k: int, step: int) -> None:
    at(comm, gradient, torch.randint(len(gradient), (k,), generator=torch.Generator().manual_seed(step)))


def masked(comm: Any, gradient: torch.Tensor, k: int, step: int) -> None:
    places = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(step))[:k]
    gradient *= torch.zeros_like(gradient).index_fill_(0, places, 1.0)
    all_reduce(comm, gradient)


@pytest.mark.parametrize(("wrong", "word"), [
    (own_places, "do all ranks mean the same ones"), (first_places, "the others never come"),
    (with_the_rest, "are not zero at the end"), (masked, "which numbers need not travel, and who need not be told the places"),
    (drawn_twice, "1 rank, 7 of 7 numbers: 6 numbers of rank 0 are not zero at the end, and 7 should be; is a place drawn twice"),
    (lambda comm, g, k, step: solution("ex-compression-seed")["random_k"](comm, g.clone(), k, step), "it is what it was before"),
], ids=lambda case: getattr(case, "__name__", ""))  # fmt: skip
def test_common_places_refuse(wrong: Any, word: str) -> None:
    refused(check.same_places(wrong), word)


# ---- int8 ---------------------------------------------------------------------------------------------------------------


def scaled(comm: Any, gradient: torch.Tensor, most: int, common: bool = True, dtype: torch.dtype = torch.int8) -> None:
    largest = gradient.abs().max().view(1)
    if common:
        all_reduce(comm, largest, ReduceOp.MAX)
    step = largest.clamp(min=1e-30) / most
    codes = (gradient / step).round().to(dtype)
    all_reduce(comm, codes)
    gradient.copy_(codes * step)


def cut_off(comm: Any, gradient: torch.Tensor) -> None:
    """Codes that are rounded towards zero, where half a step is all that may be lost."""
    step = gradient.abs().max().clamp(min=1e-30) / 127
    gradient.copy_((gradient / step).to(torch.int8) * step)


@pytest.mark.parametrize(("wrong", "word"), [
    (lambda comm, g: scaled(comm, g, 127), "does their sum fit into 8 bits"),
    (lambda comm, g: scaled(comm, g, 127 // comm.size, common=False), "Do all use one scale"),
    (lambda comm, g: scaled(comm, g, 127 // comm.size, dtype=torch.int32), "bytes; scale and codes"),
    (lambda comm, g: scaled(comm, g, 15 if comm.size > 1 else 127), "and half a step for each rank is"),
    (all_reduce, "bytes; scale and codes"), (cut_off, "is each code the nearest"),
    (lambda comm, g: scaled(comm, g.clone(), 127 // comm.size), "gradients are what they were; do you change them in place"),
], ids=["all bits", "own scales", "wide codes", "for eight", "float32", "cut off", "a copy"])  # fmt: skip
def test_int8_refuses(wrong: Any, word: str) -> None:
    refused(check.add_int8(wrong), word)


# ---- PowerSGD -----------------------------------------------------------------------------------------------------------


def rounds(
    comm: Any, matrix: torch.Tensor, q: torch.Tensor, *, orthonormal: bool = True, second: bool = True, warm: bool = True
) -> None:
    p = matrix @ q
    all_reduce(comm, p)
    p = torch.linalg.qr(p).Q if orthonormal else p
    new = matrix.T @ p
    if second:
        all_reduce(comm, new)
    if warm:
        q.copy_(new)
    matrix.copy_(p @ new.T)


def own_q(comm: Any, matrix: torch.Tensor, q: torch.Tensor) -> None:
    rounds(comm, matrix, torch.randn(q.shape, generator=comm.generator, dtype=q.dtype))


def whole_matrix(comm: Any, matrix: torch.Tensor, q: torch.Tensor) -> None:
    all_reduce(comm, matrix)
    p = torch.linalg.qr(matrix @ q).Q
    q.copy_(matrix.T @ p)
    matrix.copy_(p @ q.T)


@pytest.mark.parametrize(("wrong", "word"), [
    (lambda *given: rounds(*given, orthonormal=False), "orthonormal columns"),
    (lambda *given: rounds(*given, second=False), "summed over all ranks"),
    (lambda *given: rounds(*given, warm=False), "begin with the q of the last"),
    (own_q, "one round of rank 2 is off"), (whole_matrix, "two factors are"),
], ids=["skew", "one sum", "cold", "own q", "whole matrix"])  # fmt: skip
def test_a_round_of_power_sgd_refuses(wrong: Any, word: str) -> None:
    refused(check.power_round(wrong), word)


# ---- when it pays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [
    lambda n, c, p, t: (n - c) / t, lambda n, c, p, t: 2 * (p - 1) / p * n / t, lambda n, c, p, t: 2 * (p - 1) / p * (n - c) * t,
    lambda n, c, p, t: 2 * (p - 1) * (n - c) / t, lambda n, c, p, t: 0 * n,
], ids=["one way", "all bytes", "times t", "times p", "zero"])  # fmt: skip
def test_break_even_refuses(wrong: Any) -> None:
    refused(check.break_even(wrong), "a ring takes")


@pytest.mark.parametrize("wrong", [100, 33.3, 4 / 0.08, 66_667, "many"])
def test_crossing_refuses(wrong: Any) -> None:
    assert not check.crossing(wrong)


# ---- what the chapter says ----------------------------------------------------------------------------------------------


def pass_on(comm: Any, nbytes: int) -> None:
    mine, other = torch.empty(2, nbytes // 4, device=comm.device)
    comm.sendrecv(mine, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)


def test_pairs_of_the_largest_thousandth_cross_a_dense_ring_near_a_thousand_ranks() -> None:
    # Every step of a ring is like every other: one is simulated on all ranks. (The chapter holds 64 whole ranks against it.)
    nbytes = 100_000_000

    def step(p: int, length: int) -> float:
        return simulate(pass_on, star(p, 1.25e9, 5e-6), length, device="meta", trace=False).time

    def gained(p: int) -> float:
        return 2 * (p - 1) * step(p, nbytes // p) - (p - 1) * step(p, 8 * nbytes // 4 // 1000)

    assert gained(950) > 0 > gained(1100)
