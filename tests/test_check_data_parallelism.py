"""The checks of *Data parallelism*: wrong answers are refused in words."""

from solutions import refusing, tried

OWN_MEAN = "total * comm.size / everybody.item() -> total / max(1, count)"
CUT = "order[: count // ranks * ranks]"
MARK = "[int.from_bytes(digest[:7])] -> "

test_refused = refusing({
    "ex-data-tokens token_loss": [
        (OWN_MEAN, "of all tokens alike"),
        ("total * comm.size -> total", "3 times as large: who divides by the ranks?"),
        (("everybody = -> everybody = torch.zeros(100, dtype=torch.float64); everybody[:1] =",
          "everybody.item() -> everybody[0].item()"), "more than one number"),
        ("everybody = -> if not count: return total\n    everybody =", "all_reduce"),
        ("total * comm.size / everybody.item() -> total * float('nan')", "of all tokens alike"),
        ("return total -> return total.detach()", "cannot call backward"),
        (lambda comm, total, count: 3.0, "cannot call backward"),
    ],
    "ex-data-sampler indices": [
        (("manual_seed(epoch) -> manual_seed(rank)", f"{CUT} -> order"), "comes more than once"),
        ("manual_seed(epoch) -> manual_seed(0)", "same order"),
        ("manual_seed(epoch) -> manual_seed(epoch % 2)", "same order"),
        (f"{CUT} -> order", "waits forever"),
        (f"{CUT}[rank::ranks] -> order[: count // ranks]", "comes more than once"),
        (lambda count, epoch, rank, ranks: [], "of 12 examples come"),
        ("torch.randperm(count, generator=dice) -> torch.arange(count)", "same order"),
        ("generator=dice -> generator=dice if ranks > 1 else None", "again"),
        (("manual_seed(epoch) -> manual_seed(0)", f"{CUT} -> order.roll(epoch)[: count // ranks * ranks]"), "begun elsewhere"),
        (("manual_seed(epoch) -> manual_seed(0)", f"{CUT} -> order.roll(epoch * ranks)[: count // ranks * ranks]"),
         "begun elsewhere"),
        ("[rank::ranks].tolist() -> [rank::ranks].sort()[0].tolist()", "nothing is shuffled"),
    ],
    "ex-data-norm statistics": [
        (("len(x)) -> 1)", "x.sum(0, True) -> x.mean(0, True)", "x.square().sum(0, True) -> x.var(0, correction=0, keepdim=True)",
          " - mean.square() -> "), "over all"),  # means of means
        (("x.square().sum(0, True) -> len(x) * x.var(0, correction=0, keepdim=True)", " - mean.square() -> "), "the variance"),
        ("sums[2] / sums[0] - mean.square() -> (sums[2] - sums[0] * mean.square()) / (sums[0] - 1)", "not by 19"),
        ("sums = torch.cat -> table = x.new_zeros(comm.size, 100, 3); table[comm.rank, :len(x)] = x; all_reduce(comm, table)\n"
         "    sums = torch.cat", "more than a few numbers"),
        (lambda comm, x: (x.mean(0), x.var(0, correction=0)), "the mean"),
    ],
    "ex-data-odd odd_ranks": [
        (f"{MARK}[int(100 * tensor.sum())]", "says []"),
        (f"{MARK}[int(tensor.double().sum() * 2**24)]", "says []"),
        ("return None -> pass", "not None"),
        (("return None -> pass", "max(set(prints), key=prints.count) -> prints[0]"), "not None"),
        ("2 * prints.count(usual) <= comm.size -> any(prints.count(mark) == prints.count(usual) for mark in {*prints} - {usual})",
         "A, B, C, A: rank 0 says [1, 2], not None"),
        ("mine = torch -> all_gather_into_tensor(comm, torch.empty(comm.size * len(tensor)), tensor)\n    mine = torch",
         "fingerprints are enough"),
        (lambda comm, tensor: [], "says []"),
    ],
    "ex-data-estimates estimates": [
        ("gradients.var(0) -> gradients.var(0, correction=0)", "Too small by"),
        ("return large - noise / (ranks * batch) -> return large", "noise and all"),
        (("batch * gradients -> gradients", "(ranks * batch) -> ranks"), "3 ranks of 8: S",
         "the variance of a single example's gradient"),
        ("return large - noise / (ranks * batch) -> return max(0, large - noise / (ranks * batch))", "What of S is left"),
    ],
    "ex-data-settings settings": [
        (lambda batch, rate, ranks, keep: (batch, rate * ranks**2), "a rank's batch"),
        ("return batch // ranks, rate -> return batch // ranks, rate * ranks", "the rate"),
        ("return batch, rate * ranks -> return batch // ranks, rate", "keep the work, a rank's batch"),
        ("return batch, rate * ranks -> return batch, rate", "keep the work, the rate"),
    ],
    "ex-data-critical critical": [
        ("(250, 64, 12_800)", "least steps"), ("(200, 256, 12_800)", "critical batch"), ("(200, 64, 25_600)", "examples more"),
        ("200", "3 numbers"),
    ],
    "ex-data-bert bert": [
        ("(1.1, 3.4, 5.4)", "base"), ("(109.5, 302, 5.4)", "large"), ("(110, 340, 5.44)", "large"),
        ("(109.5, 335.1, 1.34)", "GB a device"), ("(109.5, 335.1, 0.084)", "that is ZeRO"),
        ("(109_482_240, 335_141_888, 5.36)", "base"),
    ],
})  # fmt: skip


def test_a_ranks_own_mean_is_not_taken_for_a_forgotten_factor():
    assert "who divides" not in tried("ex-data-tokens token_loss", OWN_MEAN).text
