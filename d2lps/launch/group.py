"""The processes of a run on this machine: start them, watch them, end them."""

import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from d2lps import sharedmemory
from d2lps.comm import RankDied, RankHung
from d2lps.comm.explain import State, explain
from d2lps.comm.standing import IN_VAIN, NOT_THE_READERS, SharedBoard, Standing
from d2lps.launch.failure import Failure, died, raise_in_caller
from d2lps.launch.forkserver_client import kill_session, preload, start_ranks
from d2lps.launch.output import Output
from d2lps.launch.rank import Job, Success
from d2lps.sharedmemory.procfs import is_stopped

_TICK = 0.1  # seconds between two looks at the notes of the ranks
_GRACE = 0.3  # seconds in which the cause of a failure may still turn up: a broken pipe is news before the death behind it


class Group:
    """The processes of one run, as their caller sees them.

    folder: what goes with them, even if the caller is killed. labels: what stands before the lines that each of them prints.
    """

    def __init__(self, job: Job, live: bool, folder: str = "", labels: Sequence[str] = ()) -> None:
        self.job, self.folder = job, folder
        self.output = Output(labels or [f"rank {rank}" for rank in range(job.ranks)], live)
        self.board_file = tempfile.TemporaryFile()
        self.board_file.truncate(SharedBoard.bytes_for(job.ranks))
        self.board = SharedBoard(self.board_file.fileno(), 0)
        self.stacks = [tempfile.TemporaryFile() for _ in range(job.ranks)]
        self.keeper: Any = None  # the line to their keeper
        self.pids: list[int] = []
        self.controls: list[Connection] = []
        self.pending: dict[int, Connection] = {}  # the controls of ranks that may still have something to say
        self.outcomes: dict[int, Success | Failure] = {}
        self.dead: dict[int, int] = {}  # rank -> wait status, of those that ended without a word

    def start(self, program: bytes) -> None:
        """Start the processes and give each its job."""
        with self.meeting_place() as meeting, ExitStack() as theirs:
            files = []
            for rank in range(self.job.ranks):
                ours, control = Pipe()
                self.controls.append(ours)
                own = (theirs.enter_context(control), self.output.out[rank], self.output.err[rank], self.board_file)
                files.append([*(file.fileno() for file in (*own, self.stacks[rank])), meeting])
            self.keeper, self.pids = start_ranks(files, self.folder)
        self.pending = dict(enumerate(self.controls))
        for control in self.controls:
            with suppress(OSError):  # a rank that is dead already is reported by the keeper
                control.send(self.job)
                control.send_bytes(program)

    @contextmanager
    def meeting_place(self) -> Iterator[int]:
        """The file at which the ranks meet: the memory that they will share, or the store's listening socket."""
        if self.job.backend == "shm":
            memory = sharedmemory.create(self.job.ranks)
            try:
                yield memory
            finally:
                os.close(memory)
        else:
            with socket.create_server(("127.0.0.1", 0), backlog=self.job.ranks) as listener:
                self.job.store_port = listener.getsockname()[1]
                yield listener.fileno()

    # ---- while they run -------------------------------------------------------------------------------------------

    def watch(self) -> list[Success]:
        """Wait for the outcome of every rank; raise what went wrong first."""
        while len(self.outcomes) < self.job.ranks:
            self.collect(_TICK)
            if self.dead or any(isinstance(outcome, Failure) for outcome in self.outcomes.values()):
                self._raise_first()
            self.check_waits()
            self.output.pump()
        successes = [outcome for _, outcome in sorted(self.outcomes.items()) if isinstance(outcome, Success)]
        preload({name for success in successes for name in success.imported})
        return successes

    def collect(self, patience: float) -> None:
        """Take in what ranks and keeper have to say, waiting up to `patience` seconds for the first word."""
        ready = wait([self.keeper, *self.pending.values()], patience)
        for rank in [rank for rank, control in self.pending.items() if control in ready]:
            self._hear(rank)
        if self.keeper in ready:
            try:
                rank, status = self.keeper.recv()
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

    def _raise_first(self) -> None:
        """A death explains the failures around it; among failures the earliest explains the others."""
        deadline = time.monotonic() + _GRACE
        while len(self.outcomes) < self.job.ranks and not self.dead and (patience := deadline - time.monotonic()) > 0:
            self.collect(patience)
        if self.dead:
            raise self.died(min(self.dead))
        failures = {rank: outcome for rank, outcome in self.outcomes.items() if isinstance(outcome, Failure)}
        first = min(failures, key=lambda rank: failures[rank].when)
        raise_in_caller(failures[first], first, self.job.ranks)

    def died(self, rank: int) -> RankDied:
        return died(rank, self.job.ranks, self.dead[rank], self.output.errors_of(rank), self.board.read(rank))

    # ---- when one waits for too long ------------------------------------------------------------------------------

    def check_waits(self) -> None:
        """End the run if a rank has waited for longer than `timeout` in one place."""
        if self._overdue(self._notes()):
            self.collect(0)  # a rank that is waited for in vain has sent its outcome before
            if late := self._overdue(notes := self._notes()):
                raise self._hung(notes, late)

    def _notes(self) -> dict[int, Standing | None]:
        return {rank: self.board.read(rank) for rank in self.pending}

    def _overdue(self, notes: Mapping[int, Standing | None]) -> list[int]:
        latest = time.monotonic() - self.job.timeout
        return [rank for rank, note in notes.items() if note is not None and note.since < latest]

    def _hung(self, notes: Mapping[int, Standing | None], late: Sequence[int]) -> RankHung:
        """The exception for ranks that have waited for too long; those without a note run, are stopped, or have returned."""
        for rank in notes:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR2)  # faulthandler writes where it is
        time.sleep(_TICK)
        states = [State(rank, None, "has returned") for rank in range(self.job.ranks)]
        for rank, note in notes.items():
            if rank not in late and note != self.board.read(rank):
                note = None  # it is not stuck, and no part of a deadlock
            place = (note.file, note.line, note.function) if note is not None else self._innermost(rank)
            stopped = is_stopped(self.pids[rank])  # wherever it was: nobody waits for anything but this
            states[rank] = State(rank, None, "is stopped (SIGSTOP)", *place) if stopped else State(rank, note, "", *place)
        first = notes[late[0]]
        in_vain = first is not None and first.since == IN_VAIN
        why = "waits for one that has returned" if in_vain else f"has waited for more than timeout={self.job.timeout:g} s"
        return explain(states, f"rank {late[0]} {why}", late)

    def _innermost(self, rank: int) -> tuple[str, int, str]:
        """The reader's own line in what faulthandler wrote (most recent call first)."""
        stack = os.pread(self.stacks[rank].fileno(), 1 << 16, 0).decode(errors="replace")
        for file, line, function in re.findall(r'File "(.*?)", line (\d+) in (.*)', stack):
            if not file.startswith(NOT_THE_READERS):
                return file, int(line), function
        return "", 0, ""

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every process that is left, and return when the last one is gone."""
        for control in self.controls:
            control.close()
        if self.keeper is not None:
            with self.keeper, suppress(EOFError, OSError):
                self.keeper.send(None)
                while True:
                    self.keeper.recv()  # its last reports; its end closes when all are buried
        self.output.finish()
        for file in (self.board_file, *self.stacks):
            file.close()
        self.board.memory.close()
