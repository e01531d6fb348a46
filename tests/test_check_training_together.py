"""The checks of *Training together*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refusing

from d2lps import ReduceOp
from d2lps.collectives import all_reduce
from d2lps_book.check import training_together as check


@pytest.fixture(autouse=True)
def no_long_patience(monkeypatch):
    """With what never comes."""
    monkeypatch.setattr(check, "_PATIENCE", 0.1)


def mean_of_accuracies(comm, correct, seen):
    mine = torch.tensor([correct / seen if seen else 0.0])
    all_reduce(comm, mine, ReduceOp.AVG)
    return mine.item()


def equal(speeds, batch):
    return [batch // len(speeds) + (k < batch % len(speeds)) for k in range(len(speeds))]


COUNT, BOTH = "gradient.new_tensor([count]) -> ", "torch.cat([gradient * count, total]) -> "
MEAN, ALIKE = "gradient.copy_(message[:-1] / message[-1]) -> ", "return correct / seen -> return "

test_refused = refusing({
    "ex-aggregating-weights weighted_mean": [
        (lambda comm, gradient, count: all_reduce(comm, gradient, ReduceOp.AVG), "every image count"),
        ((f"{COUNT}gradient.new_tensor([count > 0])", f"{BOTH}torch.cat([gradient, total])"), "every image count"),
        ((f"{COUNT}gradient.new_full(gradient.shape, count)", f"{MEAN}gradient.copy_(message[: len(gradient)] / message[-1])"),
         "numbers are sent"),
        ("all_reduce(comm, message) -> all_reduce(comm, message[:-1]); all_reduce(comm, message[-1:])", "travel along"),
        (f"{BOTH}torch.cat([gradient * count, total]).float()", "dtype of `gradient`"),
        (f"{MEAN}gradient.copy_(message[:-1] / (comm.size * max(count, 1)))", "off by"),
        (lambda comm, gradient, count: gradient.mul_(2), "off by"),
        (lambda comm, gradient, count: 2 * gradient, "in place"),
        (f"{MEAN}gradient = message[:-1] / message[-1]", "write into it"),
    ],
    "ex-aggregating-unequal shares": [
        (lambda speeds, batch: [round(batch * speed / sum(speeds)) for speed in speeds], "add up to"),
        ("counts[soonest] += 1 -> counts[0] += 1", "keep all waiting"),
        (equal, "keep all waiting"),
        (lambda speeds, batch: [40, 40, 10, 10], "keep all waiting"),
        (lambda speeds, batch: [batch * speed / sum(speeds) for speed in speeds], "whole"),
        (lambda speeds, batch: [batch], "whole numbers"),
    ],
    "ex-aggregating-overlap backward": [
        ("hook.remove() -> pass", "leaves 2 hooks"),
        ("talker.start()\n    loss.backward() -> loss.backward()\n    talker.start()", "before the backward pass was over"),
        ("queue.put) -> lambda parameter: aggregate(parameter.grad))", "stood still"),
        ("talker.join() -> pass", "wait for all"),
        ("talker.start() -> talker.start()\n    [each.register_post_accumulate_grad_hook("
         "lambda p: Thread(target=aggregate, args=(p.grad,)).start()) for each in model.parameters()]", "aggregated"),
        (lambda loss, model, aggregate: loss.backward(), "before the backward pass"),
    ],
    "ex-aggregating-accuracy accuracy": [
        (mean_of_accuracies, "it is 9/11 = 0.8181818182; does every image"),
        ("[correct, seen], device=comm.device) -> [correct, seen], dtype=torch.float32)", "beyond what a float32"),
        (("correct, seen = counts.tolist() -> pass", f"{ALIKE}(counts[0] / counts[1]).item()"), "as near as a float32 comes"),
        (f"{ALIKE}correct / seen if comm.rank == 0 else None", "rank 1 returns nothing"),
        (lambda comm, correct, seen: correct / seen if seen else 0.0, "rank 0 says"),
        (lambda comm, *counts: 0.75, "says 0.75"),
    ],
})  # fmt: skip


def test_torch_gives_an_empty_shard_the_gradient_0():
    """So weighted_mean needs no guard: the loss is nan, its gradient is not."""
    weights = torch.ones(3, 4, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.ones(0, 3) @ weights, torch.ones(0, dtype=torch.int64))
    assert loss.isnan() and torch.equal(torch.autograd.grad(loss, weights)[0], torch.zeros(3, 4))
