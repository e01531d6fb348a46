"""The checks of *Overlap and priority*: wrong answers are refused in words."""

import math
from functools import partial

import pytest
import torch
from solutions import refused, solution

from d2lps.collectives import all_reduce
from d2lps_book.check import overlap_and_priority as check

# ---- best_count ---------------------------------------------------------------------------------------------------------


def lowest_of_the_second_side(computing, sending, price):
    return max(1, round((computing / price) ** 0.5))


def where_the_sides_meet(computing, sending, price):
    return max(1, round((computing - sending) / price))


def rounded_down(computing, sending, price):
    return max(1, int(max((computing / price) ** 0.5, (computing - sending) / price)))


def rounded_up(computing, sending, price):
    return math.ceil(max((computing / price) ** 0.5, (computing - sending) / price))


def with_c_and_a_exchanged(computing, sending, price):
    return solution("ex-overlap-count")["best_count"](sending, computing, price)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(lowest_of_the_second_side, "with more it could be"), (where_the_sides_meet, "with more it could be"),
     (rounded_down, "with more it could be"), (with_c_and_a_exchanged, "it could be"),
     (lambda *times: 22, "with fewer it could be"),
     (rounded_up, "23 take 10.895 ms; with fewer it could be 0.000237 ms less"),
     (lambda *times: 0, "no whole number"),
     (lambda *times: {}.get(0), "no whole number"),
     (lambda computing, sending, price: (computing / price) ** 0.5, "no whole number")],
)  # fmt: skip
def test_best_count_refuses(wrong, word):
    refused(check.best_count(wrong), word)


# ---- shares -------------------------------------------------------------------------------------------------------------


def equal(computing, sending, count):
    return [1 / count] * count


def the_wrong_way_round(computing, sending, count):
    return solution("ex-overlap-shares")["shares"](computing, sending, count)[::-1]


def small_first_always(computing, sending, count):
    return solution("ex-overlap-shares")["shares"](min(computing, sending), max(computing, sending), count)


def in_float32(computing, sending, count):
    sizes = torch.tensor(not_divided_by_the_sum(computing, sending, count))
    return sizes / sizes.sum()


def not_divided_by_the_sum(computing, sending, count):
    return [(sending / computing) ** i for i in range(count)]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(equal, "the link could have begun earlier"), (the_wrong_way_round, "the step ends at"),
     (small_first_always, "before bucket"), (in_float32, "20.67, 1.9e-06 later than it could"),
     (not_divided_by_the_sum, "add up to 1"), (lambda computing, sending, count: [1.0], "not 4 fractions")],
)  # fmt: skip
def test_shares_refuses(wrong, word):
    refused(check.shares(wrong), word)


# ---- overlapped ---------------------------------------------------------------------------------------------------------


def summed(comm, bucket, before=()):
    for work in before:
        work.wait()
    flat = torch.cat([p.grad.flatten() for p in bucket])
    all_reduce(comm, flat)
    for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        parameter.grad.copy_(part.view_as(parameter) / comm.size)


def after_the_backward_pass(comm, loss, buckets):
    loss.backward()
    for bucket in buckets:
        summed(comm, bucket)


def in_the_hook(comm, loss, buckets):
    """Adds up in the backward pass itself, which stands still meanwhile."""
    with_hooks(comm, loss, buckets, lambda bucket, works: summed(comm, bucket))


def with_hooks(comm, loss, buckets, full, removed=True, waited=True):
    missing, works = [len(bucket) for bucket in buckets], []

    def ready(number, parameter):
        missing[number] -= 1
        if missing[number] == 0:
            full(buckets[number], works)

    hooks = [p.register_post_accumulate_grad_hook(partial(ready, k)) for k, bucket in enumerate(buckets) for p in bucket]
    loss.backward()
    for work in works if waited else ():
        work.wait()
    for hook in hooks if removed else ():
        hook.remove()


def started(comm, change=None):
    def add(lane, before, bucket):
        summed(lane, bucket, before)
        for parameter in bucket if change else ():
            change(lane, parameter)

    return lambda bucket, works: works.append(comm.start(add, works[-1:], bucket))


def forgets_to_divide(comm, loss, buckets):
    with_hooks(comm, loss, buckets, started(comm, lambda lane, p: p.grad.mul_(lane.size)))


def leaves_its_hooks(comm, loss, buckets):
    kept = solution("ex-overlap-hooks")["overlapped"]
    for bucket in buckets:
        bucket[0].register_post_accumulate_grad_hook(lambda p: all_reduce(comm, torch.zeros(8)))
    kept(comm, loss, buckets)


def leaves_hooks_that_count_on(comm, loss, buckets):
    """They never get to zero again, so that nothing is sent."""
    with_hooks(comm, loss, buckets, started(comm), removed=False)


def all_at_once(comm, loss, buckets):
    def full(bucket, works):
        works.append(comm.start(lambda lane: summed(lane, bucket)))

    with_hooks(comm, loss, buckets, full)


def waits_in_the_hook(comm, loss, buckets):
    """For the bucket before; the backward pass stands still meanwhile."""

    def full(bucket, works):
        for work in works[-1:]:
            work.wait()
        works.append(comm.start(lambda lane: summed(lane, bucket)))

    with_hooks(comm, loss, buckets, full)


def tensor_by_tensor(comm, loss, buckets):
    with_hooks(comm, loss, [[parameter] for bucket in buckets for parameter in bucket], started(comm))


def all_in_one(comm, loss, buckets):
    with_hooks(comm, loss, [[parameter for bucket in buckets for parameter in bucket]], started(comm))


def at_the_first_gradient(comm, loss, buckets):
    """Does not wait for the bucket to be full."""

    def add(lane, bucket, works):
        flat = torch.cat([p.new_zeros(p.shape).flatten() if p.grad is None else p.grad.flatten() for p in bucket])
        all_reduce(lane, flat)
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter) / lane.size)

    hooks = [bucket[0].register_post_accumulate_grad_hook(lambda p, bucket=bucket: works.append(comm.start(add, bucket, works)))
             for bucket in buckets]  # fmt: skip
    works = []
    loss.backward()
    for work in works:
        work.wait()
    for hook in hooks:
        hook.remove()


def alone(comm, loss, buckets):
    loss.backward()


def never_waits(comm, loss, buckets):
    with_hooks(comm, loss, buckets, started(comm), waited=False)


def sends_everything_twice(comm, loss, buckets):
    def add(lane, before, bucket):
        for work in before:
            work.wait()
        flat = torch.cat([p.grad.flatten() for p in bucket] * 2)
        all_reduce(lane, flat)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket] * 2), strict=False):
            p.grad.copy_(part.view_as(p) / lane.size)

    with_hooks(comm, loss, buckets, lambda bucket, works: works.append(comm.start(add, works[-1:], bucket)))


def for_two_ranks(comm, loss, buckets):
    with_hooks(comm, loss, buckets, started(comm, lambda lane, p: p.grad.mul_(lane.size / 2)))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(after_the_backward_pass, "leave once"), (in_the_hook, "go on meanwhile"), (forgets_to_divide, "is each divided"),
     (leaves_its_hooks, "is a hook left behind"), (leaves_hooks_that_count_on, "4 of 4 parameters have some"),
     (all_at_once, "two buckets are on their way at once"), (waits_in_the_hook, "go on meanwhile"),
     (tensor_by_tensor, "is a bucket one tensor"), (all_in_one, "one all-reduce for each bucket"),
     (at_the_first_gradient, "are not the means"), (alone, "are not the means"),
     (never_waits, "have you waited for the last"), (sends_everything_twice, "would do"), (for_two_ranks, "is each divided")],
)  # fmt: skip
def test_overlapped_refuses(wrong, word):
    refused(check.overlapped(wrong), word)


# ---- accumulate ---------------------------------------------------------------------------------------------------------


def as_printed(model, loss_of, batches):
    for batch in batches:
        loss = loss_of(model, batch)
        with model.no_sync():
            loss.backward()


def all_in_the_block(model, loss_of, batches):
    with model.no_sync():
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()


def without_dividing(model, loss_of, batches):
    with model.no_sync():
        for batch in batches[:-1]:
            loss_of(model, batch).backward()
    loss_of(model, batches[-1]).backward()


def every_time(model, loss_of, batches):
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()


def the_first_averages(model, loss_of, batches):
    (loss_of(model, batches[0]) / len(batches)).backward()
    with model.no_sync():
        for batch in batches[1:]:
            (loss_of(model, batch) / len(batches)).backward()


def by_the_flag(model, loss_of, batches):
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch) / len(batches)
        model.require_backward_grad_sync = number == len(batches) - 1
        loss.backward()


def one_large_batch(model, loss_of, batches):
    loss_of(model, torch.cat(batches)).backward()


def one_backward_pass_for_all(model, loss_of, batches):
    (sum(loss_of(model, batch) for batch in batches) / len(batches)).backward()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(one_large_batch, "one batch at a time"), (one_backward_pass_for_all, "one batch at a time"),
     (as_printed, "when does DDP decide"), (all_in_the_block, "never add up"), (without_dividing, "3.00 times"),
     (every_time, "add up 3 times"), (the_first_averages, "who averages"), (by_the_flag, "who averages")],
)  # fmt: skip
def test_accumulate_refuses(wrong, word):
    refused(check.accumulate(wrong), word)


# ---- timetable, batch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [((11, 14, 13, 12), ("first in", "then come 7 ms")), ((18, 11, 13, 12), ("whole", "until when")),
     ((18, 14, 12, 12), ("pieces of 2 ms", "until when")), ((18, 14, 13, 11), ("pieces of 1 ms",)), ((18, 14), ("4 numbers",))],
)  # fmt: skip
def test_timetable_refuses(wrong, words):
    refused(check.timetable(wrong), *words)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [((12.5, 126, 46), ("100 Gb/s", "2(p - 1)/p")), ((13, 130, 46), ("10 Gb/s", "backward pass hides it")),
     ((9, 84, 46), ("only the backward pass",)), ((13, 126, 53), ("micro-batches", "Only the last one's")),
     ((13, 126, 69), ("all forward and backward",)), ((2, 16, 46), ("a byte has 8 bits",))],
)  # fmt: skip
def test_batch_refuses(wrong, words):
    refused(check.batch(wrong), *words)
