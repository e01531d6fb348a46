"""A rank's communicator in a simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from d2lps.comm import Communicator, Mismatch, ReduceOp, ops
from d2lps.comm.work import Transfer
from d2lps.simulator.mailbox import End, Mailbox, Stream
from d2lps.simulator.scheduler import Task
from d2lps.topology import Topology


class Meetings:
    """Calls that every rank of a group makes together: they return when the last one has come, and take no time."""

    def __init__(self) -> None:
        self.present: defaultdict[tuple[str, str], dict[int, object]] = defaultdict(dict)  # (group, call) -> rank -> word
        self.blocked: defaultdict[tuple[str, str], list[Task]] = defaultdict(list)

    def meet(self, comm: SimulatedCommunicator, call: str, word: object) -> dict[int, object]:
        """What every rank of the group said, by rank."""
        comm.catch_up()
        key = (comm.name, call)
        words = self.present[key]
        words[comm.rank] = word
        if len(words) < comm.size:
            self.blocked[key].append(comm.task)
            comm.mailbox.scheduler.block(comm.task, 1, (call,))
        else:
            del self.present[key]
            for task in self.blocked.pop(key, []):
                comm.mailbox.scheduler.happened(task)
        return words


class SimulatedCommunicator(Communicator):
    """Messages are posted in the mailbox, and waiting gives the thread to another rank.

    Untraced, a thousand ranks exchange millions of messages; the calls that they make most are written out here without
    the notes and records of the general ones. They mean the same.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        name: str,
        task: Task,
        nodes: list[object],
        topology: Topology,
        mailbox: Mailbox,
        meetings: Meetings,
        device: torch.device,
    ) -> None:
        super().__init__(members, rank, name)
        self.task, self.nodes, self.topology = task, nodes, topology
        self.mailbox, self.meetings, self.device = mailbox, meetings, device
        self.node = nodes[self.members[rank]]
        self.generator = torch.Generator().manual_seed(rank)
        self._streams: dict[tuple[bool, int, int], Stream] = {}  # (whether this rank sends, peer, tag)
        self._splits = 0

    # ---- messages -------------------------------------------------------------------------------------------------

    def _stream(self, sends: bool, peer: int, tag: int) -> Stream:
        me, them = self.members[self.rank], self.members[peer]
        src, dst = (me, them) if sends else (them, me)
        route = self.topology.route(self.nodes[src], self.nodes[dst])
        stream = self._streams[sends, peer, tag] = self.mailbox.stream((self.name, src, dst, tag), route)
        return stream

    def _post_send(self, staged: torch.Tensor, dst: int, tag: int) -> Transfer:
        self.catch_up()
        return End(self.mailbox.send(self._stream(True, dst, tag), staged), "sender", self.task)

    def _post_recv(self, staged: torch.Tensor, src: int, tag: int) -> Transfer:
        self.catch_up()
        return End(self.mailbox.recv(self._stream(False, src, tag), staged), "receiver", self.task)

    def sendrecv(self, tensor: torch.Tensor, dst: int, into: torch.Tensor, src: int, tag: int = 0) -> None:
        stream_in, stream_out = self._streams.get((False, src, tag)), self._streams.get((True, dst, tag))
        if stream_in is None or stream_out is None or self.recorder is not None or not (tensor.is_meta and into.is_meta):
            return super().sendrecv(tensor, dst, into, src, tag)
        # Streams that have been used before have had all their checks.
        self.task.script.write(stream_in, into, stream_out, tensor)
        if not self._collective:
            self.catch_up()
        return None

    @contextmanager
    def inside(self, collective: str) -> Iterator[bool]:
        with super().inside(collective) as outermost:
            try:
                yield outermost
            except Exception:  # when its time has come
                self.catch_up()
                raise
            if outermost:
                self.catch_up()

    def catch_up(self) -> None:
        """Return when the messages that this rank has only written down (see script.py) have been delivered."""
        if self.task.script.steps:
            self.task.script.play()

    def chunks(self, tensor: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
        if self.recorder is not None or not tensor.is_meta:
            return super().chunks(tensor, parts)
        # Without contents, and with nobody recording which part is which, equal chunks are one and the same: a thousand
        # ranks would otherwise hold a million of them.
        length, longer = divmod(tensor.numel(), parts)
        return [tensor[: length + 1]] * longer + [tensor[:length]] * (parts - longer)

    def combine(self, into: torch.Tensor, other: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        gamma = self.mailbox.model.per_combined_byte
        if self.recorder is None and not gamma and into.is_meta:
            return self._check_pair("combine", into, other)
        start = self.now()
        self._check_pair("combine", into, other)
        if not into.is_meta:
            ops.apply(op, into.detach(), other.detach().reshape(into.shape))
        if gamma:
            self.sleep(gamma * other.nbytes)
        if self.recorder:
            self.recorder.local(ops.op_name(op), into, other, start)
        return None

    # ---- time and groups ------------------------------------------------------------------------------------------

    def now(self) -> float:
        self.catch_up()
        return self.mailbox.network.now

    def sleep(self, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds!r} is not a number from 0 up")
        scheduler, task = self.mailbox.scheduler, self.task
        self.mailbox.network.call_at(self.now() + seconds, lambda: scheduler.happened(task))
        scheduler.block(task, 1, ("sleep",))

    def _barrier(self) -> None:
        self.meetings.meet(self, "barrier", None)

    def agree(self, statement: str) -> None:
        words = self.meetings.meet(self, "agree", statement)
        if len(set(words.values())) > 1:
            said = "; ".join(f"rank {self.members[rank]} calls {words[rank]}" for rank in sorted(words))
            raise Mismatch(f"the ranks disagree: {said}")

    def native_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        raise ValueError("algorithm='native' is the all-reduce of gloo or NCCL; a simulated cluster has none of its own")

    def _split(self, color: int | None, key: int) -> SimulatedCommunicator | None:
        wishes = self.meetings.meet(self, "split", (color, key))
        self._splits += 1
        if color is None:
            return None
        ordered = sorted((wish[1], rank) for rank, wish in wishes.items() if wish[0] == color)  # type: ignore[index]
        ranks = [rank for _, rank in ordered]
        members = [self.members[rank] for rank in ranks]
        name = f"{self.name}/{self._splits}.{color}"
        return SimulatedCommunicator(
            members,
            ranks.index(self.rank),
            name,
            self.task,
            self.nodes,
            self.topology,
            self.mailbox,
            self.meetings,
            self.device,
        )
