"""The checks of *The eight collectives*: each refuses, in words, what readers hand in."""

import pytest
import torch
from solutions import refusing
from test_check_beyond_the_ring import to_and_from_0

import d2lps
from d2lps import Communicator, aggregate, collectives
from d2lps_book.check import eight_collectives as check

# ---- answers in words and numbers ---------------------------------------------------------------------------------------


def test_names_may_be_spelled_in_any_way() -> None:
    assert check.which("Reduce", "scatter", "all reduce", "ALL_GATHER", "all to all", "reduce-scatter")
    assert check.picture(7, "all gather") and check.pipeline(88, 14.6e-3, 38.4e-3)


FIVE = {"tree_broadcast": (3, 3.0), "tree_all_reduce": (6, 6), "ring_all_reduce": (8, 1.6), "bruck_all_gather": (3, 0.8)}

test_answers_refused = refusing({
    "ex-collectives-which which": [
        ("'all-reduce', *jobs[1:]", "job 1 is no all-reduce"),
        ("*jobs[:2], 'all-gather', *jobs[3:]", "job 3 is no all-gather"),
        ("*jobs[:5], 'all-reduce'", "who needs how much of the sum"),
        ("'sum', *jobs[1:]", "'sum' is none of the eight"),
        ("*jobs[:3]", "3 names for 6 jobs"),
        ("..., *jobs[1:]", "not all is filled in"),
    ],
    "ex-collectives-picture picture": [
        *((f"{number}, 'all-gather'", f"picture {number} fits") for number in (1, 2, 3, 4, 5, 6, 8)),
        ("7, 'broadcast'", "but no picture of broadcast"),
        ("7, 'all-reduce'", "but no picture of all-reduce"),
        ("9, 'gather'", "there are pictures 1 to 8"),
    ],
    "ex-collectives-five five": [
        *((f"[1, 2, 3], **{FIVE | wrong}", words) for wrong, words in (
            ({"tree_broadcast": (2, 2)}, "tree broadcast: not 2 steps"),
            ({"ring_all_reduce": (8, 2)}, "ring all_reduce: the steps are right, but not 2 n"),
            ({"bruck_all_gather": (3, 7 / 5)}, "not 1.4 n"), ({"tree_broadcast": 3}, "give a pair"))),
        ("idle, tree_broadcast=(..., ...)", "give a pair"),
        (f"[1, 2, 3, 4], **{FIVE}", "idle in the last step"),
    ],
    "ex-collectives-pipeline pipeline": [
        ("94, 14.6e-3, 38.4e-3", "94 chunks are not the best"),
        ("88, 12.8e-3, 38.4e-3", "the chain does not take 0.0128 s"),
        ("88, 14.6, 38.4", "the chain does not take 14.6 s, but ms: give it in seconds"),
        ("88, 14.6e-3, 12.8e-3", "the tree does not take"),
    ],
})  # fmt: skip


# ---- functions ----------------------------------------------------------------------------------------------------------


def round_a_ring(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    p, r = comm.size, comm.rank
    total = parts[(r - 1) % p].clone()
    for step in range(p - 1):
        incoming = torch.empty_like(total)
        comm.sendrecv(total, (r + 1) % p, incoming, (r - 1) % p)
        total = parts[(r - step - 2) % p].clone()
        comm.combine(total, incoming)
    comm.copy(output, total)


def chain_of_all_at_once(comm: Communicator, tensor: torch.Tensor, src: int, chunks: int) -> None:
    parts, sent = tensor.tensor_split(chunks), []
    coming = [comm.irecv(part, (comm.rank - 1) % comm.size) for part in parts if comm.rank != src]
    for k, part in enumerate(parts):
        if coming:
            coming[k].wait()
        if (comm.rank + 1) % comm.size != src:
            sent.append(comm.isend(part, (comm.rank + 1) % comm.size))
    for work in sent:
        work.wait()


def whole_tensors_round_a_ring(comm: Communicator, tensor: torch.Tensor) -> None:
    passing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(comm.size - 1):
        comm.sendrecv(passing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        passing = incoming.clone()
        comm.combine(tensor, incoming)


INCOMING, OUTGOING = "incoming = room[(r - step - 1) % p] -> ", "outgoing = room[(r - step) % p] -> "
DONE, BEGIN, CHUNKS = "comm.copy(tensor, total) -> ", "incoming = torch.empty_like(output) -> ", "p, r, parts = "

test_functions_refused = refusing({
    "ex-collectives-ring ring_all_gather": [
        (lambda comm, room, tensor: collectives.all_gather(comm, room, tensor), "all_gather is the library's"),
        ((f"{OUTGOING}right, left, outgoing = (r + step + 1) % p, (r - step - 1) % p, tensor",  # everyone sends to everyone
          f"{INCOMING}incoming = room[left]"), "in a ring it talks to its right neighbor only"),
        (("right, left = (r + 1) % p, (r - 1) % p -> left, right = (r + 1) % p, (r - 1) % p",
          f"{OUTGOING}outgoing = room[(r + step) % p]", f"{INCOMING}incoming = room[(r + step + 1) % p]"),
         "in a ring it talks to its right neighbor only"),
        (("comm.copy(room[r], tensor) -> pass", f"{OUTGOING}outgoing = room[(r - step) % p] if step else tensor"),
         "never written"),
        ("range(p - 1) -> range(min(p - 1, 7))", "with 11 ranks, rank 0 ends with wrong numbers"),
        (lambda comm, room, tensor: [comm.copy(one, tensor) for one in room], "with 2 ranks"),
        ("comm.sendrecv(outgoing, right, incoming, left) -> comm.send(outgoing, right); comm.recv(incoming, left)", "deadlock"),
    ],
    "ex-collectives-reduce tree_reduce": [
        (lambda comm, tensor, dst: collectives.reduce(comm, tensor, dst), "reduce is the library's"),
        ("while have >= 1: -> if comm.rank != dst:\n        return comm.send(tensor, dst)\n"  # all to the root
         "    for src in set(range(comm.size)) - {dst}:\n        comm.recv(incoming, src)\n"
         "        comm.combine(total, incoming)\n    while False:", "it takes 4 steps, not 3: film the tree broadcast"),
        ("comm.rank == dst -> True", "tensor was changed"),
        ("2 ** math.ceil(math.log2(comm.size)) // 2 -> 4", "rank 5 the root, rank 5 ends with wrong numbers"),
        ("position = (comm.rank - dst) -> dst = 0; position = (comm.rank - dst)", "only that of rank 1 should be"),
        (f"{DONE}comm.copy(tensor, total)\n"  # and it tells all the others
         "    for other in set(range(comm.size)) - {dst}:\n        if comm.rank == dst:\n            comm.send(total, other)\n"
         "        elif comm.rank == other:\n            comm.recv(incoming, dst)", "steps, not 1"),
        (lambda comm, tensor, dst: comm.barrier(), "is missing"),
    ],
    "ex-collectives-pairwise pairwise_reduce_scatter": [
        (lambda comm, output, parts: collectives.reduce_scatter(comm, output, parts), "reduce_scatter is the library's"),
        (f"{BEGIN}others = [rank for rank in range(comm.size) if rank != comm.rank]\n"
         "    rooms = [torch.empty_like(output) for _ in others]\n"
         "    comm.exchange([(parts[rank], rank) for rank in others], list(zip(rooms, others)))\n"
         "    return [comm.combine(output, room) for room in rooms]", "it takes 1 step, not 2"),
        (round_a_ring, "with 3 ranks, 3 pairs talk, not all 6"),
        ((f"{BEGIN}whole = torch.stack(parts); incoming = torch.empty_like(whole)", "parts[right], right -> whole, right",
          "output, incoming) -> output, incoming[comm.rank])"), "rank 0 sends 2 parts, where 1 are enough"),
        ("range(1, comm.size) -> range(1, comm.size - 1)", "is missing"),
    ],
    "ex-collectives-transpose transpose": [
        ("blocks = -> room = [torch.empty_like(rows) for _ in range(comm.size)]; library.all_gather(comm, room, rows)\n"
         "    return torch.cat(room).T.chunk(comm.size)[comm.rank]\n    blocks =", "some rank sends more than it has for others"),
        ("block.T.contiguous() -> block.contiguous()", "2 x 2 on 1 rank, rank 0: row 0, column 1 is wrong"),
        (lambda comm, rows: torch.arange(36).view(6, 6).T.chunk(3)[comm.rank % 3], "a tensor of shape (2, 6), not (2, 2)"),
        (lambda comm, rows: rows, "is wrong"),
        (lambda comm, rows: torch.cat([block.T for block in rows.chunk(comm.size, 1)], 1), "6 x 6 on 2 ranks"),
    ],
    "ex-collectives-pipeline chain_broadcast": [
        (lambda comm, tensor, src, chunks: collectives.broadcast(comm, tensor, src), "broadcast is the library's"),
        (f"{CHUNKS} -> chunks = 1; {CHUNKS}", "a message has 192 bytes, and a chunk at most 48"),
        (f"{CHUNKS} -> chunks = 4; {CHUNKS}", "and 1 chunk: 4 steps"),
        (f"{CHUNKS} -> src = 0; {CHUNKS}", "with 2 ranks, rank 1 the root"),
        ("comm.send(parts[-1], after) -> comm.isend(parts[-1], after)", "1 send nobody waits for"),
        (f"{CHUNKS} -> for part, dst in [(part, dst) for part in tensor.tensor_split(chunks) for dst in range(comm.size)]:\n"
         "        if comm.rank == src != dst:\n            comm.send(part, dst)\n"
         f"        elif comm.rank == dst != src:\n            comm.recv(part, src)\n    return\n    {CHUNKS}",
         "in a ring it talks to its right neighbor only"),
        ("comm.sendrecv(parts[k - 1], after, parts[k], before) -> comm.send(parts[k - 1], after); comm.recv(parts[k], before)",
         "does a rank wait"),
        (chain_of_all_at_once, "4 chunks: 1 step, and a chain needs 4; a link carries one chunk at a time"),
        (lambda comm, tensor, src, chunks: comm.barrier(), "does not end with the root's tensor"),
    ],
    "ex-collectives-bug ring_all_reduce": [
        (("chunks[(comm.rank - step + 1) % size] -> chunks[(comm.rank - step) % size]",  # as the exercise has it
          "incoming = chunks[(comm.rank - step) % size] -> incoming = chunks[(comm.rank - step - 1) % size]"),
         "rank 1 is missing"),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor), "all_reduce is the library's"),
        (lambda comm, tensor: getattr(collectives, "all_" + "reduce")(comm, tensor), "all_reduce is the library's"),
        (lambda comm, tensor: collectives.all_reduce(comm.split(0), tensor), "all_reduce is the library's"),
        (lambda comm, tensor: comm.start(collectives.all_reduce, tensor).wait(), "all_reduce is the library's"),
        (lambda comm, tensor: aggregate.on_device(comm, tensor), "on_device is the library's"),
        (lambda comm, tensor: aggregate.blockwise(comm, tensor), "all_reduce is the library's"),
        (to_and_from_0, "in a ring it talks to its right neighbor only"),
        (whole_tensors_round_a_ring, "with 2 ranks it takes 1 step, not 2"),
        (lambda comm, tensor: tensor.mul_(comm.size), "with 2 ranks"),
    ],
})  # fmt: skip


@pytest.mark.parametrize("version", [(2, 6), (2, 9), (9, 0)])
def test_torch_is_asked_in_other_words_where_its_gloo_lacks_one(version: tuple[int, int]) -> None:
    def work(comm: Communicator) -> list[list[float]]:
        inputs = [torch.tensor([10.0 * comm.rank + part]) for part in range(comm.size)]
        outputs = [torch.zeros(1) for _ in inputs]
        check.torchs_own("all_to_all", outputs, [part.clone() for part in inputs], torch=version)
        total = torch.zeros(1)
        check.torchs_own("reduce_scatter", total, inputs, torch=version)
        return [torch.cat(outputs).tolist(), total.tolist()]

    run = d2lps.run(work, 3, backend="gloo")
    assert run == [[[10.0 * src + rank for src in range(3)], [30.0 + 3 * rank]] for rank in range(3)]
