"""A run on this machine: start the ranks, watch them, end them."""

import contextlib
import errno
import os
import pickle
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from d2lps import sharedmemory
from d2lps.comm.status import SharedBoard, Status
from d2lps.launch import forkserver_client
from d2lps.launch import objects_and_files as messages
from d2lps.launch.failure import died, hung, raise_in_caller
from d2lps.launch.keeper import kill_session
from d2lps.launch.output import Output
from d2lps.launch.rank import Failure, Job, Success
from d2lps.result import Run
from d2lps.trace import merge

_TICK = 0.1  # seconds between two looks at the notes of the ranks
_GRACE = 0.3  # seconds in which the cause of a failure may still turn up: a broken pipe is news before the death behind it


def run_local(function: Callable[..., Any], args: tuple[Any, ...], job: Job, live: bool) -> Run:
    """Run on `job.ranks` new processes; see `d2lps.run`."""
    try:
        program = cloudpickle.dumps((function, args))
    except Exception as error:
        raise TypeError(f"the function or its arguments cannot be sent to other processes: {error}") from None
    with _open_files(job.ranks):
        group = Group(job, live)
    with contextlib.closing(group):
        with _open_files(job.ranks):
            group.start(program)
        return _run_of(group.watch(), job)


@contextlib.contextmanager
def _open_files(ranks: int) -> Iterator[None]:
    """Say what to do when this process may not open as many files as a run takes."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        told = f"{ranks} ranks take {5 * ranks} open files, and this process may have {limit}: raise it (ulimit -n), or run fewer"
        raise OSError(errno.EMFILE, told) from None


def _run_of(outcomes: list[Success], job: Job) -> Run:
    logs = [log for outcome in outcomes for log in outcome.logs]
    return Run(
        [cloudpickle.loads(outcome.result) for outcome in outcomes],
        max(outcome.ended for outcome in outcomes) - min(outcome.started for outcome in outcomes),
        merge(logs, job.ranks) if job.trace else None,
    )


class Group:
    """The processes of one run, as their caller sees them.

    folder: what goes with them, even if the caller is killed. labels: what stands before the lines that each of them prints.
    """

    def __init__(self, job: Job, live: bool, folder: str = "", labels: Sequence[str] = ()) -> None:
        self.job, self.folder = job, folder
        self.output = Output(labels or [f"rank {rank}" for rank in range(job.ranks)], live)
        self.board_file = tempfile.TemporaryFile()
        self.board_file.truncate(job.ranks * SharedBoard.SLOT)
        self.board = SharedBoard(self.board_file.fileno(), 0)
        self.stacks = [tempfile.TemporaryFile() for _ in range(job.ranks)]
        self.controls: list[Connection] = []
        self.keeper: socket.socket | None = None
        self.pids: dict[int, int] = {}
        self.outcomes: dict[int, Success | Failure] = {}
        self.pending: dict[int, Connection] = {}  # the ranks that may still have something to say
        self.ended: dict[int, int] = {}  # rank -> wait status, of the processes that are no more

    def start(self, program: bytes) -> None:
        """Start the processes and give each its job."""
        ends: list[Connection] = []
        with self.meeting_place() as meeting:
            for _ in range(self.job.ranks):
                ours, theirs = Pipe()
                self.controls.append(ours)
                ends.append(theirs)
            try:
                files = [self._files(rank, end, meeting) for rank, end in enumerate(ends)]
                self.keeper, self.pids = forkserver_client.start_ranks(self.job.ranks, files, self.folder)
            finally:
                for end in ends:
                    end.close()
        for control in self.controls:
            with contextlib.suppress(OSError):  # a rank that is dead already is reported by the keeper
                control.send_bytes(pickle.dumps(self.job))
                control.send_bytes(program)

    @contextlib.contextmanager
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

    def _files(self, rank: int, control: Connection, meeting: int) -> tuple[int, ...]:
        """The files that a rank inherits, in the order of `rank.main`'s parameters."""
        files = (self.output.out[rank], self.output.err[rank], self.board_file, self.stacks[rank])
        descriptors = (control.fileno(), *(file.fileno() for file in files))
        return (*descriptors, meeting) if rank == 0 or self.job.backend == "shm" else descriptors

    def watch(self) -> list[Success]:
        """Wait for the outcome of every rank; raise what went wrong first."""
        self.pending = dict(enumerate(self.controls))
        while len(self.outcomes) < self.job.ranks:
            self.collect(_TICK)
            if self.dead() or any(isinstance(outcome, Failure) for outcome in self.outcomes.values()):
                self.collect_until(time.monotonic() + _GRACE)
                self._raise_first()
            self.check_waits()
            self.output.pump()
        successes = [outcome for _, outcome in sorted(self.outcomes.items()) if isinstance(outcome, Success)]
        forkserver_client.preload({name for success in successes for name in success.imported})
        return successes

    def dead(self) -> dict[int, int]:
        """The ranks that ended without a word."""
        return {r: status for r, status in self.ended.items() if r not in self.outcomes and r not in self.pending}

    def collect(self, patience: float) -> None:
        """Take in what ranks and keeper have to say, waiting up to `patience` seconds for the first word."""
        assert self.keeper is not None
        ready = wait([self.keeper, *self.pending.values()], patience)
        for rank, control in list(self.pending.items()):
            if control in ready:
                del self.pending[rank]
                with contextlib.suppress(EOFError, OSError):  # it died: the keeper will say how
                    self.outcomes[rank] = pickle.loads(control.recv_bytes())
        if self.keeper in ready:
            rank, status = self._keepers_word()
            self.ended[rank] = status
            if rank in self.pending and not self.pending[rank].poll():
                del self.pending[rank]  # said nothing, though a process that it had started may still hold its line open

    def collect_until(self, deadline: float) -> None:
        while len(self.outcomes) < self.job.ranks and not self.dead() and (patience := deadline - time.monotonic()) > 0:
            self.collect(patience)

    def _keepers_word(self) -> tuple[int, int]:
        assert self.keeper is not None
        try:
            (rank, status), _ = messages.receive(self.keeper)
        except (EOFError, OSError):
            for pid in self.pids.values():
                kill_session(pid)  # on Linux the ranks are dead by now, but not what they had started
            raise RuntimeError("the process that watched over the ranks was killed, and they with it") from None
        return rank, status

    def _raise_first(self) -> None:
        """A death explains the failures around it; among failures the earliest explains the others."""
        for rank, status in sorted(self.dead().items()):
            raise died(rank, self.job.ranks, status, self.output.errors_of(rank), self.board.read(rank))
        failures = [(o.when, rank, o) for rank, o in self.outcomes.items() if isinstance(o, Failure)]
        _, rank, failure = min(failures, key=lambda entry: entry[0])
        raise_in_caller(failure, rank, self.job.ranks)

    def check_waits(self) -> None:
        """End the run if a rank has waited for longer than `timeout` in one place."""
        notes = self._notes()
        if not self._overdue(notes):
            return
        self.collect(0)  # a rank that is waited for in vain has sent its outcome before
        notes = {rank: note for rank, note in notes.items() if rank in self.pending}
        if not (late := self._overdue(notes)):
            return
        for rank in notes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR2)  # faulthandler writes where it is
        time.sleep(_TICK)
        # Whose note has changed by now is not stuck: it is no part of a deadlock.
        notes = {rank: note if rank in late or note == self.board.read(rank) else None for rank, note in notes.items()}
        raise hung(self.job, self._overdue(notes), notes, {rank: self._stack(rank) for rank in notes}, self.pids)

    def _notes(self) -> dict[int, Status | None]:
        return {rank: self.board.read(rank) for rank in self.pending}

    def _overdue(self, notes: Mapping[int, Status | None]) -> list[int]:
        latest = time.monotonic() - self.job.timeout
        return [rank for rank, note in notes.items() if note is not None and note.since < latest]

    def _stack(self, rank: int) -> str:
        return os.pread(self.stacks[rank].fileno(), 1 << 16, 0).decode(errors="replace")

    def close(self) -> None:
        """End every process that is left, and return when the last one is gone."""
        for control in self.controls:
            control.close()
        if self.keeper is not None:
            with self.keeper, contextlib.suppress(OSError):
                self.keeper.shutdown(socket.SHUT_WR)
                while self.keeper.recv(4096):  # the keeper's last reports; its end closes when all are buried
                    pass
        self.output.finish()
        for file in (self.board_file, *self.stacks):
            file.close()
        self.board.memory.close()
