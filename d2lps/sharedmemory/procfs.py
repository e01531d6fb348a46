"""What Linux tells of processes under /proc."""

from pathlib import Path


def state_and_parent(pid: int) -> tuple[str, int]:
    """`("R", 1)`: R runs, S sleeps, T is stopped, Z has ended but is not buried yet; "" if it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, or by a debugger."""
    return state_and_parent(pid)[0] in ("T", "t")


def is_alive(pid: int) -> bool:
    """A process that has ended is gone from /proc, or is there as a zombie until it is buried."""
    return state_and_parent(pid)[0] not in ("", "Z", "X")
