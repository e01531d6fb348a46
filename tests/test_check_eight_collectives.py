"""The checks of *The eight collectives*: each refuses, in words, what readers hand in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from solutions import refused, solution

import d2lps
from d2lps import Communicator, aggregate, collectives
from d2lps_book.check import eight_collectives as check

Function = Callable[..., Any]


# ---- answers in words and numbers ---------------------------------------------------------------------------------------


def test_which() -> None:
    right = solution("ex-collectives-which")["jobs"]
    assert check.which(*right)
    assert check.which("Reduce", "scatter", "all reduce", "ALL_GATHER", "all to all", "reduce-scatter")
    refused(check.which(*["all-reduce", *right[1:]]), "job 1 is no all-reduce")
    refused(check.which(*[*right[:2], "all-gather", *right[3:]]), "job 3 is no all-gather")
    refused(check.which(*[*right[:5], "all-reduce"]), "who needs how much of the sum")
    refused(check.which(*["sum", *right[1:]]), "'sum' is none of the eight")
    refused(check.which(*right[:3]), "3 names for 6 jobs")
    refused(check.which(*[..., *right[1:]]), "not all is filled in")


def test_picture() -> None:
    assert check.picture(7, "all gather")
    for number in (1, 2, 3, 4, 5, 6, 8):
        refused(check.picture(number, "all-gather"), f"picture {number} fits")
    refused(check.picture(7, "broadcast"), "but no picture of broadcast")
    refused(check.picture(7, "all-reduce"), "but no picture of all-reduce")
    refused(check.picture(9, "gather"), "there are pictures 1 to 8")


def test_five() -> None:
    right = {"tree_broadcast": (3, 3.0), "tree_all_reduce": (6, 6), "ring_all_reduce": (8, 1.6), "bruck_all_gather": (3, 0.8)}
    assert check.five([1, 2, 3], **right)
    refused(check.five([1, 2, 3], **right | {"tree_broadcast": (2, 2)}), "tree broadcast: not 2 steps")
    refused(check.five([1, 2, 3], **right | {"ring_all_reduce": (8, 2)}), "ring all_reduce: the steps are right, but not 2 n")
    refused(check.five([1, 2, 3], **right | {"bruck_all_gather": (3, 7 / 5)}), "not 1.4 n")
    refused(check.five([1, 2, 3, 4], **right), "idle in the last step")
    refused(check.five([1, 2, 3], **right | {"tree_broadcast": 3}), "give a pair")
    refused(check.five([1, 2, 3], **right | {"tree_broadcast": (..., ...)}), "give a pair")


def test_pipeline() -> None:
    assert check.pipeline(88, 14.6e-3, 38.4e-3)
    refused(check.pipeline(94, 14.6e-3, 38.4e-3), "94 chunks are not the best")
    refused(check.pipeline(88, 12.8e-3, 38.4e-3), "the chain does not take 0.0128 s")
    refused(check.pipeline(88, 14.6, 38.4), "the chain does not take 14.6 s, but ms: give it in seconds")
    refused(check.pipeline(88, 14.6e-3, 12.8e-3), "the tree does not take")


# ---- functions ----------------------------------------------------------------------------------------------------------


def in_turn(comm: Communicator, room: list[torch.Tensor], tensor: torch.Tensor) -> None:
    """Everyone sends to everyone, one root after the other."""
    comm.copy(room[comm.rank], tensor)
    for root in range(comm.size):
        for dst in set(range(comm.size)) - {root}:
            if comm.rank == root:
                comm.send(tensor, dst)
            elif comm.rank == dst:
                comm.recv(room[root], root)


def forgets_its_own(comm: Communicator, room: list[torch.Tensor], tensor: torch.Tensor) -> None:
    outgoing = tensor
    for step in range(comm.size - 1):
        incoming = room[(comm.rank - step - 1) % comm.size]
        comm.sendrecv(outgoing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        outgoing = incoming


def to_the_left(comm: Communicator, room: list[torch.Tensor], tensor: torch.Tensor) -> None:
    comm.copy(room[comm.rank], tensor)
    for step in range(comm.size - 1):
        outgoing, incoming = room[(comm.rank + step) % comm.size], room[(comm.rank + step + 1) % comm.size]
        comm.sendrecv(outgoing, (comm.rank - 1) % comm.size, incoming, (comm.rank + 1) % comm.size)


def sends_first(comm: Communicator, room: list[torch.Tensor], tensor: torch.Tensor) -> None:
    comm.copy(room[comm.rank], tensor)
    if comm.size > 1:
        comm.send(tensor, (comm.rank + 1) % comm.size)
        comm.recv(room[comm.rank - 1], (comm.rank - 1) % comm.size)


def for_eight(comm: Communicator, room: list[torch.Tensor], tensor: torch.Tensor) -> None:
    comm.copy(room[comm.rank], tensor)
    for step in range(min(comm.size - 1, 7)):
        outgoing, incoming = room[(comm.rank - step) % comm.size], room[(comm.rank - step - 1) % comm.size]
        comm.sendrecv(outgoing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda comm, room, tensor: collectives.all_gather(comm, room, tensor), "all_gather is the library's"),
        (in_turn, "in a ring it talks to its right neighbor only"),
        (to_the_left, "in a ring it talks to its right neighbor only"),
        (forgets_its_own, "never written"),
        (for_eight, "with 11 ranks, rank 0 ends with wrong numbers"),
        (lambda comm, room, tensor: [comm.copy(one, tensor) for one in room], "with 2 ranks"),
        (sends_first, "deadlock"),
    ],
)
def test_ring_all_gather(function: Function, words: str) -> None:
    refused(check.ring_all_gather(function), words)


def flat_reduce(comm: Communicator, tensor: torch.Tensor, dst: int) -> None:
    if comm.rank != dst:
        comm.send(tensor, dst)
        return
    incoming = torch.empty_like(tensor)
    for src in set(range(comm.size)) - {dst}:
        comm.recv(incoming, src)
        comm.combine(tensor, incoming)


def tree(comm: Communicator, tensor: torch.Tensor, dst: int, steps: int = 0, spoil: bool = False) -> None:
    position, total, incoming = (comm.rank - dst) % comm.size, tensor.clone(), torch.empty_like(tensor)
    for step in reversed(range(steps or (comm.size - 1).bit_length())):
        have = 2**step
        if position < have and position + have < comm.size:
            comm.recv(incoming, (position + have + dst) % comm.size)
            comm.combine(total, incoming)
        elif have <= position < 2 * have:
            comm.send(total, (position - have + dst) % comm.size)
    if spoil or comm.rank == dst:
        comm.copy(tensor, total)


def everywhere(comm: Communicator, tensor: torch.Tensor, dst: int) -> None:
    tree(comm, tensor, dst)
    tree_total = tensor.clone()
    for other in set(range(comm.size)) - {dst}:
        if comm.rank == dst:
            comm.send(tree_total, other)
        elif comm.rank == other:
            comm.recv(tree_total, dst)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda comm, tensor, dst: collectives.reduce(comm, tensor, dst), "reduce is the library's"),
        (flat_reduce, "it takes 4 steps, not 3: film the tree broadcast"),
        (lambda comm, tensor, dst: tree(comm, tensor, dst, spoil=True), "tensor was changed"),
        (lambda comm, tensor, dst: tree(comm, tensor, dst, steps=3), "rank 5 the root, rank 5 ends with wrong numbers"),
        (lambda comm, tensor, dst: tree(comm, tensor, 0), "only that of rank 1 should be"),
        (everywhere, "steps, not 1"),
        (lambda comm, tensor, dst: comm.barrier(), "is missing"),
    ],
)
def test_tree_reduce(function: Function, words: str) -> None:
    refused(check.tree_reduce(function), words)


def at_once(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    comm.copy(output, parts[comm.rank])
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    rooms = [torch.empty_like(output) for _ in others]
    comm.exchange([(parts[rank], rank) for rank in others], list(zip(rooms, others, strict=True)))
    for room in rooms:
        comm.combine(output, room)


def round_a_ring(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    p, r = comm.size, comm.rank
    total = parts[(r - 1) % p].clone()
    for step in range(p - 1):
        incoming = torch.empty_like(total)
        comm.sendrecv(total, (r + 1) % p, incoming, (r - 1) % p)
        total = parts[(r - step - 2) % p].clone()
        comm.combine(total, incoming)
    comm.copy(output, total)


def all_parts(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    comm.copy(output, parts[comm.rank])
    whole = torch.stack(parts)
    for k in range(1, comm.size):
        incoming = torch.empty_like(whole)
        comm.sendrecv(whole, (comm.rank + k) % comm.size, incoming, (comm.rank - k) % comm.size)
        comm.combine(output, incoming[comm.rank])


def forgets_the_last(comm: Communicator, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
    comm.copy(output, parts[comm.rank])
    incoming = torch.empty_like(output)
    for k in range(1, comm.size - 1):
        comm.sendrecv(parts[(comm.rank + k) % comm.size], (comm.rank + k) % comm.size, incoming, (comm.rank - k) % comm.size)
        comm.combine(output, incoming)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda comm, output, parts: collectives.reduce_scatter(comm, output, parts), "reduce_scatter is the library's"),
        (at_once, "it takes 1 step, not 2"),
        (round_a_ring, "with 3 ranks, 3 pairs talk, not all 6"),
        (all_parts, "rank 0 sends 2 parts, where 1 are enough"),
        (forgets_the_last, "is missing"),
    ],
)
def test_pairwise_reduce_scatter(function: Function, words: str) -> None:
    refused(check.pairwise_reduce_scatter(function), words)


def by_all_gather(comm: Communicator, rows: torch.Tensor) -> torch.Tensor:
    room = [torch.empty_like(rows) for _ in range(comm.size)]
    collectives.all_gather(comm, room, rows)
    return torch.cat(room).T.chunk(comm.size)[comm.rank]


def blocks_only(comm: Communicator, rows: torch.Tensor) -> torch.Tensor:
    inputs = [block.contiguous() for block in rows.chunk(comm.size, dim=1)]
    outputs = [torch.empty_like(block) for block in inputs]
    collectives.all_to_all(comm, outputs, inputs)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (by_all_gather, "some rank sends more than it has for others"),
        (blocks_only, "2 x 2 on 1 rank, rank 0: row 0, column 1 is wrong"),
        (lambda comm, rows: torch.arange(36).view(6, 6).T.chunk(3)[comm.rank % 3], "a tensor of shape (2, 6), not (2, 2)"),
        (lambda comm, rows: rows, "is wrong"),
        (lambda comm, rows: torch.cat([block.T for block in rows.chunk(comm.size, 1)], 1), "6 x 6 on 2 ranks"),
    ],
)
def test_transpose(function: Function, words: str) -> None:
    refused(check.transpose(function), words)


def chain(comm: Communicator, tensor: torch.Tensor, src: int, chunks: int) -> None:
    """Whoever has a chunk sends it on before it receives the next one."""
    for part in tensor.tensor_split(chunks):
        if comm.rank != src:
            comm.recv(part, (comm.rank - 1) % comm.size)
        if (comm.rank + 1) % comm.size != src:
            comm.send(part, (comm.rank + 1) % comm.size)


def chain_of_forgotten_sends(comm: Communicator, tensor: torch.Tensor, src: int, chunks: int) -> None:
    for part in tensor.tensor_split(chunks):
        if comm.rank != src:
            comm.recv(part, (comm.rank - 1) % comm.size)
        if (comm.rank + 1) % comm.size != src:
            comm.isend(part, (comm.rank + 1) % comm.size)


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


def star_in_chunks(comm: Communicator, tensor: torch.Tensor, src: int, chunks: int) -> None:
    for part in tensor.tensor_split(chunks):
        for dst in set(range(comm.size)) - {src}:
            if comm.rank == src:
                comm.send(part, dst)
            elif comm.rank == dst:
                comm.recv(part, src)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda comm, tensor, src, chunks: collectives.broadcast(comm, tensor, src), "broadcast is the library's"),
        (lambda comm, tensor, src, chunks: chain(comm, tensor, src, 1), "a message has 192 bytes, and a chunk at most 48"),
        (lambda comm, tensor, src, chunks: chain(comm, tensor, src, 4), "and 1 chunk: 4 steps"),
        (lambda comm, tensor, src, chunks: chain(comm, tensor, 0, chunks), "with 2 ranks, rank 1 the root"),
        (star_in_chunks, "in a ring it talks to its right neighbor only"),
        (chain, "does a rank wait"),
        (chain_of_all_at_once, "4 chunks: 1 step, and a chain needs 4; a link carries one chunk at a time"),
        (chain_of_forgotten_sends, "1 send nobody waits for"),
        (lambda comm, tensor, src, chunks: comm.barrier(), "does not end with the root's tensor"),
    ],
)
def test_chain_broadcast(function: Function, words: str) -> None:
    refused(check.chain_broadcast(function), words)


def by_a_flat_tree(comm: Communicator, tensor: torch.Tensor) -> None:
    flat_reduce(comm, tensor, 0)
    for dst in range(1, comm.size):
        if comm.rank == 0:
            comm.send(tensor, dst)
        elif comm.rank == dst:
            comm.recv(tensor, 0)


def spoiled(comm: Communicator, tensor: torch.Tensor) -> None:
    """As the exercise has it: the second half begins with the wrong chunk."""
    size, chunks = comm.size, tensor.tensor_split(comm.size)
    right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
    for step in range(size - 1):
        chunk = chunks[(comm.rank - step - 1) % size]
        comm.sendrecv(chunks[(comm.rank - step) % size], right, scratch := torch.empty_like(chunk), left)
        comm.combine(chunk, scratch)
    for step in range(size - 1):
        comm.sendrecv(chunks[(comm.rank - step) % size], right, chunks[(comm.rank - step - 1) % size], left)


def whole_tensors_round_a_ring(comm: Communicator, tensor: torch.Tensor) -> None:
    passing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(comm.size - 1):
        comm.sendrecv(passing, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        passing = incoming.clone()
        comm.combine(tensor, incoming)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (spoiled, "rank 1 is missing"),
        (lambda comm, tensor: collectives.all_reduce(comm, tensor), "all_reduce is the library's"),
        (lambda comm, tensor: getattr(collectives, "all_" + "reduce")(comm, tensor), "all_reduce is the library's"),
        (lambda comm, tensor: collectives.all_reduce(comm.split(0), tensor), "all_reduce is the library's"),
        (lambda comm, tensor: comm.start(collectives.all_reduce, tensor).wait(), "all_reduce is the library's"),
        (lambda comm, tensor: aggregate.on_device(comm, tensor), "on_device is the library's"),
        (lambda comm, tensor: aggregate.blockwise(comm, tensor), "all_reduce is the library's"),
        (by_a_flat_tree, "in a ring it talks to its right neighbor only"),
        (whole_tensors_round_a_ring, "with 2 ranks it takes 1 step, not 2"),
        (lambda comm, tensor: tensor.mul_(comm.size), "with 2 ranks"),
    ],
)
def test_ring_all_reduce(function: Function, words: str) -> None:
    refused(check.ring_all_reduce(function), words)


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
