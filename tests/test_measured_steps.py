"""The published steps that the book predicts are of one piece: degrees, batches, and seconds by the source's own formula."""
import csv
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "book" / "parallel_training"
CITED = set(re.findall(r"@\w+\{(\w+),", (FOLDER.parent / "references.bib").read_text()))
NAMES = {"table", "model", "device", "gated", "recompute", "sequence_parallel", "overlap", "precision", "note", "source"}


def rows(name):
    lines = [line for line in (FOLDER / name).read_text().splitlines() if not line.startswith("#")]
    return [{column: value if column in NAMES or value == "" else float(value) for column, value in row.items()}
            for row in csv.DictReader(lines)]


STEPS, MEMORY = rows("measured_steps.csv"), rows("published_memory.csv")


def says(row):
    return "-".join(str(row[column]).removesuffix(".0") for column in ("table", "model", "gpus", "dp", "tp", "pp", "micro_batch"))


def narayanan(row):
    batch, sequence, layers, hidden = row["batch"], row["sequence"], row["layers"], row["hidden"]
    return (96 * batch * sequence * layers * hidden ** 2
            * (1 + sequence / (6 * hidden) + row["vocab"] / (16 * layers * hidden)))


def megatron_core(row):
    batch, sequence, layers, hidden = row["batch"], row["sequence"], row["layers"], row["hidden"]
    return 12 * batch * sequence * layers * hidden ** 2 * (6 + sequence / hidden + row["vocab"] / (2 * layers * hidden))


FLOPS = {"narayanan1": narayanan, "narayanan2": narayanan, "megatron_core": megatron_core}
UNEVEN = "405B", "80B"  # stages of unequal length: 126 layers on 16 or 8 stages, 80 on 32


@pytest.mark.parametrize("row", STEPS, ids=says)
def test_a_step_is_of_one_piece(row):
    assert row["dp"] * row["tp"] * row["pp"] * row["cp"] == row["gpus"]
    assert row["batch"] % (row["dp"] * (row["micro_batch"] or 1)) == 0
    assert row["layers"] % (row["pp"] * (row["interleave"] or 1)) == 0 or row["model"] in UNEVEN
    heads = row["heads"] or 96
    assert row["hidden"] % (heads * 8) == 0 and heads % (row["kv_heads"] or heads) == 0
    assert heads % row["tp"] == row["ffn"] % row["tp"] == 0
    assert row["gated"] == "yes" or row["ffn"] == 4 * row["hidden"]
    assert row["zero"] in (0, 1, 2, 3, "") and row["recompute"] in ("none", "selective", "full", "")
    assert row["seconds"] or row["tflops"]
    assert row["source"] in CITED


@pytest.mark.parametrize("row", [row for row in STEPS if row["table"] in FLOPS], ids=says)
def test_seconds_are_what_the_flops_of_the_source_give(row):
    assert row["seconds"] == pytest.approx(FLOPS[row["table"]](row) / (row["tflops"] * 1e12 * row["gpus"]), abs=6e-4)


@pytest.mark.parametrize("row", [row for row in STEPS if row["table"] in ("megatron2020", "mtnlg")], ids=says)
def test_printed_seconds_and_flops_agree(row):
    agree = narayanan({**row, "vocab": row["vocab"] or 51200}) / (row["tflops"] * 1e12 * row["gpus"])
    assert row["seconds"] == pytest.approx(agree, rel=1e-2 if row["table"] == "mtnlg" else 1e-3)


@pytest.mark.parametrize("row", [row for row in STEPS if row["tokens"]], ids=says)
def test_seconds_are_what_the_tokens_of_the_source_give(row):
    assert row["seconds"] == pytest.approx(row["batch"] * row["sequence"] / (row["tokens"] * row["gpus"]), abs=6e-4)


def test_no_step_is_there_twice():
    steps = [tuple(value for column, value in row.items() if column not in ("seconds", "tflops", "tokens")) for row in STEPS]
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize("row", [row for row in MEMORY if row["state_gib"]], ids=lambda row: f"{row['model']}-{row['recompute']}")
def test_published_memory_is_the_formula(row):
    sequence, hidden, layers, tp, pp = (row[column] for column in ("sequence", "hidden", "layers", "tp", "pp"))
    assert row["state_gib"] == 18 * 12 * layers * hidden ** 2 / (tp * pp) / 2 ** 30
    kept = 34 / tp if row["recompute"] == "selective" else 10 + 24 / tp + 5 * row["heads"] * sequence / (hidden * tp)
    first = 1 if row["interleave"] == 1 else 1 + (pp - 1) / (pp * row["interleave"])
    kept *= sequence * row["micro_batch"] * hidden * layers * first / 2 ** 30
    assert row["activations_gib"] == pytest.approx(kept, rel=1e-9)
