"""The checks of *Sharding the state*: wrong answers are refused in words."""

import torch
from solutions import refusing

from d2lps.collectives import broadcast, gather, reduce, scatter


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


def quarter_only(comm, layer):
    layer.weight.data = layer.weight.data * (comm.rank == 0)


GATHER = "all_gather_into_tensor(comm, flat, mine) -> "
VELOCITY = "velocity.mul_(momentum).add_(mean) -> "

test_refused = refusing({
    "ex-sharding-memory memory": [
        ("(16 * 13, 56.875, 31.6875, 16 * 13, 13)", "stage 3"), ("(208, 12 / 32 * 13, 31.6875, 6.5, 13)", "stage 1"),
        ("(208, 56.875, 31.6875, 6.5, 12)", "2 + 14/N"), ("(208, 56.875, 31.6875, 6.5)", "5 numbers are wanted"),
        ("(18 * 13, 56.875, 31.6875, 6.5, 13)", "2 + 2 + 12"),
    ],
    "ex-sharding-accumulation accumulation": [
        ("(2, 16, 24, 17, 2)", "stage 2"), ("(2, 9, 3, 17, 2)", "Two all-gathers"), ("(2, 9, 24, 10, 2)", "no_sync"),
        ("(2, 9, 24, 17, 3)", "weights kept"),
    ],
    "ex-sharding-step sharded_step": [
        ("ReduceOp.AVG -> ReduceOp.SUM", "2 times too large: a sum over ranks"),
        (f"{VELOCITY}velocity = momentum * velocity + mean", "velocity after two steps is still zero"),
        (f"{VELOCITY}velocity.copy_(mean)", "velocity"),
        (f"{GATHER}pass", "every shard"),
        ("weights.copy_(flat[:n]) -> pass", "have not moved"),
        (("reduce_scatter_tensor(comm, mean, torch.cat -> d2lps.collectives.all_reduce(comm, whole := torch.cat",
          f"{VELOCITY}velocity.mul_(momentum).add_(whole.view(comm.size, -1)[comm.rank])"), "send"),
        ("n, length = len(weights), -> n, rate, momentum, length = len(weights), 0.5, 0.9,", "velocity"),
        (all_by_the_last_rank, "send"),
        (lambda comm, weights, gradient, velocity, rate, momentum: weights.sub_(rate * gradient), "velocity"),
    ],
    "ex-sharding-clip clip": [
        ("all_reduce(comm, square) -> pass", "its own shard"),
        (("shard.square().sum() -> shard.norm()", "square.sqrt() -> square"), "norm or square"),
        ("all_reduce(comm, square) -> all_reduce(comm, square, ReduceOp.AVG)", "norm or square"),
        (("shard.square() -> shard.abs()", "square.sqrt() -> square"), "says the norm was"),
        ("min(1, max_norm / norm.item()) -> max_norm / norm.item()", "have been scaled"),
        (("all_reduce(comm, square) -> all_gather_into_tensor(comm, every := shard.new_empty(comm.size * len(shard)), shard)",
          "square.sqrt() -> every.norm()"), "one number"),
        (("shard.square().sum() -> shard.square()", "square.sqrt() -> square.sum().sqrt()",
          "all_reduce(comm, square) -> [all_reduce(comm, one) for one in square.split(1)]"), "one number"),
        ("shard *= min(1, max_norm / norm.item()) -> "
         "norm > max_norm and shard.fill_(max_norm / (comm.size * len(shard)) ** 0.5)", "not all is scaled"),
        ("return norm -> return str(max_norm)", "says the norm was '1.0'"),
        ("return norm -> return None", "says the norm was None, which is no number"),
        ("shard *= -> shard = shard *", "scale them where they are"),
    ],
    "ex-sharding-lend lend": [
        (("flat.untyped_storage().resize_(flat.nbytes) -> full = mine.new_empty(comm.size * len(mine))",
          f"{GATHER}all_gather_into_tensor(comm, full, mine)", "data = view -> data = full.view_as(view)"),
         "autograd's included"),
        ("output.register_hook(lambda _: gather()) -> pass", "Error"),
        ("gather())\n        free() -> gather())", "in the forward pass rank 0 holds the weights of 3"),
        ("lambda _: free() -> lambda _: None", "in the backward pass rank 0 holds the weights of 3"),
        ((f"{GATHER}view.copy_(whole)", "mine = flat.chunk -> whole = layer.weight.data.clone(); mine = flat.chunk"),
         "keep more than its shard"),
        (quarter_only, "holds the weights of 3 layers"),
    ],
})  # fmt: skip
