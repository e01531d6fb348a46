"""Checks of *Why one machine is not enough*: FLOP, devices, tokens, a van, shards, stripes, equal numbers of steps."""

import math
import random
from typing import Any

from d2lps_book.check.exercise import Function, Wrong, among, answered, judged
from d2lps_book.check.tools import near, refuse


@answered
def flop(outside_products: int, never_computed: float) -> str:
    """Check how many parameters take part in no matrix product, and the FLOP an image of the product that nobody needs."""
    near("parameters outside of products", outside_products, 3 * 512 + 10, "Which of a layer's are added?", 0)
    if never_computed == 2 * 10 * 512:
        raise Wrong("the last layer's three products are all needed; which layer's input is no other layer's output?")
    near("FLOP an image of the product never computed", never_computed, 2 * 64 * 512, "Two operations for each weight", 0)
    return "every FLOP is accounted for"


@judged
def devices(function: Function) -> str:
    """Check `function(parameters, bytes_each, memory)`: the least number of devices that hold the state."""
    for parameters, each, memory in ((175e9, 16, 80e9), (5e9, 16, 80e9), (5e9 + 1, 16, 80e9), (1e6, 8, 80e9), (70e9, 12, 24e9)):
        right, mine = math.ceil(parameters * each / memory), function(parameters, each, memory)
        if mine != right:
            state = f"{parameters:,.0f} parameters of {each} bytes on devices of {memory / 1e9:g} GB"
            raise Wrong(f"{state}: {mine} devices {'do not hold it' if mine < right else 'are more than it needs'}")
    return "rounded up, and no device too many"


@answered
def llama(adam: int, plain: int, file_system: float, disk: float) -> str:
    """Check the devices for Llama 3's state in two ways, and the seconds of a checkpoint in two places."""
    near("devices with Adam", adam, 81, "16 bytes a parameter", 0)
    near("devices with plain descent", plain, 41, "What is kept: a parameter and a gradient, 4 bytes each", 0)
    which = "Which of the 16 bytes can be computed from the others, or are not needed to go on?"
    near("seconds to the file system", file_system, 405e9 * 12 / 2e12, which, 0.01)
    near("seconds to one disk", disk, 405e9 * 12 / 5e9, "The bytes that went to the file system, now at 5 GB/s", 0.01)
    return "seconds to a large file system, a quarter of an hour to a disk"


@answered
def tokens(t: float) -> str:
    """Check for how many tokens computing takes as long as the ring's sum."""
    near("t", t, 4 / 3 * 0.4 * 989e12 / 50e9, "Write both times with N, set them equal; gradients have 4 bytes, and pass twice")
    return "whatever the model's size"


@answered
def van(break_even: float, hours_by_link: float) -> str:
    """Check from how many bytes on the van wins, and the hours that 90 TB take by the link."""
    link, load = 1 / 10e9, 60 / 20e12
    if abs(break_even * link / 86_400 - 1) < 0.01:
        raise Wrong("the disks have to be loaded and unloaded as well: to the van, too, each byte costs time")
    near("break-even, in bytes", break_even, 86_400 / (link - load), "When do van and link take equally long?", 0.02)
    near("hours of 90 TB by the link", hours_by_link, 2.5, "Bytes by bytes a second, then seconds to hours", 0.01)
    return "nearly a petabyte, and 90 TB go by the link"


def _sizes() -> list[tuple[list[int], int]]:
    dice = random.Random(2)
    drawn = [([dice.choice([1, 3, 10, 80]) for _ in range(dice.randint(0, 12))], dice.randint(1, 6)) for _ in range(40)]
    return [([257] * 6 + [255], 4), ([9, 1, 1, 9, 1, 1, 9, 1], 3), ([5], 2), ([1, 2, 3, 4, 5, 6, 7, 80], 3), *drawn]


@judged
def deal(function: Function) -> str:
    """Check `function(sizes, ranks)`: a list of shards for each rank, each shard once, and nobody with too many bytes."""
    for sizes, ranks in _sizes():
        hands, where = [list(hand) for hand in function(list(sizes), ranks)], f"sizes {sizes}, {ranks} ranks"
        refuse((len(hands) != ranks, f"{where}: {len(hands)} lists, not one for each rank"))
        for rank, hand in enumerate(hands):
            if strange := [shard for shard in hand if shard not in range(len(sizes))]:
                raise Wrong(f"{where}: rank {rank} has a shard {strange[0]!r}, and there are shards 0 to {len(sizes) - 1}")
        for shard in range(len(sizes)):
            readers = [rank for rank, hand in enumerate(hands) for mine in hand if mine == shard]
            refuse((len(readers) != 1, f"{where}: shard {shard} is read by {f'ranks {readers}' if readers else 'nobody'}"))
        limit = sum(sizes) / ranks + max(sizes, default=0)
        for rank, hand in enumerate(hands):
            if (total := sum(sizes[shard] for shard in hand)) > limit:
                raise Wrong(f"{where}: rank {rank} has {total}, and mean and one shard together are {limit:.0f}")
    return "44 deals: each shard has one reader, and nobody more than the mean and one shard"


@judged
def pieces(function: Function) -> str:
    """Check `function(offset, length, stripe, targets)`: the (target, start, length) to fetch, in order, one for each stripe."""
    dice = random.Random(0)
    for stripe, targets in ((4, 3), (64, 4), (1000, 2), (7, 1), (10, 5)):
        drawn = [(start := dice.randrange(1000), dice.randint(1, 1000 - start)) for _ in range(8)]
        for offset, length in [(0, 1000), (0, 1), (999, 1), (64, 64), *drawn]:
            found = [tuple(piece) for piece in function(offset, length, stripe, targets)]
            if trouble := _misread(found, offset, offset + length, stripe, targets):
                raise Wrong(f"stripes of {stripe} on {targets} targets, {length} bytes from {offset}: {trouble}")
    return "60 reads, byte by byte"


def _misread(found: list[Any], at: int, end: int, stripe: int, targets: int) -> str:
    """What is wrong with the pieces of a read from byte `at` of the file to byte `end`; empty if nothing is."""
    begin = at
    for target, start, size in found:
        if target not in range(targets) or start < 0:
            return f"there is no place {start} on target {target}"
        if not 0 < size <= stripe:
            return f"a piece of {size} bytes; one has from 1 to a stripe's {stripe}"
        piece, lies = (target, start, size), (start // stripe * targets + target) * stripe + start % stripe
        if at == end:
            return f"the piece {piece} comes when all that was asked for is there"
        if lies != at:
            return f"the piece {piece} begins with byte {lies} of the file, and byte {at} is next; start counts on the target"
        border = (at // stripe + 1) * stripe
        if at + size > min(border, end):
            what = f"stripe, which ends with byte {border - 1}" if border <= end else f"read, which ends with byte {end - 1}"
            return f"the piece {piece} begins with byte {at} of the file and goes on beyond the {what}"
        if at + size < min(border, end):
            return f"the piece {piece} begins with byte {at} of the file and brings only a part of what is wanted of its stripe"
        at += size
    return "" if at == end else f"the pieces have {at - begin} bytes in all"


@judged
def steps_together(function: Function) -> str:
    """Check `function(comm, mine)`: on every rank the largest number of steps for which all have enough."""
    dice = random.Random(3)
    for ranks in (1, 2, 3, 4, 5, 8, 11):
        for batches in ([dice.randint(5, 99) for _ in range(ranks)], [7] * ranks, [dice.randint(0, 2) for _ in range(ranks)]):
            run = among(ranks, lambda comm, batches=batches: function(comm, batches[comm.rank]))
            for rank, steps in enumerate(run):
                refuse((steps != min(batches), f"batches {batches}: rank {rank} would take {steps!r} steps; who runs out first?"))
    return "everyone stops when the first one runs out, among 1 to 11 ranks"
