"""The checks of *Overlap and priority*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps.collectives import all_reduce


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


def as_printed(model, loss_of, batches):
    for batch in batches:
        loss = loss_of(model, batch)
        with model.no_sync():
            loss.backward()


def by_the_flag(model, loss_of, batches):
    for number, batch in enumerate(batches):
        loss = loss_of(model, batch) / len(batches)
        model.require_backward_grad_sync = number == len(batches) - 1
        loss.backward()


BEST = "best = floor(max(1, lowest, meeting)) -> "
RETURNED = "[size / sum(sizes) for size in sizes] -> "
START = "sums.append(comm.start(add, sums[-1:], buckets[number])) -> "
BEGIN = "missing, sums = "
LAST = "(loss_of(model, batches[-1]) / len(batches)).backward() -> "

test_refused = refusing({
    "ex-overlap-count best_count": [
        (f"{BEST}return max(1, round((computing / price) ** 0.5))", "with more it could be"),
        (f"{BEST}return max(1, round((computing - sending) / price))", "with more it could be"),
        (f"{BEST}return max(1, int(max((computing / price) ** 0.5, (computing - sending) / price)))", "with more it could be"),
        ("lowest = -> computing, sending = sending, computing\n    lowest =", "it could be"),
        (lambda *times: 22, "with fewer it could be"),
        (f"{BEST}return -int(-max((computing / price) ** 0.5, (computing - sending) / price) // 1)",
         "23 take 10.895 ms; with fewer it could be 0.000237 ms less"),
        (lambda *times: 0, "no whole number"),
        (lambda *times: {}.get(0), "no whole number"),
        (lambda computing, sending, price: (computing / price) ** 0.5, "no whole number"),
    ],
    "ex-overlap-shares shares": [
        (lambda computing, sending, count: [1 / count] * count, "the link could have begun earlier"),
        (f"{RETURNED}[size / sum(sizes) for size in sizes][::-1]", "the step ends at"),
        ("(sending / computing) -> (max(computing, sending) / min(computing, sending))", "before bucket"),
        (f"{RETURNED}torch.tensor(sizes) / torch.tensor(sizes).sum()", "20.67, 1.9e-06 later than it could"),
        (f"{RETURNED}sizes", "add up to 1"),
        (lambda computing, sending, count: [1.0], "not 4 fractions"),
    ],
    "ex-overlap-hooks overlapped": [
        ((f"{START}pass", "for work in sums: -> for bucket in buckets:",
          "work.wait()\n    for hook -> add(comm, (), bucket)\n    for hook"), "leave once"),
        (f"{START}add(comm, (), buckets[number])", "go on meanwhile"),  # in the backward pass itself
        ("/ lane.size -> / 1", "is each divided"),
        ("loss.backward() -> loss.backward(); [bucket[0].register_post_accumulate_grad_hook("
         "lambda p: all_reduce(comm, torch.zeros(8))) for bucket in buckets]", "is a hook left behind"),
        ("hook.remove() -> pass", "4 of 4 parameters have some"),  # hooks that never count down to zero again
        (f"{START}sums.append(comm.start(add, (), buckets[number]))", "two buckets are on their way at once"),
        (f"{START}[work.wait() for work in sums[-1:]]; sums.append(comm.start(add, (), buckets[number]))", "go on meanwhile"),
        (f"{BEGIN} -> buckets = [[p] for bucket in buckets for p in bucket]; {BEGIN}", "is a bucket one tensor"),
        (f"{BEGIN} -> buckets = [sum(buckets, [])]; {BEGIN}", "one all-reduce for each bucket"),
        (at_the_first_gradient, "are not the means"),
        (lambda comm, loss, buckets: loss.backward(), "are not the means"),
        ("for work in sums: -> for work in ():", "have you waited for the last"),
        (("torch.cat([p.grad.flatten() for p in bucket]) -> torch.cat([p.grad.flatten() for p in bucket] * 2)",
          "flat.split([p.numel() for p in bucket]) -> flat.split([p.numel() for p in bucket] * 2)"), "would do"),
        ("/ lane.size -> / 2", "is each divided"),
    ],
    "ex-overlap-accumulate accumulate": [
        (lambda model, loss_of, batches: loss_of(model, torch.cat(batches)).backward(), "one batch at a time"),
        (lambda model, loss_of, batches: (sum(loss_of(model, batch) for batch in batches) / len(batches)).backward(),
         "one batch at a time"),
        (as_printed, "when does DDP decide"),
        (("batches[:-1] -> batches", f"{LAST}pass"), "never add up"),
        (("loss_of(model, batch) / len(batches) -> loss_of(model, batch)", f"{LAST}loss_of(model, batches[-1]).backward()"),
         "3.00 times"),
        ("model.no_sync() -> torch.enable_grad()", "add up 3 times"),
        (("with model -> (loss_of(model, batches[0]) / len(batches)).backward()\n    with model", "batches[:-1] -> batches[1:]",
          f"{LAST}pass"), "who averages"),
        (by_the_flag, "who averages"),
    ],
    "ex-overlap-timetable timetable": [
        ("(11, 14, 13, 12)", "first in", "then come 7 ms"), ("(18, 11, 13, 12)", "whole", "until when"),
        ("(18, 14, 12, 12)", "pieces of 2 ms", "until when"), ("(18, 14, 13, 11)", "pieces of 1 ms"), ("(18, 14)", "4 numbers"),
    ],
    "ex-overlap-batch batch": [
        ("(12.5, 126, 46)", "100 Gb/s", "2(p - 1)/p"), ("(13, 130, 46)", "10 Gb/s", "backward pass hides it"),
        ("(9, 84, 46)", "only the backward pass"), ("(13, 126, 53)", "micro-batches", "Only the last one's"),
        ("(13, 126, 69)", "all forward and backward"), ("(2, 16, 46)", "a byte has 8 bits"),
    ],
})  # fmt: skip
