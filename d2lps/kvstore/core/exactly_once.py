"""Each request counts once: what a server remembers of its clients.

A client numbers its requests to a server, and sends again, under the same number, what has not been answered (see `Session`).
The server executes them in the order of their numbers, each once; whatever comes again is answered again, not executed
again. So nothing depends on messages arriving once, or in order: the server's side of TCP, kept in the log with the values.
"""

from __future__ import annotations

from msgspec import Struct, field

from d2lps.kvstore.core.events import LOSS, Request

WINDOW = 1024  # requests beyond a gap that are kept; further ones are dropped, and will come again
Life = tuple[int, int]  # a worker's rank, and which of its lives


class ClientRecord(Struct):
    """What a server knows of one life of a client.

    >>> client = ClientRecord()
    >>> client.hold(Request("clock", sequence=2))
    >>> client.pop()                                            # its turn has not come
    >>> client.hold(Request("push", sequence=1))
    >>> client.pop().op, client.pop().op, client.next
    ('push', 'clock', 3)
    """

    epoch: int = 0
    next: int = 1  # the sequence to execute next
    answered: int = 0  # answers to sequences below this one have arrived: the client's low-water mark
    errors: dict[int, str] = field(default_factory=dict)  # of executed requests that were refused, by sequence, to be told again
    said: str = ""  # what somebody has said to all in the barrier to which this one came last
    over: bool = False  # it was given up: only a life of a higher epoch can come back
    held: dict[int, Request] = field(default_factory=dict)  # beyond a gap; not in the log, so a crash forgets them

    def hold(self, request: Request) -> None:
        """Keep a request until its turn."""
        if request.sequence < self.next + WINDOW:
            self.held.setdefault(request.sequence, request)

    def pop(self) -> Request | None:
        """The request whose turn it is, if it is here; it counts as executed from now on."""
        request = self.held.pop(self.next, None)
        if request is not None:
            self.next += 1
            self.answered = max(self.answered, request.acknowledged)
            self.errors = {number: text for number, text in self.errors.items() if number >= self.answered}
        return request


def stale(client: ClientRecord | None, request: Request) -> str:
    """Why a request is of a life that is over, or not yet announced, or that knows more than we do; empty if it is not."""
    worker = request.client
    if client and (request.epoch < client.epoch or (client.over and request.epoch == client.epoch)):
        return f"stale epoch: worker {worker} of epoch {request.epoch} was given up"
    if request.op != "join" and (client is None or request.epoch > client.epoch):
        return f"worker {worker} of epoch {request.epoch} is not a member: it must join first"
    if client and request.epoch == client.epoch and request.acknowledged > client.next:
        answers, known = request.acknowledged - 1, client.next - 1
        return (
            f"{LOSS}: worker {worker} has the answers to {answers}, this server knows of "
            f"{known}, and of nothing that the others changed: its log was damaged, or not on the disk when power failed"
        )
    return ""
