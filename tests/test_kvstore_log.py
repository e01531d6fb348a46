"""The write-ahead log: whatever happens to its files, what is read is what was appended, up to some record and no further."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps.kvstore.core.events import Request
from d2lps.kvstore.storage import log as logs
from d2lps.kvstore.storage.frame import frame, parse
from d2lps.kvstore.storage.log import HEADER, Log, LogDamaged

CUTS = 1000


def contents(log: Log, start: int = 0) -> list[tuple[int, bytes]]:
    return [(position, bytes(data)) for position, data in log.read(start)]


def filled(folder: Path, records: list[bytes], **options: Any) -> list[int]:
    """The positions of the records in a new log, and the log's end."""
    log = Log(folder, **options)
    positions = [log.append(record) for record in records]
    log.sync()
    log.close()
    return [*positions, log.end]


def some_records(count: int) -> list[bytes]:
    """Of 0 to 60 bytes; some contain the mark with which a record begins."""
    chance = random.Random(count)
    return [chance.randbytes(chance.randrange(60)) + logs.MARK * (number % 3) for number in range(count)]


# ---- appending and reading ------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 300), st.data())
def test_what_is_appended_is_read_from_any_position(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], segment_bytes: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    positions = filled(folder, records, segment_bytes=segment_bytes)
    log = Log(folder, segment_bytes=segment_bytes)
    everything = list(zip(positions[:-1], records, strict=True))
    assert contents(log) == everything and log.cut == 0 and log.end == positions[-1]
    start = data.draw(st.integers(0, log.end + 1))
    assert contents(log, start) == [each for each in everything if each[0] >= start]
    position = log.append(b"one ", b"more")
    assert contents(log, position) == [(position, b"one more")] and position == positions[-1]
    log.close()


def test_a_record_goes_in_many_buffers_and_through_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(file: int, views: list[memoryview], writev: Callable[..., int] = os.writev) -> int:
        return writev(file, [views[0][:7]])

    monkeypatch.setattr(os, "writev", short)
    log = Log(tmp_path)
    log.append(*[bytes([number]) * 3 for number in range(40)], b"", bytearray(b"end"))
    assert contents(log) == [(0, b"".join(bytes([number]) * 3 for number in range(40)) + b"end")]
    log.close()


def test_segments_end_at_their_size_and_go_when_a_checkpoint_has_them(tmp_path: Path) -> None:
    log = Log(tmp_path, segment_bytes=100)
    positions = [log.append(bytes(34)) for _ in range(10)]  # 50 bytes with the header: two a segment
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{begin:020d}.log" for begin in range(0, 500, 100)]
    assert log.drop_before(0) == 0 and log.drop_before(199) == 100 and log.drop_before(250) == 100
    assert [position for position, _ in log.read()] == positions[4:]
    assert log.drop_before(10_000) == 200, "the last segment stays: it has the position"
    big = log.append(bytes(1000))
    log.close()
    again = Log(tmp_path, segment_bytes=100)
    assert contents(again)[-1] == (big, bytes(1000)) and again.end == 500 + 1016
    again.close()


def test_a_deletion_that_stops_half_way_leaves_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = filled(tmp_path, [bytes(84)] * 5, segment_bytes=100)
    log, unlinked = Log(tmp_path, segment_bytes=100), []

    def unlink(path: Path, real: Callable[[Path], None] = Path.unlink) -> None:
        if len(unlinked) == 2:
            raise OSError(5, "Input/output error")
        unlinked.append(path)
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(OSError, match="Input/output error"):
            log.drop_before(positions[4])
    log.close()
    again = Log(tmp_path)
    assert [position for position, _ in contents(again)] == positions[2:5]
    again.close()


def test_a_log_behind_its_checkpoint_goes_on_after_it(tmp_path: Path) -> None:
    filled(tmp_path, [b"a", b"b"])
    log = Log(tmp_path)
    log.skip_to(10)  # it is beyond that
    assert len(contents(log)) == 2
    log.skip_to(1000)
    assert log.append(b"c") == 1000 and contents(log) == [(1000, b"c")]
    log.close()
    again = Log(tmp_path)
    assert contents(again) == [(1000, b"c")] and again.end == 1017
    again.close()


def test_events_are_logged_as_frames_and_played_again(tmp_path: Path) -> None:
    events = [Request("push", f"w{number}", torch.ones(number), torch.arange(number), sequence=number) for number in range(9)]
    log = Log(tmp_path, segment_bytes=1000)
    for event in events:
        log.append(*frame(event))
    assert [parse([data], limit=1000) for _, data in log.read()] == events
    log.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with pytest.raises(BlockingIOError):
        Log(tmp_path)
    log.close()
    Log(tmp_path).close()
    with pytest.raises(RuntimeError, match="closed"):
        log.append(b"late")


def test_a_wrong_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'memory'"):
        Log(tmp_path, level="memory")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0"):
        Log(tmp_path, segment_bytes=0)


# ---- cut ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [1 << 20, 300])
def test_of_a_log_cut_anywhere_exactly_the_whole_records_are_left(tmp_path: Path, segment_bytes: int) -> None:
    records = some_records(60)
    positions = filled(tmp_path, records, segment_bytes=segment_bytes)
    files = sorted(tmp_path.iterdir())
    begin, last = int(files[-1].stem), files[-1].read_bytes()
    everything = list(zip(positions[:-1], records, strict=True))
    chance = random.Random(3)
    for _ in range(CUTS):
        at = chance.randrange(len(last) + 1)
        files[-1].write_bytes(last[:at])
        log = Log(tmp_path, segment_bytes=segment_bytes)
        whole = max(position for position in positions if position <= begin + at)
        assert log.end == whole and log.cut == begin + at - whole
        assert contents(log) == [each for each in everything if each[0] < whole]
        assert files[-1].stat().st_size == whole - begin
        log.close()


@pytest.mark.parametrize("tail", [bytes(500), logs.MARK * 100, bytes(range(256)), HEADER.pack(logs.MARK, 1 << 31, 0, 0)])
def test_what_a_power_cut_leaves_at_the_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    positions = filled(tmp_path, [b"a", b"bb"])
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + tail)
    log = Log(tmp_path)
    assert log.cut == len(tail) and log.end == positions[-1] and len(contents(log)) == 2
    log.append(b"ccc")
    log.close()
    again = Log(tmp_path)
    assert [data for _, data in contents(again)] == [b"a", b"bb", b"ccc"]
    again.close()


def test_a_record_of_another_place_is_none(tmp_path: Path) -> None:
    """A disk may show, after the log's end, what an older file had there."""
    positions = filled(tmp_path, [b"x" * 10] * 5)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: positions[2]] + whole[: positions[2]])
    log = Log(tmp_path)
    assert log.end == positions[2] and log.cut == positions[2]
    log.close()


# ---- damaged --------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_before_whole_records_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    records = some_records(20)
    positions = filled(tmp_path, records)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    chance = random.Random(4)
    for _ in range(300):
        bit = chance.randrange(8 * positions[-2])  # not in the last record: there it is like a write that was cut short
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        file.write_bytes(broken)
        position = max(position for position in positions if position <= bit // 8)
        following = positions[positions.index(position) + 1]
        with pytest.raises(LogDamaged, match=rf"position {position} is broken.*follows at {following} "):
            Log(tmp_path)
        assert file.read_bytes() == broken


def test_without_the_checksum_a_damaged_push_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(folder: Path) -> torch.Tensor:
        pushes = [Request("push", "w", torch.ones(4), sequence=number) for number in (1, 2)]
        _, second, _ = filled(folder, [b"".join(frame(push)) for push in pushes])
        [file] = folder.iterdir()
        broken = bytearray(file.read_bytes())
        broken[second - 1] ^= 64  # the last byte of the first record's tensor
        file.write_bytes(broken)
        log = Log(folder)
        try:
            return parse([next(log.read())[1]], limit=1000).value
        finally:
            log.close()

    with pytest.raises(LogDamaged, match="position 0 is broken"):
        damaged(tmp_path / "with")
    monkeypatch.setattr(logs, "checksum", lambda *buffers, start=0: 0)
    assert damaged(tmp_path / "without").tolist() != [1.0] * 4


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    filled(tmp_path, [bytes(84)] * 5, segment_bytes=100)
    (tmp_path / f"{200:020d}.log").unlink()
    with pytest.raises(LogDamaged, match=r"position 200 is broken or missing.*follows at 300"):
        Log(tmp_path)


def test_damage_after_opening_is_found_by_reading(tmp_path: Path) -> None:
    positions = filled(tmp_path, [b"abc"] * 3)
    log = Log(tmp_path)
    [file] = tmp_path.iterdir()
    broken = bytearray(file.read_bytes())
    broken[positions[1] + HEADER.size] ^= 1
    file.write_bytes(broken)
    with pytest.raises(LogDamaged, match=f"position {positions[1]} is broken"):
        contents(log)
    log.close()


# ---- failing disks --------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_no_half_record_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path)
    log.append(b"before")

    def full(file: int, views: list[memoryview], writev: Callable[..., int] = os.writev) -> int:
        writev(file, [views[0][:7]])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/0+\.log'"):
            log.append(b"lost")
    log.append(b"after")
    assert [data for _, data in contents(log)] == [b"before", b"after"]
    log.close()


def test_after_a_failed_fsync_the_log_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path, level="fsync")
    log.append(b"a")

    def fails(file: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(logs, "persist", fails)
        with pytest.raises(OSError, match="Input/output error"):
            log.sync()
    for again in (log.sync, lambda: log.append(b"b")):
        with pytest.raises(RuntimeError, match="fsync failed"):
            again()
    log.close()


def test_one_sync_is_for_many_records_and_a_segment_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persisted: list[str] = []

    def persist(file: int, real: Callable[[int], None] = logs.persist) -> None:
        persisted.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        real(file)

    monkeypatch.setattr(logs, "persist", persist)
    folder, first, second = tmp_path / "log", f"{0:020d}.log", f"{80:020d}.log"
    log = Log(folder, level="fsync", segment_bytes=100)
    assert persisted == ["log", first], "the new file's name"
    persisted.remove(first)
    for _ in range(5):
        log.append(b"")
    log.sync()
    log.sync()
    assert persisted == ["log", first], "one for five records, none for nothing new"
    log.append(bytes(50))
    assert persisted == ["log", first, "log"], "the old segment was on the disk already"
    log.append(bytes(50))
    assert persisted == ["log", first, "log", second, "log"]
    log.close()
    persisted.clear()
    Log(folder, level="fsync").close()
    assert persisted == [first, second, f"{146:020d}.log"], "what was recovered is as safe as what is appended"
    persisted.clear()
    log = Log(tmp_path / "other", level="log")
    log.append(b"a")
    log.sync()
    assert persisted == ["other"], 'level "log" leaves the rest to the operating system'
    log.close()


# ---- kill -9 --------------------------------------------------------------------------------------------------------------

LIVES = """
import mmap, os, random, signal, struct, sys, time
from d2lps.kvstore.storage.log import Log

reported = memoryview(mmap.mmap(-1, 8)).cast("q")  # how many records the writer has reported, wherever it is killed
chance, cuts = random.Random(1), 0

def write(number):
    log = Log(sys.argv[1], segment_bytes=100_000)
    while True:
        log.append(struct.pack("<q", number), bytes(number * 977 % 40_000))
        number += 1
        reported[0] = number

for life in range(25):
    begun = reported[0]
    if not (child := os.fork()):
        write(begun)
    while reported[0] < begun + 5:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    log = Log(sys.argv[1], segment_bytes=100_000)
    found = [struct.unpack_from("<q", data)[0] for _, data in log.read(start=max(0, log.end - 10_000_000))]
    assert found == list(range(found[0], found[0] + len(found))), "a record is missing"
    assert reported[0] <= found[-1] + 1 <= reported[0] + 1, (reported[0], found[-1], log.cut)
    reported[0], cuts = found[-1] + 1, cuts + (log.cut > 0)
    log.drop_before(log.end - 20_000_000)
    log.close()
print(reported[0], "records", cuts, "cut")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch was imported")
def test_a_killed_writer_loses_no_record_that_it_had_reported(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIVES, str(tmp_path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 100
