"""What a message is, checked where torch.distributed does not: gloo puts 2 floats into room for 4 and says nothing, and a message
that is longer than its receive aborts the process.

A message travels under a tag of gloo's that tells its number, dtype and length, so only what fits together ever meets; that costs
nothing. What does not fit waits. Whatever has waited for a while is written into the job's store by both of its ends, where they
compare, let each other go, and raise Mismatch.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from d2lps.comm.explain import mismatch
from d2lps.comm.rank import describe
from d2lps.comm.work import in_thread

_LONG = 0.2  # seconds between two looks at what is waited for; what is older than that is compared
_CODE = 15  # bits of gloo's 31 that say what a message is; a tag that needs more than the others is a code altogether
_NOTHING = "?"  # what a store gives for a key that it has not, if it is asked to put this in the place of this

Stream = tuple[str, str, int, int, int]  # which end ("send", "recv"), group, this rank and the other one in the run, tag
Post = Callable[[torch.Tensor, int], Any]


class Signatures:
    """The messages of one rank that are under way over one store's engines.

    patience: seconds in which the two ends must compare before anything moves. That is for NCCL, which has no tags, and in which
    what does not fit cannot be let go.
    """

    def __init__(self, store: dist.Store, patience: float | None) -> None:
        self.store, self.patience = own_connection(store), patience
        self.released: list[Any] = []  # what was sent or received so that the other end can raise; gloo needs it kept
        self._count: Counter[Stream] = Counter()  # messages so far
        self._posted: weakref.WeakSet[Message] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._watch: Future[Any] | None = None

    def message(self, stream: Stream, tensor: torch.Tensor, post: Post) -> Message:
        """Post one end of a message: `post(tensor, coded_tag)`."""
        with self._lock:
            self._count[stream] += 1
            message = Message(self, stream, self._count[stream], tensor, post)
            self._posted.add(message)
            self._watch = self._watch or in_thread(partial(_watch, weakref.ref(self)), "signatures")
        return message

    def look(self) -> None:
        """Compare what has waited for long with what the other ends wait for."""
        long_ago = time.monotonic() - _LONG
        with self._lock:
            late = [message for message in self._posted if message.since < long_ago]
        for message in late:
            message.compare()


def _watch(signatures: weakref.ref[Signatures]) -> None:
    """A thread's life: as long as anybody knows the signatures, and there is a store to write them into."""
    while (known := signatures()) is not None:
        known.look()  # a RuntimeError if the store has gone with the job
        del known
        time.sleep(_LONG)


class Message:
    """One end of a message."""

    def __init__(self, signatures: Signatures, stream: Stream, number: int, tensor: torch.Tensor, post: Post) -> None:
        self.signatures, self.stream, self.number, self.post = signatures, stream, number, post
        self.mine, self.theirs, self._told = describe(tensor), "", False  # told: this end has been written down
        self.since, self._lock = time.monotonic(), threading.Lock()
        self._work = post(tensor, self._coded(self.mine))
        self._waiter: Future[Any] | None = None

    def _coded(self, signature: str) -> int:
        tag = self.stream[-1]
        code = zlib.crc32(f"{tag} {self.number} {signature}".encode())
        return tag << _CODE | code % (1 << _CODE) if tag < 1 << _CODE else 1 << 30 | code % (1 << 30)

    def is_done(self) -> bool:
        """Whether it is complete. gloo tells only those who wait, so a thread does."""
        self._waiter = self._waiter or in_thread(self._work.wait, "waits for gloo")
        return self._waiter.done()

    def wait(self) -> None:
        """Return when it is complete; Mismatch, at both ends, if they differ: by then the receiver's tensor is spoilt."""
        if self.signatures.patience is not None:
            self._compare_first(self.signatures.patience)
        complete = self._waiter.result if self._waiter else self._work.wait
        complete()
        self.since = math.inf  # no need to look any more
        if self._told:  # after a long wait: was it the right message that has come?
            self.compare()
            self._check()
            self.signatures.store.delete_key(self._key(self.stream[0]))

    def _key(self, end: str) -> str:
        _, group, rank, peer, tag = self.stream
        src, dst = (rank, peer) if self.stream[0] == "send" else (peer, rank)
        return f"signature/{group}/{src}/{dst}/{tag}/{self.number}/{end}"

    def compare(self) -> None:
        """Write this end down, and look for the other. If they differ, send or take what the other end waits for."""
        end, store = self.stream[0], self.signatures.store
        with self._lock:
            if not self._told:
                self._told = True
                store.set(self._key(end), self.mine)
            there = self._key("recv" if end == "send" else "send")
            # Not `check` and then `get`: between the two the other end may be done, and delete it, and `get` waits for ever.
            if not self.theirs and (theirs := store.compare_set(there, _NOTHING, _NOTHING).decode()) != _NOTHING:
                self.theirs = theirs
                if theirs != self.mine and self.signatures.patience is None:
                    self.signatures.released.append(self.post(_room(theirs), self._coded(theirs)))

    def _compare_first(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not self.theirs:
            self.compare()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no signature from the other end within {patience:g} s")
            time.sleep(0.001)
        self._check()

    def _check(self) -> None:
        end, _, rank, peer, tag = self.stream
        if self.theirs not in ("", self.mine):
            raise mismatch(end == "send", rank, peer, tag, self.mine, self.theirs)


def _room(signature: str) -> torch.Tensor:
    """`_room("float32[4]")` is a tensor of 4 zeros."""
    dtype, _, length = signature.removesuffix("]").partition("[")
    return torch.zeros(int(length), dtype=getattr(torch, dtype))


def place_to_meet(ranks: int) -> tuple[int, int]:
    """Where ranks of one machine will find their store: an open descriptor, for a child to inherit, and its port, or 0.

    A file without a name, which no other user can open; where there is none, the loopback interface, where any may knock.
    """
    if sys.platform == "linux":
        return os.memfd_create("d2lps store"), 0
    listener = socket.create_server(("127.0.0.1", 0), backlog=ranks)
    port = listener.getsockname()[1]
    return listener.detach(), port


def store_at(file: int, port: int, ranks: int, rank: int, process: int | str = "self") -> dist.Store:
    """The store at a place to meet. process: whose the file is; a port's is the first rank's."""
    if not port:
        return dist.FileStore(f"/proc/{process}/fd/{file}")
    here: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": file if rank == 0 else None}
    here["use_libuv"] = torch.__version__ >= "2.7"  # before, only the older server takes a socket that listens
    return dist.TCPStore("127.0.0.1", port, ranks, rank == 0, **here)


def own_connection(store: dist.Store) -> Any:
    """A client of the same store, for one holds a lock while it waits, and all its other users up."""
    if hasattr(store, "clone"):
        return store.clone()
    if isinstance(store, dist.PrefixStore) and hasattr(store, "prefix"):  # torch 2.6 tells none: there, users do wait
        return dist.PrefixStore(store.prefix, own_connection(store.underlying_store))
    return dist.TCPStore(store.host, store.port, is_master=False) if isinstance(store, dist.TCPStore) else store
