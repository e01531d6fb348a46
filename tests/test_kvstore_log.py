"""The write-ahead log: whatever happens to its file, what is read is what was appended, up to some record and no further."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps import disk
from d2lps.kvstore.storage.log import HEADER, Log, LogDamaged, lock

BEGIN = 42  # the number of the first record, in most tests


def contents(log: Log) -> list[tuple[int, bytes]]:
    return [(number, bytes(data)) for number, data in log.read()]


def opened(path: Path, **options: Any) -> tuple[list[bytes], int]:
    """What a log has, and how much of an unfinished record was cut off."""
    log = Log(path, begin=BEGIN, **options)
    try:
        found = contents(log)
        assert [number for number, _ in found] == list(range(BEGIN, log.number))
        return [data for _, data in found], log.cut
    finally:
        log.close()


def filled(path: Path, records: list[bytes], promised: int | None = None) -> list[int]:
    """Where each record begins in a new log, and where the log ends; the first few are promised, or all."""
    log, ends = Log(path, begin=BEGIN), []
    for number, record in enumerate(records):
        if number == promised:
            log.sync()
        ends.append(log.end)
        log.append(record)
    if promised is None:
        log.sync()
    log.close()
    return [*ends, log.end]


def some_records(count: int) -> list[bytes]:
    """Of 0 to 60 bytes."""
    chance = random.Random(count)
    return [chance.randbytes(chance.randrange(60)) for _ in range(count)]


def written_over(path: Path, records: list[bytes], earlier: list[bytes], promised: int | None = None) -> list[int]:
    """`filled`, in a file that was a longer log before."""
    log = Log(path.with_name("earlier"), begin=BEGIN - len(earlier))
    for record in earlier:
        log.append(record)
    log.sync()
    log.close()
    log.path.rename(path.with_name("spare"))
    size = path.with_name("spare").stat().st_size
    ends = filled(path, records, promised)
    assert path.stat().st_size == size > ends[-1] and not path.with_name("spare").exists()
    return ends


# ---- appending and reading ------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.binary(max_size=50), max_size=20))
def test_what_is_appended_is_read_also_in_a_file_that_was_another_log(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], earlier: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    filled(path.with_name("earlier"), earlier)
    path.with_name("earlier").rename(path.with_name("spare"))
    for life in (records, [b"more", b""]):
        log = Log(path, begin=BEGIN + 20)  # beyond all that the file had
        assert log.cut == 0
        for record in life:
            log.append(record[:3], record[3:])
        log.sync()
        log.close()
    log = Log(path, begin=BEGIN + 20)
    assert contents(log) == list(enumerate([*records, b"more", b""], start=BEGIN + 20))
    assert log.number == BEGIN + 22 + len(records)
    log.close()


def test_a_record_goes_in_many_buffers_and_through_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(file: int, views: list[memoryview], offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
        return pwrite(file, b"".join(views)[:7], offset)

    monkeypatch.setattr(os, "pwritev", short)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:30], offset))
    log = Log(tmp_path / "log")
    log.append(*[bytes([number]) * 3 for number in range(40)], b"", bytearray(b"end"))
    assert contents(log) == [(0, b"".join(bytes([number]) * 3 for number in range(40)) + b"end")]
    log.close()


def test_a_log_written_over_takes_no_new_pages(tmp_path: Path) -> None:
    written_over(tmp_path / "log", [bytes(1 << 20)] * 3, [bytes(1 << 20)] * 4)
    before = (tmp_path / "log").stat()
    log = Log(tmp_path / "log", begin=BEGIN)  # this cuts off what lay behind
    log.close()
    after = (tmp_path / "log").stat()
    assert before.st_size > 4 << 20 and after.st_size == log.end < before.st_size and after.st_ino == before.st_ino


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = lock(tmp_path / "new" / "folder")
    with pytest.raises(BlockingIOError, match="new/folder"):
        lock(tmp_path / "new" / "folder")
    os.close(first)
    os.close(lock(tmp_path / "new" / "folder"))


def test_a_wrong_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'memory'"):
        Log(tmp_path / "log", level="memory")  # type: ignore[arg-type]
    filled(tmp_path / "log", [b"a"])
    with pytest.raises(LogDamaged, match=r"/log: .* not that of a log from 7 on"):
        Log(tmp_path / "log", begin=7)
    assert opened(tmp_path / "log") == ([b"a"], 0)


# ---- cut ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("promised", [0, 7, 20])
def test_of_a_log_cut_anywhere_what_was_promised_is_left_or_missed(tmp_path: Path, promised: int) -> None:
    records, path = some_records(20), tmp_path / "log"
    ends = filled(path, records, promised=promised if promised < 20 else None)
    whole = path.read_bytes()
    for at in range(len(whole) + 1):
        path.write_bytes(whole[:at])
        left = sum(end <= at for end in ends[1:])
        if at < HEADER.size:
            with pytest.raises(LogDamaged, match="its header is broken"):
                opened(path)
        elif left < promised:
            said = f"{path}: record {BEGIN + left} is broken or missing, and all before {BEGIN + promised} were promised"
            with pytest.raises(LogDamaged, match=f"{said}: acknowledged requests are lost"):
                opened(path)
            assert path.read_bytes() == whole[:at], "nothing is cut from what is damaged"
        else:
            assert opened(path) == (records[:left], at - ends[left])
            assert path.stat().st_size == ends[left]


@pytest.mark.parametrize(
    "tail", [bytes(500), bytes(range(256)), HEADER.pack(BEGIN + 2, 1 << 60, 0), HEADER.pack(BEGIN + 2, 0, 1)]
)
def test_what_a_power_cut_leaves_at_the_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log"
    ends = filled(path, [b"a", b"bb"])
    path.write_bytes(path.read_bytes() + tail)
    log = Log(path, begin=BEGIN)
    assert log.cut == (20 if len(tail) == 20 else 0) and log.end == ends[-1] == path.stat().st_size
    log.append(b"ccc")
    log.sync()
    log.close()
    assert opened(path) == ([b"a", b"bb", b"ccc"], 0)


def test_a_record_of_another_place_is_none(tmp_path: Path) -> None:
    """A disk may show, after the log's end, what an older file had there, or this one elsewhere."""
    path = tmp_path / "log"
    ends = filled(path, [b"x" * 10] * 5, promised=0)
    whole = path.read_bytes()
    path.write_bytes(whole[: ends[2]] + whole[ends[0] : ends[3]])
    assert opened(path) == ([b"x" * 10] * 2, 0) and path.stat().st_size == ends[2]


def test_what_follows_an_unfinished_record_never_comes_back(tmp_path: Path) -> None:
    """Power fails before a sync, and the disk has the second of two records, but not the first. Nobody was told of either."""
    path = tmp_path / "log"
    ends = filled(path, [b"kept", b"first", b"second"], promised=1)
    broken = bytearray(path.read_bytes())
    broken[ends[1] + HEADER.size] ^= 1
    path.write_bytes(broken)
    log = Log(path, begin=BEGIN)
    assert log.cut == 20 + 5 and log.number == BEGIN + 1
    log.append(b"other")  # of the same length: "second" would fit behind it
    log.close()
    assert opened(path) == ([b"kept", b"other"], 0)


# ---- written over -----------------------------------------------------------------------------------------------------------


def test_of_a_log_written_over_another_and_stopped_anywhere_exactly_the_whole_records_are_left(tmp_path: Path) -> None:
    """The write of the last records, not promised yet, stops at any byte; what lies there then is of the file's earlier life."""
    alike = [b"x" * 10] * 8  # as long as the records that they are written over: only their numbers tell them apart
    for name, records, earlier in (("alike", alike, alike * 2), ("other", some_records(8), some_records(30))):
        path = tmp_path / name
        ends = written_over(path, records, earlier, promised=3)
        new = path.read_bytes()
        (tmp_path / "again").mkdir(exist_ok=True)
        written_over(tmp_path / "again" / name, records[:3], earlier)
        old = (tmp_path / "again" / name).read_bytes()
        assert len(old) == len(new) and old[: ends[3]] == new[: ends[3]]
        for at in range(ends[3], ends[-1] + 1):
            mixed = new[:at] + old[at:]
            path.write_bytes(mixed)
            same = next((i for i in range(len(new)) if mixed[i] != new[i]), len(new))  # or more than at
            left = sum(end <= same for end in ends[1:])
            begun = left < 8 and mixed[ends[left] :][:8] == new[ends[left] :][:8]
            found, cut = opened(path)
            assert found == records[:left] and (cut > 0) == begun, (name, at)


def test_of_a_log_written_over_another_every_flipped_bit_that_was_promised_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    records = [data[:20] for data in some_records(4)]
    ends = written_over(path, records, [data[:20] for data in some_records(6)], promised=3)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        if bit // 8 < ends[3]:
            broken_one = sum(end <= bit // 8 for end in ends) - 1
            said = "its header is broken" if broken_one < 0 else f"record {BEGIN + broken_one} is broken .* before {BEGIN + 3}"
            with pytest.raises(LogDamaged, match=said):
                opened(path)
        else:
            found, _ = opened(path)
            assert found == records[: 3 if bit // 8 < ends[4] else 4]


# ---- damaged --------------------------------------------------------------------------------------------------------------


def test_damage_after_opening_is_found_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = filled(path, [b"abc"] * 3)
    log = Log(path, begin=BEGIN)
    broken = bytearray(path.read_bytes())
    broken[ends[1] + HEADER.size] ^= 1
    path.write_bytes(broken)
    with pytest.raises(LogDamaged, match=f"record {BEGIN + 1} is broken"):
        contents(log)
    log.close()


# ---- failing disks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next", [b"after", bytes(30)])
def test_a_full_disk_leaves_no_half_record_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next: bytes) -> None:
    log = Log(tmp_path / "log", begin=BEGIN)
    log.append(b"before")

    def full(file: int, views: list[memoryview], offset: int, pwrite: Callable[..., int] = os.pwrite) -> int:
        pwrite(file, b"".join(views)[:30], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/log'"):
            log.append(b"lost and gone")
    log.append(next)
    assert contents(log) == [(BEGIN, b"before"), (BEGIN + 1, next)]
    log.close()
    assert opened(tmp_path / "log")[0] == [b"before", next]


def test_after_a_failed_fsync_the_log_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log", level="fsync", begin=BEGIN)
    log.append(b"a")

    def fails(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "persist", fails)
        with pytest.raises(OSError, match="Input/output error"):
            log.sync()
    for again in (log.sync, lambda: log.append(b"b")):
        with pytest.raises(ValueError, match="closed"):
            again()
    assert HEADER.unpack((tmp_path / "log").read_bytes()[: HEADER.size])[1] == BEGIN, "nothing was promised"


def test_what_is_promised_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(file: int, *args: Any) -> Any:
            did.append(f"{name} {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
            return call(file, *args)

        return wrapped

    monkeypatch.setattr(disk, "persist", noted("persist", disk.persist))
    monkeypatch.setattr(os, "pwritev", noted("append", os.pwritev))
    monkeypatch.setattr(os, "pwrite", noted("promise", os.pwrite))
    folder = tmp_path / "log"
    folder.mkdir()
    log = Log(folder / "a", level="fsync")
    assert did == ["promise spare", "persist spare", "persist log"], "first its header, then its name"
    did.clear()
    for _ in range(5):
        log.append(b"")
    log.sync()
    log.sync()
    assert did == ["append a"] * 5 + ["persist a", "promise a"], "one for five records, none for nothing new"
    log.append(b"of which nobody is told")
    log.close()
    did.clear()
    Log(folder / "a", level="fsync").close()
    assert did == ["persist a", "promise a"], "what was recovered is as safe as what is appended"
    did.clear()
    log = Log(folder / "b", level="log")
    log.append(b"a")
    log.sync()
    assert did == ["promise spare", "append b", "promise b"], 'level "log" leaves the rest to the operating system'
    did.clear()
    log.restart(folder / "c", 1, b"a state")
    assert did == ["append spare", "promise spare", "persist spare", "persist log"], "first it is safe, then it counts"
    assert contents(log) == [(1, b"a state")] and not (folder / "b").exists() and (folder / "spare").exists()
    log.close()


# ---- kill -9 --------------------------------------------------------------------------------------------------------------

LIVES = """
import mmap, os, random, signal, struct, sys, time
from pathlib import Path
from d2lps.kvstore.storage.log import Log

reported = memoryview(mmap.mmap(-1, 8)).cast("q")  # how many records the writer has promised, wherever it is killed
chance, cuts, begins, folder = random.Random(1), 0, set(), Path(sys.argv[1])

def opened():
    *older, newest = sorted(int(path.name[4:]) for path in folder.glob("log-*")) or [0]
    log = Log(folder / f"log-{newest}", begin=newest)
    for begin in older:
        (folder / f"log-{begin}").rename(folder / "spare")
    return log

def write():
    log = opened()
    while True:
        number = struct.pack("<q", log.number)
        if log.end > 600_000:
            log.restart(folder / f"log-{log.number}", log.number, number, bytes(300_000))
        else:
            log.append(number, bytes(log.number * 977 % 40_000))
            log.sync()
        reported[0] = log.number

for life in range(25):
    begun = reported[0]
    if not (child := os.fork()):
        write()
    while reported[0] < begun + 5:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    log = opened()
    found = [struct.unpack_from("<q", data)[0] for _, data in log.read()]
    assert found == list(range(log.begin, log.number)), "a record is missing, or of another place"
    assert reported[0] <= log.number <= reported[0] + 1, (reported[0], log.number, log.cut)
    reported[0], cuts = log.number, cuts + (log.cut > 0)
    begins.add(log.begin)
    log.close()
print(reported[0], "records,", len(begins), "begun anew,", cuts, "cut")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch was imported")
def test_a_killed_writer_loses_no_record_that_it_had_reported(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIVES, str(tmp_path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    records, _, begun, *_ = done.stdout.split()
    assert int(records) > 100 and int(begun) > 2
