"""Compressed pushes: what a server has is what it should have, but for what the worker still keeps."""

from typing import Any

import pytest
import torch

from d2lps import compress, kvstore
from d2lps.kvstore import Refused, Request, Server
from d2lps.kvstore.core.compression import make_codec
from d2lps.kvstore.core.events import alike
from d2lps.topology import star

SHAPES = {"w": (40, 7), "b": (5,), "none": (0, 3)}
OPTIONS: dict[str, dict[str, Any]] = {"int8": {"block": 32}, "top_k": {"fraction": 0.1}, "random_k": {"fraction": 0.1}}


def push_all(kv: Any, codec: str, steps: int) -> dict[str, list[torch.Tensor]]:
    """Push random gradients; by key, their sum, what the codec keeps of it, and what was pulled at the end."""
    chance = torch.Generator().manual_seed(kv.rank)
    for key, shape in SHAPES.items():
        kv.init(key, torch.zeros(shape))
    kv.init("count", torch.zeros(2, dtype=torch.int64))
    kv.compress(codec, **OPTIONS.get(codec, {}))
    sums = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    for step in range(steps):
        for key, shape in SHAPES.items():
            gradient = torch.randn(shape, generator=chance)
            sums[key] += gradient
            if step % 2:
                kv.push(key, gradient)
            else:
                kv.pushpull(key, gradient, torch.empty(shape)).wait()
        kv.push("count", torch.ones(2, dtype=torch.int64))
        kv.clock()
    kv.barrier()
    found = {}
    for key, shape in SHAPES.items():
        kv.pull(key, out := torch.empty(shape)).wait()
        parts = [part.name for part in kv.placement.parts[key]]
        left = torch.cat([kv.codec.left[part] for part in parts]).view(shape)
        found[key] = [sums[key], left, out]
    return found


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("codec", ["half", "1bit", "fp8", "int8", "int4", "top_k", "random_k", "power_sgd"])
def test_nothing_is_lost_but_what_the_worker_keeps(codec: str, servers: int) -> None:
    run = kvstore.simulate(push_all, star(2 + servers, 1e9), 2, servers, codec, 20, split=200)
    for key in SHAPES:
        pushed, kept = (sum(found[key][number] for found in run) for number in (0, 1))
        for found in run:
            torch.testing.assert_close(found[key][2], pushed - kept, rtol=0, atol=1e-4)
        assert (key == "w") <= bool(kept.abs().sum() > 0)
    assert run.values["count"].tolist() == [40, 40]  # integers are never rounded


def switch(kv: Any, codecs: list[str | None]) -> dict[str, list[torch.Tensor]]:
    """Push under one codec after another; by key, the sum of what was pushed, and what was pulled at the end."""
    dtypes = {"w": torch.float32, "hot": torch.float32, "d": torch.float64, "b": torch.bfloat16}
    for key, dtype in dtypes.items():
        kv.init(key, torch.zeros(40, 7, dtype=dtype), everywhere=key == "hot")
    sums = {key: torch.zeros(40, 7, dtype=dtype) for key, dtype in dtypes.items()}
    for step, codec in enumerate(codecs):
        kv.compress(codec, **OPTIONS.get(str(codec), {}))
        gradient = torch.randint(-8, 9, (40, 7), generator=torch.Generator().manual_seed(step)).float()
        for key, total in sums.items():
            total += gradient.to(total.dtype)
            kv.push(key, gradient.to(total.dtype))
        kv.clock()
    found = {}
    for key, total in sums.items():
        kv.pull(key, out := torch.empty_like(total)).wait()
        found[key] = [total, out]
    assert (codecs[-1] is None) == (not kv.left)
    return found


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("before", [["top_k"], ["1bit", "1bit", "top_k"], ["random_k", None, "int4", None]])
def test_what_one_codec_has_left_comes_under_the_next_one(before: list[str | None], servers: int) -> None:
    for found in kvstore.simulate(switch, star(1 + servers, 1e9), 1, servers, [*before, None], split=200):
        for total, out in found.values():
            torch.testing.assert_close(out, total, rtol=0, atol=0.3 if out.dtype == torch.bfloat16 else 1e-4)


def test_a_codec_that_cannot_be_made_leaves_the_last_one() -> None:
    def worker(kv: Any) -> list[float]:
        kv.init("w", torch.zeros(2))
        kv.compress("1bit")
        kv.push("w", torch.tensor([3.0, -1.0])).wait()
        with pytest.raises(ValueError, match="codec '2bit' is unknown"):
            kv.compress("2bit")
        kv.push("w", torch.tensor([1.0, -3.0])).wait()
        return kv.left["w"].tolist()

    assert kvstore.simulate(worker, star(2, 1e9), 1, 1).results == [[0.0, 0.0]]


@pytest.mark.parametrize("durability", ["memory", "log", "replica"])
@pytest.mark.parametrize("codec", ["half", "1bit", "random_k"])
def test_real_servers_decode_as_simulated_ones(codec: str, durability: str) -> None:
    real = kvstore.run(push_all, 2, 2, codec, 6, durability=durability, split=200)
    simulated = kvstore.simulate(push_all, star(4, 1e9), 2, 2, codec, 6, split=200)
    assert alike(real.values, simulated.values) and alike(real.results, simulated.results)
    assert [server.received for server in real.servers] == [server.received for server in simulated.servers]


@pytest.mark.parametrize(("codec", "nbytes"), [(None, 4000), ("half", 2000), ("1bit", 4 + 125)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fewer_bytes_take_less_time(codec: str | None, nbytes: int, device: str) -> None:
    def worker(kv: Any) -> float:
        value = torch.zeros(1000, device=kv.comm.device)
        kv.init("w", value)
        kv.compress(codec)
        start = kv.comm.now()
        kv.push("w", value).wait()
        return float(kv.comm.now() - start)

    run = kvstore.simulate(worker, star(2, 1e6), 1, 1, consistency="asp", device=device)
    assert run[0] == pytest.approx(nbytes / 1e6) and run.servers[0].received == 4000 + nbytes  # init is not compressed


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bit_refuses_what_would_spoil_all(bad: float) -> None:
    feedback = compress.ErrorFeedback(make_codec("1bit"))
    feedback.encode("w", torch.tensor([3.0, -1.0]))
    left = feedback.left["w"].clone()
    with pytest.raises(ValueError, match=rf"'w' has {bad} at \[1\], which would spoil the rest"):
        feedback.encode("w", torch.tensor([3.0, bad]))
    assert torch.equal(feedback.left["w"], left) and feedback.turns["w"] == 1


def test_one_bit_bears_large_numbers() -> None:
    """Neither their sum nor what is left of them leaves float32, so the next gradients count as ever."""
    codec = make_codec("1bit")
    feedback = compress.ErrorFeedback(codec)
    for huge in (1e37, 3.4e38, -3.4e38):
        sent = feedback.encode("w", torch.full((1000,), huge))
        assert codec.decode(sent, torch.empty(1000)).isfinite().all()
        assert feedback.left["w"].isfinite().all()
    feedback.left.clear()
    gradient = torch.tensor([1e37, -1e37, 5e36, 0.0])
    total = sum(codec.decode(feedback.encode("w", gradient), gradient) for _ in range(50))
    torch.testing.assert_close(total + feedback.left["w"], 50 * gradient, rtol=1e-4, atol=0)
    sent = feedback.encode("x", huger := torch.tensor([1e300], dtype=torch.float64))  # beyond what a magnitude of 32 bits says
    assert torch.equal(codec.decode(sent, huger) + feedback.left["x"], huger) and codec.decode(sent, huger).isfinite().all()


@pytest.mark.parametrize("codec", ["half", "1bit"])
def test_copies_get_the_same_code(codec: str) -> None:
    def worker(kv: Any) -> None:
        kv.init(["w", "v"], [torch.zeros(9), torch.zeros(9)], everywhere=True)
        kv.compress(codec)
        for step in range(3):
            gradient = torch.randn(9, generator=torch.Generator().manual_seed(step + 10 * kv.rank))
            kv.push(["w", "v", "w"], [gradient, -gradient, gradient])
            kv.clock()

    servers = kvstore.simulate(worker, star(5, 1e9), 2, 3).servers
    assert alike(servers[0].values, servers[1].values) and alike(servers[0].values, servers[2].values)
    assert servers[0].values["w[*]"].abs().sum() > 0


def test_wrong_codecs_are_refused_where_they_are_named() -> None:
    with pytest.raises(ValueError, match="codec '2bit' is unknown: choose '1bit', 'bfloat16', 'fp8', 'half'"):
        make_codec("2bit")
    with pytest.raises(ValueError, match=r"codec 'half' cannot be made of \{'bits': 3\}"):
        make_codec("half", bits=3)


@pytest.mark.parametrize(
    ("value", "options", "says"),
    [
        (torch.zeros(7, dtype=torch.uint8), {"codec": "1bit"}, "16 signs and a magnitude are 6 of torch.uint8, not 7"),
        (torch.zeros(6), {"codec": "1bit"}, "16 signs and a magnitude are 6 of torch.uint8, not 6 of torch.float32"),
        (torch.zeros(6).half(), {"codec": "half"}, "its floats are 16 of torch.float16, not 6 of torch.float16"),
        (torch.full((16,), 255, dtype=torch.uint8), {"codec": "top_k", "fraction": 0.1}, "index -1 is out of bounds"),
        (torch.zeros(2), {"codec": "random_k", "fraction": 0.1, "turn": "now"}, "cannot be decoded"),
        (torch.zeros(4, 4), {"codec": ["half"]}, "cannot be decoded"),
        (torch.zeros(4, 4), {"codec": "half", "bits": 3}, "cannot be made of"),
    ],
)
def test_what_cannot_be_decoded_changes_nothing(value: torch.Tensor, options: dict[str, Any], says: str) -> None:
    server = Server([0], "asp")
    server.step(Request("init", "w", torch.ones(4, 4), sequence=1))
    [*_, reply] = server.step(Request("push", "w", value, options=options, sequence=2))
    assert says in reply.error and torch.equal(server.entries["w"].value, torch.ones(4, 4))


def test_a_refused_push_says_so() -> None:
    def worker(kv: Any) -> str:
        kv.init("w", torch.zeros(4))
        kv.compress("half")
        kv.code = {"codec": "unheard of"}
        with pytest.raises(Refused) as caught:
            kv.push("w", torch.ones(4)).wait()
        return str(caught.value)

    assert "codec 'unheard of' is unknown" in kvstore.simulate(worker, star(2, 1e9), 1, 1)[0]
