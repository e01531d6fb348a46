"""Requests that have been executed, but whose answer must wait for other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from d2lps.kvstore.events import Request

BARRIER = "barrier()"  # where those stand that wait for everybody; all others stand at the key that they wait for


def place(request: Request) -> str:
    return BARRIER if request.op == "barrier" else request.key


class Waiting:
    """By key, in the order in which they came.

    >>> waiting = Waiting([Request("pull", key="w", client=0), Request("pull", key="w", client=1, priority=5)])
    >>> [request.client for request in waiting.take(["w", "v"], lambda request: True)]
    [0, 1]
    >>> waiting.requests()
    []
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.at: dict[str, list[Request]] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        self.at.setdefault(place(request), []).append(request)

    def __contains__(self, request: Request) -> bool:
        return any(request.retry_key == other.retry_key for other in self.at.get(place(request), ()))

    def take(self, places: Iterable[str], free: Callable[[Request], bool]) -> list[Request]:
        """Remove those that need wait no longer, in the order in which they came."""
        taken: list[Request] = []
        for where in [place for place in places if place in self.at]:
            stay: list[Request] = []
            for request in self.at.pop(where):
                (taken if free(request) else stay).append(request)
            if stay:
                self.at[where] = stay
        return taken

    def forget(self, client: int) -> None:
        """This client waits no more."""
        self.at = {where: [r for r in requests if r.client != client] for where, requests in self.at.items()}

    def requests(self) -> list[Request]:
        return [request for requests in self.at.values() for request in requests]
