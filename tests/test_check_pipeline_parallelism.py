"""The checks of *Pipeline parallelism*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refused, solution

from d2lps.parallel.pipeline.balance import cut
from d2lps.parallel.pipeline.schedules import one_f_one_b
from d2lps_book.check import pipeline_parallelism as check

# ---- one_each -----------------------------------------------------------------------------------------------------


def the_librarys(ranks, micro_batches):
    return [[(a.kind, a.micro_batch) for a in row] for row in one_f_one_b(ranks, micro_batches)]


def all_forward_first(ranks, micro_batches):
    return [[("F", k) for k in range(micro_batches)] + [("B", k) for k in range(micro_batches)]] * ranks


def without_looking_at_the_number_of_micro_batches(ranks, micro_batches):
    first = [ranks - 1 - rank for rank in range(ranks)]
    return [
        [("F", k) for k in range(n)] + [a for k in range(n, micro_batches) for a in (("F", k), ("B", k - n))]
        + [("B", k) for k in range(max(micro_batches - n, 0), micro_batches)] for n in first
    ]  # fmt: skip


def one_too_many_at_first(ranks, micro_batches):
    rows = solution("ex-pipeline-schedule")["one_each"](ranks + 1, micro_batches)
    return rows[:ranks]


def backward_before_forward_in_a_pair(ranks, micro_batches):
    rows = []
    for row in solution("ex-pipeline-schedule")["one_each"](ranks, micro_batches):
        turns = [k for k in range(len(row) - 1) if (row[k][0], row[k + 1][0]) == ("B", "F")][1:2]
        for k in turns:
            row[k], row[k + 1] = row[k + 1], row[k]
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(the_librarys, "it uses one_f_one_b"), (all_forward_first, "how many stages are behind it"),
     (without_looking_at_the_number_of_micro_batches, "what if there are few of them"),
     (one_too_many_at_first, "how many stages are behind it"), (backward_before_forward_in_a_pair, "whose turn is it"),
     (lambda ranks, micro_batches: [("F", 0), ("B", 0)], "a list for each of 1 rank")],
)  # fmt: skip
def test_one_each_refuses(wrong, word):
    refused(check.one_each(wrong), word)


# ---- finish -------------------------------------------------------------------------------------------------------


def by_the_formula(schedule, forward, backward):
    p, m = len(schedule), len(schedule[0]) // 2
    return (m + p - 1) * (forward[0] + backward[0])


def with_all_ranks_as_slow_as_the_slowest(schedule, forward, backward):
    p = len(schedule)
    return solution("ex-pipeline-replay")["finish"](schedule, [max(forward)] * p, [max(backward)] * p)


def with_forward_and_backward_exchanged(schedule, forward, backward):
    return solution("ex-pipeline-replay")["finish"](schedule, backward, forward)


def that_takes_what_never_ends_for_zero(schedule, forward, backward):
    return solution("ex-pipeline-replay")["finish"](schedule, forward, backward) or 0.0


def that_never_ends_where_micro_batches_are_not_in_order(schedule, forward, backward):
    if any(row != sorted(row, key=lambda action: action[1]) for kind in "FB" for row in
           [[action for action in row if action[0] == kind] for row in schedule]):  # fmt: skip
        return None
    return solution("ex-pipeline-replay")["finish"](schedule, forward, backward)


def that_never_ends_for_one_list_only(schedule, forward, backward):
    found = solution("ex-pipeline-replay")["finish"](schedule, forward, backward)
    return 0.0 if found is None and schedule[1][0] == ("F", 0) else found


def that_goes_backward_before_it_has_gone_forward(schedule, forward, backward):
    return 5.0 if schedule[-1][:1] == [("B", 0)] else solution("ex-pipeline-replay")["finish"](schedule, forward, backward)


def with_the_first_two_ranks_costs(schedule, forward, backward):
    forward, backward = ([some[rank % 2] for rank in range(len(some))] if len(some) > 1 else some for some in (forward, backward))
    return solution("ex-pipeline-replay")["finish"](schedule, forward, backward)


def taken_off_the_lists(schedule, forward, backward):
    found = solution("ex-pipeline-replay")["finish"](schedule, forward, backward)
    for row in schedule:
        row.clear()
    return found


def test_finish_may_use_up_its_lists():
    assert check.finish(taken_off_the_lists)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(by_the_formula, "it ends at"), (with_all_ranks_as_slow_as_the_slowest, "it ends at"),
     (with_forward_and_backward_exchanged, "it ends at"), (that_takes_what_never_ends_for_zero, "it never ends"),
     (lambda schedule, forward, backward: {}.get(0), "it does end"),
     (lambda schedule, forward, backward: float("nan"), "it ends at"),
     (that_never_ends_where_micro_batches_are_not_in_order, "it does end"), (that_never_ends_for_one_list_only, "it never ends"),
     (that_goes_backward_before_it_has_gone_forward, "its own F0"), (with_the_first_two_ranks_costs, "it ends at")],
)  # fmt: skip
def test_finish_refuses(wrong, word):
    refused(check.finish(wrong), word)


# ---- carry --------------------------------------------------------------------------------------------------------


def ends(comm, kind):
    back = 1 if kind == "B" else -1
    return comm.rank + back, comm.rank - back


def carries(wait=lambda sent, number: None, keep=None, send="isend", last=True):
    """`carry` with one thing changed."""

    def carry(comm, schedule, work):
        made, sent = [], []
        for number, (kind, k) in enumerate(schedule[comm.rank]):
            (src, dst), x = ends(comm, kind), torch.zeros(4)
            if 0 <= src < comm.size:
                comm.recv(x, src)
            x = x + work(kind, k)
            made.append(x.clone())
            out = x if keep is None else keep.copy_(x)
            if 0 <= dst < comm.size:
                sent.append(getattr(comm, send)(out, dst))
            wait(sent, number)
        for message in sent if last else []:
            message and message.wait()
        return made

    return carry


def every_other_time(sent, number):
    if number % 2 and sent:
        sent[-1].wait()


def in_an_order_of_its_own(comm, schedule, work):
    order = [sorted(row, key=lambda action: (action[0] == "B", action[1])) for row in schedule]
    return solution("ex-pipeline-send")["carry"](comm, order, work)


def going_on_with_the_last_tensor(comm, schedule, work):
    made, x, sent = [], torch.zeros(4), []
    for kind, k in schedule[comm.rank]:
        src, dst = ends(comm, kind)
        if 0 <= src < comm.size:
            comm.recv(x := torch.empty(4), src)
        x = x + work(kind, k)
        made.append(x)
        if 0 <= dst < comm.size:
            sent.append(comm.isend(x, dst))
    for message in sent:
        message.wait()
    return made


def without_messages(comm, schedule, work):
    return [torch.full((4,), work(*action)) for action in schedule[comm.rank]]


def that_reckons_what_it_should_receive(comm, schedule, work):
    made = []
    for kind, k in schedule[comm.rank]:
        work(kind, k)
        ranks = range(comm.rank + 1) if kind == "F" else range(comm.rank, comm.size)
        made.append(torch.full((4,), sum(rank + 100.0 * k for rank in ranks)))
    return made


def that_sends_all_at_the_end(comm, schedule, work):
    made = that_reckons_what_it_should_receive(comm, schedule, work)
    messages = []
    for (kind, _), x in zip(schedule[comm.rank], made, strict=True):
        src, dst = ends(comm, kind)
        messages += [comm.irecv(torch.zeros(4), src)] if 0 <= src < comm.size else []
        messages += [comm.isend(x, dst)] if 0 <= dst < comm.size else []
    for message in messages:
        message.wait()
    return made


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(carries(send="send"), "deadlock"), (carries(keep=torch.zeros(4)), "still under way"),
     (carries(last=False), "leaves before"),
     (carries(wait=every_other_time), "deadlock"), (in_an_order_of_its_own, "in that order"), (without_messages, "what is sent"),
     (going_on_with_the_last_tensor, "begins with zeros"),
     (that_reckons_what_it_should_receive, "0 messages"), (that_sends_all_at_the_end, "sooner than can be")],
)  # fmt: skip
def test_carry_refuses(wrong, word):
    refused(check.carry(wrong), word)


# ---- count --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [((160, 48, 50, 450, 48), "1F1B: not 160"), ((150, 38, 50, 450, 48), "go around together"),
     ((150, 48, 150, 450, 48), "ZB-H1: not 150"), ((150, 48, 50, 48, 48), "GPipe's GB"), ((150, 48, 50, 450, 450), "1F1B's GB"),
     (150, "5 numbers are wanted"), ((150, 48, float("nan"), 450, 48), "ZB-H1")],
)  # fmt: skip
def test_count_refuses(wrong, word):
    refused(check.count(wrong), word)


# ---- best_cut -----------------------------------------------------------------------------------------------------


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


def the_librarys_cut(costs, stages):
    return [len(part) for part in cut(costs, stages)]


def good_for_few_layers_only(costs, stages):
    return solution("ex-pipeline-cut")["best_cut"](costs, stages) if len(costs) < 20 else equal_numbers(costs, stages)


def good_for_whole_numbers_only(costs, stages):
    return solution("ex-pipeline-cut")["best_cut"]([int(cost) for cost in costs], stages)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(good_for_few_layers_only, "is possible"), (good_for_whole_numbers_only, "is possible"),
     (equal_numbers, "is possible"), (filled_up_to_the_mean, "is possible"), (the_librarys_cut, "it uses cut"),
     (lambda costs, stages: [len(costs), *[0] * (stages - 1)], "at least one a stage"),
     (lambda costs, stages: 3, "numbers of layers")],
)  # fmt: skip
def test_best_cut_refuses(wrong, word):
    refused(check.best_cut(wrong), word)


# ---- pays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "word"),
    [((1.536, 2.472, 2.092, 7), "before"), ((1.704, 2.304, 2.092, 7), "slowed"), ((1.704, 2.472, 1.92, 7), "moved"),
     ((1.704, 2.472, 2.092, 6), "steps"), ((1.704, 2.472, 2.092, 4), "steps")],
)  # fmt: skip
def test_pays_refuses(wrong, word):
    refused(check.pays(wrong), word)
