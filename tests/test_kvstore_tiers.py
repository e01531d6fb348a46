"""Hot and cold tiers against a plain dictionary: the same values, the promised bytes in memory, and no needless writes."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from d2lps.kvstore.core.events import Reply, Request, alike
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.storage.tiers import Tiers

KEYS = st.sampled_from(["a", "b/c", "ключ" * 100, ""])
BUDGET = 64


def bytes_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


class AgainstADictionary(RuleBasedStateMachine):
    """A model that is a dictionary, and the order in which its keys were used."""

    folders: list[Path] = []

    @initialize()
    def start(self) -> None:
        self.folder = self.folders[0] / str(len(self.folders))
        self.folders.append(self.folder)
        self.tiers = Tiers(self.folder, BUDGET)
        self.model: dict[str, torch.Tensor] = {}
        self.hot: OrderedDict[str, int] = OrderedDict()  # nbytes by key, the least recently used first
        self.dirty: set[str] = set()

    def used(self, key: str, nbytes: int) -> int:
        """The model of what stays in memory, and how many bytes the disk was given."""
        self.hot.pop(key, None)
        written = 0
        while sum(self.hot.values()) + nbytes > BUDGET:
            old, size = self.hot.popitem(last=False)
            written += size if old in self.dirty else 0
            self.dirty.discard(old)
        self.hot[key] = nbytes
        return written

    @rule(key=KEYS, rows=st.integers(0, 5), value=st.integers(-100, 100))
    def put(self, key: str, rows: int, value: int) -> None:
        self.model[key], before = torch.full((rows, 2), float(value)), self.tiers.counts.bytes_written
        self.tiers[key] = self.model[key].clone()
        assert self.tiers.counts.bytes_written - before == self.used(key, rows * 8)
        self.dirty.add(key)

    @rule(key=KEYS)
    def push(self, key: str) -> None:
        if key not in self.model:
            return
        self.tiers[key] += 1
        self.model[key] += 1
        self.used(key, self.model[key].nbytes)
        self.dirty.add(key)

    @rule(key=KEYS)
    def pull(self, key: str) -> None:
        if key not in self.model:
            with pytest.raises(KeyError):
                self.tiers[key]
            return
        counts = self.tiers.counts
        before, was_hot = (counts.hits, counts.misses, counts.bytes_written), key in self.hot
        assert torch.equal(self.tiers[key], self.model[key])
        written = self.used(key, self.model[key].nbytes)
        assert (counts.hits, counts.misses, counts.bytes_written) == (
            before[0] + was_hot, before[1] + (not was_hot), before[2] + written,
        )  # fmt: skip

    @rule()
    def look_at_all(self) -> None:
        """What an evaluation does; it leaves no mark."""
        files, hot, counts = bytes_in(self.folder), self.tiers.hot, self.tiers.counts
        before = (counts.hits, counts.misses, counts.evictions, counts.bytes_written, counts.bytes_hot)
        assert all(torch.equal(self.tiers.peek(key), value) for key, value in self.model.items())
        assert before == (counts.hits, counts.misses, counts.evictions, counts.bytes_written, counts.bytes_hot)
        assert bytes_in(self.folder) == files and self.tiers.hot == hot

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        if key not in self.model:
            with pytest.raises(KeyError):
                del self.tiers[key]
            return
        del self.tiers[key], self.model[key]
        self.hot.pop(key, None)
        self.dirty.discard(key)

    @invariant()
    def memory_is_what_the_model_says(self) -> None:
        if not hasattr(self, "tiers"):
            return
        assert self.tiers.hot == list(self.hot) and self.tiers.counts.bytes_hot == sum(self.hot.values()) <= BUDGET
        assert set(self.tiers) == set(self.model) and len(self.tiers) == len(self.model)

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close()
            assert list(self.folder.iterdir()) == []


def test_against_a_dictionary(tmp_path: Path) -> None:
    class InThisFolder(AgainstADictionary):
        folders = [tmp_path]

    state_machine = InThisFolder.TestCase
    state_machine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
    state_machine().runTest()


# ---- one thing at a time --------------------------------------------------------------------------------------------------


def test_a_change_counts_when_it_is_set_and_however_long_that_takes(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, budget=8)
    tiers["a"], tiers["b"] = torch.ones(2), torch.ones(2)
    held = tiers["a"]
    tiers["b"]  # "a" leaves memory, unchanged
    held += 5
    assert tiers.peek("a").tolist() == [1, 1]
    tiers["a"] = held
    tiers["b"]
    assert tiers["a"].tolist() == [6, 6]
    tiers.close()


def test_a_tensor_larger_than_the_budget_is_refused_and_nothing_lost(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, budget=8)
    tiers["a"] = torch.ones(2)
    with pytest.raises(ValueError, match="'b' has 12 bytes, and the budget for all tensors in memory is 8"):
        tiers["b"] = torch.ones(3)
    with pytest.raises(ValueError, match="'a' has 12 bytes"):
        tiers["a"] = torch.ones(3)
    assert list(tiers) == tiers.hot == ["a"] and tiers["a"].tolist() == [1, 1]
    tiers.close()
    with pytest.raises(ValueError, match="budget"):
        Tiers(tmp_path, budget=0)


def test_a_view_does_not_keep_all_of_a_larger_tensor_in_memory(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, budget=8)
    tiers["a"] = torch.zeros(1000, 2)[3]
    assert tiers["a"].untyped_storage().nbytes() == 8
    tiers.close()


def test_a_full_disk_loses_nothing_that_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(tmp_path, budget=16)
    tiers["a"], tiers["b"] = torch.ones(2), torch.ones(2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        for key, value in (("a", torch.zeros(4)), ("c", torch.zeros(2))):
            with pytest.raises(OSError, match=r"No space left on device: '.*\.page'"):
                tiers[key] = value
    assert {key: tiers[key].tolist() for key in tiers} == {"a": [1, 1], "b": [1, 1]}
    tiers["c"] = torch.zeros(2)
    assert {key: tiers[key].tolist() for key in tiers} == {"a": [1, 1], "b": [1, 1], "c": [0, 0]}
    tiers.close()


def test_a_damaged_page_is_an_error_and_no_number(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, budget=8)
    tiers["a"], tiers["b"] = torch.ones(2), torch.ones(2)
    [page] = tmp_path.glob("*.page")
    broken = bytearray(page.read_bytes())
    broken[-1] ^= 1
    page.write_bytes(broken)
    for read in (tiers.peek, tiers.__getitem__):
        with pytest.raises(ValueError, match=rf"{page}, the page of 'a', is not what was written there"):
            read("a")
    assert tiers.hot == ["b"]
    tiers.close()


def test_pages_of_one_who_did_not_close_are_swept(tmp_path: Path) -> None:
    lost = Tiers(tmp_path, budget=8)
    lost["a"], lost["b"] = torch.ones(2), torch.ones(2)
    (tmp_path / "notes.txt").write_text("not ours")
    tiers = Tiers(tmp_path, budget=8)
    assert len(tiers) == 0 and [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    tiers.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64])
def test_pages_keep_dtypes_and_shapes(tmp_path: Path, dtype: torch.dtype) -> None:
    tiers = Tiers(tmp_path, budget=100)
    values = {"empty": torch.empty(0, 4), "matrix": torch.arange(6).view(2, 3).t().to(dtype), "scalar": torch.tensor(3).to(dtype)}
    tiers.update(values)
    tiers["large"] = torch.zeros(100, dtype=torch.uint8)  # puts all others on the disk
    assert tiers.hot == ["large"]
    assert all(torch.equal(tiers[key], value) and tiers[key].dtype == value.dtype for key, value in values.items())
    tiers.close()


# ---- under a server ---------------------------------------------------------------------------------------------------------


def requests(chance: random.Random, count: int, optimizer: str) -> Iterator[Request]:
    """What two workers might ask about six tensors of 400 bytes."""
    clocks, sequences = [0, 0], [0, 0]

    def asked(worker: int, op: str, **more: object) -> Request:
        sequences[worker] += 1
        return Request(op, client=worker, sequence=sequences[worker], clock=clocks[worker], **more)  # type: ignore[arg-type]

    for number in range(6):
        yield asked(0, "init", key=str(number), value=torch.full((10, 10), float(number)))
    if optimizer:
        for worker in (0, 1):
            yield asked(worker, "set_optimizer", options={"name": optimizer, "lr": 0.1})
    for _ in range(count):
        worker, key = chance.randrange(2), str(chance.randrange(6))
        match chance.randrange(5):
            case 0:
                yield asked(worker, "push", key=key, value=torch.full((10, 10), chance.random()))
            case 1:
                yield asked(worker, "push", key=key, value=torch.full((2, 10), chance.random()), rows=torch.tensor([3, 8]))
            case 2 | 3 as way:
                yield asked(worker, ("pull", "peek")[way - 2], key=key)
            case 4:
                clocks[worker] += 1
                yield asked(worker, "clock")


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
@pytest.mark.parametrize("optimizer", ["", "sgd", "adam"])
def test_a_server_answers_as_without_a_budget(tmp_path: Path, consistency: str, optimizer: str) -> None:
    tiers = Tiers(tmp_path, budget=1000)
    plain, tiered = Server([0, 1], consistency), Server([0, 1], consistency, store=tiers)
    for request in requests(random.Random(7), 300, optimizer):
        ours, theirs = ([e for e in server.step(request) if isinstance(e, Reply)] for server in (tiered, plain))
        assert alike(ours, theirs), request
        assert tiers.counts.bytes_hot <= 1000
    assert tiers.counts.evictions > 50 and tiers.counts.bytes_written and tiers.counts.misses
    assert alike(tiered.state(), plain.state())
    again = Server([0, 1], consistency, store=Tiers(tmp_path / "again", budget=1000))
    again.restore(plain.state())
    assert alike(again.state(), plain.state())


def test_a_peek_moves_and_writes_nothing(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, budget=1000)
    server = Server([0, 1], "asp", store=tiers)
    for request in requests(random.Random(8), 50, "sgd"):
        server.step(request)
    before, hot, written = bytes_in(tmp_path), tiers.hot, tiers.counts.bytes_written
    last = server.clients[0].next
    for number in range(6):
        [*_, reply] = server.step(Request("peek", str(number), client=0, sequence=last + number))
        assert torch.equal(reply.value, tiers.peek((str(number), "")))
    assert (bytes_in(tmp_path), tiers.hot, tiers.counts.bytes_written) == (before, hot, written)


def test_what_is_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    server = Server([0], "asp", store=Tiers(tmp_path, budget=1000))
    [*_, reply] = server.step(Request("init", "w", torch.zeros(251), sequence=1))
    assert reply.error == "'w' has 1004 bytes, and this server's memory a budget of 1000" and not server.entries
