"""The checks of *Why one machine is not enough*: each refuses, in words, what readers hand in."""

from solutions import refusing, tried

COUNT, HAND, FOUND = "int(np.ceil(parameters * bytes_each / memory)) -> ", "load.index(min(load)) -> ", "return found -> "
FIRST = "steps; who runs out first"

test_refused = refusing({
    "ex-why-flop flop": [
        ("1536, 65_536", "Which of a layer's are added"),
        ("1546, 10_240", "which layer's input is no other layer's output"),
        ("1546, 32_768", "Two operations for each weight"),
    ],
    "ex-why-devices devices": [
        ("np.ceil -> np.floor", "do not hold it"),
        (f"{COUNT}int(parameters * bytes_each // memory) + 1", "36 devices are more than it needs"),
        ("np.ceil -> np.round", "do not hold it"),
        (f"{COUNT}-(-parameters * 16 // 80e9)", "on devices of 24 GB: 14.0 devices do not hold it"),
        (f"{COUNT}35", "35 devices are more"),
    ],
    "ex-why-devices llama": [
        ("80, 41, 2.43, 972", "16 bytes a parameter"), ("81, 81, 2.43, 972", "What is kept"),
        ("81, 41, 3.24, 1296", "Which of the 16 bytes"),
        ("81, 41, 2.43, 16.2", "seconds to one disk: not 16.2. The bytes that went to the file system"),
    ],
    "ex-why-tokens tokens": [
        ("26_373", "gradients have 4 bytes"), ("10_549 / 2", "set them equal"), ("175e9", "t: not 175000000000.0. Write both"),
    ],
    "ex-why-van van": [
        ("0.864e15, 2.5", "to the van, too, each byte costs time"), ("10e15, 2.5", "When do van and link take equally long"),
        ("0.89e15, 9000", "then seconds to hours"),
    ],
    "ex-why-deal deal": [
        (lambda sizes, ranks: [list(range(len(sizes)))] * ranks, "shard 0 is read by ranks [0, 1, 2, 3]"),
        (f"{HAND}shard % ranks", "rank 0 has 27"),
        (lambda sizes, ranks: [[7], *[[]] * (ranks - 1)], "rank 0 has a shard 7, and there are shards 0 to 6"),
        (lambda sizes, ranks: [[-1], *[[]] * (ranks - 1)], "rank 0 has a shard -1"),
        (lambda sizes, ranks: [[]] * ranks, "shard 0 is read by nobody"),
        (lambda sizes, ranks: [list(range(len(sizes)))], "1 lists, not one for each rank"),
        (f"{HAND}shard // -(-len(sizes) // ranks)", "and mean and one shard together are"),  # in blocks
    ],
    "ex-why-stripes pieces": [
        (lambda offset, length, stripe, targets: [(0, offset, length)], "a piece of 1000 bytes; one has from 1 to a stripe's 4"),
        (("offset + length -> offset + length; offset -= offset % stripe", "min(border, end) - offset -> stripe"),
         "1 bytes from 0: the piece (0, 0, 4) begins with byte 0 of the file and goes on beyond the read, which"),
        ("(offset // stripe + 1) * stripe -> offset + stripe", "of the file and goes on beyond the stripe, which ends with byte"),
        ("*locate(offset, stripe, targets) -> locate(offset, stripe, targets)[0], offset",
         "the piece (1, 4, 4) begins with byte 16 of the file, and byte 4 is next; start counts on the target"),
        ("min(border, end) - offset -> 1",
         "the piece (0, 0, 1) begins with byte 0 of the file and brings only a part of what is wanted"),
        (f"{FOUND}return [*found, (0, 0, 1)]", "comes when all that was asked for is"),
        (lambda offset, length, stripe, targets: [], "the pieces have 0 bytes in all"),
        (f"{FOUND}return sorted(found)", "begins with byte 12 of the file, and byte 4 is"),
        (lambda *read: [(9, 0, 1)], "there is no place 0 on target 9"),
        (f"{FOUND}return found[:3]", "bytes in all"),
    ],
    "ex-why-together steps_together": [
        (lambda comm, mine: mine, FIRST), ("ReduceOp.MIN -> ReduceOp.MAX", FIRST), ("ReduceOp.MIN -> ReduceOp.SUM", FIRST),
        ("all_reduce(comm, steps, ReduceOp.MIN) -> other = steps.clone()\n"  # asks its neighbor alone
         "    comm.size > 1 and comm.sendrecv(steps, (comm.rank + 1) % comm.size, other, (comm.rank - 1) % comm.size)\n"
         "    steps = torch.minimum(steps, other)", FIRST),
        (lambda comm, mine: 4, "would take 4 steps"),
    ],
})  # fmt: skip


def test_rounded_answers_pass() -> None:
    for exercise, answer in ("devices llama", "81, 41, 2.43, 972"), ("tokens tokens", "10_549"), ("van van", "0.9e15, 2.5"):
        assert tried(f"ex-why-{exercise}", answer)
