"""A schedule for stages that lie on the ranks in any way: each rank does, turn by turn, what is the most urgent that it can."""

from collections.abc import Sequence

from d2lps.arguments import named, whole
from d2lps.parallel.pipeline.schedules import Action, Schedule, needs, replay  # noqa: F401  (replay: for the example)


def assignment(ranks: int, way: str) -> list[int]:
    """The rank of each stage; with two stages to a rank unless it is linear.

    >>> assignment(3, "linear"), assignment(3, "looped"), assignment(3, "V")
    ([0, 1, 2], [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0])
    """
    line = list(range(whole("ranks", ranks)))
    return named("way", way, {"linear": line, "looped": line + line, "V": line + line[::-1]})


def arranged(home: Sequence[int], micro_batches: int, order: str = "one_f_one_b") -> Schedule:
    """Each rank, when it is free, does what is ready: backward before forward, and weights' gradients when there is nothing else.

    >>> schedule = arranged(assignment(4, "V"), 8, "zero_bubble")
    >>> replay(schedule, forward=1 / 2, backward=1).bubble          # what ZBV's own schedule leaves, too
    0.0625

    home: the rank of each stage. order: "gpipe", all forward first; "one_f_one_b"; "zero_bubble", with split backward passes.
    But for gpipe a rank holds no more than 1F1B does at most: p - rank in a line, the first rank's share in a V, in a loop what
    Megatron-LM's interleaved schedule does. F, B and W take a turn each, an undivided B two.
    ValueError for an unknown order, and for stages among which nothing would ever be ready.
    Source: a greedy one, as is the scheduler of Qi et al. 2024.
    """
    kinds = named("order", order, {"gpipe": "FB", "one_f_one_b": "FB", "zero_bubble": "FBW"})
    return _Ranks(list(home), whole("micro_batches", micro_batches), order, kinds).arrange()


class _Ranks:
    def __init__(self, home: list[int], m: int, order: str, kinds: str) -> None:
        self.home, self.order, self.kinds, self.ranks = home, order, kinds, max(home) + 1
        self.back = home[-1] == home[0] and len(home) > 1  # the last stage is where the first is: a V
        self.stages = [[stage for stage, where in enumerate(home) if where == rank] for rank in range(self.ranks)]
        self.todo = [[Action(kind, stage, k) for kind in kinds for stage in mine for k in range(m)] for mine in self.stages]
        self.rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        self.ends: dict[Action, int] = {}
        self.free, self.held, self.turn = [0] * self.ranks, [0] * self.ranks, 0

    def arrange(self) -> Schedule:
        while any(self.todo):
            for rank in range(self.ranks):
                ready = [action for action in self.todo[rank] if self.can(action, rank)] if self.free[rank] <= self.turn else []
                if ready:
                    self.do(min(ready, key=self.urgency), rank)
            self.turn += 1
            if self.turn > max(self.ends.values(), default=0) + 1:
                raise ValueError(f"nothing is ready any more: no order for stages on the ranks {self.home}")
        return tuple(map(tuple, self.rows))

    def do(self, action: Action, rank: int) -> None:
        self.todo[rank].remove(action)
        self.rows[rank].append(action)
        turns = 2 if action.kind == "B" and self.kinds == "FB" else 1
        self.free[rank] = self.ends[action] = self.turn + turns
        self.held[rank] += (action.kind == "F") - (action.kind == self.kinds[-1])

    def can(self, action: Action, rank: int) -> bool:
        needed = {needs(action, len(self.home)), Action("F", *action[1:])} - {None, action}
        if any(self.ends.get(other, self.turn + 1) > self.turn for other in needed if other is not None):
            return False
        mine = self.stages[rank]
        if action.kind == "F":  # and leave room for the micro-batch's later stages here
            return self.held[rank] + len(mine) - mine.index(action.stage) <= self.room(rank)
        return self.order != "gpipe" or not any(other.kind == "F" for other in self.todo[rank])

    def urgency(self, action: Action) -> tuple[int, ...]:
        kind, stage, k = action
        deep = -stage if kind == "B" or self.back else stage
        return "BFW".index(kind), 0 if self.back else k // self.ranks, deep, k

    def room(self, rank: int) -> float:
        """How many micro-batches a rank may hold, stage by stage."""
        p, v = self.ranks, len(self.stages[rank])
        if self.order == "gpipe" or self.back:
            return v * p if self.back and self.order != "gpipe" else float("inf")
        left = p - 1 - (0 if self.order == "zero_bubble" else rank)
        return 1 + (left if v == 1 else 2 * left + (v - 1) * p)
