"""The checks of *Compression*: wrong answers are refused in words that say why."""

from typing import Any

import torch
from solutions import refusing

from d2lps import compress, simulate
from d2lps.collectives import all_reduce
from d2lps.topology import star


def cut_off(comm: Any, gradient: torch.Tensor) -> None:
    """Codes that are rounded towards zero, where half a step is all that may be lost."""
    step = gradient.abs().max().clamp(min=1e-30) / 127
    gradient.copy_((gradient / step).to(torch.int8) * step)


PAIRS, PUT = "torch.stack([places.int(), values]) -> ", "out[sent[0].long()] = sent[1].view(torch.float32) -> "
OWED, LEFT = "owed = gradient + self.left.get(name, 0.0) -> ", "self.left[name] = owed - sent -> self.left[name] = "
PLACES, MOST = "torch.randperm(len(gradient), generator=chance)[:k] -> ", "(127 // comm.size) -> "
GAIN = "2 * (ranks - 1) / ranks * (nbytes - sent) / seconds -> "

test_refused = refusing({
    "ex-compression-pairs pairs": [
        ((f"{PAIRS}torch.stack([places.float(), gradient[places]]).view(torch.int32)",
          f"{PUT}out[sent[0].view(torch.float32).long().clamp(max=like.numel() - 1)] = sent[1].view(torch.float32)"),
         "in which dtype does a place travel"),
        ("gradient.abs().topk(k) -> gradient.topk(k)", "largest by size, with their signs"),
        ((f"{PAIRS}torch.cat([places, values])", f"{PUT}pass"), "bytes are sent; a place and a number"),
        (f"return {PAIRS}gradient[places] = 0; return torch.stack([places.int(), values])", "the gradient itself was changed"),
        ("torch.zeros(like.shape) -> torch.zeros(like.numel() + 1)", "it has the shape"),
        ("encode, lambda sent, like: None if like.is_meta else sent", "decode gives nothing back"),
        ("encode, lambda sent, like: [sent]", "decode gives a list, and a tensor is wanted"),
        ("encode, lambda sent, like: torch.zeros_like(like)", "on meta, without content", "take its shape alone"),
        ("lambda g, k: (encode(g, k)[0], g), decode", "encode gives a tuple, and one tensor is wanted"),
        ("lambda g, k: encode(g.abs(), k), decode", "the places are right, but signs are lost"),
        ("lambda g, k, kept=(kept := []): kept.append(encode(g, k)) or torch.zeros(2, k, dtype=torch.int32), "
         "lambda sent, like: decode(kept[-1], like)", "largest by size"),  # what the two remember
    ],
    "ex-compression-kept kept": [
        (f"{LEFT}gradient - sent", "owed is all that came under this name"),
        (f"{LEFT}torch.zeros_like(sent)", "less all that was sent"),
        (f"{LEFT}(owed - sent) / 2", "owed is"),
        (f"{LEFT}(owed - sent).float().double()", "does not send lossy(what is owed)"),
        ("return sent -> return None", "gives back None, and what is sent is wanted"),
        (f"{OWED}name = ''; owed = gradient + self.left.get(name, 0.0)", "does it add what is left of another name"),
        (f"{OWED}name = str(len(gradient)); owed = gradient + self.left.get(name, 0.0)", "'v' of ['w', 'v', 'b']"),
        (f"{OWED}owed = gradient.add_(self.left.get(name, 0.0))", "has changed"),
        ("self.lossy, self.left = lossy, {} -> self.lossy, self.left = d2lps.compress.ErrorFeedback(lossy), {}",
         "the exercise is to do without"),
    ],
    "ex-compression-seed same_places": [
        ("torch.Generator().manual_seed(step) -> comm.generator", "do all ranks mean the same ones"),
        (f"{PLACES}torch.arange(k)", "the others never come"),
        ("gradient.zero_() -> pass", "are not zero at the end"),
        (("values = gradient[places] -> gradient *= torch.zeros_like(gradient).index_fill_(0, places, 1.0)",
          "all_reduce(comm, values) -> return all_reduce(comm, gradient)"),
         "which numbers need not travel, and who need not be told the places"),
        (f"{PLACES}torch.randint(len(gradient), (k,), generator=chance)",
         "1 rank, 7 of 7 numbers: 6 numbers of rank 0 are not zero at the end, and 7 should be; is a place drawn twice"),
        ("chance = -> gradient = gradient.clone(); chance =", "it is what it was before"),
        (lambda comm, g, k, step: compress.all_reduce(comm, g, compress.random_k(k / len(g)), turn=step), "without"),
    ],
    "ex-compression-int8 add_int8": [
        (f"{MOST}127", "does their sum fit into 8 bits"),
        ("all_reduce(comm, largest, ReduceOp.MAX) -> pass", "Do all use one scale"),
        ("torch.int8 -> torch.int32", "bytes; scale and codes"),
        (f"{MOST}(15 if comm.size > 1 else 127)", "and half a step for each rank is"),
        (all_reduce, "bytes; scale and codes"),
        (cut_off, "is each code the nearest"),
        ("lambda comm, g: add_int8(comm, g.clone())", "gradients are what they were; do you change them in place"),
    ],
    "ex-compression-power power_round": [
        ("torch.linalg.qr(p).Q -> p", "orthonormal columns"),
        ("all_reduce(comm, q) -> pass", "summed over all ranks"),
        ("q.copy_(matrix.T @ p) -> q = matrix.T @ p", "begin with the q of the last"),
        ("p = matrix @ q -> q = torch.randn(q.shape, generator=comm.generator, dtype=q.dtype); p = matrix @ q",
         "one round of rank 2 is off"),
        (("p = matrix @ q\n    all_reduce(comm, p) -> all_reduce(comm, matrix)\n    p = matrix @ q",
          "all_reduce(comm, q) -> pass"), "two factors are"),
        (lambda comm, matrix, q: compress.all_reduce(comm, matrix, compress.power_sgd(2)), "without"),
    ],
    "ex-compression-break-even break_even": [
        (f"{GAIN}(nbytes - sent) / seconds", "a ring takes"),
        (f"{GAIN}2 * (ranks - 1) / ranks * nbytes / seconds", "a ring takes"),
        (f"{GAIN}2 * (ranks - 1) / ranks * (nbytes - sent) * seconds", "a ring takes"),
        (f"{GAIN}2 * (ranks - 1) * (nbytes - sent) / seconds", "a ring takes"),
        (f"{GAIN}0 * nbytes", "a ring takes"),
    ],
    "ex-compression-crossing crossing": [("100",), ("33.3",), ("4 / 0.08",), ("66_667",), ("'many'",)],
})  # fmt: skip


# ---- what the chapter says ----------------------------------------------------------------------------------------------


def pass_on(comm: Any, nbytes: int) -> None:
    mine, other = torch.empty(2, nbytes // 4, device=comm.device)
    comm.sendrecv(mine, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)


def test_pairs_of_the_largest_thousandth_cross_a_dense_ring_near_a_thousand_ranks() -> None:
    # Every step of a ring is like every other, and on a star every port has one message a step, however many ports there are:
    # one step of eight ranks is simulated. (The chapter holds 64 whole ranks against it.)
    nbytes = 100_000_000

    def step(length: int) -> float:
        return simulate(pass_on, star(8, 1.25e9, 5e-6), length, device="meta", trace=False).time

    def gained(p: int) -> float:
        return 2 * (p - 1) * step(nbytes // p) - (p - 1) * step(8 * nbytes // 4 // 1000)

    assert gained(950) > 0 > gained(1100)
