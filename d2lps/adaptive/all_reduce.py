"""All-reduces over a logical topology that changes: the ranks measure, agree on what they measured, and so decide alike."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from d2lps.adaptive.controller import Controller
from d2lps.arguments import named, whole
from d2lps.collectives import all_reduce
from d2lps.collectives.all_reduce.double_tree import family, orders
from d2lps.comm import Communicator, ReduceOp

Pair = tuple[int, int]
HELLO = 64  # bytes of a handshake's message: an address and a key


class AdaptiveAllReduce:
    """Sums a step's buckets over the ranks, by whichever topology its controller thinks best.

    >>> def work(comm):
    ...     summing = AdaptiveAllReduce(comm)
    ...     for _ in range(10):
    ...         buckets = [torch.ones(1000, device=comm.device) for _ in range(4)]
    ...         summing.step(buckets)
    ...     return summing.topology
    >>> from d2lps.simulator import simulate
    >>> from d2lps.topology import star
    >>> simulate(work, star(8, bandwidth=1e9, latency=5e-6))[0]
    'blockwise'

    controller: each rank has its own, and they are alike, since they are told the same. round_trips: of a handshake between two
    ranks that were not connected; what the topologies in use do not need is closed. Each rank calls `step` with equally long
    buckets. Cost besides the sums: an all-reduce of some 8-byte numbers whenever the controller finds it due; 2 round_trips
    messages of 64 bytes each way for a new connection, all new ones at once.
    """

    def __init__(self, comm: Communicator, controller: Controller | None = None, round_trips: int = 2) -> None:
        self.comm, self.controller = comm, controller or Controller()
        for name in self.controller.topologies:
            named("topology", name, PAIRS)
        self.round_trips = whole("round_trips", round_trips)
        self.open: set[int] = set()  # ranks that this one has a connection to
        self._laps: dict[tuple[str, int], list[float]] = defaultdict(list)  # since the ranks agreed last
        self._names = frozenset[str]()  # the topologies that these serve
        self._setup = 0.0  # seconds for connections since then

    @property
    def topology(self) -> str:
        """By which all buckets go, but for one that tries another."""
        return self.controller.current

    @property
    def history(self) -> list[tuple[int, str]]:
        """(step, topology): the first, and each change."""
        return self.controller.history

    def step(self, buckets: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> None:
        """All-reduce each of the buckets, in place."""
        names = self.controller.plan([bucket.nbytes for bucket in buckets], self.comm.size)
        self._connect(frozenset([self.topology, *names]))
        for bucket, name in zip(buckets, names, strict=True):
            self._timed(name, bucket, op)
        while self.controller.due and self.comm.size > 1:  # twice, where one size alone was measured: this is the second
            self._agree()

    def _timed(self, name: str, tensor: torch.Tensor, op: ReduceOp) -> None:
        start = self.comm.now()
        all_reduce(self.comm, tensor, op, algorithm=name)
        self._laps[name, tensor.nbytes].append(self.comm.now() - start)

    def _agree(self) -> None:
        """Tell the controller the mean over steps and ranks. What this takes itself is told the next time, as a short tensor."""
        keys = sorted(self._laps)
        means = [sum(self._laps[key]) / len(self._laps[key]) for key in keys]
        device = "cpu" if self.comm.device.type == "meta" else self.comm.device  # a decision needs contents
        mine = torch.tensor([*means, self._setup], dtype=torch.float64, device=device)
        self._laps.clear()
        self._setup = 0.0
        self._timed(self.topology, mine, ReduceOp.SUM)
        *agreed, setup = (mine / self.comm.size).tolist()
        self.controller.observe(dict(zip(keys, agreed, strict=True)), setup or None)

    def _connect(self, names: frozenset[str]) -> None:
        """Shake hands with whom these topologies need and this rank has no connection to; close what they do not need."""
        if names == self._names:
            return
        wanted = set[int]().union(*(neighbors(name, self.comm.rank, self.comm.size) for name in names))
        fresh, start = sorted(wanted - self.open), self.comm.now()
        self.open, self._names = wanted, names
        for turn in range(2 * self.round_trips):  # there, and back
            self.comm.step("handshake {}", turn + 1)
            hello = torch.zeros(HELLO, dtype=torch.uint8, device=self.comm.device)
            asked = [peer for peer in fresh if (peer > self.comm.rank) == (turn % 2 == 0)]
            asking = [peer for peer in fresh if peer not in asked]
            self.comm.exchange([(hello, peer) for peer in asked], [(hello.clone(), peer) for peer in asking])
        self.comm.barrier()  # who had no hands to shake waits here, not within its first sum
        self._setup += self.comm.now() - start


# ---- who talks to whom --------------------------------------------------------------------------------------------------


def neighbors(name: str, rank: int, size: int) -> set[int]:
    """The ranks that a rank exchanges messages with: `neighbors("ring", 0, 8) == {1, 7}`."""
    return {end for pair in named("topology", name, PAIRS)(size) if rank in pair for end in pair} - {rank}


def _double_tree(size: int) -> list[Pair]:
    seats = [(order, seat, family(seat, size)[1]) for order in orders(size) for seat in range(size)]
    return [(order[seat], order[parent]) for order, seat, parent in seats if parent is not None]


def _halving_doubling(size: int) -> list[Pair]:
    """Who differ in one bit; ranks beyond the power of two have one partner below it."""
    core = 2 ** (size.bit_length() - 1)
    flips = [(rank, rank ^ 2**bit) for rank in range(core) for bit in range(core.bit_length() - 1)]
    return flips + [(rank, rank - core) for rank in range(core, size)]


PAIRS: dict[str, Callable[[int], list[Pair]]] = {
    "ring": lambda size: [(rank, (rank + 1) % size) for rank in range(size)],
    "blockwise": lambda size: list(combinations(range(size), 2)),
    "flat": lambda size: [(0, rank) for rank in range(1, size)],
    "tree": lambda size: [(rank, rank - 2 ** (rank.bit_length() - 1)) for rank in range(1, size)],  # a child has one bit more
    "double_tree": _double_tree,
    "halving_doubling": _halving_doubling,
}
