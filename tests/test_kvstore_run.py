"""The parameter server on real processes: the same values as in virtual time, and as in one process."""

# ruff: noqa: F401 - fixtures are imported, and named again as parameters

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import nothing_left, output_of, script, until
from oracles import joins_later, stored

from d2lps import kvstore
from d2lps.comm import Mismatch
from d2lps.kvstore import Refused, Request, register_optimizer
from d2lps.kvstore.core.events import alike
from d2lps.kvstore.core.optimizers import OPTIMIZERS
from d2lps.kvstore.network.deployment import LEVELS
from d2lps.kvstore.network.transport import SocketAnswer
from d2lps.topology import star

pytestmark = pytest.mark.usefixtures("nothing_left")
BOTH = pytest.mark.parametrize("real", [False, True], ids=["simulated", "processes"])


def add_up(kv: Any, steps: int) -> list[torch.Tensor]:
    big, small = torch.zeros(50, 4), torch.zeros(3)
    kv.init("big", big)
    kv.init("small", small)
    for step in range(steps):
        kv.push("big", torch.full((50, 4), float(kv.rank + step)))
        kv.push("small", torch.full((3,), 0.1 * (kv.rank + 1)))
        kv.clock()
        for work in [kv.pull("big", big), kv.pull("small", small)]:
            work.wait()
    return [big, small]


# ---- the same as elsewhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", LEVELS)
def test_values_are_those_of_a_simulation_to_the_bit(durability: str) -> None:
    real = kvstore.run(add_up, 3, 2, 4, split=100, durability=durability)
    simulated = kvstore.simulate(add_up, star(5, 1e9, 1e-6), 3, 2, 4, split=100)
    assert alike(real.results, simulated.results) and alike(real.values, simulated.values)
    assert real.staleness == simulated.staleness and real.time > 0 and not real.history and not real.lost
    for one, other in zip(real.servers, simulated.servers, strict=True):
        assert (one.received, one.sent, one.nbytes, one.requests) == (other.received, other.sent, other.nbytes, other.requests)


def exchange(kv: Any, steps: int) -> list[torch.Tensor]:
    """Big tensors, in one piece and not; some are kept by the server beyond its answer."""
    gradient, weights, both, odd = torch.zeros(300, 400), torch.zeros(300, 400), torch.zeros(70_000), torch.zeros(300, 401)
    for key, tensor in [("w", weights), ("b", both), ("odd", odd[:, 1:])]:
        kv.init(key, tensor)
    kv.set_optimizer("sgd", lr=0.5, momentum=0.5)
    for step in range(steps):
        kv.push("w", gradient.fill_(kv.rank + step)).wait()
        kv.push("w", gradient.fill_(10.0 * kv.rank)).wait()
        kv.push("odd", odd[:, 1:])
        done = kv.pushpull("b", both.fill_(step + kv.rank), both)
        kv.clock()
        for work in (done, kv.pull("w", weights), kv.pull("odd", odd[:, 1:])):
            work.wait()
    return [weights.clone(), both.clone(), odd.clone()]


@pytest.mark.parametrize("durability", LEVELS)
def test_big_tensors_come_and_go_to_the_bit(durability: str) -> None:
    real = kvstore.run(exchange, 3, 2, 4, durability=durability, split=200_000)
    simulated = kvstore.simulate(exchange, star(5, 1e9, 1e-6), 3, 2, 4, split=200_000)
    assert alike(real.results, simulated.results) and alike(real.values, simulated.values)
    assert [server.received for server in real.servers] == [server.received for server in simulated.servers]


@pytest.mark.parametrize("durability", ["log", "replica"])
def test_a_memory_budget_changes_no_value(durability: str) -> None:
    real = kvstore.run(exchange, 3, 2, 4, durability=durability, split=200_000, memory_budget=400_000)
    simulated = kvstore.simulate(exchange, star(5, 1e9, 1e-6), 3, 2, 4, split=200_000)
    assert alike(real.results, simulated.results) and alike(real.values, simulated.values)
    for server in real.servers:  # whose tensors and their momentum need more
        assert server.nbytes > 400_000 >= server.tiers.bytes_hot > 0 and server.tiers.evictions and server.tiers.bytes_written


@pytest.mark.parametrize(("backend", "options"), [("gloo", {}), ("auto", {"address": "tcp"})])
def test_big_tensors_where_no_memory_is_shared(backend: str, options: dict[str, Any]) -> None:
    real = kvstore.run(exchange, 2, 2, 3, backend=backend, **options)
    assert alike(real.results, kvstore.simulate(exchange, star(4, 1e9, 1e-6), 2, 2, 3).results)


def test_big_tensors_without_gradients_and_of_parameters() -> None:
    def worker(kv: Any) -> list[float]:
        weights = torch.nn.Parameter(torch.zeros(20_000))
        kv.init("w", weights)
        with torch.inference_mode():
            out = torch.zeros(20_000)
            kv.pushpull("w", torch.ones(20_000), out).wait()
        kv.clock()
        kv.pull("w", weights).wait()
        return [out.mean().item(), weights.mean().item()]

    assert kvstore.run(worker, 2, 1) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("consistency", ["asp", "ssp", "bsp"])
def test_more_big_tensors_than_are_sent_at_once(consistency: str) -> None:
    def worker(kv: Any) -> list[list[float]]:
        keys = range(30)
        for key in keys:
            kv.init(key, torch.zeros(20_000))
        for work in [kv.push(key, torch.full((20_000,), key + 1.0)) for key in keys]:
            work.wait()
        kv.clock()
        kv.barrier()
        outs = [torch.empty(20_000) for _ in keys]
        for work in reversed([kv.pull(key, out) for key, out in zip(keys, outs, strict=True)]):
            work.wait()
        return [out.unique().tolist() for out in outs]

    wanted = [[2.0 * (key + 1)] for key in range(30)]
    assert kvstore.run(worker, 2, 2, consistency=consistency) == [wanted, wanted]


def layer_by_layer(kv: Any, layers: int, same: bool) -> list[list[float]]:
    """The loop that anyone writes: the last layer's gradient first, the first layer's weights soonest; twice."""
    mine = range(layers) if same or not kv.rank else range(layers)[::-1]
    outs = {key: torch.zeros(25_000) for key in mine}
    for key in mine:
        kv.init(f"{layers} {same} {key}", outs[key])
    for step in range(2):
        works = [kv.pushpull(f"{layers} {same} {k}", torch.full((25_000,), k + step + 1.0), outs[k], -k) for k in reversed(mine)]
        kv.clock()
        for work in works:
            work.wait()
    kv.barrier()
    for key in mine:
        kv.pull(f"{layers} {same} {key}", outs[key]).wait()
    return [outs[key].unique().tolist() for key in range(layers)]


@pytest.mark.soak(20)
@pytest.mark.parametrize("address", ["ipc", "tcp"])
@pytest.mark.parametrize(("consistency", "staleness"), [("bsp", 0), ("ssp", 1), ("asp", 0)])
def test_no_request_waits_behind_one_that_waits_for_other_workers(consistency: str, staleness: int, address: str) -> None:
    def worker(kv: Any) -> list[Any]:
        return [layer_by_layer(kv, layers, same) for layers in (4, 20, 100) for same in (True, False)]

    run = kvstore.run(worker, 2, 2, consistency=consistency, staleness=staleness, address=address)
    wanted = [[[2.0 * (2 * key + 3)] for key in range(layers)] for layers in (4, 20, 100) for _ in range(2)]
    assert run == [wanted, wanted]


def in_its_own_order(kv: Any) -> None:
    for key in ("a", "b") if kv.rank == 0 else ("b", "a"):
        kv.init(key, torch.zeros(2))
        kv.push(key, torch.ones(2)).wait()


@BOTH
def test_workers_that_place_keys_in_another_order_are_found_out(real: bool) -> None:
    """By load, each worker thinks that a key is where the other one does not: half of the pushes would be lost."""
    rules: dict[str, Any] = {"consistency": "asp"}
    assert stored(real, in_its_own_order, 2, 2, **rules, placement="hash").values["a"].tolist() == [2.0, 2.0]
    with pytest.raises(Mismatch, match=r"'[ab]' is on servers 0 and 1: .* all workers must name the keys in the same order"):
        stored(real, in_its_own_order, 2, 2, **rules, placement="load")


def test_a_slow_worker_is_never_more_than_the_staleness_behind(tmp_path: Path) -> None:
    def worker(kv: Any, lead: int, ahead: Path) -> int:
        """How many steps it was ahead of the slowest, at most; rank 0 has `lead` steps done before the others begin."""
        out, most = torch.zeros(kv.num_workers), 0
        kv.init("clocks", out)
        kv.barrier()
        for step in range(20):
            if kv.rank:
                assert until(ahead.exists, 60)
                kv.comm.sleep(0.01)
            mine = torch.zeros(kv.num_workers)
            mine[kv.rank] = 1
            kv.push("clocks", mine)
            kv.clock()
            kv.pull("clocks", out).wait()
            most = max(most, step + 1 - int(out.min()))
            if not kv.rank and step + 1 == lead:
                ahead.touch()
        return most

    run = kvstore.run(worker, 3, 1, 2, tmp_path / "ssp", consistency="ssp", staleness=2)
    assert max(run) == max(run.staleness) == 2
    assert max(kvstore.run(worker, 3, 1, 20, tmp_path / "asp", consistency="asp")) == 20


# ---- what workers may do ----------------------------------------------------------------------------------------------------


def test_rows_priorities_strides_and_half_precision() -> None:
    def worker(kv: Any) -> list[float]:
        table, half = torch.zeros(1000, 8), torch.zeros(3, 5, dtype=torch.bfloat16)
        kv.init("table", table)
        kv.init(7, half.t())
        kv.push_rows("table", torch.tensor([999, kv.rank, 0, 999]), torch.ones(4, 8))
        kv.push(7, torch.ones(3, 5, dtype=torch.bfloat16).t(), priority=-1).wait()
        kv.barrier()
        out = torch.zeros(3, 8)
        kv.pull_rows("table", torch.tensor([999, 0, 1]), out).wait()
        kv.pull(7, half.t()).wait()
        return [*out[:, 0].tolist(), half.float().mean().item()]

    assert kvstore.run(worker, 2, 2, consistency="asp", split=1000) == [[4.0, 3.0, 1.0, 2.0]] * 2


@BOTH
def test_workers_talk_to_one_another_and_print_by_rank(real: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def worker(kv: Any) -> float:
        value = torch.full((1,), float(kv.rank))
        if kv.rank == 0:
            kv.comm.send(value + 7, dst=1)
        else:
            kv.comm.recv(value, src=0)
        assert kv.comm.size == kv.num_workers == 2
        print("I have", value.item())
        return value.item()

    assert stored(real, worker, 2, 1) == [0.0, 7.0]
    assert capsys.readouterr().out == ("rank 0 | I have 0.0\nrank 1 | I have 7.0\n" if real else "I have 0.0\nI have 7.0\n")


def test_an_optimizer_of_ones_own_is_known_to_the_servers() -> None:
    class Sign:
        def __init__(self, lr: float) -> None:
            self.lr = lr

        def state(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
            return {}

        def step(self, value: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
            value.sub_(gradient.sign(), alpha=self.lr)

    def worker(kv: Any) -> list[float]:
        out = torch.zeros(2)
        kv.init("w", out)
        kv.set_optimizer("sign of the test", lr=0.5)
        kv.pushpull("w", torch.tensor([3.0, -5.0]), out).wait()
        return out.tolist()

    register_optimizer("sign of the test", Sign)
    try:
        assert kvstore.run(worker, 2, 1) == [[-0.5, 0.5]] * 2
    finally:
        del OPTIMIZERS["sign of the test"]


@BOTH
def test_workers_join_later(real: bool) -> None:
    assert stored(real, joins_later, 3, 2, 5, absent=[2]) == [2 * 5 + 3 * 5] * 3


def test_a_log_kept_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    kvstore.run(add_up, 2, 2, 3, split=100, durability="log", folder=tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mark.json", "server-0", "server-1"]
    with pytest.raises(ValueError, match="is of a run with split=100, not 1000000"):
        kvstore.run(add_up, 2, 2, 3, durability="log", folder=tmp_path / "new")


def test_over_tcp_with_keys_and_without() -> None:
    for secret in (None, "a secret of the test"):
        run = kvstore.run(add_up, 2, 2, 2, split=100, address="tcp", secret=secret)
        assert run.values["big"].unique().tolist() == [4.0]
    run = kvstore.run(add_up, 2, 1, 2, address="tcp://*")
    assert run.values["big"].unique().tolist() == [4.0]


@pytest.mark.parametrize("address", ["ipc", "tcp"])
@pytest.mark.parametrize(
    ("out", "error", "told"),
    [
        (torch.zeros(20_000, dtype=torch.int32), ValueError, "copy needs two tensors alike, not int32"),  # as many bytes
        (torch.zeros(10_000, dtype=torch.float64), ValueError, "copy needs two tensors alike, not float64"),
        (torch.zeros(1).expand(20_000), ValueError, r"kv.pull\('w'\): out of shape \[20000\] was expanded"),
    ],
    ids=["int32", "float64", "expanded"],
)
def test_a_tensor_that_cannot_take_the_value_is_an_error_at_once(address: str, out: torch.Tensor, error: Any, told: str) -> None:
    def worker(kv: Any) -> None:
        if kv.rank == 0:
            kv.init("w", torch.full((20_000,), 1.5))
        kv.barrier()
        if kv.rank == 1:  # who has not called init does not know what the key is
            kv.pull("w", out).wait()

    with pytest.raises(error, match=told):
        kvstore.run(worker, 2, 1, address=address)


@pytest.mark.parametrize(
    ("call", "rows", "shape", "told"),
    [
        ("push_rows", [1, 2], (5, 3), r"values is float32\[5, 3\], but 2 rows of key 'e' are \[2, 3\]"),
        ("push_rows", [1, 2, 3], (2, 3), r"values is float32\[2, 3\], but 3 rows of key 'e' are \[3, 3\]"),
        ("pull_rows", [1], (2, 3), r"out is float32\[2, 3\], but 1 rows of key 'e' are \[1, 3\]"),
        ("pull_rows", [1, 2], (2, 1), r"out is float32\[2, 1\], but 2 rows of key 'e' are \[2, 3\]"),
        ("pull_rows", [True, False], (2, 3), r"rows must be flat, of int64, not bool\[2\]"),
        ("pull_rows", [1, 2], torch.zeros(2, 3).double(), r"out is float64\[2, 3\], but key 'e' is float32\[40, 3\]"),
        ("push_rows", [1, 2], torch.zeros(2, 3).int(), r"values is int32\[2, 3\], but key 'e' is float32\[40, 3\]"),
        ("pull_rows", [1, 2], torch.zeros(3).expand(2, 3), r"kv.pull_rows\('e'\): out of shape \[2, 3\] was expanded"),
    ],
)
def test_rows_and_their_values_must_fit(call: str, rows: list[int], shape: Any, told: str) -> None:
    def worker(kv: Any) -> None:
        kv.init("e", torch.zeros(40, 3))
        with pytest.raises(ValueError, match=told):
            getattr(kv, call)("e", torch.tensor(rows), torch.ones(shape) if isinstance(shape, tuple) else shape)
        out = torch.ones(40, 3)
        kv.pull("e", out).wait()
        assert not out.any()

    kvstore.run(worker, 1, 2, split=100)


STRANGE = ["", "w", "w\0momentum", "barrier()", "w[0:5]", "w[0:1]", "w[:]", "a\nb", "]", "0/values/w", "leave", "ключ"]


@pytest.mark.parametrize("log_bytes", [1 << 30, 2_000])
def test_any_text_is_a_key(log_bytes: int) -> None:
    """Small ones and split ones side by side, with momentum, in rounds of their own, in logs and checkpoints."""

    def worker(kv: Any) -> list[list[float]]:
        found = [torch.zeros(shape) for shape in ((1,), (4, 3)) for _ in STRANGE]
        keys = [*STRANGE, *(f"{key}\nlarge" for key in STRANGE)]
        for key, out in zip(keys, found, strict=True):
            kv.init(key, out)
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5)
        for _ in range(3):
            works = [
                kv.pushpull(key, torch.full_like(out, -(number + 1.0)), out)
                for number, (key, out) in enumerate(zip(keys, found, strict=True))
            ]
            kv.clock()
            for work in works:
                work.wait()
        return [out.unique().tolist() for out in found]

    run = kvstore.run(worker, 2, 2, split=48, durability="log", log_bytes=log_bytes)
    wanted = [[(number + 1) * 4.25] for number in range(2 * len(STRANGE))]  # 1 + 1.5 + 1.75 steps
    assert run == [wanted, wanted]
    assert run.values.keys() == {*STRANGE, *(f"{key}\nlarge" for key in STRANGE)}
    assert [value.shape for value in run.values.values()].count((4, 3)) == len(STRANGE)


def test_half_of_a_surrogate_pair_is_no_key_and_nothing_happens() -> None:
    def worker(kv: Any) -> None:
        kv.init("w", torch.zeros(2))
        with pytest.raises(ValueError, match=r"surrogates not allowed: .*half: "):
            kv.init("half: \ud800", torch.zeros(2))
        kv.push("w", torch.ones(2)).wait()

    assert kvstore.run(worker, 1, 1).values.keys() == {"w"}


def test_first_values_are_those_of_one_worker() -> None:
    """In parts on all servers, of four workers with four values: never torn, whoever comes first where."""

    def worker(kv: Any) -> list[float]:
        keys = [f"{number}" for number in range(60)]
        for key in keys if kv.rank % 2 else reversed(keys):
            kv.init(key, torch.full((8, 4), float(kv.rank)))
        kv.barrier()
        outs = [torch.empty(8, 4) for _ in keys]
        for work in [kv.pull(key, out) for key, out in zip(keys, outs, strict=True)]:
            work.wait()
        assert all(len(out.unique()) == 1 for out in outs)
        return [float(out[0, 0]) for out in outs]

    run = kvstore.run(worker, 4, 2, split=16)
    assert all(found == run[0] for found in run) and all(len(value.unique()) == 1 for value in run.values.values())


# ---- what they may not ------------------------------------------------------------------------------------------------------


@BOTH
def test_what_the_servers_refuse_is_raised_in_the_worker(real: bool) -> None:
    with pytest.raises(Refused, match=r"kv.push\('w'\): key 'w' is unknown: init comes first"):
        stored(real, lambda kv: kv.push("w", torch.ones(2)).wait(), 1, 1)


@pytest.mark.parametrize("durability", ["memory", "log"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex128])
def test_what_cannot_be_added_or_stored_is_refused_at_init(dtype: torch.dtype, durability: str) -> None:
    def worker(kv: Any) -> list[float]:
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(Refused, match=rf"'bad' is {name}\[2\], which cannot be added up or stored"):
            kv.init("bad", torch.zeros(2).to(dtype))
        out = torch.zeros(2)
        kv.init("w", out)
        kv.pushpull("w", torch.ones(2), out).wait()
        return out.tolist()

    assert kvstore.run(worker, 1, 1, durability=durability, log_bytes=1) == [[1.0, 1.0]]


def test_what_cannot_be_sent_is_refused_before_it_has_a_number() -> None:
    def worker(kv: Any) -> list[float]:
        out = torch.zeros(2)
        kv.init("w", out)
        with pytest.raises(ValueError, match="dtype: 'uint16'; wanted one of float32"):
            kv.init("flags", torch.ones(2, dtype=torch.uint16))
        with pytest.raises(ValueError, match="4,000 bytes are more than limit=3,000"):
            kv.init("long", torch.ones(1000))
        kv.push("w", torch.ones(2))
        kv.clock()
        kv.pull("w", out).wait()
        return out.tolist()

    assert kvstore.run(worker, 1, 1, limit=3000) == [[1.0, 1.0]]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"workers": 0}, "workers=0 is not a number of processes"),
    ({"servers": True}, "servers=True is not a number of processes"),
    ({"consistency": "bulk"}, "consistency='bulk' is unknown"),
    ({"staleness": 2}, "bsp knows no such bound"),
    ({"durability": "disk"}, "choose 'memory', 'log', 'fsync', 'replica'"),
    ({"placement": "here"}, "by='here' is unknown"),
    ({"timeout": 0}, "timeout=0 is not a number of seconds"),
    ({"backend": "mpi"}, "backend='mpi' is unknown"),
    ({"folder": "x"}, "'memory' writes nothing"),
    ({"address": "udp://1.2.3.4"}, "address='udp://1.2.3.4' is none"),
    ({"absent": [3]}, r"absent=\(3,\) are not ranks from 0 to 0, or nobody else is there"),
    ({"absent": 3}, "absent=3: expected array, got int"),
    ({"absent": ["0"]}, r"absent=\['0'\]: expected int, got str"),
    ({"absent": None}, "absent=None: expected array, got null"),
    ({"durability": ["log"]}, r"durability=\['log'\]: expected str, got array"),
    ({"consistency": None}, "consistency=None: expected str, got null"),
    ({"placement": {}}, "placement={}: expected str, got object"),
    ({"address": 5555}, "address=5555: expected str, got int"),
    ({"folder": 7}, "folder=7: expected str, got int"),
    ({"secret": 7}, "secret must be a text of at least 16 characters"),
    ({"limit": 0}, "limit=0: expected int >= 1"),
    ({"limit": True}, "limit=True: expected int, got bool"),
    ({"log_bytes": 1 << 31}, "log_bytes=2147483648: expected int <= 2147483647"),
    ({"memory_budget": 0}, "memory_budget=0: expected int >= 1"),
    ({"address": "tcp", "secret": "short"}, "at least 16 characters"),
    ({"patience": -1}, "patience=-1: expected float > 0"),
    ({"patience": True}, "patience=True: expected float, got bool"),
    ({"patience": float("nan")}, "patience=nan: expected float > 0"),
    ({"split": -1}, "split=-1 is not a number of bytes"),
    ({"split": "a"}, "split='a': expected int, got str"),
    ({"trace": "yes"}, "trace='yes': expected bool, got str"),
]


def test_wrong_arguments_are_refused_in_one_line() -> None:
    for options, says in WRONG:
        with pytest.raises(ValueError, match=says) as caught:
            kvstore.run(**({"worker": add_up, "workers": 1, "servers": 1} | options))
        assert "\n" not in str(caught.value)


def test_too_few_open_files_are_an_error_that_says_how_many_are_enough(tmp_path: Path) -> None:
    """In a process of its own: ZeroMQ ends the one in which it finds none."""
    code = """
        import os, re, resource
        from d2lps import kvstore

        def attempt(most, **options):
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
            try:
                return kvstore.run(lambda kv: kv.rank, 3, 2, **options).results
            except OSError as error:
                return str(error)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)

        if __name__ == "__main__":
            there = len(os.listdir("/dev/fd"))
            for durability in ("memory", "replica"):
                for few in range(0, 40, 13):
                    print(told := attempt(there + few, durability=durability))
                needed = int(re.search("up to ([0-9]+)", told)[1])
                print(attempt(len(os.listdir("/dev/fd")) + needed, durability=durability), len(os.listdir("/dev/fd")) - there)
    """
    told = output_of(script(tmp_path / "few.py", code)).splitlines()
    for nodes, few, well in ((2, told[:4], told[4]), (4, told[5:9], told[9])):
        wanted = rf"\[Errno 24\] 3 workers and {nodes} processes of servers take up to {35 + 9 * nodes} open files here "
        wanted += r"beside the \d that are open, and this process may have \d+: raise it"
        assert all(re.match(wanted, words) for words in few)
        assert well == "[0, 1, 2] 1", "beside the fork server nothing is left"


def test_what_is_no_function_or_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="a function of a kv, not 3"):
        kvstore.run(3, 1, 1)
    with pytest.raises(TypeError, match="cannot be sent to other processes"):
        kvstore.run(lambda kv, lock: None, 1, 1, threading.Lock())
    with pytest.raises(TypeError, match="rank 0 returned a lock, which cannot be sent back to the caller"):
        kvstore.run(lambda kv: threading.Lock(), 1, 1)


def test_a_thread_that_fails_is_heard_by_whose_request_it_had_in_hand() -> None:
    def worker(kv: Any) -> None:
        answer = SocketAnswer(kv.comm, "nobody", 3.0, None)
        kv.transport.inbox.append((9, Request("barrier"), answer))
        kv.transport._ring()
        with pytest.raises(RuntimeError, match=r"the thread that sends this worker's requests has ended: KeyError\(9\)"):
            answer.wait()

    with pytest.raises(RuntimeError, match="KeyError"):  # nor can it say goodbye
        kvstore.run(worker, 1, 1, timeout=5)
