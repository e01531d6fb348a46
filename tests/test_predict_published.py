"""Published memory, predicted, and that what ran fits: see test_predicted_steps.py for how long it took.

Settings are the sources' own (the header of measured_steps.csv). Gradients are FP32's, as Megatron-LM keeps them: 18 bytes a
parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import predicted_steps
import pytest
from predicted_steps import MEASURED, Row, cluster, model, rows, table_of

from d2lps import OutOfMemory
from d2lps.parallel import Calibration, Plan, Transformer, predict
from d2lps.parallel.prediction.predict import _by_rank, described, held
from d2lps.topology import A100, Topology

WIDE = Calibration(wide_gradients=True)
GIB = 2**30


def plan(row: Row) -> Plan:
    dp, tp, pp, cp, micro, chunks = (int(row.get(name) or 1) for name in ("dp", "tp", "pp", "cp", "micro_batch", "interleave"))
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    return Plan(
        dp, tp, pp, cp, micro_batch=micro, interleave=chunks, schedule=schedule, zero=int(row.get("zero") or 0),
        recompute=row["recompute"], sequence_parallel=row["sequence_parallel"] == "yes", overlap=row.get("overlap") == "yes",
        main_grads=row.get("precision") != "fp16",  # in FP16 they were added up as they are, but for `WIDE`
    )  # fmt: skip


def job(row: Row) -> tuple[Transformer, Plan, Topology, int]:
    return model(row), plan(row), cluster(row["table"]), int(row["batch"])


# ---- memory -------------------------------------------------------------------------------------------------------------

MEMORY = table_of(MEASURED.with_name("published_memory.csv"))


def published(row: Row) -> Iterator[tuple[float, float]]:
    """(predicted, published) GiB of the first stage, as the paper has them: without the embedding, of which it keeps a mask."""
    whole = described(model(row), plan(row), cluster("korthikanti"), 2 * int(row["gpus"]), WIDE)
    whole.__dict__["stages"] = [[part for part in stage if part.name == "block"] for stage in whole.stages]
    first = next(_by_rank(whole))
    base = next(one for one in MEMORY if one["model"] == row["model"])
    percent = float(row["activations_percent"]) / 100 * float(base["activations_gib"])
    yield first["activations"] / GIB, float(row["activations_gib"] or percent)
    if row["state_gib"]:
        yield sum(first[holder] for holder in ("weights", "gradients", "optimizer")) / GIB, float(row["state_gib"])


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: f"{row['model']}-{row['recompute']}-{row['sequence_parallel']}")
def test_published_memory(row: Row) -> None:
    for told, said in published(row):
        assert told == pytest.approx(said, rel=0.10)


RAN = [row for table in ("korthikanti", "narayanan1", "vtrain", "ultrascale") for row in rows(table) if row["micro_batch"]]


def test_no_step_that_ran_is_too_large() -> None:
    """Ultra-Scale's software adds up in FP32; of its rows some don't say whether sequences are shared out along tp, as it can."""
    for row in RAN:
        software = Calibration(fused_attention=row["device"] == "H100", wide_gradients=row["table"] == "korthikanti")
        transformer, layout, here, batch = job(row)
        unsaid = row["table"] == "ultrascale" and row["sequence_parallel"] == "" and layout.tp > 1
        layout = replace(layout, sequence_parallel=layout.sequence_parallel or unsaid)
        assert sum(held(described(transformer, layout, here, batch, software)).values()) <= A100.memory, (row["table"], layout)


@pytest.mark.parametrize(("table", "count"), [("narayanan2", 5), ("torchtitan", 2)])
def test_no_step_of_zero_3_that_ran_is_too_large(table: str, count: int) -> None:
    """Where a source says neither how much is fetched at a time, nor which operations are computed again, search may choose."""
    ran = [row for row in rows(table) if row["zero"] == "3" and not predicted_steps.is_too_large(row)]
    software = Calibration(fused_attention=table == "torchtitan")
    assert len(ran) == count
    for row in ran:
        predicted_steps.predicted(row, software)


@pytest.mark.parametrize("name", ["22B", "175B"])
def test_without_recomputation_the_published_steps_do_not_fit(name: str) -> None:
    row = next(row for row in rows("korthikanti") if row["model"] == name)
    with pytest.raises(OutOfMemory, match=r"^'activations' needs .* held there: optimizer .* B, .*weights .* B"):
        predict(*job({**row, "recompute": "none"}), WIDE)
