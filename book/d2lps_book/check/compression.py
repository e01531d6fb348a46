"""Checks of the chapter *Compression*: what is sent, what is kept, what may be added, and when it pays."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from d2lps.collectives import all_reduce
from d2lps_book.check.exercise import Function, Wrong, among, answered, judged, plural
from d2lps_book.check.tools import number, refuse, without

_RANKS = 1, 2, 3, 5, 8


def _dice(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _summed(function: Function, tensors: list[Tensor], *args: Any) -> tuple[list[Tensor], int]:
    """What each rank's tensor becomes by `function(comm, tensor, *args)`, and how many bytes all send for that."""

    def work(comm: Any) -> Tensor:
        function(comm, mine := tensors[comm.rank].clone(), *args)
        return mine

    run = among(len(tensors), work)
    return run.results, int(run.trace.bytes_sent().sum())


def _least(p: int, *nbytes: int) -> int:
    """What all-reduces of so many bytes send, together."""
    return sum(_summed(all_reduce, [torch.zeros(n, dtype=torch.uint8)] * p)[1] for n in nbytes)


@judged
def pairs(encode: Function, decode: Function) -> str:
    """Check `encode(gradient, k)`, one tensor of 8 k bytes, and `decode(sent, like)`: the k largest, zero elsewhere."""
    for n, k in ((1, 1), (10, 3), (1000, 10), (1000, 1000), (2**24 + 6, 4)):
        gradient, case = _dice(n + k, n).float(), f"{k} of {n:,} numbers"
        gradient[-1] = 9.0  # at the end of the last case a float can no longer count
        wanted, before, places = torch.zeros(n), gradient.clone(), gradient.abs().topk(k).indices
        wanted[places] = gradient[places]
        sent, _ = encode(gradient, k), encode(-gradient[:1000], 1)  # decode has nothing to go by but what it is given
        refuse((not isinstance(sent, Tensor), f"{case}: encode gives a {type(sent).__name__}, and one tensor is wanted"))
        got = decode(sent, torch.empty(n, device="meta"))
        refuse((got is None or got is ..., "decode gives nothing back yet"),
               (not isinstance(got, Tensor), f"{case}: decode gives a {type(got).__name__}, and a tensor is wanted"))
        refuse((got.is_meta, f"{case}: decode gives a tensor on meta, without content, as `like` is; take its shape alone"))
        back, far, nbytes = got.nonzero().flatten().tolist(), sorted(places.tolist()), sent.numel() * sent.element_size()
        refuse((nbytes != 8 * k, f"{case}: {nbytes} bytes are sent; a place and a number, 4 bytes each, make {8 * k}"),
               (not torch.equal(gradient, before), f"{case}: the gradient itself was changed"),
               (got.shape != gradient.shape, f"{case}: decoded, it has the shape {tuple(got.shape)}, not ({n},)"),
               (n > 2**24 and back != far, f"{case}: what was sent from places {far} came back at {back};"
                " in which dtype does a place travel, and how far does it count?"),
               (bool((wanted < 0).any()) and torch.equal(got, wanted.abs()), f"{case}: the places are right, but signs are lost"),
               (not torch.equal(got, wanted), f"{case}: not the {k} largest by size, with their signs, and zeros"))  # fmt: skip
    return "up to 16,777,222 numbers, 8 bytes for each one that is sent"


@judged
def kept(make: Function) -> str:
    """Check a class `Kept(lossy)`, called as `kept(name, gradient)`: what was sent and what is left are all that came."""

    for part in (make, *vars(make).values()):
        without(part, "compress", "ErrorFeedback")
    largest = lambda x: torch.where(x.abs() == x.abs().max(), x, 0.0)  # noqa: E731
    for lossy, names in product((largest, torch.zeros_like, torch.round, torch.clone), (["w"], ["w", "b"], ["w", "v", "b"])):
        feedback, owed = make(lossy), {name: torch.zeros(3 if name == "b" else 8).double() for name in names}
        for step, name in product(range(1, 12), names):
            gradient, said = _dice(step + 20 * ord(name), len(owed[name])), f"step {step}, {name!r} of {names}: "
            before, owed[name] = gradient.clone(), owed[name] + gradient
            try:
                got, right = feedback(name, gradient), lossy(owed[name])
            except RuntimeError as error:  # of torch: shapes that differ
                raise Wrong(f"{said}{error}; does it add what is left of another name?") from error
            refuse((not isinstance(got, Tensor), f"{said}it gives back {got!r}, and what is sent is wanted"))
            refuse((not torch.equal(gradient, before), said + "the gradient that was handed in has changed"),
                   (not torch.allclose(got, right, rtol=1e-12, atol=1e-12), said + "it does not send lossy(what is owed), and"
                    " owed is all that came under this name, less all that was sent under it"))  # fmt: skip
            owed[name] -= right
    return "four ways to lose, three sets of names: sent and left together are all that came"


@judged
def same_places(function: Function) -> str:
    """Check `random_k(comm, gradient, k, step)`: the sum at k places, the same on all ranks, others in the next step."""
    without(function, "compress", "random_k")
    for p, (n, k) in product(_RANKS, ((40, 5), (7, 7))):
        seen, case = set(), f"{plural(p, 'rank')}, {k} of {n} numbers"
        whole = torch.stack(tensors := [_dice(rank, n) for rank in range(p)]).sum(0)
        for step in range(3):
            results, moved = _summed(function, tensors, k, step)
            for rank, got in enumerate(results):
                places = got.nonzero().flatten().tolist()
                hint = "; is a place drawn twice?" if len(places) < k else ""
                hint = "; it is what it was before" if torch.equal(got, tensors[rank]) else hint
                refuse((not torch.equal(got, results[0]), f"{case}: rank {rank} ends with other numbers than rank 0"),
                       (len(places) != k, f"{case}: {len(places)} numbers of rank {rank} are not zero at the end, and"
                        f" {k} should be{hint}"),
                       (not torch.allclose(got[places], whole[places]), f"{case}: what stands at {places} is not the sum"
                        " of these places; do all ranks mean the same ones?"))  # fmt: skip
            refuse((moved > (least := _least(p, 8 * k)), f"{case}: {moved} bytes are sent, and one all-reduce of {k} numbers"
                    f" sends {least}; which numbers need not travel, and who need not be told the places?"))  # fmt: skip
            seen.add(tuple(places))
        refuse((p > 1 and k < n and len(seen) == 1, f"{case}: every step takes the places {places}; the others never come"))
    return "1 to 8 ranks, one all-reduce of k numbers"


@judged
def add_int8(function: Function) -> str:
    """Check `add_int8(comm, gradient)`: about the sum, of one number for the scale and a byte for each element."""
    for p, n, kind in product(_RANKS, (400, 7), ("all alike", "mixed", "one of them large", "all zero")):
        tensors = [_dice(rank, n).float() * (100.0 if kind[:3] == "one" and rank == 0 else 1.0) for rank in range(p)]
        tensors = [torch.full((n,), float(kind == "all alike"))] * p if kind[:3] == "all" else tensors
        (results, moved), step = _summed(function, tensors), max(float(x.abs().max()) for x in tensors) / (127 // p)
        off, case = max(float((got - torch.stack(tensors).sum(0)).abs().max()) for got in results), f"{plural(p, 'rank')}, {kind}"
        same = all(torch.equal(got, mine) for got, mine in zip(results, tensors, strict=True))
        refuse((p > 1 and same and kind != "all zero", f"{case}: gradients are what they were; do you change them in place?"),
               (not off <= 0.51 * step * p, f"{case}: off by {off:.3g}, and half a step for each rank is"
                f" {step * p / 2:.3g}. Do all use one scale, is each code the nearest, and does their sum fit into 8 bits?"),
               (moved > (least := _least(p, n, 4)), f"{case}: {moved} bytes; scale and codes make {least}"))  # fmt: skip
    return "1 to 8 ranks: no sum of codes runs over, and a quarter of the bytes is sent"


@judged
def power_round(function: Function) -> str:
    """Check `power_round(comm, matrix, q)`: the matrix becomes about the sum of all, q what the next round begins with."""
    without(function, "compress", "power_sgd")
    for p, (rows, columns, rank) in product(_RANKS, ((12, 8, 2), (5, 9, 1), (6, 6, 6))):
        tensors, q = [_dice(r, rows, columns) for r in range(p)], _dice(99, columns, rank)
        case = f"{plural(p, 'rank')}, {rows} x {columns}"

        def rounds(comm: Any, tensor: Tensor, q: Tensor, count: int) -> None:
            mine = tensor.clone()
            for _ in range(count):
                function(comm, tensor.copy_(mine), q)

        whole, (once, moved) = torch.stack(tensors).sum(0), _summed(rounds, tensors, q.clone(), 1)
        first, possible = torch.linalg.qr(whole @ q)[0], float(torch.linalg.svdvals(whole)[rank:].norm())
        off = max(float((got - first @ first.T @ whole).norm()) for got in once)
        missed = max(float((late - whole).norm()) for late in _summed(rounds, tensors, q, 60 if p == 3 else 1)[0])
        refuse((not off < 1e-6 * whole.norm(), f"{case}: one round of rank {rank} is off by {off:.3g}; which two"
                " products must be summed over all ranks, and which of the two must get orthonormal columns?"),
               (p == 3 and not missed < 1.05 * possible + 1e-6, f"{case}: 60 rounds of rank {rank} with the same matrices miss"
                f" {missed:.3g}, and {possible:.3g} is possible; does each round begin with the q of the last?"),
               (moved > (least := _least(p, 8 * rows * rank, 8 * columns * rank)),
                f"{case}: {moved} bytes; two factors are {least}"))  # fmt: skip
    return "1 to 8 ranks: with a warm start it comes as near to the sum as its rank allows"


@judged
def break_even(function: Function) -> str:
    """Check `break_even(nbytes, sent, ranks, seconds)`: bytes/s above which a ring is sooner without the codec."""
    for nbytes, sent, p, seconds in ((1e8, 25e6, 4, 0.02), (1e8, 3e6, 2, 0.1), (4e6, 8e4, 16, 0.003), (1e9, 5e8, 8, 0.01)):
        each = 2 * (p - 1) / p / (float(said := function(nbytes, sent, p, seconds)) or 1e-300)  # seconds a byte
        plain, coded = each * nbytes, each * sent + seconds
        refuse((not abs(plain - coded) < 0.005 * plain, f"{nbytes:g} bytes, {sent:g} encoded, {p} ranks, {seconds:g} s to"
                f" encode: at {said:.4g} bytes/s a ring takes {plain:.4g} s without and {coded:.4g} s with it"))  # fmt: skip
    return "four cases, 2 to 16 ranks"


@answered
def crossing(answer: Any) -> str:
    """Check at how many ranks an all-gather of 1% of float16 numbers, in pairs of 6 bytes, sends as much as a dense ring."""
    number(answer, 4 / 0.06, "ranks", "one sends p - 1 times a rank's pairs, the other 2(p - 1)/p times all numbers")
    return "200 / 3: with 66 ranks pairs are still the fewer bytes, with 67 no more"
