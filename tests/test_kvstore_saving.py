"""kv.save and kv.load: a run that was saved and goes on, on other servers, is the run that was never interrupted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from d2lps import disk, kvstore
from d2lps.comm.rank import describe
from d2lps.kvstore import Lost, Refused
from d2lps.kvstore.core import saving
from d2lps.kvstore.core.events import alike
from d2lps.kvstore.core.optimizers import OPTIMIZERS as OPTIMIZERS_BY_NAME
from d2lps.topology import star

SHAPES = {"w": (40, 3), "b": (5,), "scale": (), "rows]": (7, 2)}


def simulate(worker: Any, workers: int, servers: int, *args: Any, **options: Any) -> Any:
    return kvstore.simulate(worker, star(workers + servers, 1e9), workers, servers, *args, split=100, **options)


def gradient(key: str, rank: int, step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(key))
    return torch.randn(SHAPES[key], generator=seed)


def train(kv: Any, optimizer: dict[str, Any], steps: range, load: str = "", save: str = "", init: bool = True) -> None:
    """Some steps of a training, from a file or into one."""
    if init:
        kv.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()])
        kv.init("count", torch.tensor([5]))
        if optimizer:
            kv.set_optimizer(**optimizer)
    if load:
        kv.load(load)
        kv.init(list(SHAPES), [torch.zeros(shape) for shape in SHAPES.values()])
    for step in steps:
        for key in SHAPES:
            kv.push(key, gradient(key, kv.rank, step))
        kv.clock()
    if save:
        kv.save(save)


OPTIMIZERS = [
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    {"name": "adam", "lr": 0.1, "amsgrad": True},
    {"name": None, "reduction": "median"},
    {},
    {"name": "delayed_nesterov", "lr": 0.1, "period": 3},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("servers", [(1, 3), (3, 2), (2, 2)])
@pytest.mark.parametrize("init", [False, True])
def test_what_was_saved_goes_on_to_the_bit(tmp_path: Path, optimizer: Any, servers: tuple[int, int], init: bool) -> None:
    before, after = servers
    file = str(tmp_path / "model.safetensors")
    whole = simulate(train, 2, 2, optimizer, range(8))
    simulate(train, 2, before, optimizer, range(4), "", file)
    again = simulate(train, 2, after, optimizer, range(4, 8), file, "", init)
    assert alike(again.values, whole.values) and again.values["count"].tolist() == [5]


@pytest.mark.parametrize("durability", ["memory", "log", "replica"])
def test_in_real_runs_too(tmp_path: Path, durability: str) -> None:
    optimizer, file = OPTIMIZERS[1], str(tmp_path / "model.safetensors")
    whole = simulate(train, 2, 2, optimizer, range(6))
    kvstore.run(train, 2, 2, optimizer, range(3), "", file, split=100, durability=durability)
    again = kvstore.run(train, 2, 3, {}, range(3, 6), file, "", False, split=100, durability=durability)
    assert alike(again.values, whole.values)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_other_programs_read_what_was_saved(tmp_path: Path) -> None:
    """As torch.optim has it."""
    file = tmp_path / "model.safetensors"
    run = simulate(train, 1, 3, {"name": "adam"}, range(3), "", str(file))
    tensors = load_file(file)
    parameter = torch.nn.Parameter(torch.ones(SHAPES["w"]))
    optimizer = torch.optim.Adam([parameter])
    for step in range(3):
        parameter.grad = gradient("w", 0, step)
        optimizer.step()
    state = {f"w.{name}": tensor for name, tensor in optimizer.state[parameter].items()}
    assert alike({"w": parameter.detach(), **state}, {name: tensors[name] for name in ("w", *state)})
    assert {name for name in tensors if "." not in name} == {*SHAPES, "count"} == {*run.values}
    with safe_open(file, "pt") as opened:
        assert '"name": "adam"' in opened.metadata()["d2lps"]


def test_what_other_programs_saved_is_taken_in(tmp_path: Path) -> None:
    """Values alone: the optimizer of the run stays, and begins anew."""
    file = str(tmp_path / "other.safetensors")
    save_file({"w": torch.full((40, 3), 7.0), "new.momentum_buffer": torch.ones(2)}, file)

    def worker(kv: Any) -> None:
        train(kv, OPTIMIZERS[0], range(2), load="", save="")
        kv.load(file)
        kv.push("w", torch.ones(40, 3))
        kv.clock()

    values = simulate(worker, 2, 2).values
    assert values["w"].unique().tolist() == pytest.approx([6.9]) and values["new.momentum_buffer"].tolist() == [1.0, 1.0]


def touch(kv: Any, rows: list[int], load: str = "", save: str = "") -> None:
    """A training of some rows, from a file or into one."""
    kv.init("table", torch.ones(40, 3))
    kv.set_optimizer("sgd", lr=0.1, momentum=0.9)
    if load:
        kv.load(load)
    for row in rows:
        kv.push_rows("table", torch.tensor([row]), torch.full((1, 3), 1.0 + kv.rank))
        kv.clock()
    if save:
        kv.save(save)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("rows", [[1, 2], [39, 38], [20, 1]])
def test_parts_that_were_never_pushed_to_are_saved_too(tmp_path: Path, rows: list[int], before: int, after: int) -> None:
    """An optimizer has a state of a part's rows only from its first push to one of them."""
    file = str(tmp_path / "table.safetensors")
    whole = simulate(touch, 2, 2, [*rows, *rows, 12])
    simulate(touch, 2, before, rows, "", file)
    momentum = load_file(file)["table.momentum_buffer"]
    assert momentum.shape == (40, 3) and momentum[:, 0].nonzero().flatten().tolist() == sorted(rows)
    assert alike(simulate(touch, 2, after, [*rows, 12], file).values, whole.values)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("table", torch.zeros(41, 3)),
        ("table", torch.zeros(40, 3).double()),
        ("table.momentum_buffer", torch.zeros(20, 3)),
        ("table.momentum_buffer", torch.zeros(40, 3).double()),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, name: str, wrong: torch.Tensor) -> None:
    file = str(tmp_path / "table.safetensors")
    simulate(touch, 1, 2, [1, 39], "", file)
    with safe_open(file, "pt") as opened:
        save_file({"a": torch.ones(1), "table": torch.zeros(40, 3)} | {name: wrong}, file, opened.metadata())

    def worker(kv: Any) -> None:
        touch(kv, [5])
        with pytest.raises(Refused, match=re.escape(f"'{name}' is {describe(wrong)} in the file, and ")):
            kv.load(file)

    assert alike(simulate(worker, 1, 2).values, simulate(touch, 1, 2, [5]).values)


def test_a_round_that_has_begun_is_not_saved(tmp_path: Path) -> None:
    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(2))
        kv.push("w", torch.ones(2))
        with pytest.raises(Refused, match=r"kv.save\(\): 'w' has pushes of a round that is not over: all workers' clock"):
            kv.save(tmp_path / "file")

    simulate(worker, 2, 1)
    assert not list(tmp_path.iterdir())


def test_into_a_round_that_has_begun_nothing_is_loaded(tmp_path: Path) -> None:
    """Of a key on one server; those on the others are as they were, too, and so are the optimizer's options."""

    def worker(kv: Any) -> list[float]:
        out = torch.zeros(40, 3)
        train(kv, OPTIMIZERS[0], range(1))
        kv.save(tmp_path / "file")
        train(kv, {}, range(1), init=False)
        kv.set_optimizer("sgd", lr=1.0)
        kv.push("b", torch.ones(5))
        with pytest.raises(Refused, match="'b' has pushes of a round that is not over: all workers' clock"):
            kv.load(tmp_path / "file")
        kv.clock()
        kv.pushpull("w", torch.ones(40, 3), out).wait()
        return out.tolist()

    def wanted(kv: Any) -> list[float]:
        out = torch.zeros(40, 3)
        train(kv, OPTIMIZERS[0], range(1))
        train(kv, {}, range(1), init=False)
        kv.set_optimizer("sgd", lr=1.0)
        kv.clock()
        kv.pushpull("w", torch.ones(40, 3), out).wait()
        return out.tolist()

    assert simulate(worker, 2, 3) == list(simulate(wanted, 2, 3))


# ---- what one worker does for all, all hear ---------------------------------------------------------------------------------


def really(worker: Any, workers: int, servers: int, *args: Any, **options: Any) -> Any:
    return kvstore.run(worker, workers, servers, *args, split=100, **options)


# What goes wrong, of which file in the folder {}, and what all workers hear.
WRONG = [
    ("save", "missing/file", "FileNotFoundError", "missing"),
    ("save", ".", "IsADirectoryError", "-> '{}'"),
    ("load", "nothing", "FileNotFoundError", "nothing"),
    ("load", ".", "IsADirectoryError", "{}'"),
    ("load", "text/file", "NotADirectoryError", "text/file"),
    ("load", "text", "ValueError", "{}/text cannot be read"),
    ("load", "/dev/null", "ValueError", "/dev/null cannot be read"),
    ("load", "other", "Refused", "'w'"),
]


def attempts(kv: Any, folder: Path) -> list[tuple[str, str, Any]]:
    """All that can go wrong, and what each worker hears of it; then one that goes well."""
    kv.init("w", torch.zeros(2))
    heard: list[tuple[str, str, Any]] = []
    for what, name, *_ in [*WRONG, ("save", "file")]:
        try:
            getattr(kv, what)(folder / name)
            heard.append(("returned", "", None))
        except Exception as error:
            heard.append((type(error).__name__, str(error), getattr(error, "errno", None)))
    return heard


@pytest.mark.parametrize("world", [simulate, really])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2)])
def test_all_hear_what_went_wrong(tmp_path: Path, world: Any, workers: int, servers: int) -> None:
    (tmp_path / "text").write_text("not a file of tensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "other")
    told = list(world(attempts, workers, servers, tmp_path))
    assert told == [told[0]] * workers and told[0][0][2] == 2 and told[0][-1][0] == "returned"
    for (kind, text, _), (*_, wanted, words) in zip(told[0], WRONG, strict=False):
        assert kind == wanted and words.format(tmp_path) in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other", "text"]


@pytest.mark.parametrize("world", [simulate, really])
def test_who_finds_no_file_begins_anew(tmp_path: Path, world: Any) -> None:
    """As a program does that may be a first run, or a later one."""

    def worker(kv: Any) -> list[float]:
        weights = torch.zeros(3)
        try:
            kv.load(tmp_path / "file")
        except FileNotFoundError:
            kv.init("w", weights)
        kv.push("w", torch.ones(3))
        kv.clock()
        kv.pull("w", weights).wait()
        kv.save(tmp_path / "file")
        return weights.tolist()

    assert world(worker, 3, 2) == [[3.0] * 3] * 3
    assert world(worker, 3, 1) == [[6.0] * 3] * 3


def test_an_error_that_no_other_worker_could_make_is_named_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Melted(Exception):
        pass

    def write(*given: Any) -> None:
        raise Melted("the disk has melted " + "\U0001f525" * 100_000)

    def worker(kv: Any) -> str:
        with pytest.raises(RuntimeError, match=r"^Melted: the disk has melted") as caught:
            kv.save(tmp_path / "file")
        assert caught.value.__notes__ == ["worker 0 has raised it, which did this for all"]
        return type(caught.value.__cause__).__name__

    monkeypatch.setattr(saving, "write", write)
    assert simulate(worker, 2, 1) == ["Melted", "NoneType"]


def around(kv: Any, folder: Path, what: str) -> tuple[Any, ...]:
    """One save or load among others: when it began and ended, and whether all parts of all keys are then of one moment."""
    kv.init(["w", "b"], [torch.zeros(60, 4), torch.zeros(5)])
    kv.init("hot", torch.zeros(3), everywhere=True)
    kv.set_optimizer("sgd", lr=1.0, momentum=0.5, reduction="sum")
    outs = [torch.zeros(60, 4), torch.zeros(5), torch.zeros(3)]

    def step() -> list[float]:
        kv.push(["w", "b", "hot"], [torch.ones(60, 4), torch.ones(5), torch.ones(3)])
        kv.clock()
        kv.pull(["w", "b", "hot"], outs).wait()
        return sorted({value for out in outs for value in out.flatten().tolist()})

    found = [step()]
    kv.save(folder / "earlier")
    found.append(step())
    began = kv.comm.now()
    getattr(kv, what)(folder / ("earlier" if what == "load" else "file"))
    ended = kv.comm.now()
    found += [step(), step()]
    kv.save(folder / "later")
    return began, ended, found


@pytest.mark.parametrize(("what", "servers"), [("save", 1), ("save", 3), ("load", 1), ("load", 3)])
def test_whenever_the_one_who_acts_for_all_is_lost_it_is_done_by_the_next(tmp_path: Path, what: str, servers: int) -> None:
    began, ended, _ = simulate(around, 3, servers, tmp_path, what)[0]
    for moment in range(21):

        def worker(kv: Any) -> Any:
            try:
                return around(kv, tmp_path, what)
            except Refused as error:
                assert "was given up" in str(error) and kv.rank == 0
                return "given up"

        (tmp_path / "file").unlink(missing_ok=True)
        run = simulate(worker, 3, servers, events=[(began + (ended - began) * moment / 20, Lost(0))])
        assert run[0] == "given up" and run[1][2] == run[2][2]
        one, two, three, four = run[1][2]
        assert one == [-3.0] and two == [-7.5], "a step of all three, and one with its momentum"
        if what == "save":
            assert three == [-2 - 0.5 * 4.5 - 7.5] and load_file(tmp_path / "file")["w"].unique().tolist() == [-7.5]
        else:  # the momentum of then is there again, on all parts
            assert three == [-3.0 - 3.5] and four == [-6.5 - 3.75]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", *(["file"] if what == "save" else []), "later"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:3])
def test_tensors_without_contents_are_not_saved(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    def worker(kv: Any) -> None:
        value = torch.zeros(40, 3, device="meta")
        kv.init("w", value)
        kv.set_optimizer(**optimizer)
        kv.push("w", value)
        kv.push_rows("w", torch.tensor([1, 30]), value[:2])
        kv.clock()
        with pytest.raises(ValueError, match="'w' is a meta tensor, which has no contents to be saved"):
            kv.save(tmp_path / "file")

    assert simulate(worker, 1, 2, device="meta").values["w"].is_meta


class Dotted:
    """An optimizer with states whose names have dots."""

    def state(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"slow.sum": torch.zeros_like(value), "sum": torch.zeros_like(value)}

    def step(self, value: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        value.sub_(gradient)


@pytest.mark.parametrize(
    ("keys", "optimizer", "told"),
    [
        (["w", "w.momentum_buffer"], "sgd", r"'w' has a 'momentum_buffer', and 'w.momentum_buffer' is a key"),
        (["w", "u", "u.exp_avg"], "adam", r"'u' has a 'exp_avg', and 'u.exp_avg' is a key"),  # of u there is none yet
        (["w", "w.slow"], "dotted", r"'w.slow' has a 'sum', and 'w.slow.sum' is a key or another one's state"),
        (["w", "__metadata__"], None, "'__metadata__' is a key, and a name that safetensors keeps"),
        (["w", ""], None, "'' is a key, and a name that stands for all that a server has"),
    ],
)
def test_a_key_that_would_be_read_as_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], optimizer: str | None, told: str
) -> None:
    def worker(kv: Any) -> None:
        kv.init(keys, [torch.zeros(2)] * len(keys))
        kv.set_optimizer(optimizer, **{"momentum": 0.9} if optimizer == "sgd" else {})
        kv.push("w", torch.ones(2))
        kv.clock()
        with pytest.raises(ValueError, match=told):
            kv.save(tmp_path / "file")

    monkeypatch.setitem(OPTIMIZERS_BY_NAME, "dotted", Dotted)
    simulate(worker, 1, 1)
    assert not list(tmp_path.iterdir())


def test_the_first_of_those_who_live_writes(tmp_path: Path) -> None:
    def worker(kv: Any) -> None:
        kv.init("hot", torch.zeros(2), everywhere=True)
        kv.barrier()
        if kv.rank == 0:
            return
        kv.push("hot", torch.ones(2))
        kv.clock()
        kv.save(tmp_path / "file")
        kv.push("hot", torch.ones(2))
        kv.clock()
        kv.load(tmp_path / "file")

    run = simulate(worker, 3, 2)
    assert load_file(tmp_path / "file")["hot"].tolist() == [2.0, 2.0] == run.values["hot"].tolist()
    assert [server.values["hot[*]"].tolist() for server in run.servers] == [[2.0, 2.0]] * 2


def test_a_key_that_was_everywhere_is_so_again(tmp_path: Path) -> None:
    def before(kv: Any) -> None:
        kv.init("w", torch.ones(3))
        kv.init("hot", torch.ones(2), everywhere=True)
        kv.save(tmp_path / "file")

    def after(kv: Any) -> None:
        kv.load(tmp_path / "file")
        kv.init("hot", torch.zeros(2), everywhere=True)
        kv.push("hot", torch.ones(2))
        kv.clock()

    simulate(before, 1, 2)
    run = simulate(after, 2, 3)
    assert [server.values["hot[*]"].tolist() for server in run.servers] == [[3.0, 3.0]] * 3
    assert run.values["w"].tolist() == [1.0] * 3


def test_options_that_cannot_be_here_change_nothing(tmp_path: Path) -> None:
    def before(kv: Any) -> None:
        kv.init("w", torch.ones(2))
        kv.set_optimizer(None, reduction="median")
        kv.save(tmp_path / "file")

    def after(kv: Any) -> None:
        with pytest.raises(Refused, match="reduction='median' compares the pushes of a round"):
            kv.load(tmp_path / "file")

    simulate(before, 1, 1)
    assert simulate(after, 1, 1, consistency="asp").values == {}


# ---- drafts ------------------------------------------------------------------------------------------------------------


def test_two_who_write_one_file_at_once_do_not_sweep_away_each_others_draft(tmp_path: Path) -> None:
    """As two runs that save under one name; what is left of one that is no more goes all the same."""
    final, left = tmp_path / "weights", tmp_path / ".weights.draft-of-one-that-is-no-more"
    left.mkdir()
    (left / "weights").write_text("half of it")
    with disk.drafted(final) as first:
        assert not left.exists()
        first.write_text("the first one's")
        with disk.drafted(final) as second:
            second.write_text("the second one's")
            assert first.exists()
        assert final.read_text() == "the second one's"
    assert final.read_text() == "the first one's" and os.listdir(tmp_path) == ["weights"]


def test_a_draft_that_is_swept_away_before_it_is_locked_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []
    real = os.open

    def sweeping(path: Any, *flags: Any, **options: Any) -> int:  # another writer comes just before, then just after it
        file = -1
        if (number := len(found)) < 2 and Path(path).name.startswith(".weights.draft-"):
            found.append(Path(path))
            file = real(path, *flags) if number else -1
            os.rmdir(path)
        return real(path, *flags, **options) if file < 0 else file

    monkeypatch.setattr(os, "open", sweeping)
    with disk.drafted(tmp_path / "weights") as draft:
        draft.write_text("all of it")
    assert len(found) == 2 and (tmp_path / "weights").read_text() == "all of it" and os.listdir(tmp_path) == ["weights"]
