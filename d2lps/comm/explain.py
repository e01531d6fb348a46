"""Why nothing moves any more: the notes of all ranks, turned into a message that a person can act on."""

import linecache
from collections.abc import Sequence
from dataclasses import dataclass

from d2lps.comm.errors import Deadlock, Mismatch, RankHung
from d2lps.comm.standing import Standing

_TOGETHER = ("barrier", "native", "agree", "split", "start")


@dataclass
class State:
    """Where one rank is: waiting for something, or not, and then `condition` says what else ("running", ...)."""

    rank: int
    standing: Standing | None
    condition: str = ""
    file: str = ""
    line: int = 0
    function: str = ""


def explain(states: Sequence[State], reason: str, stuck: Sequence[int] | None = None) -> RankHung:
    """A Deadlock that names the circle of waits if there is one, else a RankHung; ready to be raised.

    `stuck`: the ranks whose waits ask for an explanation, where others may well be moving.
    """
    circle = find_circle(states, stuck)
    lines = [describe_state(state, len(states)) for state in states]
    lines += _hints(states)
    if circle:
        path = " -> ".join(f"rank {rank}" for rank in [*circle, circle[0]])
        return Deadlock(f"deadlock: {path}, each waits for the next ({reason})\n" + "\n".join(lines))
    return RankHung(f"{reason}\n" + "\n".join(lines))


def waits_for(states: Sequence[State]) -> dict[int, list[int]]:
    """For each rank that waits, the ranks without which it cannot go on."""
    at = {state.rank: state.standing for state in states}
    edges: dict[int, list[int]] = {}
    for rank, standing in at.items():
        if standing is None:
            edges[rank] = []
        elif standing.action not in _TOGETHER:
            edges[rank] = [] if _meet(rank, standing, at.get(standing.peer)) else [standing.peer]
        else:  # whoever of the group is not at the same meeting
            edges[rank] = [peer for peer in standing.group if peer != rank and not _same_meeting(standing, at.get(peer))]
    return edges


def _meet(rank: int, mine: Standing, theirs: Standing | None) -> bool:
    """Whether these are the two ends of one message: it is under way, however slowly, and no circle goes through it."""
    if theirs is None or {mine.action, theirs.action} != {"send", "recv"}:
        return False
    return (theirs.peer, theirs.tag, theirs.group) == (rank, mine.tag, mine.group)


def _same_meeting(one: Standing, other: Standing | None) -> bool:
    return other is not None and (one.action, one.group) == (other.action, other.group)


def find_circle(states: Sequence[State], stuck: Sequence[int] | None = None) -> list[int]:
    """The ranks of one circle of waits to which the waits of `stuck` lead, in order from the lowest; empty if there is none.

    A rank that waits for a circle is stuck too, but not to blame: it is not in the list.
    """
    edges = waits_for(states)
    done: set[int] = set()
    for start in edges if stuck is None else stuck:
        path: list[int] = []
        stack = [(start, iter(edges[start]))] if start not in done else []
        while stack:
            rank, peers = stack[-1]
            if not path or path[-1] != rank:
                path.append(rank)
            peer = next((p for p in peers if p in edges and p not in done), None)
            if peer is None:
                done.add(rank)
                stack.pop()
                path.pop()
            elif peer in path:
                circle = path[path.index(peer) :]
                lowest = circle.index(min(circle))
                return circle[lowest:] + circle[:lowest]
            else:
                stack.append((peer, iter(edges[peer])))
    return []


def describe_state(state: State, ranks: int = 0) -> str:
    """`  rank 1 waits for rank 0 to send 40 B, tag 0 (in work, line 3: comm.recv(x, 0))`.

    ranks: how many the whole run has; a meeting of fewer says of which.
    """
    standing = state.standing
    if standing is None:
        where = place(state.file, state.line, state.function)
        return f"  rank {state.rank} {state.condition or 'is running'}{where}"
    of = f" of ranks {_listed(standing.group)}" if len(standing.group) < ranks else ""
    what = {
        "send": f"waits for rank {standing.peer} to receive {standing.nbytes:,} B, tag {standing.tag}",
        "recv": f"waits for rank {standing.peer} to send {standing.nbytes:,} B, tag {standing.tag}",
        "barrier": f"waits at a barrier{of}",
        "start": f"waits for the others{of} to call start",
        "native": f"waits in the world's own all-reduce{of}",
        "agree": f"waits to compare its call with the others'{of}",
        "split": f"waits for the others{of} to call split",
        "join": "waits for what it has started",
        "answer": "waits for a parameter server's answer",
        "serve": "serves, and has nothing to answer",
    }[standing.action]
    inside = f" in {standing.collective}" if standing.collective else ""
    return f"  rank {state.rank} {what}{inside}{place(standing.file, standing.line, standing.function)}"


def _listed(group: Sequence[int]) -> str:
    """`_listed(range(0, 64, 2)) == "0, 2, 4, ... 62"`."""
    shown = [str(rank) for rank in group]
    return ", ".join(shown) if len(shown) <= 8 else f"{', '.join(shown[:3])}, ... {shown[-1]}"


def mismatch(src: int, dst: int, tag: int, sent: str, expected: str) -> Mismatch:
    """`message from rank 0 to rank 1, tag 0: the sender sends float32[2], the receiver expects float32[4]`."""
    where = f"message from rank {src} to rank {dst}, tag {tag}"
    return Mismatch(f"{where}: the sender sends {sent}, the receiver expects {expected}")


def place(file: str, line: int, function: str) -> str:
    """` (in work, line 3: comm.recv(x, 0))`; the source is looked up here, where a notebook's cells are known.

    Nothing where no line of the reader's is to blame: a parameter server runs none.
    """
    if not line:
        return ""
    source = linecache.getline(file, line).strip()
    source = source if len(source) <= 60 else source[:57] + "..."
    return f" (in {function}, line {line}{': ' + source if source else ''})"


def _hints(states: Sequence[State]) -> list[str]:
    """Pairs that would have met but for their tags or their calls."""
    at = {state.rank: state.standing for state in states}
    hints = []
    for rank, mine in at.items():
        theirs = at.get(mine.peer) if mine else None
        if mine is None or theirs is None or mine.action != "send" or (theirs.action, theirs.peer) != ("recv", rank):
            continue
        if mine.tag != theirs.tag:
            hint = f"  rank {rank} sends with tag {mine.tag}, rank {mine.peer} receives with tag {theirs.tag}: they never meet"
            hints.append(hint)
        elif mine.group != theirs.group:
            hints.append(f"  ranks {rank} and {mine.peer} use different communicators: their messages never meet")
    for rank, mine in at.items():
        for peer, theirs in at.items():
            if mine and theirs and rank < peer and mine.collective and theirs.collective and mine.collective != theirs.collective:
                where = f"rank {rank} is in {mine.collective}, rank {peer} in {theirs.collective}"
                hints.append(f"  {where}: all ranks must call the same")
    return hints[:4]
