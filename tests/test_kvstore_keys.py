"""What workers must agree on: a key's whole shape and dtype, and whether it lies everywhere; and keys in lists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import stored

from d2lps.kvstore import KVWorker, Refused

OTHERS = [
    (torch.zeros(101, 2), "float32[101, 2]"),  # cut at other rows
    (torch.zeros(100, 3), "float32[100, 3]"),  # cut at the same ones
    (torch.zeros(2), "float32[2]"),  # not cut
    (torch.zeros(100, 2, dtype=torch.int32), "int32[100, 2]"),
    (torch.zeros(100, 2, dtype=torch.float64), "float64[100, 2]"),
]


INNER = {"finish", "alone", "meet", "give"}  # the launcher's, and what workers do when servers come and go


def test_the_page_of_calls_has_what_workers_call_and_nothing_else() -> None:
    own = {name for name, call in vars(KVWorker).items() if name[0] != "_" and inspect.getdoc(call)}
    page = (Path(__file__).parents[1] / "book/back/calls.md").read_text()
    assert {*re.findall(r"^d2lps\.kvstore\.KVWorker\.(\S+)$", page, re.MULTILINE)} == own - INNER


def disagree(kv: Any, tensors: list[torch.Tensor], late: bool, key: str) -> str:
    """Each worker begins the key with its own tensor, all at once or one after another: what it is told."""
    for rank in range(kv.num_workers if late else 0):
        if rank < kv.rank:
            kv.barrier()
    try:
        kv.init(key, tensors[kv.rank])
        told = ""
    except Refused as refused:
        told = str(refused)
    for rank in range(kv.num_workers if late else 0):
        if rank >= kv.rank:
            kv.barrier()
    kv.barrier()
    return told


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("other", "named"), OTHERS)
@pytest.mark.parametrize("placement", ["hash", "load"])
def test_one_key_has_one_shape(real: bool, late: bool, other: torch.Tensor, named: str, placement: str) -> None:
    if real and placement == "load":
        pytest.skip("as simulated")
    tensors = [torch.zeros(100, 2), other]
    run = stored(real, disagree, 2, 3, tensors, late, "w", split=100, placement=placement)
    [told] = [text for text in run if text]
    first, second = ("float32[100, 2]", named) if run[0] == "" else (named, "float32[100, 2]")
    assert first in told and second in told and told.startswith("kv.init('w'): key 'w'")
    assert (run[0] == "") or not late
    assert {key: value.shape for key, value in run.values.items()} == {"w": tensors[0 if run[0] == "" else 1].shape}


@pytest.mark.parametrize("key", ["w", "w]", "w[0:50]", "w[*]"])
def test_any_string_is_a_key_also_for_its_shape(key: str) -> None:
    run = stored(False, disagree, 2, 3, [torch.zeros(100, 2), torch.zeros(3)], True, key, split=100)
    assert run[0] == "" and "float32[3]" in run[1] and list(run.values) == [key]


def test_who_is_refused_may_begin_again() -> None:
    def worker(kv: Any) -> list[float]:
        if kv.rank == 0:
            kv.init("w", torch.zeros(100))
        kv.barrier()
        if kv.rank == 1:
            with pytest.raises(Refused, match=r"key 'w' is float32\[100\], not float32\[101\]"):
                kv.init("w", torch.zeros(101))
            kv.init("w", torch.ones(100))
        kv.pushpull("w", torch.ones(100), out := torch.zeros(100)).wait()
        return [out.min().item(), out.max().item()]

    assert stored(False, worker, 2, 3, split=100) == [[2.0, 2.0]] * 2


def test_who_has_not_called_init_cannot_know_where_parts_lie() -> None:
    def worker(kv: Any) -> None:
        if kv.rank == 0:
            kv.init("w", torch.zeros(100))
            kv.init("b", torch.zeros(3))
        kv.barrier()
        if kv.rank == 1:
            for length in (2, 100, 101):
                with pytest.raises(Refused, match=r"'w' is float32\[100\], and does not lie here: init comes first"):
                    kv.push("w", torch.ones(length)).wait()
            kv.push("b", torch.ones(3)).wait()
            kv.init("w", torch.zeros(100))
            kv.push("w", torch.ones(100)).wait()

    run = stored(False, worker, 2, 3, split=100)
    assert run.values["b"].tolist() == [1.0] * 3 and run.values["w"].tolist() == [1.0] * 100


# ---- lists ----------------------------------------------------------------------------------------------------------------


def many(kv: Any) -> list[list[float]]:
    keys, zeros = ["a", 7, "big"], [torch.zeros(2), torch.zeros(()), torch.zeros(60)]
    kv.init(keys, zeros)
    kv.push(keys, [torch.ones(2), torch.tensor(2.0), torch.full((60,), 3.0)])
    kv.clock()
    outs = [torch.empty(2), torch.empty(()), torch.empty(60)]
    kv.pull(tuple(keys), outs).wait()
    both = [torch.empty(2), torch.empty(())]
    kv.pushpull(keys[:2], outs[:2], both, priority=3).wait()
    return [outs[0].tolist(), outs[1].item(), outs[2].unique().tolist(), both[0].tolist(), both[1].item()]


@pytest.mark.parametrize("real", [False, True])
def test_lists_of_keys(real: bool) -> None:
    run = stored(real, many, 2, 3, split=100)
    assert run == [[[2.0, 2.0], 4.0, [6.0], [6.0, 6.0], 12.0]] * 2


def test_wrong_lists_are_refused_before_anything_is_sent() -> None:
    def worker(kv: Any) -> None:
        kv.init(["a", "b"], [torch.zeros(2), torch.zeros(3)])
        kv.compress("1bit")
        nan = torch.full((3,), float("nan"))
        wrong = [
            (["a", "b"], [torch.ones(2)], r"2 keys, \['a', 'b'\], need a list of as many tensors, not \[1\]"),
            (["a", "b"], torch.ones(2), r"not \['Tensor'\]"),
            (["a", "b"], [torch.ones(2), torch.ones(2)], r"'b' is float32\[3\], not float32\[2\]"),
            (["a", "b"], [torch.ones(2), nan], r"'b' has nan at \[0\]"),
        ]
        for keys, values, says in wrong:
            with pytest.raises(ValueError, match=says):
                kv.push(keys, values)
        assert not kv.codec.left, "what is kept of a gradient is as it was"
        for ask in (kv.push, kv.pull):
            with pytest.raises(TypeError, match="priority='a' is not a whole number"):
                ask("a", torch.ones(2), priority="a")

    run = stored(False, worker, 1, 1)
    assert run.servers[0].requests["push"] == 0


def test_a_compressed_push_that_is_refused_changes_no_part() -> None:
    """The NaN is in the last of three parts."""

    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(30))
        kv.compress("1bit")
        kv.push("w", torch.arange(30.0)).wait()
        kept = {part: left.clone() for part, left in kv.codec.left.items()}
        bad = torch.arange(30.0)
        bad[29] = float("nan")
        with pytest.raises(ValueError, match=r"'w' has nan at \[29\]"):
            kv.push("w", bad)
        assert len(kept) == 3 and all(torch.equal(left, kv.codec.left[part]) for part, left in kept.items())

    stored(False, worker, 1, 3, split=100)


def test_hyperparameters_are_looked_at_before_they_are_sent() -> None:
    def worker(kv: Any) -> None:
        for lr in (float("nan"), float("inf"), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=rf"set_optimizer: \{{'name': 'sgd', .*'lr': {lr}".replace("(", r"\(")[:40]):
                kv.set_optimizer("sgd", lr=lr)

    assert stored(False, worker, 1, 1).servers[0].requests["set_optimizer"] == 0


def test_rows_are_named_as_the_worker_knows_them() -> None:
    def worker(kv: Any) -> None:
        kv.init("e", torch.zeros(100, 2))
        with pytest.raises(ValueError, match="rows of 'e' go from 0 to 99, not from 60 to 100"):
            kv.push_rows("e", torch.tensor([60, 100]), torch.ones(2, 2))
        with pytest.raises(ValueError, match="rows of 'e' go from 0 to 99, not from -1 to 3"):
            kv.pull_rows("e", torch.tensor([3, -1]), torch.ones(2, 2))

    stored(False, worker, 1, 3, split=100)


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("shape", [(6,), (3, 2), (1, 2, 3)])
def test_a_pull_without_init_fills_no_tensor_of_another_shape(real: bool, shape: tuple[int, ...]) -> None:
    stored(real, pull_as, 2, 1, shape)


def pull_as(kv: Any, shape: tuple[int, ...]) -> None:
    """Of one worker's key the other one has been told the name alone."""
    if kv.rank == 0:
        kv.init("w", torch.ones(2, 3))
    kv.barrier()
    if kv.rank == 1:
        out = torch.zeros(shape)
        says = f"kv.pull of 'w': a copy needs two tensors alike, not float32{list(shape)} and float32[2, 3]"
        with pytest.raises(ValueError, match=re.escape(says)):
            kv.pull("w", out).wait()
        assert not out.any(), "nothing is written to it"
        kv.pull("w", out := torch.zeros(2, 3)).wait()
        assert out.all()


def test_what_is_no_dense_tensor_or_has_no_rows_is_named() -> None:
    def worker(kv: Any) -> None:
        kv.init(["w", "s"], [torch.zeros(4, 2), torch.tensor(1.0)])
        rows, values = torch.tensor([1, 2]), torch.ones(2, 2)
        torch.sparse.check_sparse_tensor_invariants.disable()  # says that we know
        sparse = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), values, (4, 2))
        wrong: list[tuple[type[Exception], str, Any]] = [
            (ValueError, r"float32\[4, 2\] for key 'w' is torch.sparse_coo: push_rows sends", lambda: kv.push("w", sparse)),
            (ValueError, r"'w' is torch.sparse_coo: push_rows", lambda: kv.push_rows("w", torch.arange(4), sparse)),
            (ValueError, r"key 's' is float32\[\], one number, which has no rows", lambda: kv.push_rows("s", rows, values)),
            (ValueError, r"key 's' is float32\[\], one number, which has no rows", lambda: kv.pull_rows("s", rows, values)),
            (TypeError, r"rows and values of 'w' are torch.Tensors, not \[1, 2\]", lambda: kv.push_rows("w", [1, 2], values)),
            (TypeError, "rows and out of 'w' are torch.Tensors, not tensor", lambda: kv.pull_rows("w", rows, [0.0, 0.0])),
        ]
        for kind, says, ask in wrong:
            with pytest.raises(kind, match=says):
                ask()

    assert [server.requests["push"] for server in stored(False, worker, 1, 1).servers] == [0]


# ---- a key that is everywhere ---------------------------------------------------------------------------------------------


def hot(kv: Any, everywhere: bool) -> list[list[float]]:
    """All read one key in each of four iterations, and add to it by whole tensors and by rows."""
    kv.init("hot", torch.full((4, 1), float(kv.rank)), everywhere=everywhere)
    out, seen = torch.zeros(4, 1), []
    for _ in range(4):
        kv.pull("hot", out).wait()
        seen.append((out - out.min()).flatten().tolist())
        kv.push("hot", torch.full((4, 1), 0.1 * (1 + kv.rank)))
        kv.push_rows("hot", torch.tensor([kv.rank, 3]), torch.ones(2, 1))
        kv.clock()
    kv.pull_rows("hot", torch.tensor([3]), last := torch.zeros(1, 1)).wait()
    return [*seen, [last.item() - out[3].item()]]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("placement", ["hash", "load"])
def test_copies_are_equal_to_the_bit_and_share_the_reads(real: bool, placement: str) -> None:
    run = stored(real, hot, 4, 2, True, placement=placement)
    plain = stored(False, hot, 4, 2, False)
    assert run == [run[0]] * 4 and plain == [plain[0]] * 4
    for mine, theirs in zip(run[0], plain[0], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    copies = [server.values["hot[*]"] for server in run.servers]
    assert torch.equal(copies[0], copies[1]) and torch.equal(copies[0], run.values["hot"])
    assert [server.requests["pull"] for server in run.servers] == [10, 10]
    assert sorted(server.requests["pull"] for server in plain.servers) == [0, 20]


def test_who_does_not_know_that_a_key_is_everywhere_is_told() -> None:
    def worker(kv: Any) -> None:
        if kv.rank == 0:
            kv.init("w", torch.zeros(3), everywhere=True)
            with pytest.raises(ValueError, match=r"is float32\[3\] everywhere, not float32\[3\]$"):
                kv.init("w", torch.zeros(3))
            with pytest.raises(ValueError, match="pushpull of 'w', which is everywhere"):
                kv.pushpull("w", torch.zeros(3), torch.zeros(3))
        kv.barrier()
        if kv.rank == 1:
            with pytest.raises(Refused, match=r"is float32\[3\] everywhere, and does not lie here"):
                kv.push("w", torch.ones(3)).wait()
            with pytest.raises(Refused, match=r"'w' already holds float32\[3\] everywhere, not float32\[3\]"):
                kv.init("w", torch.ones(3))

    assert stored(False, worker, 2, 2).values["w"].tolist() == [0.0] * 3


# ---- dtypes ---------------------------------------------------------------------------------------------------------------

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*DTYPES, torch.float64, torch.complex64)


def add_each(kv: Any) -> dict[str, list[Any]]:
    """Of each dtype a key, to which every worker adds 1 + 2, in a whole tensor and in rows; bools are or-ed."""
    found = {}
    for dtype in DTYPES:
        name = str(dtype)
        kv.init(name, torch.zeros(3, 1, dtype=dtype))
        kv.push(name, torch.ones(3, 1, dtype=dtype))
        kv.push_rows(name, torch.tensor([2, 2]), torch.ones(2, 1, dtype=dtype))
    kv.init("bool", torch.tensor([[False], [False], [True], [False]]))
    kv.push("bool", torch.tensor([[False], [kv.rank == 1], [False], [False]]))
    kv.push_rows("bool", torch.tensor([3, 3]), torch.tensor([[False], [kv.rank == 0]]))
    kv.clock()
    for key, shape in [(str(dtype), (3, 1)) for dtype in DTYPES] + [("bool", (4, 1))]:
        out = torch.zeros(shape, dtype=kv.placement.shapes[key][1])
        kv.pull(key, out).wait()
        found[key] = out.flatten().tolist()
    return found


@pytest.mark.parametrize("options", [{}, {"durability": "log"}, {"durability": "replica"}, {"real": False}])
def test_each_dtype_is_added_up(options: dict[str, Any]) -> None:
    options = dict(options)
    run = stored(options.pop("real", True), add_each, 2, 1, **options)
    assert run == [{str(dtype): [2, 2, 6] for dtype in DTYPES} | {"bool": [False, True, True, True]}] * 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("options", [{"name": "sgd"}, {"name": None, "reduction": "mean"}])
def test_an_optimizer_takes_floats(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Also if the push was there before the optimizer: then it counts as it would have without."""

    def worker(kv: Any) -> list[Any]:
        kv.init("n", torch.zeros(1, dtype=dtype))
        if kv.rank == 0:
            kv.push("n", torch.ones(1, dtype=dtype)).wait()
        kv.barrier()
        kv.set_optimizer(**options)
        with pytest.raises(Refused, match="an optimizer, and any reduction but 'sum', needs floating-point values"):
            kv.push("n", torch.ones(1, dtype=dtype)).wait()
        kv.clock()
        kv.pull("n", out := torch.zeros(1, dtype=dtype)).wait()
        return out.tolist()

    assert stored(False, worker, 2, 1) == [[1]] * 2


def test_a_list_that_is_refused_leaves_what_was_known() -> None:
    def worker(kv: Any) -> float:
        kv.init("w", torch.ones(40, 3))
        with pytest.raises(Refused, match="'v' is float8_e4m3fn"):
            kv.init(["w", "v"], [torch.zeros(40, 3), torch.zeros(2, dtype=torch.float8_e4m3fn)])
        kv.pull("w", out := torch.empty(40, 3)).wait()  # in two parts
        kv.init("v", torch.zeros(3))  # of another shape
        return float(out.sum())

    assert stored(False, worker, 2, 2, split=64) == [120.0] * 2


# ---- memory that is pulled into -----------------------------------------------------------------------------------------


def into_one_memory(kv: Any) -> list[Any]:
    base, twice, names = torch.zeros(8), torch.ones(4), ["a", "b{}"]
    kv.init(names, [torch.full((4,), 1.0), torch.full((4,), 2.0)])
    kv.barrier()
    wrong = [
        lambda: kv.pull(names, [base[:4], base[2:6]]),
        lambda: kv.peek(names, [twice, twice]),
        lambda: kv.pull("b{}", torch.zeros(1).expand(4)),
        lambda: kv.pushpull("a", base[:4], base[1:5]),
        lambda: kv.pushpull(names, [twice, twice], [twice, base[:4]]),  # a's answer may come before b's value has left
        lambda: kv.pushpull(names, [base[:4], base[4:]], [base[4:], base[:4]]),
    ]
    told = []
    for call in wrong:
        with pytest.raises(ValueError) as caught:
            call()
        told.append(str(caught.value))
    kv.pull(names, [base[:4], base[4:]]).wait()
    works = [kv.pushpull(names, [base[:4], base[4:]], [base[:4], base[4:]]), kv.clock()]
    columns = torch.zeros(4, 2)
    works += [kv.pull(names, columns.unbind(1)), kv.push(names, [twice, twice])]
    for work in works:
        work.wait()
    return [told, base.tolist(), columns.tolist()]


@pytest.mark.parametrize("real", [True, False])
def test_two_keys_are_not_pulled_into_one_memory(real: bool) -> None:
    for told, pushed, columns in stored(real, into_one_memory, 2, 2, split=8):
        assert told == [
            "kv.pull(['a', 'b{}']): out[0], float32[4], and out[1], float32[4], share memory: both are received into",
            "kv.peek(['a', 'b{}']): out[0], float32[4], and out[1], float32[4], share memory: both are received into",
            "kv.pull('b{}'): out of shape [4] was expanded: several elements share one place in memory",
            *(
                f"kv.pushpull({names}): {pair}, share memory: what arrives would overwrite what is to be sent"
                for names, pair in (
                    ("'a'", "out, float32[4], and value, float32[4]"),
                    ("['a', 'b{}']", "out[0], float32[4], and value[1], float32[4]"),
                    ("['a', 'b{}']", "out[0], float32[4], and value[1], float32[4]"),
                )
            ),
        ]
        assert pushed == [3.0] * 4 + [6.0] * 4 and columns == [[3.0, 6.0]] * 4
