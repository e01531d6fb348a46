"""What can go wrong between ranks, each with a name that an `except` can catch."""


class Mismatch(ValueError):
    """Two ranks that should have agreed did not: another size, dtype, root, or another collective."""


class RankDied(RuntimeError):
    """A rank's process ended without a word: killed, out of memory, or a crash in compiled code."""


class RankFailed(RuntimeError):
    """A rank raised an exception that cannot be carried to the caller; its text is in this one."""


class RankHung(TimeoutError):
    """A rank waited longer than `timeout` for another one; the text says where every rank stood."""


class Deadlock(RankHung):
    """Ranks wait for one another in a circle: no amount of time would help."""


class OutOfMemory(MemoryError):
    """More memory was to be held than the device has; the text says who holds how much of it."""
