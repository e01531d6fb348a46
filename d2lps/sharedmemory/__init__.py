"""Ranks on one machine that read and write the same memory: no message is copied through the kernel.

One file without a name, made by the launcher and mapped by every rank, holds all that they share (`arena`). A rank that
waits sleeps until another wakes it (`waiting`, `linux`). Messages go from rank to rank (`mailbox`), and what all ranks do
together begins with a meeting (`meeting`): an all-reduce then is a sum that every rank forms over all ranks' tensors,
where they are (`all_reduce`).
"""

from d2lps.sharedmemory.arena import create, missing
from d2lps.sharedmemory.communicator import SharedMemoryCommunicator, join

__all__ = ["SharedMemoryCommunicator", "create", "join", "missing"]
