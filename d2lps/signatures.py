"""The debug mode over torch.distributed: no byte moves before both ends have said, and compared, what it is.

gloo does not check what meets: a message that is shorter than its receive leaves the rest as it was, a longer one
aborts the process. So here both ends first write a signature into the job's store, and the sender holds the message
back until it has read the receiver's. A rank that waits for anything keeps looking after what it holds back, or two
ranks that send to each other would both be waiting.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import torch.distributed as dist

from d2lps.comm import Mismatch
from d2lps.comm.work import Transfer

_POLL = 0.001  # seconds between two looks into the store
_STATEMENT = 512  # bytes of a statement that ranks compare; a longer one ends in its hash


class Signatures:
    """The signed messages of one rank in one group."""

    def __init__(self, store: dist.Store, group: str, rank: int, members: list[int], timeout: float) -> None:
        self.store, self.group, self.rank, self.members, self.timeout = store, group, rank, members, timeout
        self._count: Counter[tuple[int, int, int]] = Counter()  # (src, dst, tag) -> messages so far
        self._held: list[SignedSend] = []

    def send(self, post: Callable[[], Transfer], signature: str, dst: int, tag: int) -> SignedSend:
        """Announce a message; `post` will be called when the receiver's signature fits."""
        message = SignedSend(self, self._key(self.rank, dst, tag), signature, self._stream(self.rank, dst, tag), post)
        self._held.append(message)
        return message

    def recv(self, post: Callable[[], Transfer], signature: str, src: int, tag: int) -> SignedRecv:
        """Announce what is expected, and post the receive at once: nothing arrives before the sender has compared."""
        return SignedRecv(self, self._key(src, self.rank, tag), signature, self._stream(src, self.rank, tag), post)

    def _key(self, src: int, dst: int, tag: int) -> str:
        self._count[src, dst, tag] += 1
        return f"d2lps/{self.group}/{src}/{dst}/{tag}/{self._count[src, dst, tag]}"

    def _stream(self, src: int, dst: int, tag: int) -> str:
        return f"message from rank {self.members[src]} to rank {self.members[dst]}, tag {tag}"

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait, and meanwhile let go what is held back as its receivers turn up."""
        deadline = time.monotonic() + self.timeout
        while not condition():
            self._held = [message for message in self._held if not message.try_to_post()]
            if time.monotonic() > deadline:
                raise TimeoutError(f"no signature from the other end within {self.timeout:g} s")
            time.sleep(_POLL)

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def compare(self, stream: str, sent: str, expected: str) -> None:
        if sent != expected:
            raise Mismatch(f"{stream}: the sender sends {sent}, the receiver expects {expected}")


class SignedSend:
    def __init__(
        self, signatures: Signatures, key: str, signature: str, stream: str, post: Callable[[], Transfer]
    ) -> None:
        self.signatures, self.key, self.signature, self.stream, self.post = signatures, key, signature, stream, post
        self.transfer: Transfer | None = None
        signatures.store.set(key + "/sent", signature)

    def try_to_post(self) -> bool:
        """True once the message is on its way."""
        if self.transfer is None and self.signatures.has(self.key + "/expected"):
            expected = self.signatures.store.get(self.key + "/expected").decode()
            self.signatures.compare(self.stream, self.signature, expected)
            self.transfer = self.post()
            self.signatures.store.set(self.key + "/posted", "")
        return self.transfer is not None

    def is_done(self) -> bool:
        return self.try_to_post() and self.transfer is not None and self.transfer.is_done()

    def wait(self) -> None:
        self.signatures.until(self.try_to_post)
        assert self.transfer is not None
        self.transfer.wait()


class SignedRecv:
    def __init__(
        self, signatures: Signatures, key: str, signature: str, stream: str, post: Callable[[], Transfer]
    ) -> None:
        self.signatures, self.key, self.signature, self.stream = signatures, key, signature, stream
        self.transfer = post()
        signatures.store.set(key + "/expected", signature)

    def is_done(self) -> bool:
        return self.signatures.has(self.key + "/posted") and self.transfer.is_done()

    def wait(self) -> None:
        store, key = self.signatures.store, self.key
        self.signatures.until(lambda: self.signatures.has(key + "/sent"))
        self.signatures.compare(self.stream, store.get(key + "/sent").decode(), self.signature)
        self.signatures.until(lambda: self.signatures.has(key + "/posted"))
        self.transfer.wait()
        for ending in ("/sent", "/expected", "/posted"):
            store.delete_key(key + ending)


def fixed(text: bytes) -> bytes:
    """Bytes of a fixed length, so that ranks with different statements can still exchange them."""
    if len(text) > _STATEMENT:
        text = text[: _STATEMENT - 40] + hashlib.sha1(text).hexdigest().encode()
    return text.ljust(_STATEMENT, b"\0")


def by_statement(said: list[str], members: list[int]) -> str:
    """`rank 2 calls broadcast(src=1); ranks 0, 1, 3 call broadcast(src=0)`: the few first."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, statement in enumerate(said):
        groups[statement].append(members[rank])
    parts = []
    for statement, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1])):
        who = f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
        parts.append(f"{who} {statement}")
    return "; ".join(parts)
