"""Local SGD and DiLoCo, on collectives and on the store, against one process that plays all workers with torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector as flat

import d2lps
from d2lps import Communicator, Mismatch, RankHung, compress, kvstore
from d2lps.compress import ErrorFeedback
from d2lps.kvstore.core.optimizers import make_optimizer
from d2lps.parallel import DiLoCo, DiLoCoWorker, LocalSGD
from d2lps.topology import star

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
STEPS = 14


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


def batches(rank: int, steps: int = STEPS) -> Iterator[torch.Tensor]:
    own = torch.Generator().manual_seed(100 + rank)
    yield from (torch.randn(6, 5, generator=own) for _ in range(steps))


def descend(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    (net(batch) - batch.flip(1)).square().mean().backward()
    optimizer.step()


def alone(workers: int, every: int, fragments: int = 1, delay: int = 0, keep: float = 0.0, outer: Any = NESTEROV) -> torch.Tensor:
    """The shared weights at the end: what torchft.local_sgd does, told step by step."""
    nets = [network() for _ in range(workers)]
    optimizers, data = [adam(net) for net in nets], [batches(rank) for rank in range(workers)]
    shared, period, sent = flat(nets[0].parameters()).detach(), every // fragments, torch.empty(0)
    parts = shared.tensor_split(fragments)
    movers = [torch.optim.SGD([part], **outer) for part in parts]
    for step in range(1, STEPS + 1):
        for net, optimizer, own in zip(nets, optimizers, data, strict=True):
            descend(net, optimizer, next(own))
        weights = torch.stack([flat(net.parameters()).detach() for net in nets])
        if (step + delay) % period == 0:
            sent = shared - weights.mean(0)
        if step % period == 0:
            number = (step // period - 1) % fragments
            parts[number].grad = sent.tensor_split(fragments)[number]
            movers[number].step()
            for net, mine in zip(nets, weights, strict=True):
                part = mine.tensor_split(fragments)[number]
                part.copy_(keep * part + (1 - keep) * parts[number])
                nn.utils.vector_to_parameters(mine, net.parameters())
    return shared


def together(comm: Communicator, every: int, **options: Any) -> torch.Tensor:
    net = network()
    optimizer, diloco = adam(net), DiLoCo(comm, net.parameters(), every, **options)
    for batch in batches(comm.rank):
        descend(net, optimizer, batch)
        diloco.step()
    return diloco.shared


def served(kv: Any, every: int, **options: Any) -> torch.Tensor:
    net = network()
    optimizer, diloco = adam(net), DiLoCoWorker(kv, net.parameters(), every, **options)
    for batch in batches(kv.rank):
        descend(net, optimizer, batch)
        diloco.step()
    return diloco.start


def near(found: Any, wanted: torch.Tensor) -> None:
    for mine in found:
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-6)


# ---- the same as elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_diloco_is_what_one_process_gets(workers: int, every: int) -> None:
    wanted = alone(workers, every)
    near(d2lps.simulate(together, star(workers, 1e9), every), wanted)
    near(kvstore.simulate(served, star(workers + 2, 1e9), workers, 2, every, split=20), wanted)


@pytest.mark.parametrize(("workers", "every"), [(2, 3), (3, 7)])
def test_and_so_do_real_processes(workers: int, every: int) -> None:
    wanted = alone(workers, every)
    near(d2lps.run(together, workers, every), wanted)
    near(kvstore.run(served, workers, 1, every), wanted)


STREAMS = [(6, 2, 0, 0.0), (6, 6, 0, 0.0), (4, 1, 3, 0.0), (6, 2, 1, 0.5), (6, 2, 2, 1.0), (12, 4, 1, 0.25)]


@pytest.mark.parametrize(("every", "fragments", "delay", "keep"), STREAMS)
def test_fragments_in_turn_and_late(every: int, fragments: int, delay: int, keep: float) -> None:
    options = {"fragments": fragments, "delay": delay, "keep": keep}
    near(d2lps.simulate(lambda comm: together(comm, every, **options), star(3, 1e9)), alone(3, every, **options))


def test_fragments_late_on_real_processes() -> None:
    options = {"fragments": 2, "delay": 2, "keep": 0.5}
    near(d2lps.run(lambda comm: together(comm, 6, **options), 3), alone(3, 6, **options))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_each_step_with_rate_1_is_the_mean_of_the_weights(algorithm: str) -> None:
    def averaged(comm: Communicator, every: int) -> torch.Tensor:
        net = network()
        optimizer, local = adam(net), LocalSGD(comm, net.parameters(), every, algorithm)
        for batch in batches(comm.rank):
            descend(net, optimizer, batch)
            local.step()
        return flat(net.parameters()).detach()

    for every in (1, 7):
        wanted = alone(3, every, outer={"lr": 1.0})
        kw = {"outer": {"lr": 1.0}, "algorithm": algorithm}
        near(d2lps.simulate(lambda comm, h=every, kw=kw: together(comm, h, **kw), star(3, 1e9)), wanted)
        near(d2lps.simulate(averaged, star(3, 1e9), every), wanted)


# ---- bytes and time ---------------------------------------------------------------------------------------------------


def drift(bandwidth: float, ranks: int, every: int, steps: int, n: int = 1200, device: str = "cpu", **options: Any) -> Any:
    """The run of a model of n weights that never change, a second a step: for what travels, and when."""

    def work(comm: Communicator) -> None:
        diloco = DiLoCo(comm, [torch.zeros(n, device=comm.device)], every, **options)
        for _ in range(steps):
            comm.sleep(1.0)
            diloco.step()

    return d2lps.simulate(work, star(ranks, bandwidth), device=device)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_fiftieth_of_the_bytes(ranks: int) -> None:
    sent = [drift(1e9, ranks, every, 100).trace.bytes_sent() for every in (1, 50)]
    assert (sent[0] == 50 * sent[1]).all()
    assert sent[1].tolist() == [2 * 2 * (ranks - 1) * 4800 // ranks] * ranks


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 6])
def test_fragments_send_as_much_but_less_at_once(fragments: int) -> None:
    messages = drift(1e9, 4, 12, 24, 4800, fragments=fragments).trace.messages
    whole = 2 * 3 * 4 * 4800  # an all-reduce of all weights, by four ranks together
    moments = {int(start): 0 for start in messages["start"]}
    for start, nbytes in zip(messages["start"], messages["nbytes"], strict=True):
        moments[int(start)] += int(nbytes)
    assert sorted(moments) == [12 // fragments * turn for turn in range(1, 2 * fragments + 1)]
    assert set(moments.values()) == {whole // fragments}


def test_what_travels_late_travels_under_the_computing() -> None:
    # an all-reduce among four: 2 x 3/4 x 4,800 bytes in 7.2 s
    times = [drift(1000.0, 4, 10, 40, delay=delay).time for delay in (0, 5, 8)]
    assert times == pytest.approx([40 + 4 * 7.2, 40 + 4 * 2.2, 40])


def test_a_model_without_contents_takes_as_long() -> None:
    times = [drift(1e4, 4, 10, 40, 6000, device, fragments=2, delay=1).time for device in ("cpu", "meta")]
    assert times[0] == times[1] == pytest.approx(40 + 8 * 0.8)  # 2 x 3/4 x 12,000 bytes are 1.8 s, of which 1 is under a step


def test_what_is_no_codec_is_refused_before_the_first_round() -> None:
    with pytest.raises(TypeError, match="codec='int4' is none"):
        d2lps.simulate(lambda comm: DiLoCo(comm, [torch.ones(4)], 2, codec="int4"), star(2, 1e9))  # type: ignore[arg-type]


# How far an element of the mean may be off, of the largest element of the deltas: half a unit in the last place at each of four
# roundings, or a unit for each of the two encodings, of which the second is of the first one's sum.
@pytest.mark.parametrize(("codec", "times", "bound"), [("half", 2, 4 / 2**11), ("int8", 4, 2.1 / 127), ("int4", 8, 2.3 / 7)])
def test_deltas_in_fewer_bytes(codec: str, times: float, bound: float) -> None:
    def work(comm: Communicator, codec: Any) -> tuple[torch.Tensor, float]:
        own = torch.Generator().manual_seed(comm.rank)
        weights, delta = torch.randn(8192, generator=torch.Generator().manual_seed(9)), torch.randn(8192, generator=own) / 100
        diloco = DiLoCo(comm, [weights], every=1, outer={"lr": 1.0}, codec=codec)
        weights -= delta
        diloco.step()
        return diloco.shared, delta.abs().max().item()

    plain, fewer = (d2lps.simulate(work, star(4, 1e9), codec) for codec in (None, getattr(compress, codec)()))
    assert all(torch.equal(fewer[0][0], other) for other, _ in fewer)  # the same on all ranks, to the bit
    off = (plain[0][0] - fewer[0][0]).abs().max().item()
    assert 0 < off < bound * max(largest for _, largest in plain)
    ratio = plain.trace.bytes_sent() / fewer.trace.bytes_sent()
    assert ratio == pytest.approx([times] * 4, rel=0.04)  # blocks have a scale each


@pytest.mark.parametrize("delay", [0, 1])
def test_what_is_rounded_by_chance_is_rounded_anew_each_round(delay: int) -> None:
    def work(comm: Communicator) -> float:
        weights = torch.zeros(4)
        diloco = DiLoCo(comm, [weights], 2, {"lr": 1.0}, delay=delay, codec=compress.int4())
        for _ in range(120):
            weights += torch.tensor([7.0, 0.5, 7.0, 0.5]) / (2 - delay)  # a delta of scale 1: 0.5 goes as 0 or 1
            diloco.step()
        return diloco.shared[1].item() / 60

    assert all(0.3 < mean < 0.7 for mean in d2lps.simulate(work, star(2, 1e9)))


def test_what_a_codec_leaves_comes_with_the_next_delta() -> None:
    def work(comm: Communicator, feedback: bool) -> float:
        codec = compress.top_k(0.25)
        weights = torch.zeros(4)
        diloco = DiLoCo(comm, [weights], 1, {"lr": 1.0}, fragments=1, codec=ErrorFeedback(codec) if feedback else codec)
        for _ in range(40):
            weights += torch.tensor([1.0, 2.0, 3.0, 4.0])
            diloco.step()
        return (diloco.shared - 40 * torch.tensor([1.0, 2.0, 3.0, 4.0])).abs().max().item()

    with_it, without = (d2lps.simulate(work, star(2, 1e9), feedback)[0] for feedback in (True, False))
    assert with_it < 20 and without == 120


# ---- what is odd ------------------------------------------------------------------------------------------------------


def test_one_that_ends_early_is_named() -> None:
    def work(comm: Communicator, steps: int) -> None:
        weights = torch.zeros(8)
        diloco = DiLoCo(comm, [weights], every=5)
        for _ in range(steps if comm.rank == 1 else 20):
            diloco.step()

    with pytest.raises(RankHung, match="rank 1 has returned"):
        d2lps.simulate(work, star(3, 1e9), 14)
    assert d2lps.simulate(work, star(3, 1e9), 20) == [None] * 3


def test_steps_beyond_the_last_round_are_a_ranks_own() -> None:
    def work(comm: Communicator) -> list[float]:
        weights = torch.zeros(2)
        diloco = DiLoCo(comm, [weights], 5, {"lr": 1.0})
        for _ in range(10 + comm.rank):  # all make two rounds
            weights += 1
            diloco.step()
        assert diloco.shared.tolist() == [10.0, 10.0]
        return weights.tolist()

    assert d2lps.simulate(work, star(3, 1e9)) == [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]


def test_a_worker_of_the_store_may_end_early() -> None:
    def work(kv: Any, steps: int) -> list[float]:
        weights = torch.zeros(2)
        diloco = DiLoCoWorker(kv, [weights], every=5, outer={"lr": 1.0})
        for _ in range(steps if kv.rank else 10):
            weights += 1 + kv.rank
            diloco.step()
        return weights.tolist()

    run = kvstore.simulate(work, star(3, 1e9), 2, 1, 23)
    # two rounds of both, each 5 x (1 + 2) / 2; two of rank 1 alone, each 5 x 2; three steps of its own
    assert run == [[15.0, 15.0], [41.0, 41.0]]


def test_what_has_no_gradient_stays_and_gradients_stay_too() -> None:
    def work(comm: Communicator) -> bool:
        net = network()
        frozen, before = net[0].weight, net[0].weight.detach().clone()
        frozen.requires_grad_(False)
        optimizer, diloco = adam(net), DiLoCo(comm, net.parameters(), every=2)
        for batch in batches(comm.rank):
            descend(net, optimizer, batch)
            held = net[0].bias.grad.clone()
            diloco.step()
            assert torch.equal(net[0].bias.grad, held) and frozen.grad is None
        return torch.equal(frozen, before)

    assert d2lps.simulate(work, star(2, 1e9)) == [True, True]


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float32", "bfloat16"), ("float16", "float16")])
def test_weights_of_two_dtypes(dtypes: tuple[str, str]) -> None:
    def work(comm: Communicator) -> list[torch.Tensor]:
        parts = [torch.full((3, 2), 2.0, dtype=getattr(torch, dtype)).t() for dtype in dtypes]  # and not contiguous
        diloco, local = DiLoCo(comm, parts, 2, {"lr": 1.0}), LocalSGD(comm, parts, 4)
        for _ in range(4):
            for part in parts:
                part += 1 + 2 * comm.rank
            diloco.step()
            local.step()
        assert [str(part.dtype) for part in parts] == [f"torch.{dtype}" for dtype in dtypes]
        return parts

    for parts in d2lps.simulate(work, star(2, 1e9)):
        assert all((part == 10).all() for part in parts)


def test_who_begins_elsewhere_is_told() -> None:
    def work(comm: Communicator) -> None:
        DiLoCo(comm, [torch.full((2,), float(comm.rank == 1))], every=5)

    with pytest.raises(Mismatch, match="weights"):
        d2lps.simulate(work, star(3, 1e9))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every=0"),
    ({"every": 2.0}, r"every=2\.0"),
    ({"every": 10, "fragments": 3}, "fragments=3"),
    ({"every": 10, "fragments": 0}, "fragments=0"),
    ({"every": 10, "fragments": 5}, "at most the 4 weights"),
    ({"every": 10, "delay": 10}, "delay=10"),
    ({"every": 10, "fragments": 2, "delay": 5}, "the 5 steps"),
    ({"every": 10, "keep": 0.5}, "there must be a delay"),
    ({"every": 10, "delay": 1, "keep": 1.5}, r"keep=1\.5"),
    ({"every": 10, "parameters": []}, "there are none"),
    ({"every": 10, "parameters": [torch.ones(2), torch.ones(2, dtype=torch.int64)]}, r"parameters\[1\] is torch.int64"),
    ({"every": 10, "parameters": ["w"]}, r"parameters\[0\] is 'w'"),
    ({"every": 10, "outer": {"lr": 0.1, "nesterov": True}}, "momentum"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    options = {"parameters": [torch.ones(4)], **options}
    with pytest.raises(ValueError, match=words):
        d2lps.simulate(lambda comm: DiLoCo(comm, **options), star(2, 1e9))


# ---- nobody waits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("period", "activation"), [(1, 0.0), (3, 0.0), (3, 0.2), (4, 0.25)])
def test_delayed_nesterov_is_the_papers_rule(period: int, activation: float) -> None:
    optimizer = make_optimizer("delayed_nesterov", lr=0.7, momentum=0.9, period=period, activation=activation)
    deltas = torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    value, wanted = torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    state, momentum, waiting = optimizer.state(value), torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for turn, delta in enumerate(deltas):
        optimizer.step(value, delta / period, state)
        waiting = waiting + delta
        part = activation
        if (turn + 1) % period == 0:
            momentum, waiting = 0.9 * momentum + waiting / period, torch.zeros(4, dtype=torch.float64)
            part = 1 - activation * period + activation
        wanted = wanted - 0.7 * (part * 0.9 * momentum + delta / period)
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("hyper", [{"period": 0}, {"period": 2, "activation": 0.6}, {"period": 1.5}, {"activation": -0.1}])
def test_delayed_nesterov_refuses(hyper: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="period"):
        make_optimizer("delayed_nesterov", lr=0.7, **hyper)


def test_one_worker_that_waits_for_nobody_is_alone() -> None:
    for optimizer, outer in (("sgd", NESTEROV), ("delayed_nesterov", {"lr": 0.7, "momentum": 0.9})):
        run = kvstore.simulate(
            lambda kv, o=optimizer, h=outer: served(kv, 3, outer=h, optimizer=o), star(2, 1e9), 1, 1, consistency="asp"
        )
        near(run, alone(1, 3))


def race(kv: Any, dynamic: bool, seconds: float, until: float) -> tuple[int, list[float]]:
    """How many steps this worker has made, and when it has pushed."""
    weights, mine = torch.zeros(4), seconds if kv.rank == 0 else 1.0
    every = int(12 / mine) if dynamic else 12
    diloco, steps, pushed = DiLoCoWorker(kv, [weights], every, {"lr": 1.0}), 0, []
    while kv.comm.now() < until:
        kv.comm.sleep(mine)
        steps += 1
        if diloco.step():
            pushed.append(round(kv.comm.now(), 3))
    return steps, pushed


def test_who_is_slow_makes_fewer_steps_and_comes_in_time() -> None:
    bsp, asp, dynamic = (
        kvstore.simulate(race, star(4, 1e9), 3, 1, how, 4.0, 47.5, consistency=consistency)
        for how, consistency in ((False, "bsp"), (False, "asp"), (True, "asp"))
    )
    assert [steps for steps, _ in bsp] == [12, 12, 12]  # all wait for the slowest
    assert [steps for steps, _ in asp] == [steps for steps, _ in dynamic] == [12, 48, 48]
    assert [len(pushed) for _, pushed in asp] == [1, 4, 4]
    assert [pushed for _, pushed in dynamic] == [pytest.approx([12, 24, 36, 48], abs=0.01)] * 3

