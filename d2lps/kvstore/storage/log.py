"""The write-ahead log: what a server has accepted, in order, in a file that survives it.

A server appends an event before it answers. After a crash the log is read from its beginning, and every event is executed
again. What the two levels promise, of all records that were appended before a `sync` that returned:

    "log"     the operating system has them: they survive kill -9 of the server, not a power cut
    "fsync"   the disk itself has them: they survive a power cut too

One `sync` is for all records before it: a server that has several requests at hand appends them all, syncs once, and then
answers them all (group commit). Records are numbered from any number on:

    header    number of the first record | number of the first that is not promised | checksum
    record    its number                 | bytes of its data                        | checksum      then the data, and so on

A checksum covers the two numbers before it and the data after it. The first record that does not fit ends the log. If it was
promised, that is damage, and an error. If not, it is a write that was cut short, of which nobody was told, and its place is
free again.

A log that has become too long is begun anew, with one record that stands for all that were before it. The new log is written
beside the old one, under the name `spare`, and takes its own name when all of it is on the disk: whoever is stopped before
this rename goes on with the old log, and whoever is stopped after it, with the new one. The old log is the next spare. For new
pages of a file take a kernel twenty times as long as old ones, so logs are written over in turn. What an earlier life of a file
has left in it has smaller numbers, and is never taken for a record.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Literal
from zlib import crc32

from d2lps import disk

Level = Literal["log", "fsync"]
Bytes = bytes | bytearray | memoryview
HEADER = struct.Struct("<QQI")
MOST = 1024  # buffers that Linux takes at once


class LogDamaged(RuntimeError):
    """A record that was promised is broken or missing: to go on without it would lose what was acknowledged."""


class Log:
    """A log in a file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log"
    >>> log = Log(path)
    >>> log.append(b"push w 1")
    >>> log.append(b"push w ", b"2")
    >>> log.sync(), log.number, log.end  # in bytes: a header of 20 for the file, and one for each record
    (None, 2, 76)
    >>> log.close()
    >>> [(number, bytes(data)) for number, data in Log(path).read()]
    [(0, b'push w 1'), (1, b'push w 2')]

    begin: the number of its first record. first: that record's buffers, of a log that is new. each: is called with every record's
    number and data as they are found, since opening a log reads and checks all of it. `number`: of the next record. `cut`: bytes
    of an unfinished record that were cut off. LogDamaged where a promised record is broken. An error of the disk, such as a full
    one, names the file, and what was appended before it stays. Two processes must not have it open: see `lock`.
    """

    def __init__(
        self,
        path: str | Path,
        level: Level = "log",
        begin: int = 0,
        first: Iterable[Bytes] = (),
        each: Callable[[int, bytearray], object] = lambda number, data: None,
    ) -> None:
        if level not in ("log", "fsync"):
            raise ValueError(f'a log has level "log" or "fsync", not {level!r}')
        self.path, self.level, self.begin, self.cut = Path(path), level, begin, 0
        if not self.path.exists():
            self._begin(self.path, begin, [*first])
            return
        self._file = self.path.open("r+b", buffering=0)
        try:
            self._recover(each)
        except BaseException:
            self.close()
            raise

    def restart(self, path: Path, begin: int, *first: Bytes) -> None:
        """Go on in a new file, which begins with this record, whole on the disk; the one so far becomes `spare`.

        If this is stopped by an error, such as that of a full disk, the log goes on where it was.
        """
        old, former = self._file, self.path
        self._begin(path, begin, [*first])
        old.close()
        if former != path:
            former.rename(path.with_name("spare"))

    def _begin(self, path: Path, begin: int, first: list[Bytes]) -> None:
        """A new log, which is there with its header and its first record, if it has one, or not at all."""
        spare, safe = path.with_name("spare"), bool(first) or self.level == "fsync"
        spare.touch(0o600)
        file, end = spare.open("r+b", buffering=0), HEADER.size
        try:
            if first:
                end += write_record(file.fileno(), spare, end, begin, first)
            os.pwrite(file.fileno(), header(begin, begin + bool(first)), 0)
            if safe:
                disk.persist(file.fileno())
            spare.rename(path)
        except BaseException:
            file.close()
            raise
        self.path, self._file, self.begin, self.end = path, file, begin, end
        self.number = self._safe = begin + bool(first)
        if safe:
            disk.persist_path(path.parent)

    def _recover(self, each: Callable[[int, bytearray], object]) -> None:
        """Find what an earlier life of this log has left, and promise it."""
        self.number, following, self.end = self._promised(), self.begin, HEADER.size
        for number, data in self.read():
            each(number, data)
            following, self.end = number + 1, self.end + HEADER.size + len(data)
        self.number = following
        self.cut = self._unfinished()
        self._file.truncate(self.end)  # a later record of that write may be whole: it must never come after others
        self._safe = -1  # a killed process may have left records that only the kernel has
        self.sync()

    def append(self, *buffers: Bytes) -> None:
        """Write one record, given in one or more buffers; n bytes cost 20 more, a checksum, and one copy by the kernel."""
        # A write that fails half way is written over by the next.
        self.end += write_record(self._file.fileno(), self.path, self.end, self.number, buffers)
        self.number += 1

    def sync(self) -> None:
        """Promise all that was appended; 2 us, and on "fsync" what the disk takes, 0.1 to 10 ms.

        That the promise was made reaches the disk by the next sync: a power cut may take it back, and no record with it.
        """
        if self._safe == self.number:
            return
        if self.level == "fsync":
            try:
                disk.persist(self._file.fileno())
            except OSError:  # the kernel may have dropped the pages, and a second fsync would then succeed
                self.close()
                raise
        os.pwrite(self._file.fileno(), header(self.begin, self.number), 0)
        self._safe = self.number

    def read(self) -> Iterator[tuple[int, bytearray]]:
        """All records with their numbers; the bytes are the reader's own, and writable."""
        number = self.begin
        with self.path.open("rb") as file:
            file.seek(HEADER.size)
            while (data := record(file, number)) is not None:
                yield number, data
                number += 1
        if number < self.number:
            said = f"record {number} is broken or missing, and all before {self.number} were promised"
            raise LogDamaged(f"{self.path}: {said}: acknowledged requests are lost")

    def close(self) -> None:
        self._file.close()

    def _promised(self) -> int:
        """The number before which all records were promised."""
        found = os.pread(self._file.fileno(), HEADER.size, 0)
        promised = HEADER.unpack(found.ljust(HEADER.size))[1]
        if found != header(self.begin, promised):
            raise LogDamaged(f"{self.path}: its header is broken, or not that of a log from {self.begin} on: {found!r}")
        return promised

    def _unfinished(self) -> int:
        """The bytes of a record that was begun at the end; what an earlier life of the file has there is none."""
        found = os.pread(self._file.fileno(), HEADER.size, self.end)
        if found[:8] != header(self.number, 0)[: len(found[:8])]:
            return 0
        length = HEADER.unpack(found.ljust(HEADER.size))[1]
        return min(os.fstat(self._file.fileno()).st_size - self.end, HEADER.size + length)


# ---- records --------------------------------------------------------------------------------------------------------------


def checksum(*buffers: Bytes) -> int:
    """The crc32 of buffers that follow each other: `checksum(b"ab", b"c") == checksum(b"abc")`; 3 to 4 GB/s."""
    value = 0
    for buffer in buffers:
        value = crc32(buffer, value)
    return value


def header(number: int, other: int, *data: Bytes) -> bytes:
    """Two numbers, and the checksum of them and of the data: a record's, for which `other` is its length, or the file's."""
    return HEADER.pack(number, other, checksum(struct.pack("<QQ", number, other), *data))


def write_record(file: int, path: Path, offset: int, number: int, buffers: Iterable[Bytes]) -> int:
    """Write one record; its bytes. path: what an error calls the file."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    length = sum(view.nbytes for view in views)
    try:
        write_at(file, offset, [memoryview(header(number, length, *views)), *views])
    except OSError as error:
        error.filename = str(path)
        raise
    return HEADER.size + length


def record(file: BufferedReader, number: int) -> bytearray | None:
    """The data of the record that begins here; None if it is not the one of this number, or not whole."""
    found = file.read(HEADER.size)
    length = HEADER.unpack(found.ljust(HEADER.size))[1]
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    data = bytearray(length)
    file.readinto(data)
    return data if found == header(number, length, data) else None


# ---- files ----------------------------------------------------------------------------------------------------------------


def write_at(file: int, offset: int, views: Iterable[memoryview]) -> None:
    """Write buffers one after another; the kernel may take less than it was given, but seldom does."""
    left = deque(views)
    while left:
        written = os.pwritev(file, [*islice(left, MOST)], offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]


def lock(folder: Path) -> int:
    """A descriptor that keeps other processes out until it is closed, or this one ends, however that may be.

    The folder is made if need be. BlockingIOError, which names it, if somebody else is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        error.filename = str(folder)
        raise
    return file
