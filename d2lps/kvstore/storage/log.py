"""The write-ahead log: what a server has accepted, in order, in files that survive it.

A server appends a request before it answers. After a crash the log is read from its beginning, or from where the last
checkpoint was taken, and every request is applied again. What the two levels promise:

    "log"     an appended record is with the operating system: it survives kill -9 of the server, not a power cut
    "fsync"   a record appended before a `sync` that returned is on the disk: it survives a power cut too

One `sync` is for all records before it: a server that has several requests at hand appends them all, syncs once, and then
answers them all (group commit). A position counts bytes from the log's first day; the log lies in segments, each a file
named by the position of its first record, so that those before a checkpoint can go. A record is a header of 16 bytes

    mark | length | checksum of mark, length and position | checksum of the data      then the data

and the first one that is not whole ends the log, if nothing whole follows it: a write that was cut short, of which nobody
was told. Where something does follow, records that were promised are damaged, and that is an error.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal
from zlib import crc32

Level = Literal["log", "fsync"]
Bytes = bytes | bytearray | memoryview
MARK = b"rec\n"
HEADER = struct.Struct("<4sIII")
LONGEST = 1 << 31  # bytes of one record


class LogDamaged(RuntimeError):
    """A record is broken, or a segment missing, and whole records follow: cutting there would lose what was promised."""


class Log:
    """A log in a folder of its own, opened by one process at a time.

    >>> import tempfile
    >>> log = Log(tempfile.mkdtemp())
    >>> log.append(b"push w 1"), log.append(b"push w ", b"2"), log.end  # 16 bytes of header each
    (0, 24, 48)
    >>> [(position, bytes(data)) for position, data in log.read(start=24)]
    [(24, b'push w 2')]
    >>> log.close()

    Opening it reads and checks all of it; `cut` is how many bytes of an unfinished record were cut off. LogDamaged where
    whole records follow a broken one, BlockingIOError where another process has it open. segment_bytes: bytes after which a
    new segment begins.
    """

    def __init__(self, folder: str | Path, level: Level = "log", segment_bytes: int = 64 << 20) -> None:
        if level not in ("log", "fsync") or segment_bytes < 1:
            raise ValueError(f'a log has level "log" or "fsync" and segments of at least 1 byte: {level!r}, {segment_bytes}')
        self.folder, self.level, self.segment_bytes, self._failed = Path(folder), level, segment_bytes, ""
        self._file, self._begin, self._synced = -1, 0, 0  # the last segment, its first position, what an fsync has reached
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however that ends
            self.end, self.cut = self._recover()
            self._open(max(self._segments(), default=0))
            for begin in self._segments() if level == "fsync" else []:
                persist_path(self._path(begin))  # a killed process may have left records that only the kernel has
        except BaseException:
            self.close()
            raise

    @property
    def begin(self) -> int:
        """The position of the first record that is still here."""
        return min(self._segments())

    def append(self, *buffers: Bytes) -> int:
        """Write one record, given in one or more buffers, and return its position; n bytes cost 16 more and one write."""
        self._check_usable()
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        length = sum(view.nbytes for view in views)
        if length > LONGEST:
            raise ValueError(f"a record has at most {LONGEST} bytes: {length}")
        position = self.end
        if position > self._begin and position + HEADER.size + length - self._begin > self.segment_bytes:
            self._turn()
        try:
            write_all(self._file, [memoryview(header(position, length, checksum(*views))), *views])
            self.end += HEADER.size + length
        except BaseException as error:  # an interrupt too
            self._take_back()
            if isinstance(error, OSError):
                error.filename = str(self._path(self._begin))
            raise
        return position

    def sync(self) -> None:
        """Return when all that was appended is as safe as the level promises; 0.1 to 10 ms on "fsync", nothing on "log"."""
        self._check_usable()
        if self.level == "fsync" and self._synced < self.end:
            try:
                persist(self._file)
            except OSError as error:  # the kernel may have dropped the pages, and a second fsync would then succeed
                self._failed = f"fsync failed: {error}"
                raise
            self._synced = self.end

    def read(self, start: int = 0) -> Iterator[tuple[int, bytearray]]:
        """The records from position `start` on, each with its position; the bytes are the reader's own, and writable."""
        segments = self._segments()
        for begin, following in zip(segments, [*segments[1:], self.end], strict=True):
            if following <= start:
                continue
            position = begin
            for position, data in records(self._path(begin).read_bytes(), begin):
                if position >= start:
                    yield position, bytearray(data)
                position += HEADER.size + data.nbytes
            if position < following:
                raise LogDamaged(f"{self._path(begin)}: the record at position {position} is broken")

    def drop_before(self, position: int) -> int:
        """Delete the segments of which nothing lies at `position` or later, and return how many bytes that were."""
        segments = self._segments()
        gone = [begin for begin, following in pairwise(segments) if following <= position]
        freed = sum(self._path(begin).stat().st_size for begin in gone)
        for begin in gone:  # the oldest first: what is left has no gap, wherever this stops
            self._path(begin).unlink()
        return freed

    def skip_to(self, position: int) -> None:
        """Go on at `position`, without the records before it: for a checkpoint that is newer than what the log still has.

        A power cut can take records from a log of level "log" that a checkpoint, which is always synced, includes. What
        is appended next must not get positions from before that checkpoint, or the next recovery would skip it.
        """
        if position > self.end:
            for begin in self._segments():
                self._path(begin).unlink()
            self.end = position
            self._open(position)

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file, self._lock, self._failed = -1, -1, "it is closed"

    # ---- segments ---------------------------------------------------------------------------------------------------

    def _path(self, begin: int) -> Path:
        return self.folder / f"{begin:020d}.log"

    def _segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.log"))

    def _open(self, begin: int) -> None:
        """Append to this segment from now on; a new one's name is on the disk before its first record is."""
        if self._file >= 0:
            os.close(self._file)
        new = not self._path(begin).exists()
        self._file = os.open(self._path(begin), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._begin, self._synced = begin, begin
        if new:
            persist(self._lock)

    def _turn(self) -> None:
        """Begin a new segment; on "fsync" only after the old one is on the disk, so that only the last is ever cut short."""
        self.sync()
        self._open(self.end)

    def _take_back(self) -> None:
        """After a write that failed half way (a full disk): cut its bytes off, or what follows them could not be read."""
        try:
            os.ftruncate(self._file, self.end - self._begin)
        except OSError as error:
            self._failed = f"an unfinished record could not be taken back: {error}"

    def _check_usable(self) -> None:
        if self._failed:
            raise RuntimeError(f"nothing can be written to the log in {self.folder}: {self._failed}")

    # ---- recovery ---------------------------------------------------------------------------------------------------

    def _recover(self) -> tuple[int, int]:
        """The end of the last whole record, and how many bytes beyond it were cut off."""
        segments = self._segments()
        end = segments[0] if segments else 0
        for index, begin in enumerate(segments):
            data = self._path(begin).read_bytes()
            if begin == end:
                for position, record in records(data, begin):
                    end = position + HEADER.size + record.nbytes
            if begin > end or end < begin + len(data):
                return end, self._cut(end, segments[index:])
        return end, 0

    def _cut(self, end: int, segments: list[int]) -> int:
        """End the log at `end`, which lies in the first of the segments, or before it."""
        whole = [(begin, at) for begin in segments if (at := whole_after(self._path(begin).read_bytes(), begin, end)) is not None]
        if whole:
            begin, position = whole[0]
            raise LogDamaged(
                f"{self.folder}: the record at position {end} is broken or missing, and a whole one follows at {position} "
                f"in {self._path(begin).name}"
            )
        cut = sum(self._path(begin).stat().st_size - max(0, end - begin) for begin in segments)
        for begin in reversed(segments):  # the last first: what is left stays one run
            if begin <= end:
                os.truncate(self._path(begin), end - begin)
            else:
                self._path(begin).unlink()
        return cut


# ---- records --------------------------------------------------------------------------------------------------------------


def checksum(*buffers: Bytes, start: int = 0) -> int:
    """The crc32 of buffers that follow each other: `checksum(b"ab", b"c") == checksum(b"abc")`; 3 to 4 GB/s."""
    for buffer in buffers:
        start = crc32(buffer, start)
    return start


def header(position: int, length: int, data: int) -> bytes:
    """What stands before a record; its checksum covers the position, so that bytes of another place are never a record."""
    return HEADER.pack(MARK, length, checksum(MARK, struct.pack("<IQ", length, position)), data)


def record_at(data: memoryview, begin: int, position: int) -> memoryview | None:
    """The record at a position, in a segment that begins at `begin`; None if there is no whole one."""
    start = position - begin
    if start + HEADER.size > len(data):
        return None
    length = HEADER.unpack_from(data, start)[1]
    found = data[start + HEADER.size : start + HEADER.size + length]
    whole = len(found) == length and data[start : start + HEADER.size] == header(position, length, checksum(found))
    return found if whole else None


def records(segment: bytes, begin: int) -> Iterator[tuple[int, memoryview]]:
    """The whole records of a segment with their positions, up to the first that is broken or cut."""
    data, position = memoryview(segment), begin
    while (found := record_at(data, begin, position)) is not None:
        yield position, found
        position += HEADER.size + len(found)


def whole_after(segment: bytes, begin: int, position: int) -> int | None:
    """The position of the first whole record beyond the one at `position`; None if there is none."""
    at = segment.find(MARK, max(0, position - begin + 1))
    while at >= 0:
        if record_at(memoryview(segment), begin, begin + at) is not None:
            return begin + at
        at = segment.find(MARK, at + 1)
    return None


# ---- files ----------------------------------------------------------------------------------------------------------------


def write_all(file: int, views: list[memoryview]) -> None:
    """Write buffers one after another with as few calls as it takes; the kernel may take less than it was given."""
    left = [view for view in views if view.nbytes]
    while left:
        written = os.writev(file, left[:16])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]


def persist_path(path: Path) -> None:
    """`persist` for a file or a folder that is not open."""
    file = os.open(path, os.O_RDONLY)
    try:
        persist(file)
    finally:
        os.close(file)


def persist(file: int) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk itself."""
    if sys.platform == "darwin":
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # fsync there stops at the disk's own cache
    else:
        os.fsync(file)
