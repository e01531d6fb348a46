"""The text that part five trains on: the same order under every cut."""

import pytest
import torch

from d2lps.parallel.training.text import LETTERS, NOTHING, decode, text


def test_every_cut_of_a_batch_gives_the_same_sequences() -> None:
    data = text(32, seed=3)
    whole = data.batch(5 * 24, 24)
    for ranks in (1, 2, 3, 4, 8):
        share = 24 // ranks
        parts = [data.batch(5 * 24 + rank * share, share) for rank in range(ranks)]
        for both in (0, 1):
            assert torch.equal(torch.cat([part[both] for part in parts]), whole[both])


def test_an_epoch_has_each_sequence_once_and_the_next_another_order() -> None:
    data = text(100)
    first, second = data.batch(0, len(data))[0], data.batch(len(data), len(data))[0]
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(map(decode, epoch)) == sorted(map(decode, data.windows[:, :-1]))
    across = data.batch(len(data) - 1, 2)[0]
    assert torch.equal(across, torch.stack([first[-1], second[0]]))


def test_seeds_differ_and_targets_are_the_next_letters() -> None:
    (tokens, targets), (other, _) = text(50, seed=0).batch(0, 8), text(50, seed=1).batch(0, 8)
    assert not torch.equal(tokens, other)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.max() < len(LETTERS) and text().windows.unique().numel() > 90


def test_with_whole_lines_what_comes_after_the_last_line_does_not_count() -> None:
    plain, lines = text(64).batch(0, 40)[1], text(64, whole_lines=True).batch(0, 40)[1]
    counts = set()
    for row, kept in zip(plain, lines, strict=True):
        written = decode(row)
        length = written.rindex("\n") + 1 if "\n" in written else len(written)
        assert torch.equal(kept[:length], row[:length]) and bool((kept[length:] == NOTHING).all())
        counts.add(length)
    assert len(counts) > 5


def test_the_test_text_is_no_part_of_the_training_text() -> None:
    seen = decode(text(999).windows.flatten())
    assert all(decode(window)[:500] not in seen for window in text(999, test=True).windows)


def test_wrong_calls_say_what() -> None:
    with pytest.raises(ValueError, match="sequence=0"):
        text(0)
    with pytest.raises(ValueError, match="1000000"):
        text(1_000_000)
    with pytest.raises(ValueError, match="first=-1"):
        text().batch(-1, 2)
