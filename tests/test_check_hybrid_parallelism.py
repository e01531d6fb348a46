"""The checks of *Hybrid parallelism*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps_book.check import hybrid_parallelism as check

NOT_SUMMED = ("all_reduce(mesh.dp, found) -> pass", "found / mesh.dp.size -> found")
KEY, SAYS = "[(tp * pp, -tp, pp) for -> ", "return ranks // copy, -tp, pp -> "
OVERHEAD = "return 1 / inverse, (c1 * t2 - c2 * t1) / (c1 * n2 - c2 * n1) -> return "

test_refused = refusing({
    "ex-hybrid-groups groups": [
        ('"tp": (1, tp), "dp": (tp, dp) -> "tp": (dp, tp), "dp": (1, dp)', "differ from rank 0"),
        (('"dp": (tp, dp) -> "dp": (tp * pp, dp)', "(tp * dp, pp) -> (tp, pp)"), "nearer to each other than dp's"),
        (('"dp": (tp, dp) -> "dp": (1, dp)', "(tp * dp, pp) -> (1, pp)"), "differ from rank 0"),
        (lambda *given: [[0]], "exactly one group"),
        (lambda *given: [], "exactly one group"),
        (lambda *given: 3, "is not a list of lists"),
        ("first + stride * place -> first + stride * place + 0.4", "is not a list of lists"),
        (lambda axis, dp, tp, pp: [[rank] for rank in range(dp * tp * pp)], "a group has"),
    ],
    "ex-hybrid-gradient gradient": [
        (("all_reduce(mesh.tp, -> all_reduce(mesh.dp,", "all_reduce(mesh.dp, found) -> all_reduce(mesh.tp, found)"),
         "whose rows"),
        (("all_reduce(mesh.tp, product) -> pass", *NOT_SUMMED), "whose rows"),
        (NOT_SUMMED, "whose rows"),
        ("product = x @ w -> product = x @ w; "
         "d2lps.collectives.all_gather(mesh.comm, [x.clone() for _ in range(mesh.comm.size)], x)",
         "would send"),
        ("found / mesh.dp.size -> found", "times too large"),
        ("all_reduce(mesh.tp, product) -> all_reduce(mesh.dp, product)", "whose rows"),
        ("found / mesh.dp.size -> found / mesh.dp.size / 2", "a factor of 2"),
        (lambda mesh, x, w, y: x, "came back"),
        (lambda *given: [1.0], "came back"),
        (lambda *given: 3, "came back"),
        (lambda *given: torch.ones(8).numpy(), "came back"),
    ],
    "ex-hybrid-memory memory": [
        ("(30.29, 3.37, 128)", "ZeRO 1 share out"), ("(34.07, 10.1, 128)", "16 bytes"), ("(30.29, 10.1, 106)", "power of two"),
        ("(30.29, 10.1, 64)", "power of two"), ("30.29", "3 numbers are wanted"),
    ],
    "ex-hybrid-bubble micro_batches": [
        ("(1536, 7 / 96, 0.25, 6)", "shared out along dp"), ("(96, 8 / 96, 0.25, 6)", "what (a) gives"),
        ("(96, 7 / 96, 3 / 24, 6)", "of 2 are left"), ("(96, 7 / 96, 0.25, 5)", "v must divide"),
    ],
    "ex-hybrid-fit fit": [
        ("t1, t2 = t1 - r1, t2 - r2 -> pass", "efficiency of"),
        ("return 1 / inverse -> return inverse", "1/efficiency"),
        (lambda rows: (0.5, 0.001), "efficiency of"),
        (lambda rows: 0.5, "is not two numbers"),
        (f"{OVERHEAD}1 / inverse, 0.0", "overhead of"),
        (f"{OVERHEAD}1 / inverse, float('nan')", "overhead of"),
    ],
    "ex-hybrid-fewest fewest": [
        ((f"{KEY}[(tp * pp, tp, pp) for", f"{SAYS}return ranks // copy, tp, pp"), "tp comes first"),
        ((f"{KEY}[(pp, -tp, pp) for", f"{SAYS}return ranks // (-tp * pp), -tp, pp"), "fewer ranks would do"),
        ((f"{KEY}[(pp, tp, pp) for", f"{SAYS}return ranks // (tp * pp), tp, pp"), "fewer ranks"),
        ("machine % tp == heads % tp == layers % pp == 0 -> True", "tp divides machine"),
        ("machine % tp == heads % tp == layers % pp == 0 -> machine % tp == layers % pp == 0", "machine and heads"),
        ("for tp in range(1, machine + 1) -> for tp in (1, 2, 4, 8)", "tp comes first"),
        ("<= memory -> < memory", "(4, 8, 2) fits, but fewer ranks"),
        (lambda *given: (given[0], 1, 1), "GB a device"),
        (lambda *given: (1, 1, 1), "is not all ranks"),
        (lambda *given: given[6:] or None, "it does fit"),
        ("return None -> return 1, 1, ranks", "None"),
    ],
})  # fmt: skip


def test_the_order_within_a_group_is_free():
    def groups(axis, dp, tp, pp):
        grid, place = torch.arange(dp * tp * pp).view(pp, dp, tp), ("pp", "dp", "tp").index(axis)
        return [set(one) for one in grid.movedim(place, -1).reshape(-1, grid.shape[place]).tolist()]

    assert check.groups(groups)


def test_a_fit_may_solve_two_equations():
    def fit(rows):
        matrix, wanted = (torch.tensor(part).double() for part in zip(*((row[:2], row[3] - row[2]) for row in rows), strict=True))
        one, overhead = torch.linalg.solve(matrix, wanted).tolist()
        return 1 / one, overhead

    assert check.fit(fit)
