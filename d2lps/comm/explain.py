"""Why nothing moves any more, or what does not fit together: what the ranks say, turned into a message to act on."""

import linecache
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import networkx as nx

from d2lps.comm.errors import Deadlock, Mismatch, RankHung
from d2lps.comm.status import Status

_TOGETHER = ("barrier", "native", "agree", "split", "start", "group")


def explain(ranks: Sequence[Status], reason: str, stuck: Sequence[int] | None = None) -> RankHung:
    """A Deadlock that names the circle of waits if there is one, else a RankHung; ready to be raised.

    `stuck`: the ranks whose waits ask for an explanation, where others may well be moving.
    """
    at = {status.rank: status for status in ranks}
    lines = "\n".join([*(describe_status(status, len(ranks)) for status in ranks), *_hints(at)])
    if circle := _circle(at, stuck):
        path = " -> ".join(f"rank {rank}" for rank in [*circle, circle[0]])
        return Deadlock(f"deadlock: {path}, each waits for the next ({reason})\n{lines}")
    return RankHung(f"{reason}\n{lines}")


def _circle(at: Mapping[int, Status], stuck: Sequence[int] | None) -> list[int]:
    """The ranks of one circle of waits to which the waits of `stuck` lead, in order from the lowest; empty if there is none.

    A rank that waits for a circle is stuck too, but not to blame: it is not in the list.
    """
    waits = nx.from_dict_of_lists({rank: _waits_for(status, at) for rank, status in at.items()}, nx.DiGraph)
    try:
        circle = [rank for rank, _ in nx.find_cycle(waits, stuck)]
    except nx.NetworkXNoCycle:
        return []
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]


def _waits_for(mine: Status, at: Mapping[int, Status]) -> list[int]:
    """The ranks without which this one cannot go on."""
    if mine.action in _TOGETHER:  # whoever of the group is not at the same meeting
        there = {rank for rank, other in at.items() if (other.action, other.group) == (mine.action, mine.group)}
        return [peer for peer in mine.group if peer not in there]
    theirs = at.get(mine.peer)
    if theirs is None:
        return []
    opposite = {mine.action, theirs.action} == {"send", "recv"}
    if opposite and (theirs.peer, theirs.tag, theirs.group) == (mine.rank, mine.tag, mine.group):
        return []  # the two ends of one message: it is under way, however slowly, and no circle goes through it
    return [mine.peer]


def describe_status(status: Status, ranks: int = 0) -> str:
    """`  rank 1 waits for rank 0 to send 40 B, tag 0 (in work, line 3: comm.recv(x, 0))`.

    ranks: how many the whole run has; a meeting of fewer says of which.
    """
    of = f" of ranks {_listed(status.group)}" if len(status.group) < ranks else ""
    what = {
        "send": f"waits for rank {status.peer} to receive {status.nbytes:,} B, tag {status.tag}",
        "recv": f"waits for rank {status.peer} to send {status.nbytes:,} B, tag {status.tag}",
        "barrier": f"waits at a barrier{of}",
        "begin": "waits for the others to begin",
        "start": f"waits for the others{of} to call start",
        "native": f"waits in the world's own all-reduce{of}",
        "agree": f"waits to compare its call with the others'{of}",
        "split": f"waits for the others{of} to call split",
        "group": f"waits for the others{of} to make a process group",
        "join": "waits for what it has started",
        "event": "waits for what another of its lanes is to signal",
        "compute": "computes",
        "sleep": "sleeps",
        "flow": "waits for a message that is on its way",
        "answer": "waits for a parameter server's answer",
        "serve": "serves, and has nothing to answer",
    }.get(status.action, status.action)
    inside = f" in {status.collective}" if status.collective else ""
    return f"  rank {status.rank} {what}{inside}{_place(status)}"


def _place(status: Status) -> str:
    """` (in work, line 3: comm.recv(x, 0))`; the source is looked up here, where a notebook's cells are known.

    Nothing where no line of the reader's is to blame: a parameter server runs none.
    """
    if not status.line:
        return ""
    source = linecache.getline(status.file, status.line).strip()
    source = source if len(source) <= 60 else source[:57] + "..."
    return f" (in {status.function}, line {status.line}{': ' + source if source else ''})"


def _hints(at: Mapping[int, Status]) -> list[str]:
    """Pairs that would have met but for their tags or their calls: the first few."""
    hints = []
    for rank, mine in at.items():
        theirs = at.get(mine.peer)
        if theirs is None or (mine.action, theirs.action, theirs.peer) != ("send", "recv", rank):
            continue
        if mine.tag != theirs.tag:
            tags = f"rank {rank} sends with tag {mine.tag}, rank {mine.peer} receives with tag {theirs.tag}"
            hints.append(f"  {tags}: they never meet")
        elif mine.group != theirs.group:
            hints.append(f"  ranks {rank} and {mine.peer} use different communicators: their messages never meet")
    for mine, theirs in combinations(at.values(), 2):
        if mine.collective and theirs.collective and mine.collective != theirs.collective:
            where = f"rank {mine.rank} is in {mine.collective}, rank {theirs.rank} in {theirs.collective}"
            hints.append(f"  {where}: all ranks must call the same")
    return hints[:4]


# ---- what does not fit together ---------------------------------------------------------------------------------------


def mismatch(sends: bool, rank: int, peer: int, tag: int, mine: str, theirs: str) -> Mismatch:
    """`message from rank 0 to rank 1, tag 0: the sender sends float32[2], the receiver expects float32[4]`; by either end."""
    src, dst, sent, expected = (rank, peer, mine, theirs) if sends else (peer, rank, theirs, mine)
    where = f"message from rank {src} to rank {dst}, tag {tag}"
    return Mismatch(f"{where}: the sender sends {sent}, the receiver expects {expected}")


def disagreement(calls: Sequence[str], members: Sequence[int]) -> Mismatch:
    """`the ranks disagree: rank 2 calls broadcast(src=1); ranks 0, 1, 3 call broadcast(src=0)`: the few first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, call in zip(members, calls, strict=True):
        groups[call].append(rank)
    parts = []
    for call, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1])):
        who = f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
        parts.append(f"{who} {call}")
    return Mismatch("the ranks disagree: " + "; ".join(parts))


def _listed(group: Sequence[int]) -> str:
    """`_listed(range(0, 64, 2)) == "0, 2, 4, ... 62"`."""
    shown = [str(rank) for rank in group]
    return ", ".join(shown) if len(shown) <= 8 else f"{', '.join(shown[:3])}, ... {shown[-1]}"
