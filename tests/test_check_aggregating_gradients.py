"""The checks of *Aggregating gradients*: wrong answers are refused in words."""

from solutions import refusing, solution, tried

from d2lps import aggregate, collectives

by_owner = solution("ex-aggregating-owner")["by_owner"]
DEVIATION = "(squares / count - (total / count) ** 2) ** 0.5"
RESULT, SUMS = f"low, high, {DEVIATION} -> ", "sums = torch.stack([count, mine.sum(), mine.square().sum()]) -> sums = "

test_refused = refusing({
    "ex-aggregating-by-hand by_hand": [
        ("350, 800, 87.5", "on their way out"), ("700, 700, 87.5", "no gradient of its own"),
        ("700, 800, 700 / 8 * 2", "a block"), ("0.7, 800, 87.5", "a thousand times too small"),
        ("'700', 800, 87.5", "no number"), ("700, ..., 87.5", "not all"),
    ],
    "ex-aggregating-cable cable": [
        ("16", "20.0 ms"), ("20", "16.0 ms"), ("21", "15.2 ms"), ("22", "slower cable"), ("32", "slower cable"),
        ("21.33e9", "a billion times too large"),
    ],
    "ex-aggregating-pipeline pipelined": [
        ("lambda comm, tensor, k: [pipelined(comm, chunk, 1) for chunk in tensor.tensor_split(k)]", "on its way out"),
        ("lambda comm, tensor, k: pipelined(comm, tensor, 1)", "60.0 ms in 2 chunks"),
        (lambda comm, tensor, k: by_owner(comm, tensor.tensor_split(comm.size)), "should add up"),  # quick, but not by rank 0
        ("tensor.tensor_split(k), -> tensor.tensor_split(k)[:max(1, k - 1)],", "missing"),
        (lambda comm, tensor, k: collectives.all_reduce(comm, tensor), "the library's"),
        (lambda comm, tensor, k: aggregate.on_device(comm, tensor), "the library's"),
        (lambda comm, tensor, k: None, "still empty"),
        (lambda comm, tensor, k: comm.send(tensor, 0), "rank 0"),
    ],
    "ex-aggregating-owner by_owner": [
        ("index % comm.size -> 0", "let it own as many"),
        (("tensors): -> tensors, turn=None):\n    if turn is None:  # one after another\n"
          "        return [by_owner(comm, [tensor], turn) for turn, tensor in enumerate(tensors)]",
          "index % comm.size -> turn % comm.size"), "under way at once"),
        ("lambda comm, tensors: [by_owner(comm, t.tensor_split(comm.size)) for t in tensors]", "stay whole"),
        ("lambda comm, tensors: by_owner(comm, tensors[:-1] or tensors)", "missing"),
        (("mine = [t for t, who in zip(tensors, owner) if who == comm.rank] -> mine = tensors",
          "theirs = [(t, who) for t, who in zip(tensors, owner)\n              if who != comm.rank] -> "
          "theirs = [(t, rank) for t in tensors for rank in others]",
          "works = [comm.irecv(t, who) for t, who in theirs]\n    works += -> return\n    works ="),
         "to its owner"),  # everyone adds everything: one step, and p / 2 times the bytes
        (lambda comm, tensors: [aggregate.blockwise(comm, t) for t in tensors], "the library's"),
    ],
    "ex-aggregating-reductions statistics": [
        (f"{DEVIATION} -> {DEVIATION} * (count / (count - 1)) ** 0.5", "correction=0"),
        (f"{RESULT}low, high, [{DEVIATION}] * 4", "one number, not 4"),
        (f"{RESULT}{DEVIATION}, low, high", "one for each of the 4 columns"),
        (f"{RESULT}torch.cat([low, high, torch.tensor([{DEVIATION}])])", "three things"),
        ("return low -> if comm.rank:\n        return None\n    return low", "rank 1 returns None"),
        (("all_reduce(comm, sums) -> deviation = mine.std(correction=0); all_reduce(comm, deviation, ReduceOp.AVG)",
          f"{RESULT}low, high, deviation.item()"), "deviation of"),
        (("all_reduce(comm, sums) -> deviation = mine.std(); all_reduce(comm, deviation, ReduceOp.AVG)",
          f"{RESULT}low, high, deviation.item()"), "different means"),
        (f"{SUMS}torch.stack([count / count, mine.mean(), mine.square().mean()])", "different numbers of values"),
        ("low, high = mine.min -> rows = torch.tensor(len(mine)); all_reduce(comm, rows, ReduceOp.MAX)\n"
         "    table = mine.new_zeros(comm.size, rows, mine.shape[1]); table[comm.rank, :len(mine)] = mine\n"
         "    all_reduce(comm, table); low, high = mine.min", "more data make"),
        (lambda comm, mine: (mine.min(0).values, mine.max(0).values, mine.std(correction=0).item()), "smallest values"),
        ("return low, high, -> return low.min(), high.max(),", "smallest values"),
    ],
})  # fmt: skip


def test_statistics_may_be_lists():
    assert tried("ex-aggregating-reductions statistics", "return low, high, -> return low.tolist(), high.tolist(),")
