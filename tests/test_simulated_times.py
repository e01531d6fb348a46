"""How long each collective takes in the simulator, to the bit: a rewrite of an algorithm or of the simulator may change none.

The times in simulated_times.json are those of version a572234. This file, run as a script, prints them as they are now; they
are stored anew only where the model itself is meant to change.
"""

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from d2lps import Communicator, aggregate, collectives
from d2lps.simulator import Model, simulate
from d2lps.topology import Topology, dgx1, fat_tree, hgx_h100, multi_node, pcie_tree, ring, star

STORED = Path(__file__).with_name("simulated_times.json")
RANKS = (2, 3, 5, 8, 16)
SIZES = (24_000, 10_007, 7)  # float32 elements: even parts for all of RANKS, for none, fewer than there are ranks
COSTS = Model(eager=8192, per_message=5e-6, per_combined_byte=1e-10)
CLUSTERS: dict[str, tuple[Topology, Model]] = {
    "star": (star(16, 1e9, 1e-6), Model()),
    "star with costs": (star(16, 1e9, 1e-6), COSTS),
    "ring": (ring(16, 1e9, 1e-6), Model()),
    "pcie_tree": (pcie_tree(8), Model()),
    "dgx1": (dgx1(), Model()),
    "hgx_h100": (hgx_h100(16), Model()),
    "fat_tree": (fat_tree(4), Model()),
    "multi_node": (multi_node(hgx_h100(4), 4), Model()),
    "multi_node, a port a machine": (multi_node(hgx_h100(4), 4, ports="node"), COSTS),
}
Work = Callable[[Communicator, torch.Tensor], None]  # what a rank does with a tensor of so many elements


def parts(comm: Communicator, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Views that cover the tensor, one for each rank, the last ones shorter."""
    return list(tensor.tensor_split(comm.size))


def equal_parts(comm: Communicator, tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor[: len(tensor) // comm.size * comm.size].tensor_split(comm.size))


def rooted(name: str, algorithm: str) -> Work:
    """The last rank is the root."""

    def work(comm: Communicator, tensor: torch.Tensor) -> None:
        getattr(collectives, name)(comm, tensor, comm.size - 1, algorithm=algorithm)

    return work


def listed(name: str, algorithm: str) -> Work:
    """Scatter and gather, the last rank the root."""

    def work(comm: Communicator, tensor: torch.Tensor) -> None:
        root, pieces = comm.size - 1, equal_parts(comm, tensor)
        mine = torch.empty_like(pieces[0])
        getattr(collectives, name)(comm, mine, pieces if comm.rank == root else None, root, algorithm=algorithm)

    return work


def all_gather(comm: Communicator, tensor: torch.Tensor, algorithm: str) -> None:
    room = parts(comm, tensor)
    collectives.all_gather(comm, room, torch.empty_like(room[comm.rank]), algorithm)


def reduce_scatter(comm: Communicator, tensor: torch.Tensor, algorithm: str) -> None:
    pieces = parts(comm, tensor)
    collectives.reduce_scatter(comm, torch.empty_like(pieces[comm.rank]), pieces, algorithm=algorithm)


def all_to_all(comm: Communicator, tensor: torch.Tensor, algorithm: str) -> None:
    pieces = equal_parts(comm, tensor)
    collectives.all_to_all(comm, [torch.empty_like(piece) for piece in pieces], pieces, algorithm)


def by_last(comm: Communicator, tensor: torch.Tensor, way: Callable[..., None]) -> None:
    way(comm, tensor, comm.size - 1)


def uneven_groups(comm: Communicator, tensor: torch.Tensor) -> None:
    ranks, first = list(range(comm.size)), (2 * comm.size + 1) // 3
    collectives.all_reduce(comm, tensor, algorithm="hierarchical", groups=[ranks[:first], ranks[first:]])


ALL_REDUCE = ("flat", "tree", "double_tree", "ring", "two_rings", "blockwise", "halving_doubling", "hierarchical", "auto")
WORKS: dict[str, Work] = {f"all_reduce {name}": partial(collectives.all_reduce, algorithm=name) for name in ALL_REDUCE}
WORKS |= {"all_reduce double_tree, 7 chunks": partial(collectives.all_reduce, algorithm="double_tree", chunks=7)}
WORKS |= {"all_reduce two_rings, 2 to 1": partial(collectives.all_reduce, algorithm="two_rings", shares=(2, 1))}
WORKS |= {"all_reduce hierarchical, uneven groups": uneven_groups}
WORKS |= {f"{name} {algorithm}": rooted(name, algorithm) for name in ("broadcast", "reduce") for algorithm in ("flat", "tree")}
WORKS |= {f"{name} {algorithm}": listed(name, algorithm) for name in ("scatter", "gather") for algorithm in ("linear", "tree")}
WORKS |= {f"all_gather {name}": partial(all_gather, algorithm=name) for name in ("ring", "bruck")}
WORKS |= {f"reduce_scatter {name}": partial(reduce_scatter, algorithm=name) for name in ("ring", "pairwise")}
WORKS |= {f"all_to_all {name}": partial(all_to_all, algorithm=name) for name in ("direct", "pairwise")}
WORKS |= {f"aggregate {way.__name__}": partial(by_last, way=way) for way in (aggregate.on_device, aggregate.on_host)}


def measured(work: Work, cluster: str, ranks: int, n: int, trace: bool) -> list[float]:
    """[when the last rank is done, the sum of the moments in which each is]"""

    def rank(comm: Communicator) -> float:
        work(comm, torch.empty(n, device=comm.device))
        return comm.now()

    topology, model = CLUSTERS[cluster]
    run = simulate(rank, topology, ranks=ranks, device="meta", model=model, trace=trace)
    return [run.time, math.fsum(run)]


def times(cluster: str, work: str, trace: bool = False) -> dict[str, list[float]]:
    most = len(CLUSTERS[cluster][0].devices)
    cases = [(ranks, n) for ranks in RANKS if ranks <= most for n in SIZES]
    return {f"{ranks} ranks, {n} elements": measured(WORKS[work], cluster, ranks, n, trace) for ranks, n in cases}


@cache
def stored() -> dict[str, dict[str, dict[str, list[float]]]]:
    """By cluster and collective."""
    return json.loads(STORED.read_text())


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("work", WORKS)
def test_the_time_is_the_stored_one_to_the_bit(cluster: str, work: str) -> None:
    assert times(cluster, work) == stored()[cluster][work]


@pytest.mark.parametrize("work", WORKS)
def test_being_traced_costs_no_virtual_time(work: str) -> None:
    assert times("star", work, trace=True) == stored()["star"][work]


def test_everything_stored_is_compared() -> None:
    assert {cluster: list(works) for cluster, works in stored().items()} == {cluster: list(WORKS) for cluster in CLUSTERS}


def main() -> None:
    """A line for each cluster and collective."""
    clusters = []
    for cluster in CLUSTERS:
        lines = [f"  {json.dumps(work)}: {json.dumps(times(cluster, work))}" for work in WORKS]
        clusters.append(f" {json.dumps(cluster)}: {{\n" + ",\n".join(lines) + "\n }")
    print("{\n" + ",\n".join(clusters) + "\n}")


if __name__ == "__main__":
    main()
