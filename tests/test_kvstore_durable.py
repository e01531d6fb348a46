"""A server on disk: wherever it is stopped, the next one knows all that was promised, or says that it does not."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ROOT, running, script, until

from d2lps import kvstore
from d2lps.kvstore.core.events import Append, Request, alike
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.network.deployment import deploy
from d2lps.kvstore.storage.durable import Durable, load_state, read_mark, renew, save_state, write_mark
from d2lps.kvstore.storage.frame import MAGIC, PREFIX, VERSION, FrameError, pack, unpack
from d2lps.kvstore.storage.log import Log, LogDamaged


@pytest.fixture(params=["log", "fsync"])
def level(request: pytest.FixtureRequest) -> str:
    """A durability by disk."""
    return str(request.param)


def new_server() -> Server:
    return Server([0, 1])


def story() -> list[Request]:
    """Adam with two workers: a round that is over, then one with a push put aside, and a pull that waits."""
    sequences = [0, 0]

    def asked(client: int, op: str, **fields: Any) -> Request:
        sequences[client] += 1
        return Request(op, "w", client=client, sequence=sequences[client], **fields)

    requests = [asked(0, "init", value=torch.ones(3))]
    requests += [asked(client, "set_optimizer", options={"name": "adam", "lr": 0.1}) for client in (0, 1)]
    for clock in (0, 1):
        requests += [asked(client, "push", value=torch.tensor([1.0, 2.0, 3.0]) + client, clock=clock) for client in (0, 1)]
        requests += [asked(0, "clock", clock=clock + 1), asked(0, "pull", clock=clock + 1)]
        requests += [asked(1, "clock", clock=clock + 1)] if clock == 0 else []
    return requests


def told(durable: Durable, requests: list[Request]) -> None:
    """What a driver does: all is written down before anybody is told."""
    for request in requests:
        for effect in durable.server.step(request):
            if isinstance(effect, Append):
                durable.append(effect.event)
        durable.sync()


def after(requests: list[Request]) -> Server:
    server = new_server()
    for request in requests:
        server.step(request)
    return server


def made(folder: Path, level: str = "log", **options: Any) -> Durable:
    folder.mkdir(parents=True, exist_ok=True)
    return Durable(new_server(), folder, level, **options)


def reopened(folder: Path, level: str = "log", **options: Any) -> Server:
    """The server that a folder makes."""
    durable = made(folder, level, **options)
    assert durable.number == durable.server.number
    durable.close()
    return durable.server


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- coming back ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "later", "log_bytes"), [("log", "fsync", 1), ("fsync", "log", 1000), ("log", "log", 1 << 20)])
def test_a_server_goes_on_from_its_checkpoint_and_its_log(tmp_path: Path, level: str, later: str, log_bytes: int) -> None:
    """Between two rounds of Adam, with a push put aside and a pull that waits: nothing is lost, to the bit, at another level."""
    requests = story()
    for stop in range(len(requests) + 1):
        durable = made(tmp_path / str(stop), level)
        told(durable, requests[:stop])
        durable.checkpoint()
        told(durable, requests[stop:])
        durable.close()
        again = made(tmp_path / str(stop), later, log_bytes=log_bytes)
        assert alike(again.server.state(), after(requests).state()) and again.number == len(requests) and again.cut == 0
        again.close()


def test_logs_are_written_over_in_turn(tmp_path: Path) -> None:
    durable, files = made(tmp_path, "log", log_bytes=1), []
    for request in story():
        told(durable, [request])
        files.append((tmp_path / f"log-{durable.number:012d}").stat().st_ino)
        assert names(tmp_path) == [f"log-{durable.number:012d}", "spare"]
    assert len(set(files)) == 2 and files[0] == files[2] != files[1] == files[3]
    told(durable, [story()[-1]])  # nothing new
    durable.close()
    assert alike(reopened(tmp_path).state(), after(story()).state())


@pytest.mark.parametrize(("floats", "log_bytes", "longest"), [(10, 1 << 30, 3000), (1000, 1 << 30, 16_000), (1000, 5000, 5000)])
def test_logs_are_as_long_as_the_state_asks_and_no_longer_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floats: int, log_bytes: int, longest: int
) -> None:
    """Short ones are written over sooner, in pages that are there; but what is written shall be the log, by and large."""
    monkeypatch.setattr("d2lps.kvstore.storage.durable._SHORT", 3000)
    durable, lengths = Durable(Server([0], "asp"), tmp_path, "log", log_bytes=log_bytes), [0]
    told(durable, [Request("init", "w", torch.zeros(floats), sequence=1)])
    durable.checkpoint()
    state = durable.log.end
    while durable.log.end - state >= lengths[-1]:
        lengths.append(durable.log.end - state)
        told(durable, [Request("push", "w", torch.ones(floats), sequence=durable.number + 1)])
    durable.close()
    assert lengths[-1] <= longest < lengths[-1] + 4 * floats + 300  # bytes of a push


# ---- stopped anywhere -----------------------------------------------------------------------------------------------------


class Stop(Exception):
    """What stops the writer."""


def stopped(work: Callable[[], None], count: int, late: bool) -> str:
    """Do work of which the call to the system of this number, before or after its deed, is the last; its name, or ""."""
    made: list[str] = []

    def stopping(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            result = call(*args, **kwargs) if len(made) < count or (late and len(made) == count) else None
            if len(made) >= count:
                raise Stop(name)
            return result

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "open", "fsync", "rename", "pwrite", "pwritev"):
            patch.setattr(os, name, stopping(name, getattr(os, name)))
        try:
            work()
        except Stop:
            return made[count - 1]
    return ""


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_stopped_at_any_system_call_loses_nothing(tmp_path: Path, level: str, late: bool) -> None:
    requests, seen, count = story(), set(), 0
    while True:
        count += 1
        folder = tmp_path / str(count)
        durable = made(folder, level)
        told(durable, requests[:6])
        durable.checkpoint()  # so there is a spare
        told(durable, requests[6:8])
        call = stopped(durable.checkpoint, count, late)
        durable.close()
        assert alike(reopened(folder, level, promised=8).state(), after(requests[:8]).state()), (count, call)
        durable = made(folder, level)
        told(durable, requests[8:])
        durable.checkpoint()
        durable.close()
        newest = len(requests)
        assert names(folder) == [f"log-{newest:012d}", "spare"]
        assert alike(reopened(folder, level).state(), after(requests).state()), (count, call)
        if not call:
            break
        seen.add(call)
    assert count > 6 and seen >= {"open", "fsync", "rename", "pwrite", "pwritev"}


@pytest.mark.parametrize("late", [False, True])
def test_a_start_stopped_at_any_system_call_loses_nothing(tmp_path: Path, level: str, late: bool) -> None:
    """After a checkpoint that was stopped between two renames: then a start has most to do."""
    requests, count, call = story(), 0, "none yet"
    while call:
        count += 1
        folder = tmp_path / str(count)
        durable = made(folder, level)
        told(durable, requests)
        log = (folder / "log-000000000000").read_bytes()
        durable.checkpoint()
        durable.close()
        (folder / "log-000000000000").write_bytes(log)
        call = stopped(lambda folder=folder: made(folder, level).close(), count, late)  # type: ignore[misc]
        assert alike(reopened(folder, level).state(), after(requests).state()), (count, call)
        assert names(folder) == [f"log-{len(requests):012d}", "spare"]
    assert count > 2


def test_a_change_without_an_event_is_kept_by_a_checkpoint(tmp_path: Path, level: str) -> None:
    """As of keys that come from another server: to an empty log, or to one that is not."""
    durable = made(tmp_path, level)
    durable.server.options = {"reduction": "sum"}
    durable.checkpoint()
    durable.close()
    assert reopened(tmp_path, level).options == {"reduction": "sum"} and durable.number == 0
    durable = made(tmp_path, level)
    told(durable, story()[:1])
    for reduction in ("mean", "sum"):
        durable.server.options = {"reduction": reduction}
        durable.checkpoint()
    durable.close()
    server = reopened(tmp_path, level)
    assert server.options == {"reduction": "sum"} and [*server.entries] == ["w"] and server.number == 1


def test_a_checkpoint_that_fails_leaves_a_server_that_goes_on(
    tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = made(tmp_path, level)
    told(durable, story()[:5])

    def full(file: int, views: list[memoryview], offset: int, pwritev: Callable[..., int] = os.pwritev) -> int:
        pwritev(file, [b"".join(views)[:100]], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match=r"No space left on device.*spare"):
            durable.checkpoint()
    assert alike(reopened(tmp_path, level, promised=5).state(), after(story()[:5]).state())
    told(durable, story()[5:])
    durable.checkpoint()
    durable.close()
    assert alike(reopened(tmp_path, level).state(), after(story()).state())


# ---- a loss is said -------------------------------------------------------------------------------------------------------


def kept(folder: Path, level: str = "log") -> None:
    """Eight events: a state after five, and three in the log."""
    durable = made(folder, level)
    told(durable, story()[:5])
    durable.checkpoint()
    told(durable, story()[5:8])
    durable.close()


def test_a_log_that_is_missing_is_missed(tmp_path: Path, level: str) -> None:
    kept(tmp_path, level)
    (tmp_path / "log-000000000005").unlink()
    with pytest.raises(LogDamaged, match=r"log-0+: there are 0 events, and 8 were promised: acknowledged"):
        reopened(tmp_path, level, promised=8)


@pytest.mark.parametrize("bytes_left", [0, 10, 20, 100, -1])
def test_a_log_that_lost_its_tail_is_named_though_nobody_asks(tmp_path: Path, level: str, bytes_left: int) -> None:
    kept(tmp_path, level)
    log = tmp_path / "log-000000000005"
    os.truncate(log, bytes_left if bytes_left >= 0 else log.stat().st_size - 1)
    with pytest.raises(LogDamaged, match=r"log-000000000005: (its header is broken|record [5678] is .* before 9 were promised)"):
        reopened(tmp_path, level)


def test_what_was_written_and_not_promised_is_no_loss(tmp_path: Path) -> None:
    durable = made(tmp_path, "log")
    told(durable, story()[:4])
    durable.append(story()[4])
    durable.close()
    log = tmp_path / "log-000000000000"
    os.truncate(log, log.stat().st_size - 1)
    durable = made(tmp_path, "log")
    assert durable.number == 4 and durable.cut > 50 and alike(durable.server.state(), after(story()[:4]).state())
    durable.close()


def test_a_folder_of_an_older_version_is_refused(tmp_path: Path) -> None:
    log = Log(tmp_path / "log-000000000000")
    log.append(PREFIX.pack(MAGIC, VERSION - 1, 0, 0))
    log.sync()
    log.close()
    with pytest.raises(FrameError, match=rf"magic and version of a state: \(b'd2ps', {VERSION - 1}\)"):
        reopened(tmp_path)


# ---- a state as bytes -----------------------------------------------------------------------------------------------------


leaves = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
leaves |= st.lists(st.integers(-9, 9), max_size=3).map(torch.tensor)
keys = st.integers(-9, 9) | st.text(max_size=5)
states = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@settings(max_examples=100, deadline=None)
@given(states)
def test_any_state_comes_back(state: Any) -> None:
    assert alike(unpack(bytearray(b"".join(pack(state)))), state)


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(4, 3)
    tensors = {
        "parts of one tensor in memory": [table[:2], table[2:], table, table[:, 1]],
        "transposed": torch.arange(6).view(2, 3).t(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "needs a gradient / @ é": torch.ones(2, requires_grad=True),
        "many": [torch.full((3,), float(number)) for number in range(5000)],  # more buffers than a kernel takes at once
    }
    save_state(tmp_path / "new", 10**12 + 7, tensors)
    assert names(tmp_path / "new") == ["log-1000000000007"] and alike(load_state(tmp_path / "new"), tensors)


# ---- one run after another ------------------------------------------------------------------------------------------------


def renewed(server: Server, earlier: Server, folder: Path, promised: int = 0) -> None:
    renew(server, earlier, folder, "log", 1 << 30, 1 << 30, promised).close()


def test_a_new_run_has_what_the_last_one_taught_and_nothing_else(tmp_path: Path) -> None:
    """Other workers, other rules: the old log is read by the old ones."""
    durable = made(tmp_path, "log")
    told(durable, story())
    durable.close()
    for turn in range(2):
        server = Server([0, 1, 2], "asp")
        renewed(server, new_server() if turn == 0 else Server([0, 1, 2], "asp"), tmp_path, promised=len(story()))
        before, fresh = after(story()), Server([0, 1, 2], "asp").state()
        state = server.state()
        assert state["number"] == len(story()) and not state["open"]["w"] and before.state()["open"]["w"]
        lasting = ("values", "moments", "versions", "options")
        assert all(alike(state[name], before.state()[name]) for name in lasting)
        assert all(alike(state[name], fresh[name]) for name in state.keys() - {*lasting, "open", "number"})
    durable = Durable(again := Server([0, 1, 2], "asp"), tmp_path, "log")
    assert alike(again.state(), state)
    told(durable, [Request("push", "w", torch.ones(3), client=2, sequence=1)])
    assert again.entries["w"].version == before.entries["w"].version + 1
    durable.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_renewal_may_be_stopped_anywhere_and_done_again(tmp_path: Path, late: bool) -> None:
    count, call = 0, "none yet"
    while call:
        count += 1
        folder, server = tmp_path / str(count), Server([0], "asp")
        kept(folder)
        call = stopped(lambda folder=folder: renewed(Server([0], "asp"), new_server(), folder), count, late)  # type: ignore[misc]
        renewed(server, new_server(), folder, promised=8)
        assert alike(server.state()["moments"], after(story()[:8]).state()["moments"])
        assert server.number == 8 and reopened(folder).number == server.number
    assert count > 6


def count_up(kv: Any, folder: Path, pushes: int) -> list[float]:
    value = torch.zeros(300)
    kv.init("w", value)
    seen = []
    for number in range(pushes):
        kv.push("w", torch.ones(300)).wait()
        kv.clock()
        kv.pull("w", value).wait()
        seen.append(value.max().item())
        (folder / f"{kv.rank} pushed {number}").touch()
    return seen


def test_a_run_goes_on_from_the_folder_of_an_earlier_one(tmp_path: Path, level: str) -> None:
    options = {"durability": level, "folder": tmp_path / "store", "split": 100}
    assert kvstore.run(count_up, 2, 2, tmp_path, 3, **options) == [[2, 4, 6]] * 2
    assert kvstore.run(count_up, 3, 2, tmp_path, 2, consistency="asp", log_bytes=2000, **options).values["w"].unique() == 12
    run = kvstore.run(count_up, 1, 2, tmp_path, 2, **options)
    assert run == [[13, 14]] and run.values["w"].unique() == 14
    told = sorted(line.partition(": ")[2] for line in run.history)
    assert told == [f"server {server} goes on with all that an earlier run had acknowledged" for server in range(2)]
    numbers = {str(server): report.number for server, report in enumerate(run.servers)}
    assert read_mark(tmp_path / "store") | {"numbers": numbers} == read_mark(tmp_path / "store")


def test_a_run_goes_on_from_one_that_was_killed_in_the_middle(tmp_path: Path) -> None:
    """The caller's whole job goes: of the two pushes of its last step, what was acknowledged is there, each once."""
    code = f"""
from pathlib import Path
from test_kvstore_durable import count_up
from d2lps import kvstore
if __name__ == "__main__":
    folder = Path({str(tmp_path)!r})
    kvstore.run(count_up, 1, 2, folder, 10**6, durability="log", folder=folder / "store", split=100, consistency="asp")
"""
    with running(script(tmp_path / "job.py", code), PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}") as job:
        assert until(lambda: job.poll() is not None or (tmp_path / "0 pushed 20").exists(), 100) and job.poll() is None
    options = {"durability": "log", "folder": tmp_path / "store", "split": 100, "consistency": "asp"}
    deadline = time.monotonic() + 60
    while True:  # the servers of the killed job end by themselves, and hold their logs until then
        try:
            run = kvstore.run(count_up, 1, 2, tmp_path, 0, **options)
            break
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert sum("cannot vouch that it is all: that run did not end" in line for line in run.history) == 2
    acknowledged = max(int(path.name.split()[-1]) for path in tmp_path.glob("0 pushed *")) + 1
    parts = {part[:: len(part) - 1].tolist()[0] for report in run.servers for part in report.values.values()}
    assert parts <= {acknowledged, acknowledged + 1}
    run = kvstore.run(count_up, 2, 2, tmp_path, 1, **options)
    assert {part[0].item() for report in run.servers for part in report.values.values()} == {part + 2 for part in parts}


def wait_and_push(kv: Any, tried: Path) -> None:
    """Of three keys, two lie on the disk while somebody else tries to use the folder."""
    value = torch.zeros(100)
    for key in ("a", "b", "c"):
        kv.init(key, value)
    while not tried.exists():
        kv.comm.sleep(0.01)
    for key in ("a", "b", "c"):
        kv.push(key, torch.ones(100)).wait()
        kv.pull(key, value).wait()
        assert value.unique().tolist() == [1.0]


def test_two_runs_at_the_same_time_do_not_share_a_folder(tmp_path: Path) -> None:
    options = {"durability": "log", "folder": tmp_path / "store", "memory_budget": 500, "consistency": "asp"}
    said = []

    def saboteur(cluster: Any) -> None:
        while not any((tmp_path / "store").glob("pages-0/*.page")):
            cluster.sleep(0.01)
        try:
            kvstore.run(count_up, 1, 1, tmp_path, 1, **options)
        except BlockingIOError as error:
            said.append(str(error))
        (tmp_path / "tried").touch()

    kvstore.run(wait_and_push, 1, 1, tmp_path / "tried", saboteur=saboteur, **options)
    assert len(said) == 1 and said[0].endswith("store/server-0'")
    assert kvstore.run(count_up, 1, 1, tmp_path, 1, **options | {"memory_budget": 2000}) == [[1.0]]


def test_another_folder_is_refused_in_words(tmp_path: Path) -> None:
    options: dict[str, Any] = {"durability": "log", "folder": tmp_path / "store", "split": 100}
    kvstore.run(count_up, 1, 2, tmp_path, 1, **options)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "store").rglob("*"))
    with pytest.raises(ValueError, match="store' is of a run with servers=2, not 3"):
        deploy(1, 3, **options)
    with pytest.raises(ValueError, match="store' is of a run with split=100, not 200"):
        deploy(1, 2, **options | {"split": 200})
    with pytest.raises(ValueError, match="store' is of a run with placement='hash', not 'load'"):
        deploy(1, 2, **options, placement="load")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="other' is not empty, and no earlier run has left it"):
        deploy(1, 2, **options | {"folder": tmp_path / "other"})
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "store").rglob("*"))
    write_mark(tmp_path / "store", read_mark(tmp_path / "store") | {"servers": [1]})  # as the last one's server 0 had gone
    told = r"store' .*servers=\[1\]: no other run can go on there; let such a run end with kv.save, and the next one begin with"
    with pytest.raises(ValueError, match=told):
        deploy(1, 1, **options)
    (tmp_path / "store" / "mark.json").write_text('{"servers":')
    with pytest.raises(ValueError, match=r"store/mark\.json is no mark of a run"):
        deploy(1, 2, **options)


def test_a_damaged_folder_of_an_earlier_run_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"durability": "log", "folder": tmp_path / "store", "split": 100}
    kvstore.run(count_up, 1, 2, tmp_path, 5, **options)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    log = tmp_path / "store" / "server-1" / "log-000000000000"
    os.truncate(log, log.stat().st_size - 1)
    with pytest.raises(LogDamaged, match=r"server-1/log-0+: record \d+ is broken .* acknowledged requests are lost"):
        kvstore.run(count_up, 1, 2, tmp_path, 1, **options)
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "copy", tmp_path / "store")
    mark = read_mark(tmp_path / "store")
    for ended in (True, False):  # a run that was killed has promised no number
        write_mark(tmp_path / "store", {name: found for name, found in mark.items() if ended or name != "numbers"})
        shutil.rmtree(tmp_path / "store" / "server-0")
        with pytest.raises(LogDamaged, match="server-0: its log is gone: acknowledged requests are lost"):
            kvstore.run(count_up, 1, 2, tmp_path, 1, **options)
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "copy", tmp_path / "store")
    assert kvstore.run(count_up, 1, 2, tmp_path, 1, **options) == [[6]]


def test_a_mark_is_there_as_a_whole_or_as_before(tmp_path: Path) -> None:
    assert read_mark(tmp_path) == {}
    for late in (False, True):
        count, call = 0, "none yet"
        write_mark(tmp_path, {"servers": 1})
        while call:
            count += 1
            call = stopped(lambda: write_mark(tmp_path, {"servers": 2}), count, late)
            assert read_mark(tmp_path)["servers"] == (2 if not call or (tmp_path / "mark.json").read_text().count("2") else 1)
        assert json.loads((tmp_path / "mark.json").read_text()) == {"servers": 2} and count > 3
