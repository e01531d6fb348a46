"""Something to train on that every machine has: source text of Python's standard library, letter by letter."""

import difflib
import heapq
import optparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from d2lps.arguments import whole

LETTERS = "".join(map(chr, range(32, 127))) + "\n"  # the vocabulary: printable ASCII and the new line
NOTHING = -100  # a target that does not count: cross_entropy's ignore_index


@dataclass(frozen=True)
class Text:
    """Sequences of letters, in an order that depends on no plan: sequence 17 is the same whichever rank asks for it.

    >>> data = text(sequence=8)
    >>> tokens, targets = data.batch(first=0, count=2)
    >>> tokens.shape, targets.shape, torch.equal(tokens[:, 1:], targets[:, :-1])
    (torch.Size([2, 8]), torch.Size([2, 8]), True)
    >>> torch.equal(data.batch(1, 1)[0], tokens[1:])
    True

    len(data) sequences are an epoch, each in it once; the next epoch has them in another order. With whole_lines a sequence ends
    with its last whole line: the targets behind that are NOTHING, so that sequences have different numbers of tokens that count.
    """

    windows: Tensor  # [sequences, sequence + 1]
    seed: int = 0
    whole_lines: bool = False

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [count, sequence] each, of the sequences from number `first` on, from the first epoch's first.

        In step s of batches of b sequences, rank r of p takes `batch(s * b + r * (b // p), b // p)`.
        """
        if first < 0 or count < 0:
            raise ValueError(f"first={first}, count={count}: there are no sequences before the first")
        epochs = (divmod(number, len(self)) for number in range(first, first + count))
        chosen = self.windows[[_order(self.seed + epoch, len(self))[place] for epoch, place in epochs]]
        tokens, targets = chosen[:, :-1], chosen[:, 1:]
        if self.whole_lines:
            ends = targets == LETTERS.index("\n")
            behind = ~ends.flip(1).cumsum(1).bool().flip(1) & ends.any(1, keepdim=True)
            targets = targets.masked_fill(behind, NOTHING)
        return tokens.contiguous(), targets.contiguous()


def text(sequence: int = 64, seed: int = 0, whole_lines: bool = False, test: bool = False) -> Text:
    """Text that is cut into windows of sequence + 1 letters; test: those tenths of it that no training has seen.

    >>> data = text(sequence=64)
    >>> print(decode(data.windows[0][:50]))
    \"\"\"
    Module difflib -- helpers for computing deltas
    >>> len(LETTERS)                                        # the vocabulary: a model that knows nothing has the loss log 96
    96

    It is the source of three modules, the same in Python 3.11 to 3.13. ValueError for a sequence that is not a whole number.
    """
    letters = _letters()
    blocks = letters[: len(letters) // 1000 * 1000].view(-1, 1000)
    kept = (torch.arange(len(blocks)) % 10 == 9) == test
    chosen, size = blocks[kept].flatten(), whole("sequence", sequence) + 1
    if size > len(chosen):
        raise ValueError(f"sequence={sequence}: the text has {len(chosen):,} letters")
    return Text(chosen[: len(chosen) // size * size].view(-1, size), seed, whole_lines)


def decode(tokens: Tensor) -> str:
    """The letters that these numbers mean."""
    return "".join(LETTERS[token] for token in tokens.tolist())


@cache
def _letters() -> Tensor:
    files = [Path(str(module.__file__)) for module in (difflib, optparse, heapq)]
    written = "".join(path.read_text(encoding="utf-8") for path in files)
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    return torch.tensor([numbers[letter] for letter in written if letter in numbers])


@cache
def _order(seed: int, count: int) -> list[int]:
    """In which the sequences come in one epoch."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=dice).tolist()
