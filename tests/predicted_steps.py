"""The published steps, predicted: the rows that *Hybrid parallelism* shows, and the plans of GPT-3 that it compares.

    python tests/predicted_steps.py steps           # minutes; the lines of the chapter's tables of steps
    python tests/predicted_steps.py zero            # how far off steps under ZeRO-3 are, of which the chapter tells in words
    python tests/predicted_steps.py plans           # minutes; the fastest plan of each pair of degrees, and how many fit
    python tests/predicted_steps.py rules           # minutes; Megatron's and DeepSpeed's plans beside search's

With names of tables after `steps`, those only. What is measured is of book/parallel_training/measured_steps.csv.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from d2lps.parallel import Calibration, Plan, Prediction, Transformer, calibrate, search
from d2lps.parallel.prediction.predict import described, held
from d2lps.topology import A100, H100, Topology, dgx_a100, dgx_a100_pod, dgx_h100_pod, multi_node

MEASURED = Path(__file__).parent.parent / "book" / "parallel_training" / "measured_steps.csv"
Row = dict[str, str]
PLAIN, FUSED = Calibration(), Calibration(fused_attention=True)


class Table(NamedTuple):
    """Rows of one software. fitted: two of them, as (model, gpus, tp, recompute or pp); start: what is known of the software."""

    rows: str
    fitted: tuple[tuple[str, ...], ...]
    start: Calibration = PLAIN


TABLES = {
    "1a": Table("korthikanti", (("22B", "8", "8", "full"), ("1T", "512", "8", "full"))),
    "1b": Table("narayanan1", (("1.7B", "32", "1", ""), ("1T", "3072", "8", ""))),
    "1b, table 2": Table("narayanan2", ()),
    "1c": Table("vtrain", (("3.6B", "64", "1", ""), ("175B", "512", "8", "8"))),
    "Ultra-Scale": Table("ultrascale", (("1B", "8", "1", ""), ("8B", "64", "1", "")), FUSED),
    "Megatron-Core": Table("megatron_core", (("1.7B", "48", "1", ""), ("314B", "3072", "8", "")), FUSED),
    "MegaScale": Table("megascale", (("175B", "256", "8", ""),), FUSED),
}  # fmt: skip


def rows(table: str) -> list[Row]:
    """Those of a table that say seconds, in a precision that a Plan has."""
    found = [row for row in table_of(MEASURED) if row["table"] == table and row["seconds"] and row["precision"] != "fp8"]
    return [row for row in found if row["note"] != "compiled"]


def table_of(path: Path) -> list[Row]:
    """A file's rows, without the comments before them."""
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


@cache
def cluster(table: str) -> Topology:
    """As many machines as the table's largest step has."""
    some = rows(table)
    nodes = max(-(-int(row["gpus"]) // 8) for row in some)
    if table == "vtrain":
        return multi_node(dgx_a100(device=A100), nodes, 12.5e9, reached=0.9)  # 800 Gb/s a machine
    if table == "torchtitan":
        return dgx_h100_pod(nodes, replace(H100, memory=96e9, memory_bandwidth=2.4e12))  # 96 GB of HBM2e, as its own report says
    return dgx_a100_pod(nodes) if some[0]["device"] == "A100" else dgx_h100_pod(nodes)


def model(row: Row) -> Transformer:
    """A vocabulary is filled up so that all degrees of tp divide it, as Megatron-LM does."""
    gated, layers, hidden, sequence = row.get("gated") == "yes", int(row["layers"]), int(row["hidden"]), int(row["sequence"])
    vocab, heads = -(-int(row["vocab"]) // 1024) * 1024, int(row["heads"] or 96)
    return Transformer(
        layers, hidden, heads, vocab, sequence, ffn=int(row.get("ffn") or 4 * hidden), gated=gated,
        kv_heads=int(row.get("kv_heads") or heads),
        dropout=0.0 if gated or row["device"] == "H100" else 0.1,
    )  # fmt: skip


def plans(row: Row) -> Iterator[Plan]:
    """All that are what the row says: where it says nothing, search may choose."""
    dp, tp, pp, cp = (int(row[axis] or 1) for axis in ("dp", "tp", "pp", "cp"))
    chunks = [v for v in range(1, int(row["layers"]) // pp + 1) if int(row["layers"]) % (pp * v) == 0] if pp > 1 else [1]
    chunks = [int(row["interleave"])] if row["interleave"] else chunks
    again = [row["recompute"]] if row["recompute"] else ["none", "selective"]
    if row["table"] == "torchtitan" and row["recompute"] == "selective":  # of single operations, which no Plan has: the nearest
        again = ["selective", "activation"]
    sequence = row["sequence_parallel"] == "yes" or (row["sequence_parallel"] == "" and row["recompute"] == "" and tp > 1)
    zero = int(row["zero"] or (row["device"] == "H100" and dp > 1))
    overlap, main = row["overlap"] == "yes" or zero == 3, row["precision"] != "fp16"  # FP16 was added up as it is
    plan = Plan(dp, tp, pp, cp, zero=zero, sequence_parallel=sequence, main_grads=main, overlap=overlap)
    for v in chunks:
        for recompute in again:
            schedule = "interleaved" if v > 1 else "one_f_one_b"
            for micro in [int(row["micro_batch"])] if row["micro_batch"] else [1, 2, 4]:
                yield replace(plan, interleave=v, schedule=schedule, recompute=recompute, micro_batch=micro)


def predicted(row: Row, calibration: Calibration, here: Topology | None = None) -> Prediction:
    """On a cluster of the row's table, or `here`."""
    gpus, batch = int(row["gpus"]), int(row["batch"])
    return search(model(row), here or cluster(row["table"]), batch, calibration, ranks=gpus, plans=plans(row)).best


def is_fitted(row: Row, table: Table) -> bool:
    said = row["model"], row["gpus"], row["tp"]
    return any(said == one[:3] and one[3] in ("", row["recompute"], row["pp"]) for one in table.fitted)


@cache
def fit(name: str) -> Calibration:
    """Of the rows that are fitted; a table without any has the calibration of the one before."""
    table = TABLES[name]
    if not table.fitted:
        return fit("1b")
    chosen: dict[tuple[str, ...], Row] = {}
    for row in rows(table.rows):
        if is_fitted(row, table):
            chosen.setdefault((row["model"], row["gpus"], row["tp"]), row)
    found = []
    for row in chosen.values():
        plan = predicted(row, table.start).job.plan
        found.append((model(row), plan, int(row["batch"]), float(row["seconds"])))
    return calibrate(found, cluster(row["table"]), table.start)


def line(row: Row, prediction: Prediction) -> str:
    """As the chapter has it: model gpus batch micro dp tp pp v zero recompute measured predicted."""
    plan = prediction.job.plan
    numbers = (plan.micro_batch, plan.dp, plan.tp, plan.pp, plan.interleave, plan.zero, plan.recompute)
    measured = float(row["seconds"])
    said = " ".join(map(str, (row["model"], row["gpus"], row["batch"], *numbers)))
    return f"{said} {measured:.4g} {prediction.time:.4g}"


def steps(names: list[str]) -> None:
    for name in names or TABLES:
        calibration, table = fit(name), TABLES[name]
        print(f"\n{name}: {calibration}", flush=True)
        errors = []
        for row in rows(table.rows):
            try:
                prediction = predicted(row, calibration)
            except ValueError as error:
                print(row["model"], row["gpus"], error)
                continue
            error = error_of(row, prediction)
            fitted = is_fitted(row, table)
            errors += [] if fitted else [abs(error)]
            print(f"{line(row, prediction)}    # {'fitted' if fitted else format(error, '+.1%')}", flush=True)
        print(f"# mean {mean(errors):.1%}, worst {max(errors):.1%}", flush=True)


def zero_3() -> Iterator[tuple[str, Row, Prediction]]:
    """Steps under ZeRO-3 and nothing else: DeepSpeed's with eight ports a machine and with one of 200 Gb/s, torchtitan's 8B."""
    for row in (deepspeeds := [row for row in rows("narayanan2") if row["zero"] == "3" and not is_too_large(row)]):
        yield "eight ports", row, predicted(row, fit("1b"))
    machines = max(int(row["gpus"]) for row in deepspeeds) // 8
    one_port = multi_node(dgx_a100(device=A100), machines, 25e9, ports="node", reached=0.9)
    for row in deepspeeds:
        yield "one port", row, predicted(row, fit("1b"), one_port)
    for row in table_of(MEASURED):
        if row["table"] == "torchtitan" and row["precision"] == "bf16":
            yield "torchtitan", row, predicted(row, FUSED)


def is_too_large(row: Row) -> bool:
    """The step that ran and that no Plan fits: its software fetched single layers."""
    return (row["model"], row["gpus"], row["zero"]) == ("530B", "640", "3")


def error_of(row: Row, prediction: Prediction) -> float:
    return prediction.time / float(row["seconds"]) - 1


def needed(row: Row, plan: Plan, calibration: Calibration = PLAIN) -> float:
    """GB on a device, whether it has them or not."""
    return sum(held(described(model(row), plan, cluster(row["table"]), int(row["batch"]), calibration)).values()) / 1e9


def print_zero_3() -> None:
    for what, row, found in zero_3():
        told = f"{error_of(row, found):+.1%}, {found.memory / 1e9:.1f} GB, {found.job.plan}"
        print(f"{what}: {line(row, found)}    # {told}", flush=True)
    too_large = next(filter(is_too_large, rows("narayanan2")))
    for plan in plans(too_large):
        for overlap in (True, False):
            print(f"530B on 640: {needed(too_large, replace(plan, overlap=overlap)):.1f} GB with {overlap=}")


# ---- one model, all plans -----------------------------------------------------------------------------------------

GPT3 = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048, dropout=0.1)
GPUS, BATCH = 1024, 1536
TRIED: dict[str, Any] = {"zero": (0, 1), "micro_batches": (1, 2, 4, 8)}


def print_plans() -> None:
    calibration = fit("1a")
    ranking = search(GPT3, dgx_a100_pod(GPUS // 8), BATCH, calibration, **TRIED)
    print(calibration, len(ranking.found), "fit", len(ranking.lost), "do not; worst", ranking.found[-1])
    for prediction in ranking.found[:3]:
        print(prediction, ranking.why(prediction))
    best: dict[tuple[int, int], Prediction] = {}
    for prediction in ranking.found:
        best.setdefault((prediction.job.plan.tp, prediction.job.plan.pp), prediction)
    for (tp, pp), prediction in sorted(best.items()):
        plan = prediction.job.plan
        numbers = (plan.micro_batch, plan.interleave, plan.zero, plan.recompute, int(plan.sequence_parallel))
        print(tp, pp, *numbers, f"{prediction.time:.4g} {prediction.memory / 1e9:.3g}")


JOBS = (("7.5B", 128, 512), ("175B", 1024, 1536))


def print_rules() -> None:
    calibration = fit("1a")
    for name, gpus, batch in JOBS:
        row = next(row for row in rows("narayanan1") + rows("korthikanti") if row["model"] == name)
        cluster = dgx_a100_pod(gpus // 8)
        like = {"micro_batches": (1, 2, 4), "zero": (1, 3)}
        ranking = search(model(row), cluster, batch, calibration, **like)  # type: ignore[arg-type]
        print(name, gpus, batch, "search", ranking.best, flush=True)
        rules = {"megatron": megatron(model(row), gpus, batch), "deepspeed": deepspeed(gpus), "zero_1": zero_1(gpus)}
        for rule, some in rules.items():
            try:
                print(name, gpus, batch, rule, search(model(row), cluster, batch, calibration, plans=list(some)).best, flush=True)
            except ValueError as error:
                print(name, gpus, batch, rule, error, flush=True)


def megatron(model: Transformer, gpus: int, batch: int) -> Iterator[Plan]:
    """tp as large as a machine, the fewest stages of a pipeline that fit, the rest dp; every layer recomputed."""
    across = [pp for pp in range(2, model.layers + 1) if model.layers % pp == gpus % (8 * pp) == 0]
    for tp, pp in [(1, 1), (2, 1), (4, 1), (8, 1), *((8, pp) for pp in across)]:
        tried = [Plan(dp=gpus // (tp * pp), tp=tp, pp=pp, micro_batch=micro, recompute="full") for micro in (1, 2, 4, 8, 16)]
        for plan in list(tried):
            chunks = [v for v in (2, 3, 4) if pp > 1 and model.layers % (pp * v) == 0]
            tried += [replace(plan, interleave=v, schedule="interleaved") for v in chunks]
        try:
            search(model, dgx_a100_pod(gpus // 8), batch, plans=tried[:1])
        except ValueError:
            continue
        yield from tried
        return


def deepspeed(gpus: int) -> Iterator[Plan]:
    """ZeRO-3, and nothing else, with the largest micro-batch."""
    for micro in (1, 2, 4, 8):
        for again in ("none", "selective", "full"):
            yield Plan(dp=gpus, zero=3, micro_batch=micro, recompute=again)


def zero_1(gpus: int) -> Iterator[Plan]:
    """Beside DeepSpeed's: replicas again, whole weights on each."""
    yield from (replace(plan, zero=1) for plan in deepspeed(gpus))


if __name__ == "__main__":
    if (command := sys.argv[1]) == "steps":
        steps(sys.argv[2:])
    else:
        {"zero": print_zero_3, "plans": print_plans, "rules": print_rules}[command]()
