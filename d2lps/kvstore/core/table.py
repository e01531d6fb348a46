"""The table of operations: of each that a client can ask for, what it does, what its answer waits for, and what that carries.

The store's own stand in `operations`; whoever has one of his own puts it into the table just so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from d2lps.kvstore.core.clocks import ALL
from d2lps.kvstore.core.events import Request

MEETING = 0  # where those stand that wait for everybody; all others stand at the key that they wait for, or at ALL


class Operation(NamedTuple):
    """What a client can ask for.

    do: what it does at once. It first finds out whether it may, and raises Refused, in words, where it may not: so a refused
    request leaves everything as it was. It returns the places whose slowest worker has thereby moved on, if any.
    at: where its answer waits, if it must: "key", as reads do; "meeting" of all workers; "all" keys, also for what never waits.
    until: whether the answer may go. then: what happens just before that, once. carries: what the answer has of a Reply's fields.
    Each of these is given the Server and the request.
    """

    do: Callable[[Any, Request], set[Any] | None]
    at: str
    until: Callable[[Any, Request], bool]
    then: Callable[[Any, Request], None]
    carries: Callable[[Any, Request], Mapping[str, Any]]

    def place(self, request: Request) -> Hashable:
        """Where a request waits if it must."""
        return {"key": request.key, "meeting": MEETING}.get(self.at, ALL)


OPERATIONS: dict[str, Operation] = {}
MORE: dict[str, Any] = {}  # what else a server has to remember for operations that are not the store's own: {name: its type}


def at_once(server: Any, request: Request) -> bool:
    """Until nothing."""
    return True


def operation(
    at: str = "all",
    until: Callable[[Any, Request], bool] = at_once,
    then: Callable[[Any, Request], None] = lambda server, request: None,
    carries: Callable[[Any, Request], Mapping[str, Any]] = lambda server, request: {},
    name: str = "",
) -> Callable[[Any], Any]:
    """Put a function into the table, under its name or another one; see `Operation`, and for examples `operations`."""

    def put(do: Any) -> Any:
        OPERATIONS[name or do.__name__] = Operation(do, at, until, then, carries)
        return do

    return put
