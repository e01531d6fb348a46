"""Pipeline schedules as data: for each rank, what it does one after another. Nothing here computes or sends.

A batch is cut into micro-batches, the model into stages, one after another. `F` is a stage's forward pass of one micro-batch, `B`
its backward pass. Where a schedule has a `W` too, `B` makes the gradient of the stage's input alone, for which the stage before
is waiting, and `W` those of its weights, for which nobody is.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from d2lps.arguments import whole


class Action(NamedTuple):
    """`str(Action("F", 1, 0)) == "1F0"`: stage 1 takes micro-batch 0 forward."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Schedule = Sequence[Sequence[Action]]  # by rank
Costs = float | Sequence[float]  # seconds, of every stage or by stage
End = Callable[[Action, float], float]  # see `played`
Arrives = Callable[[Action, Action, float, float], float]


# ---- schedules ----------------------------------------------------------------------------------------------------


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forward, then all backward.

    >>> print(picture(gpipe(2, 3)))
    rank 0  F0 F1 F2 .  .  B0 B1 B2
    rank 1  .  F0 F1 F2 B0 B1 B2 .

    Bubble (p - 1)/m; rank 0 holds m micro-batches. (Huang's turn around and begin with the last: as long, as much.)
    Source: Huang et al. 2019 (GPipe).
    """
    p, m = whole("ranks", ranks), whole("micro_batches", micro_batches)
    return _made([("F", rank, k) for k in range(m)] + [("B", rank, k) for k in range(m)] for rank in range(p))


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Backward as soon as can be, and for each backward pass one forward.

    >>> print(picture(one_f_one_b(2, 3)))
    rank 0  F0 F1 .  B0 F2 B1 .  B2
    rank 1  .  F0 B0 F1 B1 F2 B2 .

    Bubble (p - 1)/m as GPipe's, but a rank holds min(p - rank, m) micro-batches only. Fewer micro-batches than ranks will do.
    Source: Narayanan et al. 2019 (PipeDream), 2021.
    """
    p, m = whole("ranks", ranks), whole("micro_batches", micro_batches)
    return _made(_one_each([("F", r, k) for k in range(m)], [("B", r, k) for k in range(m)], p - 1 - r) for r in range(p))


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B with `chunks` stages on each rank, p apart: a micro-batch goes round the ranks so many times.

    >>> print(picture(interleaved(2, 2, 2)))
    rank 0  0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
    rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .

    Bubble (p - 1)/(chunks m), for stages are so much shorter; messages are so many more. Rank 0 holds 1 + (p - 1)/(p chunks)
    times what it does in 1F1B. ValueError unless micro_batches is a multiple of ranks: they go round in groups of p.
    Source: Narayanan et al. 2021 (Megatron-LM).
    """
    p, m, v = whole("ranks", ranks), whole("micro_batches", micro_batches), whole("chunks", chunks)
    if m % p:
        raise ValueError(f"interleaved: micro_batches={m} is no multiple of ranks={p}, and they go round in groups of so many")

    def nth(k: int) -> tuple[int, int]:
        """Which chunk, and which micro-batch."""
        group, place = divmod(k, p * v)
        return place // p, group * p + place % p

    def of(rank: int) -> list[tuple[str, int, int]]:
        turns = [nth(k) for k in range(m * v)]
        ahead = [("F", chunk * p + rank, k) for chunk, k in turns]
        back = [("B", (v - 1 - chunk) * p + rank, k) for chunk, k in turns]
        return _one_each(ahead, back, 2 * (p - 1 - rank) + (v - 1) * p if v > 1 else p - 1 - rank)

    return _made(map(of, range(p)))


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose backward passes are cut in two: the half that nobody waits for fills the gaps (ZB-H1).

    >>> print(picture(zero_bubble(2, 3)))
    rank 0  F0 F1 .  B0 W0 F2 B1 W1 B2 W2
    rank 1  .  F0 B0 F1 B1 W0 F2 B2 W1 W2

    Bubble (p - 1)/3m where F, B and W take the same time. Rank r is r weight gradients behind, so that every rank holds
    min(p, m) micro-batches, as only rank 0 does in 1F1B. Schedules with less bubble hold up to twice as many.
    Source: Qi et al. 2024 (zero bubble pipeline parallelism).
    """
    p, m = whole("ranks", ranks), whole("micro_batches", micro_batches)

    def of(r: int) -> list[tuple[str, int, int]]:
        actions, behind = [], 0
        for kind, stage, k in _one_each([("F", r, k) for k in range(m)], [("B", r, k) for k in range(m)], p - 1 - r):
            actions.append((kind, stage, k))
            if kind == "B" and k >= r:
                actions.append(("W", stage, behind))
                behind += 1
        return actions + [("W", r, k) for k in range(behind, m)]

    return _made(map(of, range(p)))


def _one_each(ahead: list[tuple[str, int, int]], back: list[tuple[str, int, int]], first: int) -> list[tuple[str, int, int]]:
    """So many forward at first, then one forward and one backward in turn, then what is left."""
    first = min(first, len(ahead))
    turns = [action for pair in zip(ahead[first:], back, strict=False) for action in pair]
    return ahead[:first] + turns + back[len(ahead) - first :]


def _made(rows: object) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action(*action) for action in row) for row in rows)  # type: ignore[attr-defined]


# ---- when, with costs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """starts, ends: seconds, by action. busy: seconds that each rank computes. peak: micro-batches that each rank holds at most.

    A stage holds a micro-batch from the start of its `F` to the end of its `B`, or of its `W`. On a rank with several stages
    each counts: with v stages to a rank, one is a v-th as large. bubble: how much longer the busiest rank takes than it computes.
    """

    starts: dict[Action, float]
    ends: dict[Action, float]
    time: float
    busy: tuple[float, ...]
    peak: tuple[int, ...]

    @property
    def bubble(self) -> float:
        return self.time / max(self.busy) - 1


def replay(
    schedule: Schedule, forward: Costs = 1.0, backward: Costs = 2.0, weight: Costs | None = None, message: Costs = 0.0,
    ahead: bool = True,
) -> Replay:  # fmt: skip
    """What a schedule would take, if computing and sending took just this long.

    >>> done = replay(one_f_one_b(4, 8))
    >>> done.time, done.bubble, done.peak               # 8 x (1 + 2), and 3 x (1 + 2) more
    (33.0, 0.375, (4, 3, 2, 1))
    >>> replay(zero_bubble(4, 8)).bubble
    0.125

    forward, backward: of a stage and one micro-batch. weight: what of `backward` the `W` takes, where there is one; by default
    half. message: between a stage and the next, if they are on two ranks. All in seconds, one for all stages or a list by stage
    (a message's: by the lower stage). ahead: a receive is posted ahead of time, so that a message travels while its receiver
    computes; otherwise it begins when the receiver has nothing else left to do, as with a plain `recv`.
    ValueError, with what waits for what, for a schedule that never ends, or names an action twice.
    Cost: none but a dictionary entry for each action.
    """
    home, _ = placed(schedule)
    split = {action[1:] for row in schedule for action in row if action.kind == "W"}

    def seconds(action: Action) -> float:
        if action.kind == "F":
            return _of(forward, action.stage)
        whole_pass = _of(backward, action.stage)
        half = whole_pass / 2 if weight is None else _of(weight, action.stage)
        return half if action.kind == "W" else whole_pass - half if action[1:] in split else whole_pass

    def arrives(before: Action, action: Action, ended: float, free: float) -> float:
        if home[before.stage] == home[action.stage]:
            return ended
        return (ended if ahead else max(ended, free)) + _of(message, min(before.stage, action.stage))

    starts, ends = played(schedule, lambda action, start: start + seconds(action), arrives)
    busy = tuple(sum(map(seconds, row)) for row in schedule)
    return Replay(starts, ends, max(ends.values()), busy, tuple(_peak(row, split) for row in schedule))


def _of(costs: Costs, stage: int) -> float:
    return costs[stage] if isinstance(costs, Sequence) else costs


def needs(action: Action, stages: int) -> Action | None:
    """What must have been done, perhaps on another rank, before this can be: `needs(Action("F", 1, 0), 4)` is 0F0."""
    kind, stage, k = action
    if kind == "F":
        return Action("F", stage - 1, k) if stage else None
    if kind == "B":
        return Action("B", stage + 1, k) if stage < stages - 1 else Action("F", stage, k)
    return Action("B", stage, k)


def placed(schedule: Schedule) -> tuple[dict[int, int], int]:
    """The rank of each stage, and how many micro-batches there are; ValueError, in words, for what is no schedule."""
    home: dict[int, int] = {}
    done: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for rank, row in enumerate(schedule):
        for action in row:
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} is on rank {home[action.stage]} and on rank {rank}")
            if action.kind not in ("F", "B", "W") or action[1:] in done[action.kind]:
                raise ValueError(f"rank {rank} has {action} twice, or of a kind that is none of F, B and W")
            done[action.kind].add(action[1:])
    micro_batches = len({k for _, k in done["F"]})
    wanted = {(stage, k) for stage in range(len(home)) for k in range(micro_batches)}
    for kind in ("F", "B"):
        if left := sorted(wanted ^ done[kind]):
            told = ", ".join(str(Action(kind, *one)) for one in left[:3])
            raise ValueError(f"{len(home)} stages need one {kind} each of each of {micro_batches} micro-batches: see {told}")
    return home, micro_batches


def played(schedule: Schedule, end: End, arrives: Arrives) -> tuple[dict[Action, float], dict[Action, float]]:
    """When each action starts and ends.

    end(action, start): asked once of each, in its rank's order. arrives(before, action, ended, free): when what `before` made,
    which ended then, is there for `action`, whose rank has had nothing else to do since `free`.
    """
    stages = 1 + max(action.stage for row in schedule for action in row)
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    free, at = [0.0] * len(schedule), [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule):
            while at[rank] < len(row):
                action, start = row[at[rank]], free[rank]
                before, forward = needs(action, stages), Action("F", *action[1:])
                if (before is not None and before not in ends) or (forward != action and forward not in ends):
                    break
                if before is not None:
                    start = max(start, arrives(before, action, ends[before], start))
                starts[action], ends[action] = start, end(action, start)
                free[rank], at[rank], moved = ends[action], at[rank] + 1, True
    stuck = [(rank, row[k]) for rank, (row, k) in enumerate(zip(schedule, at, strict=True)) if k < len(row)]
    if stuck:
        told = "; ".join(f"rank {rank} waits with {action} for {needs(action, stages)}" for rank, action in stuck)
        raise ValueError(f"this schedule never ends: {told}")
    return starts, ends


def _peak(row: Sequence[Action], split: set[tuple[int, int]]) -> int:
    held = most = 0
    for action in row:
        held += (action.kind == "F") - (action.kind == ("W" if action[1:] in split else "B"))
        most = max(most, held)
    return most


def _in_turns(schedule: Schedule) -> tuple[dict[Action, float], dict[Action, float]]:
    """Every action takes one turn, and messages none."""
    return played(schedule, lambda _, start: start + 1.0, lambda before, action, ended, free: ended)


def picture(schedule: Schedule) -> str:
    """A row for each rank, a column for each turn: what is done if everything takes one turn. See `gpipe`."""
    starts, _ = _in_turns(schedule)
    alone = len({action.stage for row in schedule for action in row}) == len(schedule)
    rows: list[dict[int, str]] = [{int(starts[action]): str(action) for action in row} for row in schedule]
    if alone:
        rows = [{turn: word.lstrip("0123456789") for turn, word in row.items()} for row in rows]
    width = max(len(word) for row in rows for word in row.values())
    turns = range(1 + max(turn for row in rows for turn in row))
    lines = [" ".join(row.get(turn, ".").ljust(width) for turn in turns) for row in rows]
    return "\n".join(f"rank {rank}  {line}".rstrip() for rank, line in enumerate(lines))


@lru_cache(maxsize=16)  # by all ranks of a job
def traffic(schedule: tuple[tuple[Action, ...], ...]) -> dict[tuple[int, int], list[tuple[Action, int]]]:
    """For each two ranks, the messages between them in an order that both can keep to: (what makes it, the rank that sends).

    It is the order in which a replay makes them, whoever sends: each message depends on earlier ones only. Two ranks that both
    post in this order, and wait, have no send that waits for a send; nor have they where a link carries one at a time.
    """
    home, _ = placed(schedule)
    _, ends = _in_turns(schedule)
    pairs: defaultdict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)
    for action in sorted(ends, key=lambda action: (ends[action], action)):
        src, dst = home[action.stage], home.get(after(action), -1)
        if dst not in (src, -1):
            pairs[min(src, dst), max(src, dst)].append((action, src))
    return dict(pairs)


def after(action: Action) -> int:
    """The stage that what it makes goes to; -1 or one too many if there is none."""
    return {"F": action.stage + 1, "B": action.stage - 1, "W": -1}[action.kind]
