"""The checks of *Hybrid parallelism*: solutions pass, wrong answers are refused in words."""

from functools import partial

import pytest
import torch
from solutions import refused, solution

from d2lps.collectives import all_gather, all_reduce
from d2lps_book.check import hybrid_parallelism as check

SOLUTIONS = {"groups": "ex-hybrid-groups", "gradient": "ex-hybrid-gradient", "fit": "ex-hybrid-fit", "fewest": "ex-hybrid-fewest"}
ANSWERS = {"memory": "ex-hybrid-memory", "micro_batches": "ex-hybrid-bubble"}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solution_passes(name):
    verdict = getattr(check, name)(solution(SOLUTIONS[name])[name])
    assert verdict, verdict


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_passes(name):
    assert getattr(check, name)(solution(ANSWERS[name])["answer"])


# ---- groups -------------------------------------------------------------------------------------------------------------


def outermost(axis, dp, tp, pp, order=("pp", "tp", "dp")):
    """The innermost axis last in `order`: right with ("pp", "dp", "tp")."""
    sizes = {"dp": dp, "tp": tp, "pp": pp}
    grid = torch.arange(dp * tp * pp).view([sizes[name] for name in order])
    return grid.movedim(order.index(axis), -1).reshape(-1, sizes[axis]).tolist()


def neighbors(axis, dp, tp, pp):
    size = {"dp": dp, "tp": tp, "pp": pp}[axis]
    return torch.arange(dp * tp * pp).view(-1, size).tolist()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(outermost, "differ from rank 0"), (partial(outermost, order=("dp", "pp", "tp")), "nearer to each other than dp's"),
     (neighbors, "differ from rank 0"), (lambda *given: [[0]], "exactly one group"), (lambda *given: 3, "is not a list of lists"),
     (lambda axis, dp, tp, pp: [[rank] for rank in range(dp * tp * pp)], "a group has")],
)  # fmt: skip
def test_groups_refuses(wrong, word):
    assert check.groups(partial(outermost, order=("pp", "dp", "tp")))
    refused(check.groups(wrong), word)


def with_parts(axis, dp, tp, pp):
    return [[rank + 0.4 for rank in one] for one in outermost(axis, dp, tp, pp, ("pp", "dp", "tp"))]


def test_groups_are_of_whole_numbers():
    refused(check.groups(with_parts), "is not a list of lists")


def test_the_order_within_a_group_is_free_and_no_group_at_all_is_said():
    assert check.groups(lambda *given: [set(one) for one in outermost(*given, ("pp", "dp", "tp"))])
    refused(check.groups(lambda *given: []), "exactly one group")


# ---- gradient -----------------------------------------------------------------------------------------------------------


def swapped(mesh, x, w, y, forward="dp", backward="tp", mean=True):
    product = x @ w
    all_reduce(getattr(mesh, forward), product)
    found = 2 * x.T @ (product - y) / len(y)
    all_reduce(getattr(mesh, backward), found)
    return found / mesh.dp.size if mean else found


def nothing_sent(mesh, x, w, y):
    return 2 * x.T @ (x @ w - y) / len(y)


def forward_alone(mesh, x, w, y):
    product = x @ w
    all_reduce(mesh.tp, product)
    return 2 * x.T @ (product - y) / len(y)


def all_of_it(mesh, x, w, y):
    """Right, but everybody is sent everything."""
    rows = [torch.empty_like(x) for _ in range(mesh.comm.size)]
    all_gather(mesh.comm, rows, x)
    return swapped(mesh, x, w, y, "tp", "dp")


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(swapped, "whose rows"), (nothing_sent, "whose rows"), (forward_alone, "whose rows"), (all_of_it, "would send"),
     (partial(swapped, forward="tp", backward="dp", mean=False), "times too large"),
     (partial(swapped, forward="dp", backward="dp"), "whose rows"), (lambda mesh, x, w, y: x, "came back")],
)  # fmt: skip
def test_gradient_refuses(wrong, word):
    assert check.gradient(partial(swapped, forward="tp", backward="dp"))
    refused(check.gradient(wrong), word)


@pytest.mark.parametrize("got", [[1.0], 3, torch.ones(8).numpy()])
def test_a_gradient_that_is_no_tensor_is_refused_in_words(got):
    refused(check.gradient(lambda mesh, x, w, y: got), "came back")


def test_half_a_gradient_is_refused_in_words():
    refused(check.gradient(lambda *given: swapped(*given, "tp", "dp") / 2), "a factor of 2")


# ---- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"),
    [((43.75, 2.73, 64), "ZeRO 1 share out"), ((49.2, 12.99, 64), "16 bytes"), ((43.75, 12.99, 35), "power of two"),
     ((43.75, 12.99, 32), "power of two"), (43.75, "3 numbers are wanted")],
)  # fmt: skip
def test_memory_refuses(answer, word):
    refused(check.memory(answer), word)


@pytest.mark.parametrize(
    ("answer", "word"),
    [((1536, 7 / 96, 0.25, 6), "shared out along dp"), ((96, 8 / 96, 0.25, 6), "what (a) gives"),
     ((96, 7 / 96, 3 / 24, 6), "of 2 are left"),
     ((96, 7 / 96, 0.25, 5), "v must divide")],
)  # fmt: skip
def test_micro_batches_refuses(answer, word):
    refused(check.micro_batches(answer), word)


# ---- fit ----------------------------------------------------------------------------------------------------------------


def fitted(rows, rest=True, inverse=True):
    matrix = torch.tensor([row[:2] for row in rows]).double()
    wanted = torch.tensor([row[3] - (row[2] if rest else 0) for row in rows]).double()
    one, overhead = torch.linalg.solve(matrix, wanted).tolist()
    return (1 / one if inverse else one), overhead


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(partial(fitted, rest=False), "efficiency of"), (partial(fitted, inverse=False), "1/efficiency"),
     (lambda rows: (0.5, 0.001), "efficiency of"), (lambda rows: 0.5, "is not two numbers"),
     (lambda rows: (fitted(rows)[0], 0.0), "overhead of"),
     (lambda rows: (fitted(rows)[0], float("nan")), "overhead of")],
)  # fmt: skip
def test_fit_refuses(wrong, word):
    assert check.fit(fitted)
    refused(check.fit(wrong), word)


# ---- fewest -------------------------------------------------------------------------------------------------------------


def by_rule(ranks, machine, layers, heads, state, memory, tp_first=True, least=True, divides=True, every_head=True, tps=None,
            full=True):  # fmt: skip
    found = []
    for tp in tps or range(1, machine + 1):
        for pp in range(1, layers + 1):
            allowed = not (machine % tp or (every_head and heads % tp) or layers % pp) or not divides
            if allowed and ranks % (tp * pp) == 0 and (state / tp / pp < memory or (full and state / tp / pp == memory)):
                found.append((tp * pp if least else pp, -tp if tp_first else tp, tp, pp))
    if not found:
        return None
    *_, tp, pp = min(found)
    return ranks // (tp * pp), tp, pp


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(partial(by_rule, tp_first=False), "tp comes first"), (partial(by_rule, least=False), "fewer ranks would do"),
     (partial(by_rule, divides=False), "tp divides machine"), (partial(by_rule, every_head=False), "machine and heads"),
     (partial(by_rule, tps=(1, 2, 4, 8)), "tp comes first"), (partial(by_rule, least=False, tp_first=False), "fewer ranks"),
     (partial(by_rule, full=False), "(4, 8, 2) fits, but fewer ranks"),
     (lambda *given: (given[0], 1, 1), "GB a device"),
     (lambda *given: (1, 1, 1), "is not all ranks"), (lambda *given: given[6:] or None, "it does fit"),
     (lambda *given: by_rule(*given) or (1, 1, given[0]), "None")],
)  # fmt: skip
def test_fewest_refuses(wrong, word):
    assert check.fewest(by_rule)
    refused(check.fewest(wrong), word)
