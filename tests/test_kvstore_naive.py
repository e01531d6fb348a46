"""The server that fits on a page: as long as nothing goes wrong it does what the real one does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import d2lps
from d2lps import kvstore, topology
from d2lps.comm import Deadlock
from d2lps.kvstore import naive
from d2lps.kvstore.storage.tiers import Tiers


def train(kv: Any, steps: int) -> list[float]:
    """Two keys, pushed every time, in iterations as everywhere."""
    w, b = torch.zeros(5), torch.full((1,), float(kv.rank))
    kv.init("w", w)
    kv.init("b", b)
    for step in range(steps):
        for key, value in (("w", torch.full((5,), float(kv.rank + step))), ("b", torch.ones(1))):
            kv.push(key, value).wait()
        kv.clock()
        kv.pull("w", w).wait()
        kv.pull("b", b).wait()
    return [*w.tolist(), *b.tolist()]


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_it_agrees_with_the_real_one_in_both_worlds(workers: int) -> None:
    star = topology.star(workers + 1, bandwidth=1e9)
    wanted = list(kvstore.simulate(train, star, workers, 1, 3))
    assert d2lps.simulate(naive.play, star, train, 3)[:workers] == wanted
    assert d2lps.run(naive.play, workers + 1, train, 3)[:workers] == wanted


def test_its_port_carries_what_the_formula_says() -> None:
    def exchange(kv: Any) -> None:
        value = torch.ones(1000)
        kv.init("w", value)
        kv.push("w", value).wait()
        kv.pull("w", value).wait()

    star = topology.star(5, bandwidth=1e9)
    carried = d2lps.simulate(naive.play, star, exchange).trace.bytes_on_links()
    requests = 4 * 4 * 24  # each of four workers asks four times, with three numbers
    assert carried["switch", "gpu4"] == 4 * 2 * 4000 + requests
    assert carried["gpu4", "switch"] == 4 * 4000


def test_a_worker_with_other_calls_holds_up_everybody() -> None:
    def uneven(kv: Any) -> None:
        kv.init("w", torch.zeros(1))
        if kv.rank == 0:
            kv.comm.recv(torch.zeros(1), 1)  # waits for somebody who waits for the server, who waits for this one
        kv.pull("w", torch.zeros(1)).wait()

    with pytest.raises(Deadlock):
        d2lps.simulate(naive.play, topology.star(3, bandwidth=1e9), uneven)


def test_what_it_cannot_do_is_refused_in_words() -> None:
    def wrong(kv: Any) -> None:
        kv.push("w", torch.zeros(1))

    with pytest.raises(ValueError, match=r"key 'w' with float32.* init comes first"):
        d2lps.simulate(naive.play, topology.star(2, bandwidth=1e9), wrong)


def test_it_keeps_its_tensors_in_whatever_dictionary_it_is_given(tmp_path: Path) -> None:
    def part(comm: Any, store_of: Callable[[], Any]) -> Any:
        if comm.rank == comm.size - 1:
            naive.serve(comm, store := store_of())
            return {key: store[key].tolist() for key in store}
        train(kv := naive.Worker(comm), 3)
        kv.leave()
        return None

    star = topology.star(3, bandwidth=1e9)
    cold = d2lps.simulate(part, star, lambda: Tiers(tmp_path, budget=20))  # room for the larger key alone
    assert cold[2] == d2lps.simulate(part, star, dict)[2] == {0: [9.0] * 5, 1: [6.0]}
