"""The checks of *Pipeline parallelism*: wrong answers are refused in words."""

import torch
from solutions import refusing, solution, tried

from d2lps.parallel.pipeline.balance import cut
from d2lps.parallel.pipeline.schedules import one_f_one_b


def the_librarys(ranks, micro_batches):
    return [[(a.kind, a.micro_batch) for a in row] for row in one_f_one_b(ranks, micro_batches)]


def all_forward_first(ranks, micro_batches):
    return [[("F", k) for k in range(micro_batches)] + [("B", k) for k in range(micro_batches)]] * ranks


def by_the_formula(schedule, forward, backward):
    p, m = len(schedule), len(schedule[0]) // 2
    return (m + p - 1) * (forward[0] + backward[0])


def equal_numbers(costs, stages):
    return [len(part) for part in torch.arange(len(costs)).tensor_split(stages)]


def filled_up_to_the_mean(costs, stages):
    counts, left = [], list(costs)
    for stage in range(stages, 1, -1):
        n, mean = 1, sum(left) / stage
        while n < len(left) - stage + 1 and sum(left[: n + 1]) <= mean:
            n += 1
        counts.append(n)
        left = left[n:]
    return [*counts, len(left)]


def good_for_few_layers_only(costs, stages):
    return solution("ex-pipeline-cut")["best_cut"](costs, stages) if len(costs) < 20 else equal_numbers(costs, stages)


COST, ENDS = '(forward if kind == "F" else backward)[rank] -> ', "return None if stuck else max(ended.values()) -> "
BEGIN = "ended, last = "
OUT_OF_ORDER = """any(row != sorted(row, key=lambda action: action[1]) for kind in "FB" for row in
           [[action for action in row if action[0] == kind] for row in schedule])"""
SENT, MADE = "sent.append(comm.isend(made[-1], dst)) -> ", "made.append(x + work(kind, k)) -> "
BEGUN = "made, sent = [], [] -> made, sent, "
RECKONED = "x += sum(r + 100.0 * k for r in (range(comm.rank) if kind == 'F' else range(comm.rank + 1, comm.size)))"

test_refused = refusing({
    "ex-pipeline-schedule one_each": [
        (the_librarys, "it uses one_f_one_b"),
        (all_forward_first, "how many stages are behind it"),
        ("min(ranks - 1 - rank, micro_batches) -> ranks - 1 - rank", "what if there are few of them"),
        ("min(ranks - 1 - rank, -> min(ranks - rank,", "how many stages are behind it"),
        ('[("F", k), ("B", k - first)] -> [("F", k), ("B", k - first)][:: -1 if k == first + 1 else 1]', "whose turn is it"),
        (lambda ranks, micro_batches: [("F", 0), ("B", 0)], "a list for each of 1 rank"),
    ],
    "ex-pipeline-replay finish": [
        (by_the_formula, "it ends at"),
        (f'{COST}max(forward if kind == "F" else backward)', "it ends at"),
        (f'{COST}(backward if kind == "F" else forward)[rank]', "it ends at"),
        (f'{COST}(forward if kind == "F" else backward)[rank % 2]', "it ends at"),
        (f"{ENDS}return 0.0 if stuck else max(ended.values())", "it never ends"),
        (f'{ENDS}return 0.0 if stuck and schedule[1][0] == ("F", 0) else None if stuck else max(ended.values())',
         "it never ends"),
        (f"{BEGIN} -> if {OUT_OF_ORDER}: return None\n    {BEGIN}", "it does end"),
        (f'{BEGIN} -> if schedule[-1][:1] == [("B", 0)]: return 5.0\n    {BEGIN}', "its own F0"),
        (lambda schedule, forward, backward: {}.get(0), "it does end"),
        (lambda schedule, forward, backward: float("nan"), "it ends at"),
    ],
    "ex-pipeline-send carry": [
        (f"{SENT}comm.send(made[-1], dst)", "deadlock"),
        ((f"{BEGUN}out = [], [], torch.zeros(4)", f"{MADE}made.append(x + work(kind, k)); out.copy_(made[-1])",
          "isend(made[-1] -> isend(out"), "still under way"),
        ("message.wait() -> pass", "leaves before"),
        (f"{SENT}sent.append(comm.isend(made[-1], dst))\n        if len(made) % 2 == 0 and sent: sent[-1].wait()", "deadlock"),
        ("in schedule[comm.rank] -> in sorted(schedule[comm.rank], key=lambda action: (action[0] == 'B', action[1]))",
         "in that order"),
        ((f"{BEGUN}x = [], [], torch.zeros(4)", "        x = torch.zeros(4)\n -> ", f"{MADE}made.append(x := x + work(kind, k))",
          "comm.recv(x, src) -> comm.recv(x := torch.empty(4), src)"), "begins with zeros"),
        (("comm.recv(x, src) -> pass", f"{SENT}pass"), "what is sent"),
        ((f"comm.recv(x, src) -> {RECKONED}", f"{SENT}pass"), "0 messages"),
        ((f"comm.recv(x, src) -> {RECKONED}; sent.append((comm.irecv, torch.zeros(4), src))",
          f"{SENT}sent.append((comm.isend, made[-1], dst))",  # all at the end
          "for message in sent: -> for message in [start(*what) for start, *what in sent]:"), "sooner than can be"),
    ],
    "ex-pipeline-count count": [
        ("(160, 48, 50, 450, 48)", "1F1B: not 160"), ("(150, 38, 50, 450, 48)", "go around together"),
        ("(150, 48, 150, 450, 48)", "ZB-H1: not 150"), ("(150, 48, 50, 48, 48)", "GPipe's GB"),
        ("(150, 48, 50, 450, 450)", "1F1B's GB"), ("150", "5 numbers are wanted"), ("(150, 48, float('nan'), 450, 48)", "ZB-H1"),
    ],
    "ex-pipeline-cut best_cut": [
        (good_for_few_layers_only, "is possible"),
        ("@cache\n    def best -> costs = [int(cost) for cost in costs]\n    @cache\n    def best", "is possible"),
        (equal_numbers, "is possible"),
        (filled_up_to_the_mean, "is possible"),
        (lambda costs, stages: [len(part) for part in cut(costs, stages)], "it uses cut"),
        (lambda costs, stages: [len(costs), *[0] * (stages - 1)], "at least one a stage"),
        (lambda costs, stages: 3, "numbers of layers"),
    ],
    "ex-pipeline-pays pays": [
        ("(1.536, 2.472, 2.092, 7)", "before"), ("(1.704, 2.304, 2.092, 7)", "slowed"), ("(1.704, 2.472, 1.92, 7)", "moved"),
        ("(1.704, 2.472, 2.092, 6)", "steps"), ("(1.704, 2.472, 2.092, 4)", "steps"),
    ],
})  # fmt: skip


def test_finish_may_use_up_its_lists():
    assert tried("ex-pipeline-replay finish", "return None if stuck -> [row.clear() for row in schedule]; return None if stuck")
