"""What goes from one server to another when servers come or go: a file for each pair, whole or not there.

Until all that has to go lies in such files, nothing has changed anywhere. Then each server takes what is for it, in its own
time, and as often as it is killed meanwhile: the files stay until the last one has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d2lps.kvstore.core.entry import Entry
from d2lps.kvstore.core.events import Reply
from d2lps.kvstore.core.pieces import Pieces
from d2lps.kvstore.core.server import Server
from d2lps.kvstore.storage import checkpoint
from d2lps.kvstore.storage.durable import Durable

Order = dict[str, Any]  # what the coordinator wants of one server: see `Resizing`


def carry_out(word: str, order: Order, server: Server, durable: Durable | None) -> tuple[Order, list[Reply]]:
    """What a server says to an order, when it has carried it out, and the answers that workers get then.

    "settled": what it has, {name: (shape, dtype)}, or that it is too early, or None: it never will be. "resume": workers go on.
    "give": see there. "take": what it was given is safe here. What was done before is not done again, only said.
    """
    said, replies, changed = {"view": order["view"]}, list[Reply](), False
    if word == "settled" and server.stuck:
        said["parts"] = None
    elif word == "settled" and not server.settled:
        said["view"] = server.view
    elif word == "settled":
        likes = {name: entry.like for name, entry in server.entries.items()}
        said["parts"] = {name: (list(like.shape), str(like.dtype).removeprefix("torch.")) for name, like in likes.items()}
    elif word == "resume" and server.stuck:
        replies, changed = server.resume(), True
    elif word == "give":
        give(server, order)
    elif word == "take" and server.view < order["view"]:
        replies, changed = take(server, order), True
    if changed and durable is not None:
        durable.checkpoint()
    return said, replies


def give(server: Server, order: Order) -> None:
    """Write the parts that are for others, and what else a newcomer must know; nothing of what is written already."""
    pieces = Pieces(server.entries.values())
    for dst, names in order["gives"].items():
        parcel = Path(order["folder"], f"{order['server']}-{dst}")
        if not checkpoint.steps(parcel):
            content = {"parts": {name: pieces.cut(name) for name in names}, "beginning": server.beginning()}
            tensors, plain = checkpoint.flatten(content)
            checkpoint.save(parcel, order["view"], tensors, {"state": plain})


def take(server: Server, order: Order) -> list[Reply]:
    """Become what this server is in the new view: the answers that are now due, as soon as that is safe."""
    found = [checkpoint.load(Path(order["folder"], f"{src}-{order['server']}")) for src in order["takes"]]
    came = [checkpoint.unflatten(parcel.tensors, parcel.meta["state"]) for parcel in found]
    if order["new"]:
        server.restore(came[0]["beginning"] | {"number": server.number})
    others = [Entry(name, value, None, *rest) for parcel in came for name, (value, *rest) in parcel["parts"].items()]
    pieces = Pieces([*server.entries.values(), *others])
    new = {name: pieces.cut(name) for name in order["parts"] if name not in server.entries}
    for parcel in came:
        server.wholes |= parcel["beginning"]["wholes"]
    return server.resize(order["view"], set(order["parts"]), new)
