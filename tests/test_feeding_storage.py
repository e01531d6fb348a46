"""Storage and caches: formulas beside simulations."""

import random
from collections import deque
from math import inf

import pytest

from d2lps.feeding import Cache, Shuffle, Storage
from d2lps.feeding.cache import HITS

OBJECTS = Storage(servers=32, bandwidth=90e6, latency=0.1, private=True)
FILES = Storage(servers=4, bandwidth=2e9, latency=0.5e-3, per_request=0.2e-3, lookup=0.1e-3)


def reading(comm, mount, nbytes, count, outstanding, opens=0):
    """`count` requests, that many under way at a time; a file is opened before every `opens` of them."""
    queue = deque()
    while mount.asked < count or queue:
        while len(queue) < outstanding and mount.asked < count:
            if opens and mount.asked % opens == 0:
                mount.open()
            queue.append(mount.read(nbytes))
        queue.popleft().wait()
    return comm.now()


@pytest.mark.parametrize("store", [OBJECTS, FILES])
@pytest.mark.parametrize("nbytes", [1, 100_000, 50_000_000])
def test_one_request_takes_what_the_formula_says(store, nbytes):
    run = store.simulate(reading, 1, nbytes, 1, 1)
    assert run.time == pytest.approx(store.request(nbytes), rel=1e-9, abs=1e-6)
    assert store.simulate(reading, 1, nbytes, 7, 1)[0] == pytest.approx(7 * store.request(nbytes), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("store", "nbytes", "outstanding", "readers", "count", "opens"),
    [
        (OBJECTS, 100_000, 8, 1, 400, 0),  # latency: Little's law
        (OBJECTS, 16_000_000, 32, 1, 1200, 0),  # connections
        (Storage(servers=16, bandwidth=90e6, latency=0.01, private=True, port=500e6), 4_000_000, 16, 2, 600, 0),  # the port
        (FILES, 10_000, 4, 16, 100, 0),  # requests
        (FILES, 8_000_000, 4, 16, 100, 0),  # disks
        (FILES, 10_000, 4, 32, 40, 1),  # lookups
        (FILES, 10_000, 1, 2, 60, 1),  # everything, one after the other
    ],
)
def test_many_requests_reach_the_predicted_rate(store, nbytes, outstanding, readers, count, opens):
    run = store.simulate(reading, readers, nbytes, count, outstanding, opens, trace=False)
    rate = store.rate(nbytes, outstanding, readers, opens or inf)
    assert count / max(run) == pytest.approx(rate, rel=0.15)
    assert count / max(run) <= rate * 1.001  # it is a bound


def test_writing_takes_the_disks_from_who_reads():
    """A server's disks are shared by reads and writes: two at once take twice as long."""

    def both(comm, mount):
        if comm.rank == 0:
            mount.write(1_000_000_000).wait()
        else:
            mount.read(1_000_000_000).wait()
        return comm.now()

    store = Storage(servers=1, bandwidth=1e9, latency=0.0, port=1e12)
    assert max(store.simulate(both, 2)) == pytest.approx(2, rel=0.01)
    apart = Storage(servers=1, bandwidth=1e9, latency=0.0, port=1e12, private=True)
    assert max(apart.simulate(both, 2)) == pytest.approx(1, rel=0.01)


def test_wrong_requests_are_refused():
    with pytest.raises(ValueError, match="readers=0"):
        OBJECTS.simulate(reading, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="nbytes=0"):
        OBJECTS.simulate(lambda comm, mount: mount.read(0), 1)
    for wrong, word in (((0,), "nbytes=0"), ((1e6, 0), "outstanding=0"), ((1e6, 1, 0), "readers=0")):
        with pytest.raises(ValueError, match=word):
            OBJECTS.rate(*wrong)


# ---- caches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["lru", "pinned"])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.8, 0.95, 1.0])
def test_hits_are_as_predicted(rule, share):
    things, epochs = 3000, 6
    cache = Cache(int(things * share), rule)
    for epoch in range(epochs):
        if epoch == 1:
            cache.hits = 0
        for key in Shuffle(things, 8)(range(things), epoch).tolist():
            assert cache.get(key, lambda key: -key) == -key
            assert len(cache.kept) <= cache.room
    assert cache.hits / things / (epochs - 1) == pytest.approx(HITS[rule](share), abs=0.012)


def test_in_one_order_again_and_again_lru_finds_nothing():
    for rule, hits in (("lru", 0), ("pinned", 70)):
        cache = Cache(70, rule)
        for _ in range(2):
            for key in range(100):
                cache.get(key, str)
        assert cache.hits == hits


def test_lru_throws_away_what_was_used_longest_ago():
    cache, model, dice = Cache(5), [], random.Random(3)
    for _ in range(2000):
        key = dice.randrange(9)
        hit = key in model
        model = [*(kept for kept in model if kept != key), key][-5:]
        before = cache.hits
        cache.get(key, str)
        assert (cache.hits > before) == hit and list(cache.kept) == model


def test_wrong_caches_are_refused():
    with pytest.raises(ValueError, match="room=0"):
        Cache(0)
    with pytest.raises(ValueError, match="rule='fifo'"):
        Cache(3, "fifo")
    with pytest.raises(ValueError, match=r"share=1\.5"):
        HITS["lru"](1.5)


@pytest.mark.parametrize(
    "wrong", [{"servers": 0}, {"servers": 1.5}, {"bandwidth": 0}, {"port": -1.0}, {"latency": -0.1}, {"lookup": inf}]
)
def test_wrong_storage_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Storage(**{"servers": 1, "bandwidth": 1e9, "latency": 0.0} | wrong)
