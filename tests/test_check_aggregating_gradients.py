"""The checks of *Aggregating gradients*: wrong answers are refused in words."""

import pytest
import torch
from solutions import refused

from d2lps import ReduceOp, aggregate, collectives
from d2lps_book.check import aggregating_gradients as check


@pytest.mark.parametrize(
    ("answers", "word"),
    [((350, 800, 87.5), "on their way out"), ((700, 700, 87.5), "no gradient of its own"), ((700, 800, 700 / 8 * 2), "a block"),
     ((0.7, 800, 87.5), "a thousand times too small"), (("700", 800, 87.5), "no number"), ((700, ..., 87.5), "not all")],
)  # fmt: skip
def test_by_hand_refuses(answers, word):
    refused(check.by_hand(*answers), word)


@pytest.mark.parametrize(("answer", "word"), [
    (16, "20.0 ms"), (20, "16.0 ms"), (21, "15.2 ms"), (22, "slower cable"), (32, "slower cable"),
    (21.33e9, "a billion times too large"),
])  # fmt: skip
def test_cable_refuses(answer, word):
    refused(check.cable(answer), word)


# ---- pipelined ----------------------------------------------------------------------------------------------------------


def collected(comm, tensor, root=0):
    """All to rank 0 at once, and back at once: what has no chunks."""
    others = [rank for rank in range(comm.size) if rank != root]
    if comm.rank != root:
        comm.send(tensor, root)
        comm.recv(tensor, root)
        return
    inbox = tensor.new_empty((comm.size, tensor.numel()))
    for work in [comm.irecv(inbox[rank], rank) for rank in others]:
        work.wait()
    for rank in others:
        comm.combine(tensor, inbox[rank])
    for work in [comm.isend(tensor, rank) for rank in others]:
        work.wait()


def chunk_by_chunk(comm, tensor, k):
    """Chunks that never overlap: 60 ms, as without them."""
    for chunk in tensor.tensor_split(k):
        collected(comm, chunk)


def ignores_k(comm, tensor, k):
    collected(comm, tensor)


def each_its_chunk(comm, tensor, k):
    """The roots take turns, all at the same time: quick, but not by rank 0."""
    for root, block in enumerate(tensor.tensor_split(comm.size)):
        collected(comm, block, root)


def loses_a_chunk(comm, tensor, k):
    for chunk in tensor.tensor_split(k)[: max(1, k - 1)]:
        collected(comm, chunk)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(chunk_by_chunk, "on its way out"), (ignores_k, "60.0 ms in 2 chunks"), (each_its_chunk, "should add up"),
     (loses_a_chunk, "missing"), (lambda comm, tensor, k: collectives.all_reduce(comm, tensor), "the library's"),
     (lambda comm, tensor, k: aggregate.on_device(comm, tensor), "the library's"), (lambda comm, tensor, k: None, "still empty"),
     (lambda comm, tensor, k: comm.send(tensor, 0), "rank 0")],
)  # fmt: skip
def test_pipelined_refuses(wrong, word):
    refused(check.pipelined(wrong), word)


# ---- by_owner -----------------------------------------------------------------------------------------------------------


def rank_0_owns_all(comm, tensors):
    """In two steps."""
    together = torch.cat(list(tensors))
    collected(comm, together)
    for tensor, total in zip(tensors, together.split([len(tensor) for tensor in tensors]), strict=True):
        comm.copy(tensor, total)


def one_after_another(comm, tensors):
    for index, tensor in enumerate(tensors):
        collected(comm, tensor, index % comm.size)


def cuts_them_up(comm, tensors):
    for tensor in tensors:
        for root, block in enumerate(tensor.tensor_split(comm.size)):
            collected(comm, block, root)


def everyone_adds_everything(comm, tensors):
    """In one step, without owners: p / 2 times the bytes."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    room = [(tensor, torch.empty_like(tensor), rank) for tensor in tensors for rank in others]
    works = [comm.irecv(inbox, rank) for _, inbox, rank in room]
    for work in works + [comm.isend(tensor, rank) for tensor in tensors for rank in others]:
        work.wait()
    for tensor, inbox, _ in room:
        comm.combine(tensor, inbox)


def forgets_the_last(comm, tensors):
    one_after_another(comm, tensors[:-1] or tensors)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(rank_0_owns_all, "let it own as many"), (one_after_another, "under way at once"), (cuts_them_up, "stay whole"),
     (forgets_the_last, "missing"), (everyone_adds_everything, "to its owner"),
     (lambda comm, tensors: [aggregate.blockwise(comm, t) for t in tensors], "the library's")],
)  # fmt: skip
def test_by_owner_refuses(wrong, word):
    refused(check.by_owner(wrong), word)


# ---- statistics ---------------------------------------------------------------------------------------------------------


def extremes(comm, mine):
    low, high = mine.min(0).values, mine.max(0).values
    collectives.all_reduce(comm, low, ReduceOp.MIN)
    collectives.all_reduce(comm, high, ReduceOp.MAX)
    return low, high


def mean_of_deviations(comm, mine):
    deviation = mine.std(correction=0).reshape(1)
    collectives.all_reduce(comm, deviation, ReduceOp.AVG)
    return *extremes(comm, mine), deviation.item()


def mean_of_means(comm, mine):
    """Right where all ranks have as many rows."""
    both = torch.stack([mine.mean(), mine.square().mean()])
    collectives.all_reduce(comm, both, ReduceOp.AVG)
    return *extremes(comm, mine), float((both[1] - both[0] ** 2) ** 0.5)


def gathers_all(comm, mine):
    count = torch.tensor([len(mine)])
    counts = [torch.empty_like(count) for _ in range(comm.size)]
    collectives.all_gather(comm, counts, count)
    room = [mine.new_zeros(max(map(int, counts)) * mine.shape[1]) for _ in counts]
    padded = torch.zeros_like(room[0])
    padded[: mine.numel()] = mine.flatten()
    collectives.all_gather(comm, room, padded)
    data = torch.cat([part.reshape(-1, mine.shape[1])[: int(n)] for part, n in zip(room, counts, strict=True)])
    return data.min(0).values, data.max(0).values, data.std(correction=0).item()


def its_own(comm, mine):
    return mine.min(0).values, mine.max(0).values, mine.std(correction=0).item()


def of_the_whole_table(comm, mine):
    low, high = extremes(comm, mine)
    return low.min(), high.max(), 0.0


def right_but_for(change):
    """The deviation of all, then changed."""

    def statistics(comm, mine):
        sums = torch.stack([torch.ones_like(mine).sum(), mine.sum(), mine.square().sum()])
        collectives.all_reduce(comm, sums)
        count, total, squares = sums.tolist()
        return change(comm, *extremes(comm, mine), (squares / count - (total / count) ** 2) ** 0.5, count)

    return statistics


def test_statistics_may_be_lists():
    assert check.statistics(right_but_for(lambda comm, low, high, deviation, _: (low.tolist(), high.tolist(), deviation)))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [(right_but_for(lambda comm, low, high, deviation, count: (low, high, deviation * (count / (count - 1)) ** 0.5)),
      "correction=0"),
     (right_but_for(lambda comm, low, high, deviation, _: (low, high, [deviation] * 4)), "one number, not 4"),
     (right_but_for(lambda comm, low, high, deviation, _: (deviation, low, high)), "one for each of the 4 columns"),
     (right_but_for(lambda comm, low, high, deviation, _: torch.cat([low, high, torch.tensor([deviation])])), "three things"),
     (right_but_for(lambda comm, *found: found[:3] if comm.rank == 0 else None), "rank 1 returns None"),
     (mean_of_deviations, "deviation of"), (mean_of_means, "different numbers of values"), (gathers_all, "more data make"),
     (its_own, "smallest values"), (of_the_whole_table, "smallest values")],
)  # fmt: skip
def test_statistics_refuses(wrong, word):
    refused(check.statistics(wrong), word)
