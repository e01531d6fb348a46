"""The checks of *Six network architectures*: wrong answers are refused in words that say why."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from solutions import refused

from d2lps.gossip import mix
from d2lps_book.check import six_architectures as check


def told(comm: Any, tensor: torch.Tensor, dst: int, src: int) -> None:
    if comm.size > 1 and dst % comm.size != comm.rank:
        comm.sendrecv(tensor, dst % comm.size, other := torch.empty_like(tensor), src % comm.size)
        comm.combine(tensor, other)
        tensor /= 2


def hop(comm: Any, step: int) -> int:
    return 1 << step % max(1, math.ceil(math.log2(comm.size)))


def complete(comm: Any, tensor: torch.Tensor, step: int) -> None:
    others = [torch.empty_like(tensor) for _ in range(comm.size)]
    ranks = [rank for rank in range(comm.size) if rank != comm.rank]
    comm.exchange([(tensor, dst) for dst in ranks], [(others[src], src) for src in ranks])
    told(comm, tensor, comm.rank + hop(comm, step), comm.rank - hop(comm, step))


def test_one_peer() -> None:
    assert check.one_peer(lambda comm, t, step: told(comm, t, comm.rank + hop(comm, step), comm.rank - hop(comm, step)))


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda comm, t, step: t.add_(0), "2 ranks, after 1 step, rank 0 has 1 of rank 0, not 0.5 of rank 0, 0.5 of rank 1"),
    (lambda comm, t, step: told(comm, t, comm.rank + 1, comm.rank - 1), "4 ranks, after 2 steps"),
    (lambda comm, t, step: told(comm, t, comm.rank - hop(comm, step), comm.rank + hop(comm, step)), "4 ranks, after 1 step"),
    (lambda comm, t, step: mix(comm, t, "one_peer", step), "mix is the library's"),
    (complete, "with 8 ranks somebody sends"),
], ids=["nothing", "always the next", "the wrong way", "the library's", "everybody"])  # fmt: skip
def test_peers_misjudged(wrong: Any, words: str) -> None:
    refused(check.one_peer(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda gap, eps: math.floor(math.log(eps) / math.log1p(-gap)) if gap < 1 else 1, "gap 0.05: 134 steps leave 0.00104"),
    (lambda gap, eps: math.ceil(math.log(1 / eps) / gap), "gap 0.05: 139 steps"),
    (lambda gap, eps: math.log(eps) / math.log1p(-gap) if gap < 1 else 1, "gap 0.05: 134.67 is no whole number"),
    (lambda gap, eps: max(1, math.ceil(math.log(eps) / math.log(gap))) if gap < 1 else 1, "gap 0.05: 3 steps leave 0.857"),
    (lambda gap, eps: math.ceil(math.log(eps) / math.log1p(-gap)), "ValueError"),
], ids=["rounded down", "for small gaps", "not rounded", "the gap for what is left", "a gap of 1"])  # fmt: skip
def test_rounds_misjudged(wrong: Any, words: str) -> None:
    refused(check.rounds(wrong), words)


def cut(W: np.ndarray, dead: int) -> np.ndarray:
    return np.delete(np.delete(W, dead, 0), dead, 1)


def closed(W: np.ndarray, dead: int) -> np.ndarray:
    """What each of the two gave the dead rank, it gives the other one: a ring again."""
    left, (a, b) = cut(W, dead), np.flatnonzero(np.delete(W[:, dead], dead))
    left[[a, b], [b, a]] += 1 / 3
    return left


def test_the_grave_may_close_the_ring() -> None:
    assert check.buried(closed)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda W, dead: W, "3 ranks are left, and your matrix has the shape [4, 4]"),
    (cut, "row sums are [0.667, 1.0, 0.667]: no means"),
    (lambda W, dead: cut(W, dead) / cut(W, dead).sum(1, keepdims=True), "a ring of 4 without rank 3: column sums are"),
    (lambda W, dead: np.full((len(W) - 1,) * 2, 1 / (len(W) - 1)), "how should they have heard?"),
    (lambda W, dead: closed(W, dead) + 0.1 * (np.roll(np.eye(len(W) - 1), 1, 0) - np.eye(len(W) - 1)), "have heard?"),
    (lambda W, dead: 2 * np.eye(len(W) - 1) - cut(W, dead), "can't be negative"),
], ids=["nothing", "no repair", "rows only", "everybody anew", "all by a little", "negative"])  # fmt: skip
def test_graves_misjudged(wrong: Any, words: str) -> None:
    refused(check.buried(wrong), words)


PORT = {"one_server": 16, "servers": 1.875, "ring": 1.875, "one_peer": 1}


def test_ports() -> None:
    assert check.busiest(**PORT)
    assert check.busiest(**PORT | {"ring": ...}).text == "not all is filled in"
    assert check.busiest(ring=1.875).text.startswith("nothing is said of one_server")


@pytest.mark.parametrize(("wrong", "words"), [
    ({"one_server": 1}, "one_server: 1 GB is too little"), ({"one_server": 32}, "is too much"),
    ({"servers": 0.9375}, "answers 15 workers"), ({"ring": 0.9375}, "goes round twice"), ({"one_peer": 2}, "how many messages"),
], ids=str)  # fmt: skip
def test_ports_misjudged(wrong: dict[str, float], words: str) -> None:
    refused(check.busiest(**PORT | wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda *job: "mixed", "with 'mixed' the busiest port sends"),
    (lambda *job: "ring", "'ring' is none of 'all-reduce', 'store', 'mixed'"),
    (lambda table, touched, dense, m, s: "mixed" if table > dense else "all-reduce", "with another form"),
    (lambda table, touched, dense, m, s: min({"all-reduce": 2 * (m - 1) / m * (table + dense), "store": touched + dense,
     "mixed": touched + 2 * (m - 1) / m * dense}.items(), key=lambda item: item[1])[0], "with 'store' the busiest port"),
    (lambda table, touched, dense, m, s: "mixed" if 2 * (m - 1) / m * dense + touched < max(1, m / s) * (touched + dense)
     else "store", "2 workers, 1 servers: with 'mixed' the busiest port sends 2e+08 B"),
    (lambda table, touched, dense, m, s: min({"all-reduce": 2 * (table + dense), "store": max(1, m / s) * (touched + dense),
     "mixed": max(2 * dense + touched, m / s * touched)}.items(), key=lambda item: item[1])[0], "2 workers, 1 servers"),
], ids=["always mixed", "another word", "the larger part", "no servers' ports", "never all-reduce", "rings twice"])  # fmt: skip
def test_forms_misjudged(wrong: Any, words: str) -> None:
    refused(check.form(wrong), words)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda n, p, alpha, beta: p, "16 ranks: 16 pieces take"),
    (lambda n, p, alpha, beta: 10**6, "and fewer would take"),
    (lambda n, p, alpha, beta: 1, "and more would take"),
    (lambda n, p, alpha, beta: math.sqrt((p - 2) * n * beta / alpha), "is no whole number of pieces"),
    (lambda n, p, alpha, beta: round(math.sqrt((p - 2) * n * beta / alpha)), "0 is no whole number of pieces from 1 up"),
], ids=["as many as ranks", "many", "one", "no whole number", "none for two"])  # fmt: skip
def test_pieces_misjudged(wrong: Any, words: str) -> None:
    refused(check.pieces(wrong), words)


JOBS = {"recommender": "parameter server", "one_machine": "ring", "giant": "hybrid", "pod": "hierarchical",
        "spot": "cloud-native", "shared": "dynamic"}  # fmt: skip


def test_choices() -> None:
    assert check.choose(**JOBS) and check.choose(**JOBS | {"pod": "hybrid"})


@pytest.mark.parametrize(("wrong", "words"), [
    ({"recommender": "ring"}, "recommender: not 'ring': a batch touches"), ({"giant": "ring"}, "nobody need all of them"),
    ({"spot": "parameter server"}, "who reads the share of one that is gone?"),
    ({"one_machine": "hybrid"}, "what does anything more complicated buy"), ({"spot": "MPI"}, "'MPI' is none of cloud-native"),
], ids=str)  # fmt: skip
def test_choices_misjudged(wrong: dict[str, str], words: str) -> None:
    refused(check.choose(**JOBS | wrong), words)
