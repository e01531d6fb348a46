"""The processes of a run on this machine: start them, watch them, end them."""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from d2lps import sharedmemory
from d2lps.comm import RankDied, RankHung
from d2lps.comm.explain import describe_status, explain
from d2lps.comm.status import IN_VAIN, NOT_THE_READERS, SharedBoard, Status
from d2lps.launch.failure import Failure, raise_in_caller
from d2lps.launch.forkserver import kill_session, preload, start_ranks
from d2lps.launch.rank import START, Job, Success
from d2lps.sharedmemory.linux import is_stopped
from d2lps.signatures import place_to_meet

_TICK = 0.1  # seconds between two looks at the notes of the ranks
# Seconds in which the cause of a failure may still turn up: a broken pipe is news before the death behind it. And in which
# other ranks may come to wait in vain, as one does already.
_GRACE = 0.3
# What torch 2.7 to 2.9 print for each group.
_GLOOS = re.compile(r"^\[Gloo\] Rank \d+ is connected to \d+ peer ranks.*\n?", re.MULTILINE)
_MOST = 1_000_000  # bytes of one rank's output that are shown; the beginning of a longer one is left out


class Output:
    """What the ranks print: kept apart while they run, shown by rank and in rank order, so that two runs look alike.

    Two files without a name for each: what it writes to its standard output, and to its standard error.
    """

    def __init__(self, labels: Sequence[str], files: ExitStack) -> None:
        self.labels = labels
        self.out, self.err = ([files.enter_context(tempfile.TemporaryFile()) for _ in labels] for _ in range(2))
        self._shown: dict[IO[bytes], int] = dict.fromkeys([*self.out, *self.err], 0)

    def show(self, whole_lines: bool) -> None:
        """What has come since the last call."""
        for files, stream in ((self.out, sys.stdout), (self.err, sys.stderr)):
            if stream is not None:  # as it is in a program without a console
                for label, file in zip(self.labels, files, strict=True):
                    for line in lines_of(self._new(file, whole_lines)):
                        print(f"{label} | {line}", file=stream)
                stream.flush()

    def _new(self, file: IO[bytes], whole_lines: bool) -> str:
        begin, size = self._shown[file], os.fstat(file.fileno()).st_size
        left_out = max(0, size - begin - _MOST)
        # The ranks share the file's position, so read beside it.
        text = os.pread(file.fileno(), _MOST, begin + left_out)
        if whole_lines:  # one that is rewritten, as a progress bar is, is whole when it stays
            text = text[: text.rfind(b"\n") + 1]
            if not text:
                return ""
        self._shown[file] = begin + left_out + len(text)
        return (f"... {left_out:,} bytes left out ...\n" if left_out else "") + _GLOOS.sub("", text.decode(errors="replace"))


def lines_of(text: str) -> list[str]:
    """Its lines, as a terminal would leave them: of one that was rewritten, by carriage returns, its last state.

    `lines_of("1%\\r50%\\r99%\\ndone\\r\\n") == ["99%", "done"]`. A line that was wiped, with blanks, is none.
    """
    found = []
    for line in text.removesuffix("\n").split("\n") if text else []:
        states = line.rstrip("\r").split("\r")
        if len(states) == 1 or states[-1].strip():
            found += states[-1].splitlines() or [""]  # other ends of lines, as Python knows them
    return found


def end_of(file: IO[bytes], most: int) -> str:
    """The last so many bytes of a file that somebody else writes."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), most, max(0, size - most)).decode(errors="replace")


def how_it_ended(status: int) -> str:
    """`how_it_ended(9) == "was killed by SIGKILL"`: what the wait status of a process says that has left no outcome."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit status {code} before its function had returned"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"


class Group:
    """The processes of one run, as their caller sees them.

    folder: what goes with them, even if the caller is killed. labels: what stands before the lines that each of them prints.
    """

    def __init__(self, job: Job, live: bool, folder: str = "", labels: Sequence[str] = ()) -> None:
        self.job, self.live, self.folder = job, live, folder
        self.files = ExitStack()  # all that are open until the end
        self.output = Output(labels or [f"rank {rank}" for rank in range(job.ranks)], self.files)
        self.stacks = [self.files.enter_context(tempfile.TemporaryFile()) for _ in range(job.ranks)]
        self.board_file = self.files.enter_context(tempfile.TemporaryFile())
        self.board_file.truncate(job.ranks * SharedBoard.SLOT)
        self.board = SharedBoard(self.board_file.fileno(), 0)
        self.supervisor: Any = None  # the line to their supervisor
        self.supervisor_pid = 0
        self.pids: list[int] = []
        self.pending: dict[int, Connection] = {}  # the lines to ranks that may still have something to say
        self.outcomes: dict[int, Success | Failure] = {}
        self.dead: dict[int, int] = {}  # rank -> wait status, of those that ended without a word

    def start(self, program: bytes) -> None:
        """Start the processes, each with the job, and with what it needs to take part."""
        with self.meeting_place() as meeting, ExitStack() as theirs:
            files = []
            for rank in range(self.job.ranks):
                ours, control = Pipe()
                self.pending[rank] = self.files.enter_context(ours)
                theirs.enter_context(control)
                own = (control, self.output.out[rank], self.output.err[rank], self.board_file, self.stacks[rank], meeting)
                files.append([file.fileno() for file in own])
            self.supervisor, (self.supervisor_pid, *self.pids) = start_ranks(self.job, program, files, self.folder)

    def meeting_place(self) -> Any:
        """The file at which the ranks meet: the memory that they will share, or their store's."""
        if self.job.backend == "shm":
            return open(sharedmemory.create(self.job.ranks), "r+b", 0)
        file, self.job.store_port = place_to_meet(self.job.ranks)
        return open(file, "r+b", 0)

    # ---- while they run -------------------------------------------------------------------------------------------

    def watch(self) -> list[Success]:
        """Wait for the outcome of every rank; raise what went wrong first."""
        while len(self.outcomes) < self.job.ranks:
            self.collect(_TICK)
            if self._failed:
                self._raise_first()
            self.check_waits()
            if self.live:
                self.output.show(whole_lines=True)
        successes = [outcome for _, outcome in sorted(self.outcomes.items()) if isinstance(outcome, Success)]
        preload({name for success in successes for name in success.imported})
        return successes

    def lines(self) -> list[Connection]:
        """What can be read as soon as a rank, or the supervisor, has something to say."""
        return [self.supervisor, *self.pending.values()]

    def collect(self, patience: float) -> None:
        """Take in what ranks and supervisor have to say, waiting up to `patience` seconds for the first word."""
        ready = wait(self.lines(), patience)
        for rank in [rank for rank, control in self.pending.items() if control in ready]:
            self._hear(rank)
        if self.supervisor in ready:
            try:
                rank, status = self.supervisor.recv()
            except (EOFError, OSError):
                for pid in self.pids:
                    kill_session(pid)  # on Linux the ranks are dead by now, but not what they had started
                raise RuntimeError("the process that watched over the ranks was killed, and they with it") from None
            self._hear(rank)
            if rank not in self.outcomes:
                self.dead[rank] = status

    def _hear(self, rank: int) -> None:
        """The last word of a rank, if there is one: one that died has none, and what it had started may still hold its line."""
        control = self.pending.pop(rank, None)
        with suppress(EOFError, OSError):
            if control is not None and control.poll():
                self.outcomes[rank] = control.recv()

    @property
    def _failed(self) -> bool:
        return bool(self.dead) or any(isinstance(outcome, Failure) for outcome in self.outcomes.values())

    def _raise_first(self) -> None:
        """A death explains the failures around it; among failures the earliest explains the others."""
        deadline = time.monotonic() + _GRACE
        while len(self.outcomes) < self.job.ranks and not self.dead and (patience := deadline - time.monotonic()) > 0:
            self.collect(patience)
        if self.dead:
            raise self.died(min(self.dead))
        failures = {rank: outcome for rank, outcome in self.outcomes.items() if isinstance(outcome, Failure)}
        first = min(failures, key=lambda rank: failures[rank].when)
        raise_in_caller(failures[first], f"rank {first} of {self.job.ranks}")

    def died(self, rank: int) -> RankDied:
        """The exception for a process that ended by itself: how, where it stood, and its last words."""
        note = self.board.read(rank)
        errors = end_of(self.output.err[rank], 2000).strip()
        lines = [f"rank {rank} of {self.job.ranks} {how_it_ended(self.dead[rank])}"]
        if note is not None:
            lines.append(describe_status(note))
        if errors:
            lines.append("  it last wrote: " + errors.splitlines()[-1])
        return RankDied("\n".join(lines))

    # ---- when one waits for too long ------------------------------------------------------------------------------

    def check_waits(self) -> None:
        """End the run if a rank has waited for longer than `timeout` in one place."""
        if self._late():
            self._let_others_come_to_rest()
            if (late := self._late()) and not self._failed:  # which explains more
                raise self._hung(late)

    def _let_others_come_to_rest(self) -> None:
        """One that is waited for in vain has sent its outcome before; one that runs may be about to wait in vain, or to fail."""
        deadline = time.monotonic() + _GRACE
        self.collect(0)
        while time.monotonic() < deadline and not all(self.board.read(rank) for rank in self.pending):
            self.collect(_TICK)

    def _late(self) -> dict[int, Status]:
        """The notes of ranks that have waited for too long."""
        notes = {rank: self.board.read(rank) for rank in self.pending}
        latest = time.monotonic() - self.job.timeout
        return {rank: note for rank, note in notes.items() if note and note.since + START * (note.action == "begin") < latest}

    def _hung(self, late: Mapping[int, Status]) -> RankHung:
        """The exception for them; those without a note run, are stopped, or have returned."""
        notes = {rank: late.get(rank) or self.board.read(rank) for rank in self.pending}
        for rank in notes:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR2)  # faulthandler writes where it is
        time.sleep(_TICK)
        ranks = [Status(rank, "has returned") for rank in range(self.job.ranks)]
        for rank, note in notes.items():
            if note is None or (rank not in late and note != self.board.read(rank)):  # it is not stuck, and no part of a deadlock
                note = Status(rank, "is running", **self._innermost(rank))
            if is_stopped(self.pids[rank]):  # wherever it was: nobody waits for anything but this
                note = Status(rank, "is stopped (SIGSTOP)", file=note.file, line=note.line, function=note.function)
            ranks[rank] = note
        first, note = next(iter(late.items()))
        waited = f"has waited for more than timeout={self.job.timeout:g} s"
        why = "waits for one that has returned" if note.since == IN_VAIN else waited
        return explain(ranks, f"rank {first} {why}", list(late))

    def _innermost(self, rank: int) -> dict[str, Any]:
        """The reader's own line in what faulthandler wrote (most recent call first)."""
        for file, line, function in re.findall(r'File "(.*?)", line (\d+) in (.*)', end_of(self.stacks[rank], 1 << 16)):
            if not file.startswith(NOT_THE_READERS):
                return {"file": file, "line": int(line), "function": function}
        return {}

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process that is left, and return when the last one is gone."""
        if self.supervisor is not None:
            with self.supervisor, suppress(EOFError, OSError):
                os.kill(self.supervisor_pid, signal.SIGCONT)  # it may have been stopped
                self.supervisor.send(None)
                while True:
                    self.supervisor.recv()  # its last reports; its end closes when all are buried
        self.output.show(whole_lines=False)
        self.board.memory.close()
        self.files.close()
