"""What lies where in the shared file. All offsets and sizes in bytes.

    desks       a line for each rank: its bell, who may wake it, its process, and how that has ended
    inboxes     for each pair of ranks, counters and a ring of the messages announced
    meeting     where all ranks of the run meet; smaller groups get theirs from the space of their first rank
    spaces      one for each rank: tensors, and messages under way
"""

import math
import os

PAGE = 4096
LINE = 64  # what a processor moves at once: words that different ranks write lie in different lines
RING = 16  # messages that one rank can have announced to another before that one looks
STATEMENT = 1024  # what a rank says at a meeting
MOST_SLOT = 1 << 16  # a small tensor that it brings along; less where there are many ranks


def pages(nbytes: int) -> int:
    """`pages(5000) == 8192`."""
    return -(-nbytes // PAGE) * PAGE


class Layout:
    """The file of a run; its length is far more than is ever used, and only used pages take memory."""

    def __init__(self, ranks: int) -> None:
        self.desks = 0
        self.posted = self.desks + ranks * LINE
        self.seen = self.posted + 8 * ranks * ranks
        self.rings = self.seen + 8 * ranks * ranks
        self.meeting = pages(self.rings + 8 * RING * ranks * ranks)
        self.spaces = self.meeting + MeetingLayout(ranks).size
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.space = 1 << math.ceil(math.log2(memory))  # no rank can use more than the machine has
        self.end = self.spaces + ranks * self.space


class MeetingLayout:
    """The place where the ranks of a group meet: for each a line, two statements and two slots, used in turn."""

    def __init__(self, ranks: int) -> None:
        self.slot = min(MOST_SLOT, pages((1 << 22) // ranks))
        self.statements = ranks * LINE
        self.slots = pages(self.statements + 2 * ranks * STATEMENT)
        self.size = self.slots + 2 * ranks * self.slot
