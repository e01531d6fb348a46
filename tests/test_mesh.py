"""The grid of ranks, and its groups."""

from __future__ import annotations

from typing import Any

import pytest

import d2lps
from d2lps import Communicator
from d2lps.parallel import Mesh
from d2lps.topology import star


def groups(comm: Communicator, sizes: dict[str, int], **options: Any) -> dict[str, list[int]]:
    mesh = Mesh(comm, **sizes, **options)
    return {name: getattr(mesh, name).members for name in ("tp", "cp", "dp", "pp", "data", "ep", "edp")}


def test_the_innermost_ranks_are_neighbors() -> None:
    ranks = d2lps.simulate(groups, star(16, 1e9, 0), {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2})
    assert ranks[0] == {
        "tp": [0, 1], "cp": [0, 2], "dp": [0, 4], "pp": [0, 8], "data": [0, 2, 4, 6], "ep": [0, 2], "edp": [0, 4],
    }  # fmt: skip
    assert ranks[15]["tp"] == [14, 15] and ranks[15]["pp"] == [7, 15]
    for name in ranks[0]:  # each axis shares out all ranks
        assert sorted(member for group in {tuple(rank[name]) for rank in ranks} for member in group) == list(range(16))


def test_another_order() -> None:
    order = ("pp", "tp", "cp", "dp")
    ranks = d2lps.simulate(lambda comm: groups(comm, {"tp": 2, "pp": 2}, order=order), star(4, 1e9, 0))
    assert ranks[0]["pp"] == [0, 1] and ranks[0]["tp"] == [0, 2]


def test_on_processes() -> None:
    assert d2lps.run(groups, 4, {"dp": 2, "tp": 2})[1]["dp"] == [1, 3]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [({"tp": 3}, "tp=3 x cp=1 x dp=1 x pp=1 makes 3 ranks, and there are 4"), ({"dp": 4, "ep": 3}, "ep=3"), ({"dp": 0}, "dp=0")],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        d2lps.simulate(groups, star(4, 1e9, 0), sizes)
