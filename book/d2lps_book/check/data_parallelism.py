"""Checks of the chapter *Data parallelism*: what makes four devices differ from one, who is odd, and how large a batch pays."""

import itertools
from typing import Any

import torch

from d2lps_book.check.exercise import Function, among, answered, judged, plural
from d2lps_book.check.tools import near, parts, refuse, without

RANKS = 1, 2, 3, 5, 8


@judged
def token_loss(function: Function) -> str:
    """Check `token_loss(comm, total, count)`: what to call backward on, where the ranks' gradients are then averaged."""
    for ranks in 1, 3, 2, 5, 8:  # of 2, one has all the tokens, and its own mean is half of what is wanted, as 1/p of it is
        counts = [7 * rank % 13 for rank in range(ranks - 1)] + [4]  # rank 0 has none
        slopes = [float(rank**2) for rank in range(1, ranks + 1)]
        run = among(ranks, _tokens, function, counts, slopes)
        wanted = sum(count * slope for count, slope in zip(counts, slopes, strict=True)) / sum(counts)
        got, sent = sum(run) / ranks, int(run.trace.bytes_sent().max(initial=0))
        told = f"{plural(ranks, 'rank')} with {counts} tokens: the mean gradient is"
        why = f", {ranks} times as large: who divides by the ranks?" * (ranks > 1 and abs(got * ranks - wanted) <= 1e-6)
        refuse((not abs(got - wanted) <= 1e-6, f"{told} {got:.4g}, and of all tokens alike it would be {wanted:.4g}{why}"),
               (sent > 8 * ranks, f"with {ranks} ranks a rank sends {sent} bytes: more than one number"))  # fmt: skip
    return "1 to 8 ranks with 0 to 10 tokens each"


def _tokens(comm: Any, function: Function, counts: list[int], slopes: list[float]) -> float:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = function(comm, weight * slopes[comm.rank] * counts[comm.rank], counts[comm.rank])
    refuse((not isinstance(loss, torch.Tensor) or not loss.requires_grad, f"one cannot call backward on {loss!r}"))
    return torch.autograd.grad(loss, weight)[0].item()


@judged
def indices(function: Function) -> str:
    """Check `indices(count, epoch, rank, ranks)`: a rank's examples: equal shares, none twice, another order each epoch."""
    for count, ranks in (12, 3), (100, 4), (101, 8), (37, 5), (12, 1):
        epochs = []
        for epoch in (0, 1, 2, 0):
            shares = [[int(index) for index in function(count, epoch, rank, ranks)] for rank in range(ranks)]
            every = [index for share in shares for index in share]
            case, long = f"{count} examples, ranks: {ranks}, epoch {epoch}", {*map(len, shares)}
            refuse((len(long) > 1, f"{case}: ranks get {sorted(long)} examples; who has one more waits forever"),
                   (twice := [i for i in every if every.count(i) > 1], f"{case}: example {twice[:1]} comes more than once"),
                   (not {*every} <= {*range(count)}, f"{case}: {max(every, default=0)} is no example"),
                   (len(every) != (most := count // ranks * ranks), f"{case}: {len(every)} of {most} examples come"))  # fmt: skip
            epochs.append(shares)
        case, plain = f"{count} examples, ranks: {ranks}", [sorted(share) for share in epochs[0]]
        first, second = ({pair for share in epoch for pair in itertools.pairwise(share)} for epoch in epochs[:2])
        refuse((len({*map(str, epochs)}) < 3, f"{case}: two epochs have the same order"),
               (epochs[0] == plain, f"{case}: nothing is shuffled"),
               (2 * len(first & second) > len(first), f"{case}: epoch 1 is epoch 0, begun elsewhere; shuffle again"),
               (epochs[0] != epochs[3], "asked again, an epoch has another order: no run could be repeated"))  # fmt: skip
    return "5 sizes, three epochs each"


@judged
def statistics(function: Function) -> str:
    """Check `statistics(comm, x)`: mean and variance of each column over the rows of all ranks, which have unequally many."""
    without(function, "all_gather", "gather")
    for ranks in RANKS:
        run = among(ranks, _columns, function)
        sent, told = int(run.trace.bytes_sent().max(initial=0)), f"with {plural(ranks, 'rank')}"
        refuse(*((found, f"{told}, rank {rank}: {found}") for rank, found in enumerate(run)),
               (sent > 224 * ranks, f"{told} a rank sends {sent} bytes: more than a few numbers a column"))  # fmt: skip
    return "1 to 8 ranks with 20 to 55 rows each"


def _columns(comm: Any, function: Function) -> str | None:
    rows = [20 + 17 * rank % 50 for rank in range(comm.size)]
    everything = torch.randn(sum(rows), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 2
    mean, variance = function(comm, everything.split(rows)[comm.rank].clone())
    for name, given, wanted in (("mean", mean, everything.mean(0)), ("variance", variance, everything.var(0, correction=0))):
        if not torch.allclose(given, wanted):
            one_less = name == "variance" and torch.allclose(given, everything.var(0))
            return (f"the {name} is {given.tolist()[0]:.4f} in column 0, and {wanted[0]:.4f} over all {sum(rows)} rows"
                    + f": divide by the number of rows, not by {sum(rows) - 1}" * one_less)  # fmt: skip
    return None


@judged
def odd_ranks(function: Function) -> str:
    """Check `odd_ranks(comm, tensor)`: the ranks that a majority outvotes; [] if all agree, None if there is no majority."""
    for marks in "A", "AA", "AB", "AABA", "BAAAA", "ABCA", "ABC", "ABACAAAD", "AAABBBBB", "AAAABBBB":
        majority = max(set(marks), key=marks.count)
        wanted = [rank for rank, mark in enumerate(marks) if mark != majority] if 2 * marks.count(majority) > len(marks) else None
        run = among(len(marks), _vote, function, marks)
        sent, told = int(run.trace.bytes_sent().max(initial=0)), f"ranks with tensors {', '.join(marks)}"
        refuse(*((said != wanted, f"{told}: rank {rank} says {said}, not {wanted}") for rank, said in enumerate(run)),
               (sent > 64 * (len(marks) - 1), f"{told}: a rank sends {sent:,} bytes; fingerprints are enough"))  # fmt: skip
    return "10 votes of 1 to 8 ranks; a change of 1e-7 was seen, and two numbers that changed places"


def _vote(comm: Any, function: Function, marks: str) -> Any:
    tensor, mark = torch.linspace(1, 2, 1000), ord(marks[comm.rank]) - ord("A")
    if mark % 2:  # two elements change places
        tensor[mark : mark + 2] = tensor[mark : mark + 2].flip(0)
    tensor[500] *= 1 + 1.2e-7 * mark * (mark % 2 == 0)
    return (said := function(comm, tensor)) and sorted(int(rank) for rank in said)


@judged
def estimates(function: Function) -> str:
    """Check `estimates(gradients, batch)`: |G|^2 and S, unbiased, from a row for each rank's gradient of `batch` examples."""
    without(function, "estimate", "NoiseScale")
    for ranks, batch in (2, 1), (3, 8), (8, 16), (5, 1):
        rows = torch.randn(ranks, 6, generator=torch.Generator().manual_seed(ranks), dtype=torch.float64) + (ranks < 8)
        gradient, noise = (float(value) for value in function(rows.clone(), batch))
        wanted, large, case = batch * float(rows.var(0).sum()), float(rows.mean(0).square().sum()), f"{ranks} ranks of {batch}"
        biased = abs(noise - wanted * (ranks - 1) / ranks) < 1e-9 * wanted
        hint = "First |G|^2, then S, the variance of a single example's gradient: a rank's is that of the mean of its batch"
        hint = f"Too small by {ranks - 1}/{ranks}: their own mean lies too near to the ranks" if biased else hint
        near(f"{case}: S", noise, wanted, hint, 1e-6)
        hint = "That is the squared mean, noise and all" if abs(gradient - large) < 1e-9 else "What of S is left in a mean?"
        near(f"{case}: |G|^2", gradient, large - wanted / (ranks * batch), hint, 1e-6)
    return "4 shapes"


@judged
def settings(function: Function) -> str:
    """Check `settings(batch, rate, ranks, keep)`: a rank's batch and the rate, from those that are good on one device."""
    for batch, rate, ranks in (64, 0.1, 4), (256, 0.01, 8), (32, 1.0, 1), (96, 0.3, 3):
        for keep, wanted in ("training", (batch // ranks, rate)), ("work", (batch, rate * ranks)):
            parts(f"batch {batch}, rate {rate}, {ranks} devices, keep the {keep}", function(batch, rate, ranks, keep),
                  ("a rank's batch", wanted[0], "How many examples has a step then, all ranks together?"),
                  ("the rate", wanted[1], "DDP takes the mean: is the step's batch larger than before?"))  # fmt: skip
    return "8 cases"


@answered
def critical(answer: Any) -> str:
    """Check the answer: the least steps, the critical batch, and the examples that a batch of 64 reads beyond the least."""
    parts("the training", answer, ("least steps", 200, "Two measurements, two unknowns: s_min and the product s_min B."),
          ("critical batch", 64, "At it, twice the least steps are needed."),
          ("examples more", 12_800, "400 steps of 64, less what the smallest batches would need: s_min B."))  # fmt: skip
    return "400 steps at 64: twice the least, and twice the examples"


@answered
def bert(answer: Any) -> str:
    """Check the answer: millions of parameters of BERT, base and large; GB of the large one's state on each of 64 devices."""
    shared = isinstance(answer, tuple | list) and len(answer) == 3 and abs(answer[2] - 335.1 * 16e-3 / 64) < 0.01
    refuse((shared, "a 64th of the state on each device: that is ZeRO. An all-reduce leaves all of it everywhere"))
    parts("BERT", answer, ("base, millions", 109.5, "Embeddings, 12 layers of about 12 h^2, a pooler."),
          ("large, millions", 335.1, "340 is rounded. h = 1,024 and 24 layers."),
          ("GB a device", 5.36, "16 bytes a parameter, and all parameters."), within=0.008)  # fmt: skip
    return "hundreds of millions, and all of them on every device"
