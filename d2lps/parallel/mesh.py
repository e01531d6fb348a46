"""The ranks of a job as a grid: an axis for each kind of parallelism, and this rank's group along each."""

from math import prod

from d2lps.arguments import whole
from d2lps.comm import Communicator

ORDER = ("tp", "cp", "dp", "pp")  # from the innermost axis, whose ranks are neighbors, to the outermost


class Mesh:
    """Groups by name: `mesh.tp` is the communicator of the ranks that differ from this one in their place along tp alone.

    >>> mesh = Mesh(comm, dp=2, tp=2)                       # on 4 ranks: 0 and 1 share a copy of the model, as 2 and 3 do
    ... # doctest: +SKIP
    >>> mesh.tp.members, mesh.dp.members, mesh.at           # on rank 1     # doctest: +SKIP
    ([0, 1], [1, 3], {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 0})

    dp, tp, pp, cp: how many ranks share a batch, a layer, the layers, a sequence; their product is comm.size. order: the axes
    from the innermost, whose ranks have consecutive numbers and so should sit on the fastest links. `data` is the group of
    those that hold the same parameters, dp and cp together. ep, which divides that group, shares out the experts of a layer:
    `ep` is the group that holds all of them once, `edp` those ranks that hold the same ones. Groups of one rank are
    communicators too. Traces know each group's axis; `data` and `edp` count as dp.
    ValueError, with the numbers, if they do not multiply to comm.size. Cost: six splits.
    """

    def __init__(
        self, comm: Communicator, dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, order: tuple[str, ...] = ORDER
    ) -> None:
        self.sizes = {"tp": whole("tp", tp), "cp": whole("cp", cp), "dp": whole("dp", dp), "pp": whole("pp", pp)}
        if sorted(order) != sorted(ORDER):
            raise ValueError(f"order={order!r} must name each of {', '.join(ORDER)} once, the innermost first")
        if prod(self.sizes.values()) != comm.size:
            told = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items())
            raise ValueError(f"{told} makes {prod(self.sizes.values())} ranks, and there are {comm.size}")
        if dp * cp % whole("ep", ep):
            raise ValueError(f"ep={ep} must divide dp x cp = {dp} x {cp}, among which the experts are shared out")
        self.comm, self.order = comm, order
        self.at = self.place(comm.rank)  #: this rank's place along each axis
        self.tp, self.cp, self.dp, self.pp = (self._group(axis) for axis in ("tp", "cp", "dp", "pp"))
        self.data = self._group("dp", "cp")
        together = self.data.rank // ep  # which of the groups that hold all experts once
        model = self.at["tp"] + tp * self.at["pp"]
        self.ep = self._split(model * self.data.size + together, "ep")
        self.edp = self._split(model * self.data.size + self.data.rank % ep, "dp")

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank of the job stands along each axis."""
        at = {}
        for axis in self.order:
            rank, at[axis] = divmod(rank, self.sizes[axis])
        return at

    def _group(self, *axes: str) -> Communicator:
        """The ranks that stand where this one does along all other axes."""
        color = 0
        for axis in self.order:
            if axis not in axes:
                color = color * self.sizes[axis] + self.at[axis]
        return self._split(color, next((axis for axis in axes if self.sizes[axis] > 1), axes[0]))

    def _split(self, color: int, axis: str) -> Communicator:
        group = self.comm.split(color, axis=axis)
        assert group is not None
        return group
