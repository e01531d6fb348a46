"""The checks of *Training together*: wrong answers are refused in words."""

from queue import Queue
from threading import Thread

import pytest
import torch
from solutions import refused, solution

from d2lps import ReduceOp
from d2lps.collectives import all_reduce
from d2lps_book.check import training_together as check

# ---- weighted_mean ------------------------------------------------------------------------------------------------------


def plain_mean(comm, gradient, count):
    all_reduce(comm, gradient, ReduceOp.AVG)


def over_those_with_images(comm, gradient, count):
    message = torch.cat([gradient, gradient.new_tensor([count > 0])])
    all_reduce(comm, message)
    gradient.copy_(message[:-1] / message[-1])


def twice_the_length(comm, gradient, count):
    message = torch.cat([gradient * count, gradient.new_full(gradient.shape, count)])
    all_reduce(comm, message)
    gradient.copy_(message[: len(gradient)] / message[-1])


def a_message_of_its_own(comm, gradient, count):
    total = gradient.new_tensor([count])
    gradient *= count
    all_reduce(comm, gradient)
    all_reduce(comm, total)
    gradient /= total


def gives_the_name_away(comm, gradient, count):
    message = torch.cat([gradient * count, gradient.new_tensor([count])])
    all_reduce(comm, message)
    gradient = message[:-1] / message[-1]


def a_message_of_floats(comm, gradient, count):
    message = torch.cat([gradient * count, gradient.new_tensor([count])]).float()
    all_reduce(comm, message)
    gradient.copy_(message[:-1] / message[-1])


def divides_by_the_ranks(comm, gradient, count):
    gradient *= count
    all_reduce(comm, gradient)
    gradient /= comm.size * count if count else 1


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(plain_mean, "every image count"), (over_those_with_images, "every image count"), (twice_the_length, "numbers are sent"),
     (a_message_of_its_own, "travel along"), (a_message_of_floats, "dtype of `gradient`"), (divides_by_the_ranks, "off by"),
     (lambda comm, gradient, count: gradient.mul_(2), "off by"),
     (lambda comm, gradient, count: 2 * gradient, "in place"), (gives_the_name_away, "write into it")],
)  # fmt: skip
def test_weighted_mean_refuses(wrong, word):
    refused(check.weighted_mean(wrong), word)


def test_torch_gives_an_empty_shard_the_gradient_0():
    """So weighted_mean needs no guard: the loss is nan, its gradient is not."""
    weights = torch.ones(3, 4, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.ones(0, 3) @ weights, torch.ones(0, dtype=torch.int64))
    assert loss.isnan() and torch.equal(torch.autograd.grad(loss, weights)[0], torch.zeros(3, 4))


# ---- shares -------------------------------------------------------------------------------------------------------------


def rounded(speeds, batch):
    return [round(batch * speed / sum(speeds)) for speed in speeds]


def rest_to_the_first(speeds, batch):
    counts = [int(batch * speed / sum(speeds)) for speed in speeds]
    counts[0] += batch - sum(counts)
    return counts


def equal(speeds, batch):
    return [batch // len(speeds) + (k < batch % len(speeds)) for k in range(len(speeds))]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(rounded, "add up to"), (rest_to_the_first, "keep all waiting"), (equal, "keep all waiting"),
     (lambda speeds, batch: [40, 40, 10, 10], "keep all waiting"),
     (lambda speeds, batch: [batch * speed / sum(speeds) for speed in speeds], "whole"),
     (lambda speeds, batch: [batch], "whole numbers")],
)  # fmt: skip
def test_shares_refuses(wrong, word):
    refused(check.shares(wrong), word)


# ---- accuracy -----------------------------------------------------------------------------------------------------------


def mean_of_accuracies(comm, correct, seen):
    mine = torch.tensor([correct / seen if seen else 0.0])
    all_reduce(comm, mine, ReduceOp.AVG)
    return mine.item()


def in_float32(comm, correct, seen):
    counts = torch.tensor([correct, seen], dtype=torch.float32)
    all_reduce(comm, counts)
    return float(counts[0].double() / counts[1].double())


def divides_in_float32(comm, correct, seen):
    counts = torch.tensor([correct, seen])
    all_reduce(comm, counts)
    return (counts[0] / counts[1]).item()


def on_rank_0(comm, correct, seen):
    counts = torch.tensor([correct, seen])
    all_reduce(comm, counts)
    return counts[0].item() / counts[1].item() if comm.rank == 0 else None


def only_here(comm, correct, seen):
    return correct / seen if seen else 0.0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(mean_of_accuracies, "it is 9/11 = 0.8181818182; does every image"), (in_float32, "beyond what a float32"),
     (divides_in_float32, "as near as a float32 comes"), (on_rank_0, "rank 1 returns nothing"), (only_here, "rank 0 says"),
     (lambda comm, *counts: 0.75, "says 0.75")],
)  # fmt: skip
def test_accuracy_refuses(wrong, word):
    refused(check.accuracy(wrong), word)


# ---- backward -----------------------------------------------------------------------------------------------------------


def after_it(loss, model, aggregate):
    loss.backward()
    for weight in reversed(list(model.parameters())):
        aggregate(weight.grad)


def in_the_hook(loss, model, aggregate):
    hooks = [w.register_post_accumulate_grad_hook(lambda w: aggregate(w.grad)) for w in model.parameters()]
    loss.backward()
    for hook in hooks:
        hook.remove()


def does_not_wait(loss, model, aggregate):
    waiting = Queue()
    Thread(target=lambda: [aggregate(waiting.get().grad) for _ in model.parameters()], daemon=True).start()
    hooks = [weight.register_post_accumulate_grad_hook(waiting.put) for weight in model.parameters()]
    loss.backward()
    for hook in hooks:
        hook.remove()


def leaves_its_hooks(loss, model, aggregate):
    mine = solution("ex-aggregating-overlap")["backward"]
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda w: Thread(target=aggregate, args=(w.grad,)).start())
    mine(loss, model, aggregate)


def leaves_what_does_nothing(loss, model, aggregate):
    """Its own hooks put what is ready into a queue that nobody reads any more."""
    waiting = Queue()
    talker = Thread(target=lambda: [aggregate(weight.grad) for weight in iter(waiting.get, None)])
    talker.start()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(waiting.put)
    loss.backward()
    waiting.put(None)
    talker.join()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(leaves_what_does_nothing, "leaves 2 hooks"),
     (after_it, "before the backward pass was over"), (in_the_hook, "stood still"), (does_not_wait, "wait for all"),
     (leaves_its_hooks, "aggregated"),
     (lambda loss, model, aggregate: loss.backward(), "before the backward pass")],
)  # fmt: skip
def test_backward_refuses(monkeypatch, wrong, word):
    monkeypatch.setattr(check, "_PATIENCE", 0.1)
    refused(check.backward(wrong), word)
