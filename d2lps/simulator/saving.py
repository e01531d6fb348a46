"""The hooks through which autograd saves tensors (checkpointing has some): which are on, and off and on again with them.

torch keeps them for each thread, and ranks share one. Newer versions say which hooks are on; an older one does not, so there
we note them as they come and go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch._C._autograd
Hooks = tuple[Callable[..., Any], Callable[..., Any]]


def _note_as_they_come() -> None:
    """Give an older torch the function that says which hooks are on."""
    noted = threading.local()
    really_push, really_pop = _torch._push_saved_tensors_default_hooks, _torch._pop_saved_tensors_default_hooks

    def stack() -> list[Hooks]:
        found: list[Hooks] = noted.__dict__.setdefault("stack", [])
        return found

    def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        really_push(pack, unpack)
        stack().append((pack, unpack))

    def pop() -> None:
        really_pop()
        stack().pop()

    _torch._push_saved_tensors_default_hooks, _torch._pop_saved_tensors_default_hooks = push, pop
    _torch._top_saved_tensors_default_hooks = lambda while_tracing: stack()[-1] if stack() else None


if not hasattr(_torch, "_top_saved_tensors_default_hooks"):
    _note_as_they_come()

top: Callable[[bool], Hooks | None] = _torch._top_saved_tensors_default_hooks  # top(True): also while a graph is traced
push: Callable[..., None] = _torch._push_saved_tensors_default_hooks
pop: Callable[[], None] = _torch._pop_saved_tensors_default_hooks
