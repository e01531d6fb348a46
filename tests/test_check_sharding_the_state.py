"""The checks of *Sharding the state*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refused

from d2lps import ReduceOp
from d2lps.collectives import all_gather_into_tensor, all_reduce, broadcast, gather, reduce, reduce_scatter_tensor, scatter
from d2lps_book.check import sharding_the_state as check


@pytest.mark.parametrize(
    ("name", "wrong", "word"),
    [
        ("memory", (16 * 13, 56.875, 31.6875, 16 * 13, 13), "stage 3"),
        ("memory", (208, 12 / 32 * 13, 31.6875, 6.5, 13), "stage 1"),
        ("memory", (208, 56.875, 31.6875, 6.5, 12), "2 + 14/N"),
        ("memory", (208, 56.875, 31.6875, 6.5), "5 numbers are wanted"),
        ("memory", (18 * 13, 56.875, 31.6875, 6.5, 13), "2 + 2 + 12"),
        ("accumulation", (2, 16, 24, 17, 2), "stage 2"),
        ("accumulation", (2, 9, 3, 17, 2), "Two all-gathers"),
        ("accumulation", (2, 9, 24, 10, 2), "no_sync"),
        ("accumulation", (2, 9, 24, 17, 3), "weights kept"),
    ],
)
def test_answer_refused(name, wrong, word):
    refused(getattr(check, name)(wrong), word)


# ---- sharded_step -------------------------------------------------------------------------------------------------------


def a_step(op=ReduceOp.AVG, gather=True, moves=True, remembers=True, all_of_it=False):
    def sharded_step(comm, weights, gradient, velocity, rate, momentum):
        n, length = len(weights), len(velocity)
        padding = weights.new_zeros(length * comm.size - n)
        mean, whole = torch.empty_like(velocity), torch.cat([weights, padding])
        if all_of_it:
            all_reduce(comm, padded := torch.cat([gradient, padding]), op)
            mean.copy_(padded.view(comm.size, -1)[comm.rank])
        else:
            reduce_scatter_tensor(comm, mean, torch.cat([gradient, padding]), op)
        new = (momentum * velocity if remembers else 0) + mean
        if remembers is None:
            velocity = new  # another tensor
        velocity.copy_(new)
        mine = whole.view(comm.size, -1)[comm.rank]
        mine -= rate * velocity
        if gather:
            all_gather_into_tensor(comm, whole, mine)
        if moves:
            weights.copy_(whole[:n])

    return sharded_step


def all_by_the_last_rank(comm, weights, gradient, velocity, rate, momentum):
    n, length, last = len(weights), len(velocity), comm.size - 1
    padding, is_last = weights.new_zeros(length * comm.size - n), comm.rank == last
    reduce(comm, summed := torch.cat([gradient, padding]), last)
    scatter(comm, mean := torch.empty_like(velocity), list(summed.view(comm.size, -1)) if is_last else None, last)
    velocity.mul_(momentum).add_(mean / comm.size)
    new = torch.cat([weights, padding]).view(comm.size, -1)[comm.rank] - rate * velocity
    parts = [torch.empty_like(new) for _ in range(comm.size)] if is_last else None
    gather(comm, new, parts, last)
    broadcast(comm, whole := torch.cat(parts) if is_last else summed, last)
    weights.copy_(whole[:n])


def knows_the_rate(comm, weights, gradient, velocity, rate, momentum):
    a_step()(comm, weights, gradient, velocity, 0.5, 0.9)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (a_step(op=ReduceOp.SUM), "2 times too large: a sum over ranks"),
        (a_step(remembers=None), "velocity after two steps is still zero"),
        (a_step(gather=False), "every shard"),
        (a_step(moves=False), "have not moved"),
        (a_step(remembers=False), "velocity"),
        (a_step(all_of_it=True), "send"),
        (all_by_the_last_rank, "send"),
        (knows_the_rate, "velocity"),
        (lambda comm, weights, gradient, velocity, rate, momentum: weights.sub_(rate * gradient), "velocity"),
    ],
)
def test_sharded_step_refuses(wrong, word):
    refused(check.sharded_step(wrong), word)


# ---- clip ---------------------------------------------------------------------------------------------------------------


def clipper(power=2, average=False, always=False, gathers=False, local=False):
    def clip(comm, shard, max_norm):
        total = shard.abs().pow(power).sum()
        if gathers:
            everything = shard.new_empty(comm.size * len(shard))
            all_gather_into_tensor(comm, everything, shard)
            total = everything.square().sum()
        elif not local:
            all_reduce(comm, total, ReduceOp.AVG if average else ReduceOp.SUM)
        norm = total ** (1 / power)
        shard *= max_norm / norm.item() if always else min(1, max_norm / norm.item())
        return norm

    return clip


def number_by_number(comm, shard, max_norm):
    squares = shard.square()
    for k in range(len(squares)):
        all_reduce(comm, squares[k : k + 1])
    norm = squares.sum().sqrt()
    shard *= min(1, max_norm / norm.item())
    return norm


def as_long_and_elsewhere(comm, shard, max_norm):
    all_reduce(comm, square := shard.square().sum())
    if (norm := square.sqrt()) > max_norm:
        shard.fill_(max_norm / (comm.size * len(shard)) ** 0.5)
    return norm


def sums_norms(comm, shard, max_norm):
    norm = shard.norm()
    all_reduce(comm, norm)
    shard *= min(1, max_norm / norm.item())
    return norm


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (clipper(local=True), "its own shard"),
        (sums_norms, "norm or square"),
        (clipper(average=True), "norm or square"),
        (clipper(power=1), "says the norm was"),
        (clipper(always=True), "have been scaled"),
        (clipper(gathers=True), "one number"),
        (number_by_number, "one number"),
        (as_long_and_elsewhere, "not all is scaled"),
        (lambda comm, shard, max_norm: str(max_norm), "says the norm was '1.0'"),
        (lambda *given: [clipper()(*given), None][1], "says the norm was None, which is no number"),
        (lambda comm, shard, max_norm: clipper()(comm, shard.clone(), max_norm), "scale them where they are"),
    ],
)
def test_clip_refuses(wrong, word):
    refused(check.clip(wrong), word)


# ---- lend ---------------------------------------------------------------------------------------------------------------


def lender(shrinks=True, returns=True, pays_back=True, ends=True):
    def lend(comm, layer):
        kept = [layer.weight.data.flatten()]
        shape, mine = layer.weight.shape, kept[0].chunk(comm.size)[comm.rank].clone()

        def gather():
            if shrinks:
                kept[0].untyped_storage().resize_(kept[0].nbytes)
            else:
                kept[0] = kept[0].new_empty(comm.size * len(mine))
            all_gather_into_tensor(comm, kept[0], mine)
            layer.weight.data = kept[0].view(shape)

        def free():
            layer.weight.data = mine.new_empty(0)
            if shrinks:
                kept[0].untyped_storage().resize_(0)

        def left(layer, inputs, output):
            if returns:
                output.register_hook(lambda _: gather())
            if pays_back:
                free()

        free()
        layer.register_forward_pre_hook(lambda *_: gather())
        layer.register_forward_hook(left)
        if ends:
            layer.weight.register_post_accumulate_grad_hook(lambda _: free())

    return lend


def keeps_all(comm, layer):
    """The right moments, and nothing is ever sent: every rank has a whole copy beside."""
    whole, mine = layer.weight.data.clone(), layer.weight.data.flatten()
    view = mine.view_as(layer.weight)

    def gather():
        mine.untyped_storage().resize_(mine.nbytes)
        view.copy_(whole)
        layer.weight.data = view

    def free():
        layer.weight.data = whole.new_empty(0)
        mine.untyped_storage().resize_(0)

    def left(layer, inputs, output):
        output.register_hook(lambda _: gather())
        free()

    free()
    layer.register_forward_pre_hook(lambda *_: gather())
    layer.register_forward_hook(left)
    layer.weight.register_post_accumulate_grad_hook(lambda _: free())


def quarter_only(comm, layer):
    layer.weight.data = layer.weight.data * (comm.rank == 0)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lender(shrinks=False), "autograd's included"),
        (lender(returns=False), "Error"),
        (lender(pays_back=False), "in the forward pass rank 0 holds the weights of 3"),
        (lender(ends=False), "in the backward pass rank 0 holds the weights of 3"),
        (keeps_all, "keep more than its shard"),
        (quarter_only, "holds the weights of 3 layers"),
    ],
)
def test_lend_refuses(wrong, word):
    refused(check.lend(wrong), word)
