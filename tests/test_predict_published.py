"""Published steps and memory, predicted: how far off, and what fits.

Each table is one state of one software: two of its rows are fitted, and left out of the comparison. Settings are the sources' own
(the header of measured_steps.csv). Memory has FP32 gradients, as Megatron-LM keeps them: 18 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

import predicted_steps
import pytest
from predicted_steps import MEASURED, Row, cluster, model, rows, table_of

from d2lps import OutOfMemory
from d2lps.parallel import Calibration, Plan, Prediction, Transformer, calibrate, predict
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


def predicted(table: str, *fitted: int) -> tuple[list[Row], list[float]]:
    """The rows that are not fitted, and the seconds that are predicted for them."""
    found, largest = rows(table), cluster(table)
    known = [(model(row), plan(row), int(row["batch"]), float(row["seconds"])) for row in map(found.__getitem__, fitted)]
    calibration = calibrate(known, largest)
    rest = [row for number, row in enumerate(found) if number not in fitted]
    jobs = (described(model(row), plan(row), largest, int(row["batch"]), calibration) for row in rest)
    return rest, [Prediction(job, largest).time for job in jobs]


def errors(found: list[Row], times: list[float]) -> Iterator[float]:
    return (time / float(row["seconds"]) - 1 for row, time in zip(found, times, strict=True))


@pytest.mark.parametrize(("table", "fitted", "limit"), [("korthikanti", (0, 6), 0.05), ("narayanan1", (0, 9), 0.10)])
def test_published_steps(table: str, fitted: tuple[int, int], limit: float) -> None:
    """Fitted: the smallest and the largest model, fully recomputed. Seen: 3.9% and 3.6% in the mean, 8.5% and 6.3% at most."""
    wrong = list(errors(*predicted(table, *fitted)))
    assert mean(map(abs, wrong)) < limit


def test_published_steps_of_many_layouts_and_the_best_of_them() -> None:
    """Fitted: 3.6B on 64 devices, all data parallel, and 175B in 8 x 8 x 8. Seen of the others: 8.4% in
    the mean, tp over two machines 21% too fast. Of 175B's other eight the pick is within 1% of the best that was measured."""
    found = rows("vtrain")
    ways = [(row["dp"], row["tp"], row["pp"]) for row in found]
    fitted = ways.index(("64", "1", "1")), ways.index(("8", "8", "8"))
    rest, times = predicted("vtrain", *fitted)
    wrong = list(errors(rest, times))
    assert mean(map(abs, wrong)) < 0.10
    large = [(time, float(row["seconds"])) for row, time in zip(rest, times, strict=True) if row["model"] == "175B"]
    assert min(large)[1] < 1.01 * min(seconds for _, seconds in large)


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
