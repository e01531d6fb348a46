"""A trace once more: which messages share a round, in which order things happened, and whose data is where.

Most traces here are told line by line (`oracles.told`), small enough to work out by hand.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import told

import d2lps
from d2lps.trace import Origins, Trace


def rounds(trace: Trace) -> list[tuple[int, int, int]]:
    """(round, src, dst) of every message, in this order."""
    m = trace.messages
    return sorted(zip(trace.replay.round_of.tolist(), m["src"].tolist(), m["dst"].tolist(), strict=True))


# ---- rounds: how many messages had to wait for one another ------------------------------------------------------------


@pytest.mark.parametrize(
    "programs, wanted",
    [
        pytest.param(["", ""], [], id="nobody says anything"),
        pytest.param(["send 1", "recv 0"], [(1, 0, 1)], id="one message"),
        pytest.param(
            ["send 1", "recv 0; send 2", "recv 1; send 3", "recv 2"],
            [(1, 0, 1), (2, 1, 2), (3, 2, 3)],
            id="a chain: each message waits for the one before",
        ),
        pytest.param(
            ["send 1; send 2", "recv 0", "recv 0"], [(1, 0, 1), (2, 0, 2)], id="one after another, though nobody else is busy"
        ),
        pytest.param(
            ["isend 1; isend 2; wait", "recv 0", "recv 0"], [(1, 0, 1), (1, 0, 2)], id="sent together, in one round"
        ),
        pytest.param(
            ["isend 1; irecv 2; wait", "isend 2; irecv 0; wait", "isend 0; irecv 1; wait"],
            [(1, 0, 1), (1, 1, 2), (1, 2, 0)],
            id="a ring that sends and receives at once",
        ),
        pytest.param(
            ["send 1; recv 2", "recv 0; send 2", "recv 1; send 0"],
            [(1, 0, 1), (2, 1, 2), (3, 2, 0)],
            id="a ring that sends first",
        ),
        pytest.param(["send 2", "send 2", "recv 1; recv 0"], [(1, 1, 2), (2, 0, 2)], id="the later end counts, the receiver's"),
        pytest.param(
            ["recv 1; send 2", "send 0", "irecv 0; wait"], [(1, 1, 0), (2, 0, 2)], id="the later end counts, the sender's"
        ),
        pytest.param(
            ["send 1", "recv 0", "send 3", "recv 2"], [(1, 0, 1), (1, 2, 3)], id="two pairs that know nothing of each other"
        ),
        pytest.param(
            ["send 1; barrier", "recv 0; barrier", "barrier; send 3", "barrier; recv 2"],
            [(1, 0, 1), (2, 2, 3)],
            id="a barrier joins the clocks",
        ),
        pytest.param(
            ["send 1; recv 1; barrier", "recv 0; send 0; barrier", "recv 3; barrier; send 3", "send 2; barrier; recv 2"],
            [(1, 0, 1), (1, 3, 2), (2, 1, 0), (3, 2, 3)],
            id="a barrier joins the clocks, whoever comes last",
        ),
        pytest.param(
            ["send 1; barrier one", "recv 0; barrier one", "barrier other; send 3", "barrier other; recv 2"],
            [(1, 0, 1), (1, 2, 3)],
            id="a barrier of one group is nothing to another",
        ),
    ],
)
def test_rounds_worked_out_by_hand(programs: list[str], wanted: list[tuple[int, int, int]]) -> None:
    trace = told(*programs)
    assert rounds(trace) == wanted
    assert trace.rounds == max((round for round, _, _ in wanted), default=0)


def test_a_rank_takes_part_in_the_rounds_in_which_it_sends_or_receives() -> None:
    trace = told("send 1; send 2", "recv 0", "recv 0")
    assert [trace.steps_of(rank) for rank in range(3)] == [2, 1, 1]


# ---- events: every cause before its effect ----------------------------------------------------------------------------


def test_the_events_of_a_message_that_is_added_to() -> None:
    trace = told("send 1 x", "recv 0 y; add x y; copy z x; barrier", "barrier")
    told_again = [(event.kind, event.rank, event.round) for event in trace.replay.events if event.rank < 2]
    assert told_again == [("send", 0, 1), ("recv", 1, 1), ("combine", 1, 1), ("copy", 1, 1), ("meet", 1, 1)]


def test_an_event_says_what_was_read_and_what_was_written() -> None:
    trace = told("send 1 x[4:8]", "recv 0 y[0:4]; add x[8:12] y[0:4]")
    _, arrived, added = trace.replay.events
    names = [trace.buffers[part.buffer].name for part in (arrived.source, arrived.into, added.source, added.into)]
    assert names == ["x", "y", "y", "x"]
    assert [(part.offset, part.length) for part in (arrived.source, arrived.into, added.source, added.into)] == [
        (4, 4),
        (0, 4),
        (0, 4),
        (8, 4),
    ]


def test_a_message_leaves_when_both_ends_are_there() -> None:
    trace = told("send 2", "send 2", "recv 1; recv 0")
    sent = [(event.rank, event.round) for event in trace.replay.events if event.kind == "send"]
    assert sent == [(1, 1), (0, 2)]


def test_a_send_that_nobody_received_yet_was_buffered() -> None:
    # Both ranks send first, which only a simulation with eager sends survives; then they overwrite what they sent.
    trace = told("send 1 x; copy x z; recv 1 y", "send 0 x; copy x z; recv 0 y")
    assert rounds(trace) == [(1, 0, 1), (1, 1, 0)]
    assert sorted((event.kind, event.rank) for event in trace.replay.events) == [
        (kind, rank) for kind in ("copy", "recv", "send") for rank in (0, 1)
    ]
    assert held(trace, rank=1, name="y")[0] == {"0x0": 1}  # not 0z0


def test_of_two_sends_that_block_each_other_the_smaller_was_buffered() -> None:
    trace = told("send 1 x[0:1]; recv 1 y", "send 0 x; send 2; recv 0 y[0:1]", "recv 1")
    assert rounds(trace) == [(1, 0, 1), (1, 1, 0), (2, 1, 2)]  # rank 1 did wait for rank 0 before it sent to rank 2


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, int] | None]]:
    """Messages one after another as somebody saw them all, (src, dst), and barriers (None): no program of it deadlocks."""
    ranks = draw(st.integers(2, 5))
    pairs = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)).filter(lambda pair: pair[0] != pair[1])
    return ranks, draw(st.lists(st.one_of(pairs, pairs, pairs, st.none()), max_size=25))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(histories())
def test_any_history_is_replayed_whole_in_a_causal_order(history: tuple[int, list[tuple[int, int] | None]]) -> None:
    ranks, happened = history
    programs: list[list[str]] = [[] for _ in range(ranks)]
    clocks, wanted = [0] * ranks, []
    for message in happened:  # every send and receive is waited for at once, so two clocks tell the round
        if message is None:
            clocks = [max(clocks)] * ranks
            for program in programs:
                program.append("barrier")
            continue
        src, dst = message
        programs[src].append(f"send {dst}")
        programs[dst].append(f"recv {src}")
        clocks[src] = clocks[dst] = max(clocks[src], clocks[dst]) + 1
        wanted.append((clocks[src], src, dst))
    trace = told(*(";".join(program) for program in programs))
    assert rounds(trace) == sorted(wanted)
    events = trace.replay.events
    place = {(event.kind, event.index): number for number, event in enumerate(events)}
    assert len(events) == 2 * len(wanted) + ranks * happened.count(None)
    assert all(place["send", message] < place["recv", message] for message in range(len(trace)))
    for rank in range(ranks):
        mine = [event for event in events if event.rank == rank and event.kind in ("recv", "meet")]
        assert [event.round for event in mine] == sorted(event.round for event in mine)


# ---- origins: whose data every part of memory holds -------------------------------------------------------------------


def held(trace: Trace, rank: int, name: str = "x") -> list[Counter[str]]:
    """For each byte of a buffer at the end, whose bytes it is the sum of: Counter({"0x3": 1}) is byte 3 of rank 0's x."""
    number = next(k for k, buffer in enumerate(trace.buffers) if (buffer.rank, buffer.name) == (rank, name))
    bytes_: list[Counter[str]] = [Counter() for _ in range(trace.buffers[number].nbytes)]
    for piece in Origins(trace).held(number):
        for k in range(piece.length):
            sources = ((trace.buffers[b], offset + k, times) for (b, offset), times in piece.sources.items())
            bytes_[piece.offset + k] = Counter({f"{b.rank}{b.name}{offset}": times for b, offset, times in sources})
    return bytes_


def test_a_message_carries_what_its_sender_held_then() -> None:
    trace = told("send 1; recv 1", "recv 0 y; add y x; send 0 y")
    carried = [[piece.sources for piece in Origins(trace).carried[message]] for message in (0, 1)]
    x0, x1 = (next(k for k, b in enumerate(trace.buffers) if (b.rank, b.name) == (rank, "x")) for rank in (0, 1))
    assert carried == [[{(x0, 0): 1}], [{(x0, 0): 1, (x1, 0): 1}]]


def test_a_strided_message_stays_within_its_buffers() -> None:
    def work(comm):
        matrix, column = torch.ones(4, 4), torch.zeros(4)
        comm.send(matrix[:, 0], 1) if comm.rank == 0 else comm.recv(column, 0)
        return matrix, column

    trace = d2lps.run(work, 2, trace=True).trace
    for number, buffer in enumerate(trace.buffers):
        for piece in Origins(trace).held(number):
            assert piece.offset >= 0 and piece.offset + piece.length <= buffer.nbytes, f"{piece} in {buffer}"


@st.composite
def scribbles(draw: st.DrawFn) -> list[tuple[str, int, int, int, int]]:
    """(how, rank that reads, its offset, rank that writes, its offset), of 4 bytes each; between ranks it is a message."""
    place = st.integers(0, 12)
    rank = st.integers(0, 1)
    return draw(st.lists(st.tuples(st.sampled_from(["copy", "add"]), rank, place, rank, place), max_size=12))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(scribbles())
def test_any_copies_and_sums_are_followed_byte_by_byte(scribbles: list[tuple[str, int, int, int, int]]) -> None:
    programs: list[list[str]] = [["copy x x"], ["copy x x"]]  # so that every byte has been looked at
    memory = [[Counter({f"{rank}x{k}": 1}) for k in range(16)] for rank in range(2)]
    for how, src, a, dst, b in scribbles:
        read = [Counter(sources) for sources in memory[src][a : a + 4]]
        if src == dst:
            programs[src].append(f"{how} x[{b}:{b + 4}] x[{a}:{a + 4}]")
        else:
            how = "copy"
            programs[src].append(f"send {dst} x[{a}:{a + 4}]")
            programs[dst].append(f"recv {src} x[{b}:{b + 4}]")
        for k in range(4):
            memory[dst][b + k] = read[k] + (memory[dst][b + k] if how == "add" else Counter())
    trace = told(*(";".join(program) for program in programs))
    assert [held(trace, rank) for rank in range(2)] == memory
