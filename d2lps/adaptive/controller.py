"""Which logical topology a training step's all-reduces take: decided from measured times alone, so it runs in no world.

It hopes, tries, and then believes what it saw: optimism in the face of uncertainty (Auer, Cesa-Bianchi, Fischer 2002). A
topology that might be better, at its best, gets one bucket of the next step. What that bucket took decides whether all follow.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from d2lps import cost
from d2lps.adaptive.estimate import Estimate
from d2lps.arguments import named, whole
from d2lps.cost.reducing import FORMULAS


class Controller:
    """
    >>> controller = Controller(["ring", "tree"], first="ring")
    >>> controller.plan([1000, 1000], ranks=8)
    ['ring', 'ring']
    >>> controller.observe({("ring", 1000): 140e-6, ("ring", 16): 140e-6})      # by the formula a tree takes 60
    >>> controller.plan([1000, 1000], ranks=8)                                  # one bucket tries it
    ['tree', 'ring']
    >>> controller.observe({("tree", 1000): 61e-6, ("ring", 1000): 140e-6})
    >>> controller.plan([1000, 1000], ranks=8)                                  # and all follow
    ['tree', 'tree']

    topologies: names of all_reduce, of which `first` begins, by default the one that `cost.choose` finds best. gain: the least
    share of a step that a change must save; horizon: within so many steps it must also save what its connections take. every:
    agree on measured times after so many steps, or as soon as anything is new. patience: in so many steps what was measured
    loses its weight by a factor of e, so one that was r times slower is tried again after patience ln r steps.
    Steps should have several buckets, since one of them tries: of a single one each trial is a whole step. ValueError for no
    topologies, a name without a formula, a `first` that is not among them, and numbers out of range.
    """

    def __init__(
        self, topologies: Sequence[str] = ("ring", "double_tree", "blockwise"), first: str = "",
        gain: float = 0.05, horizon: int = 50, every: int = 8, patience: float = 100,
    ) -> None:  # fmt: skip
        if not topologies:
            raise ValueError("topologies is empty: name at least one all-reduce")
        for name in topologies:
            named("topology", name, FORMULAS)
        named("first", first, dict.fromkeys(["", *topologies], 0))
        if not 0 <= gain < 1:
            raise ValueError(f"gain={gain!r} is not a share from 0 to 1")
        if not patience > 0:
            raise ValueError(f"patience={patience!r} is not a number of steps above 0")
        self.topologies, self.current, self.trial = list(topologies), first, ""
        self.gain, self.horizon, self.every = gain, whole("horizon", horizon), whole("every", every)
        self.estimate = Estimate(patience)
        self.sizes, self.ranks, self.step, self.due_at = Counter[int](), 0, 0, 0
        self.observed = 0  # the step of the last agreement
        self.setup = 0.0  # seconds that the last connections took to set up
        self.history: list[tuple[int, str]] = []  # (step, topology): the first, and each change
        self.trials: list[tuple[int, str]] = []

    def plan(self, sizes: Sequence[int], ranks: int) -> list[str]:
        """The topology of each bucket, of so many bytes, in the step that begins now."""
        self.step += 1
        counted = Counter(sizes)
        if (counted, ranks) != (self.sizes, self.ranks):
            self.sizes, self.ranks, self.due_at = counted, whole("ranks", ranks), self.step
            self._decide() if self.estimate.rows else self._begin()
        names = [self.current] * len(sizes)
        if self.trial and names:
            names[self._probe(sizes)] = self.trial
        return names

    @property
    def due(self) -> bool:
        """Whether the ranks should agree on what they have measured, now that the step is over."""
        return self.step >= self.due_at

    def observe(self, seconds: Mapping[tuple[str, int], float], setup: float | None = None) -> None:
        """What all ranks have agreed on: seconds by (topology, bytes), and what new connections took, if there were any."""
        for (name, nbytes), time in seconds.items():
            named("topology", name, dict.fromkeys(self.topologies))
            if not 0 <= time < math.inf:
                raise ValueError(f"{name} of {nbytes} bytes took {time!r}, which is not a number of seconds from 0 up")
        self.setup = self.setup if setup is None else setup
        factors = {}
        for (name, nbytes), time in seconds.items():
            factors[name, nbytes] = self.estimate.learn(name, self.ranks, nbytes, time, self.step)
        changed = [factor for (name, _), factor in factors.items() if name == self.current and factor != 1.0]
        if changed:
            self.estimate.doubt(self.current, self.ranks, changed[0])
        again = len(self.estimate.rows.get((self.current, self.ranks), {})) < 2 and self.observed < self.step
        self.due_at = self.step + (0 if again else self.every)  # one size alone does not tell latency from bytes
        self.observed = self.step
        self._decide()

    def _begin(self) -> None:
        """Nothing is measured yet: what the formulas say of links that are taken to be ordinary ones."""
        mean = sum(size * count for size, count in self.sizes.items()) / max(1, self.sizes.total())
        choice = cost.choose(mean, self.ranks, cost.ALPHA, cost.BETA, candidates=self.topologies)
        self.current = self.current or choice.algorithm
        self.history.append((1, self.current))

    # ---- the decision ---------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Follow what is known to be better; else try what might be; else stay."""
        self.trial = ""
        most = max(self.sizes, default=0)
        known = [name for name in self.topologies if self.estimate.knows(name, self.ranks, most)]
        best = min([self.current, *known], key=self._total)
        if best != self.current and self._pays(self._total(best)):
            self.current = best
            self.history.append((self.step + (self.due_at != self.step), best))
            self.due_at = self.step + 1
            return
        hopes = {name: self._total(name, hopeful=True) for name in self.topologies if name != self.current}
        hope = min(hopes, key=lambda name: hopes[name], default=self.current)
        if hopes and self._pays(hopes[hope]):
            self.trial, self.due_at = hope, self.step + 1
            self.trials.append((self.step + 1, hope))

    def _total(self, name: str, hopeful: bool = False) -> float:
        """Seconds of a step whose buckets all go this way."""
        ask = self.estimate.hopeful if hopeful else self.estimate.seconds
        return sum(count * ask(name, self.ranks, nbytes) for nbytes, count in self.sizes.items())

    def _pays(self, seconds: float) -> bool:
        """Whether a step that takes so long is worth a change."""
        now = self._total(self.current)
        return seconds < (1 - self.gain) * now and (now - seconds) * self.horizon > self.setup

    def _probe(self, sizes: Sequence[int]) -> int:
        """The bucket that tries: the first of the size that takes most of the step's time."""
        share = {size: count * self.estimate.seconds(self.current, self.ranks, size) for size, count in self.sizes.items()}
        return list(sizes).index(max(share, key=lambda size: share[size]))
