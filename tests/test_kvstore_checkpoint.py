"""Checkpoints: what is loaded is what was saved, wherever a writer stops, and on as many servers as one likes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2lps import disk
from d2lps.kvstore.core.events import Request, alike
from d2lps.kvstore.storage import checkpoint as checkpoints
from d2lps.kvstore.storage.checkpoint import CheckpointDamaged, CheckpointMissing, flatten, load, save, steps, unflatten

META = {"clock": 3, "optimizer": {"name": "adam", "lr": 1e-3}, "filter": {"0": [1, 17], "1": [2, 4]}}


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Tensors in which every number is the step's."""
    return {"w": torch.full((100, 3), step), "b": torch.tensor(step)}


def is_step(folder: Path, step: int | None = None) -> int:
    """The step of a checkpoint that is whole, and all of which is of that step."""
    checkpoint = load(folder, step)
    assert checkpoint.meta["step"] == checkpoint.step
    values = torch.cat([tensor.flatten() for tensor in checkpoint.tensors.values()])
    assert len(values) == 301 and values.unique().tolist() == [checkpoint.step]
    return checkpoint.step


# ---- saving and loading ---------------------------------------------------------------------------------------------------


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(4, 3)
    tensors = {
        "table[0:2]": table[:2],  # parts of one tensor in memory
        "table[2:4]": table[2:],
        "table": table,
        "transposed": torch.arange(6).view(2, 3).t(),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "needs a gradient / @ é": torch.ones(2, requires_grad=True),
    }
    save(tmp_path, 5, tensors, META)
    checkpoint = load(tmp_path)
    assert checkpoint.step == 5 and checkpoint.meta == META
    again = checkpoint.tensors
    assert again.keys() == tensors.keys()
    assert all(again[name].dtype == tensors[name].dtype and torch.equal(again[name], tensors[name]) for name in tensors)


def test_what_was_loaded_can_be_changed_and_outlives_its_file(tmp_path: Path) -> None:
    save(tmp_path, 1, tensors_of(1), {"step": 1})
    loaded = load(tmp_path).tensors["w"]
    loaded += 1
    assert is_step(tmp_path) == 1
    shutil.rmtree(tmp_path)
    assert loaded.unique().tolist() == [2]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 9, 11):
        save(tmp_path, step, tensors_of(step), {"step": step}, keep=3)
    assert steps(tmp_path) == [9, 10, 11] and [is_step(tmp_path, step) for step in (9, 10, 11)] == [9, 10, 11]
    save(tmp_path, 12, tensors_of(12), {"step": 12}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000012.safetensors"]


def test_a_step_may_have_more_digits_than_the_names_are_filled_up_to(tmp_path: Path) -> None:
    """A server's steps are positions of its log: beyond 10^12 bytes it must find its newest checkpoint, and drop older ones."""
    for step in (10**12 - 1, 10**12, 10**12 + 7, 10**15):
        save(tmp_path, step, tensors_of(step), {"step": step}, keep=2)
    assert steps(tmp_path) == [10**12 + 7, 10**15] and is_step(tmp_path) == 10**15


def test_a_step_that_is_saved_again_is_the_new_one(tmp_path: Path) -> None:
    for value in (2, 1):
        save(tmp_path, 1, tensors_of(value), {"step": value})
    assert is_step(tmp_path) == 1 and steps(tmp_path) == [1]


def test_what_cannot_be_saved_leaves_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, tensors_of(1), {"step": 1})
    with pytest.raises(ValueError, match="keep=0"):
        save(tmp_path, 2, tensors_of(2), {}, keep=0)
    with pytest.raises(TypeError, match="Tensor"):
        save(tmp_path, 2, tensors_of(2), {"momentum": torch.ones(1)})
    assert steps(tmp_path) == [1] and is_step(tmp_path) == 1


# ---- damaged --------------------------------------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match=r"it has steps \[\]"):
        load(tmp_path / "nowhere")
    save(tmp_path, 4, tensors_of(4), {"step": 4})
    with pytest.raises(CheckpointMissing, match=r"of step 3 .*it has steps \[4\]"):
        load(tmp_path, 3)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_file_is_named_and_no_older_one_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    for step in (1, 2):
        save(tmp_path, step, tensors_of(step), {"step": step})
    damage(tmp_path / "step-000000000002.safetensors")
    with pytest.raises(CheckpointDamaged, match="step-000000000002"):
        load(tmp_path)
    assert is_step(tmp_path, 1) == 1


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path, value = save(tmp_path, 1, {"w": torch.arange(4.0).view(1, 4)}, {"step": 1}), torch.arange(4.0).view(1, 4)
    whole, missed = path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        try:
            found = load(tmp_path)
        except CheckpointDamaged as error:
            assert path.name in str(error)
        else:
            missed += 1
            assert found.step == 1 and found.meta == {"step": 1} and alike(found.tensors, {"w": value})
    assert missed < 8 * 8, "only bits that mean nothing, of spaces or of the notation, may go unnoticed"


# ---- writers that stop ----------------------------------------------------------------------------------------------------

CALLS = ["mkdir", "open", "writev", "close", "fsync", "rename", "unlink", "rmdir"]


class Stop(Exception):
    """What stops the writer."""


def stop_at(patch: pytest.MonkeyPatch, count: int, after: bool) -> list[str]:
    """From this call on, before or after it has done its work, every system call fails, as if the process were gone."""
    made: list[str] = []

    def stopping(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            result = call(*args, **kwargs) if len(made) < count or (after and len(made) == count) else None
            if len(made) >= count:
                raise Stop(name)
            return result

        return wrapped

    for name in CALLS:
        patch.setattr(os, name, stopping(name, getattr(os, name)))
    patch.setattr(checkpoints, "save_file", stopping("save_file", checkpoints.save_file))
    return made


@pytest.mark.parametrize("after", [False, True])
def test_a_writer_stopped_at_any_system_call_leaves_the_old_or_the_new_one_whole(tmp_path: Path, after: bool) -> None:
    seen, count = set(), 0
    while True:
        count += 1
        folder = tmp_path / str(count)
        save(folder, 1, tensors_of(1), {"step": 1}, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            made = stop_at(patch, count, after)
            try:
                save(folder, 2, tensors_of(2), {"step": 2}, keep=1)
                break
            except Stop:
                pass
        seen.add(made[count - 1])
        newest = is_step(folder)
        renamed = len([name for name in made[: count if after else count - 1] if name == "rename"])
        assert newest == (2 if renamed else 1) and all(is_step(folder, step) == step for step in steps(folder))
        save(folder, 3, tensors_of(3), {"step": 3}, keep=1)
        assert is_step(folder) == 3 and len(list(folder.iterdir())) == 1, "what the stopped writer left is gone"
    assert count > 8 and seen >= {"mkdir", "open", "fsync", "rename", "unlink", "save_file"}


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


def test_all_is_on_the_disk_before_the_rename_and_the_rename_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, tensors_of(1), {"step": 1})
    did: list[str] = []
    real_persist, real_rename = disk.persist, os.rename

    def persist(file: int) -> None:
        did.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        real_persist(file)

    def rename(old: Path, new: Path) -> None:
        assert old.parent.name.startswith(f".{old.name}.draft-")
        did.append(f"draft of {old.name} -> {new.name}")
        real_rename(old, new)

    real_unlink = Path.unlink

    def unlink(path: Path) -> None:
        did.append(f"{path.name} goes")
        real_unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(disk, "persist", persist)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path, 2, tensors_of(2), {"step": 2}, keep=1)
    final, old = "step-000000000002.safetensors", "step-000000000001.safetensors"
    assert did == [final, f"draft of {final} -> {final}", tmp_path.name, f"{old} goes"]


KILLED = """
import os, random, signal, sys, time
import torch
from d2lps.kvstore.storage.checkpoint import load, save, steps

torch.set_num_threads(1)
folder, chance, between = sys.argv[1], random.Random(2), 0

def files(step):
    return {"w": torch.full((400_000,), float(step)), "b": torch.tensor([step])}

def drafts():
    return any(name.startswith(".") for name in os.listdir(folder))

def whole(step=None):
    found = load(folder, step)
    assert all((t == found.step).all() for t in found.tensors.values())
    assert found.meta["step"] == found.step
    return found.step

save(folder, 0, files(0), {"step": 0})
for life in range(30):
    newest = whole()
    if not (child := os.fork()):
        for step in range(newest + 1, newest + 1000):
            save(folder, step, files(step), {"step": step})
    while not (drafts() if life % 2 else max(steps(folder)) > newest):  # until it writes, or has written
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.06))
    between += drafts()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert whole() >= newest and all(whole(step) == step for step in steps(folder))
print(newest := whole(), between)
save(folder, newest + 1, files(newest + 1), {"step": newest + 1})
assert not drafts(), f"what killed writers have left is still there: {os.listdir(folder)}"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks after torch was imported")
def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_one_whole(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    newest, between = map(int, done.stdout.split())
    assert newest >= 5 and between >= 5, "killed now in the midst of writing, now elsewhere"


# ---- a server's state -----------------------------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
leaves |= st.lists(st.integers(-9, 9), max_size=3).map(torch.tensor)
leaves |= st.builds(Request, st.just("push"), st.text(max_size=3), st.just(torch.ones(2)), options=st.just({"lr": 0.1}))
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=5), inner, max_size=3)
    ),
)


@settings(max_examples=100, deadline=None)
@given(states)
def test_any_state_is_tensors_and_json_and_comes_back(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    folder = tmp_path_factory.mktemp("state")
    tensors, plain = flatten(state)
    save(folder, 1, tensors, {"server-0": plain})
    found = load(folder)
    again = unflatten(found.tensors, found.meta["server-0"])
    assert alike(again, state) and type(again) is type(state)
