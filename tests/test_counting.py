"""What torch computes in a block that is counted: FLOP against torch's own formulas and by hand, bytes by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import d2lps
from d2lps import Communicator
from d2lps.simulator.counting import Counting
from d2lps.topology import Device, star

CHIP = Device(flops=1e12, memory=1e9, memory_bandwidth=1e15)


def counted(call: Callable[[], Any]) -> tuple[float, float]:
    with Counting() as counting:
        call()
    return counting.flops, counting.bytes


# ---- FLOP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_in_one_operation_is_counted_as_its_products(heads: int) -> None:
    """On a CPU, where torch has no formula; the oracle is what it counts of its parts."""
    query, key = (torch.ones(2, count, 64, 16, requires_grad=True) for count in (4, heads))

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=heads < 4)

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as products:
        attend()
    forward = products.get_total_flops()
    assert counted(attend)[0] == forward
    out = attend()
    backward = counted(lambda: out.backward(torch.ones_like(out)))[0]
    assert 5 / 2 * forward <= backward <= 2.6 * forward  # and some elements for the sums of gradients


LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda **on: nn.LSTM(64, 32, num_layers=2, **on), (5, 4, 64)),
    "two ways": (lambda **on: nn.LSTM(64, 32, bidirectional=True, **on), (5, 4, 64)),
    "encoder": (lambda **on: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **on).eval(), (2, 16, 64)),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_one_operation_is_counted_as_its_parts(name: str, gradients: bool) -> None:
    """A CPU has them in one; on "meta" they come in parts, which have the sums of the parts besides."""
    make, shape = LAYERS[name]
    found = []
    for device in ("cpu", "meta"):
        layer, x = make(device=device), torch.ones(shape, device=device, requires_grad=gradients)

        def compute(layer: Any = layer, x: torch.Tensor = x) -> None:
            out = layer(x)
            out = out[0] if isinstance(out, tuple) else out
            if gradients:
                out.sum().backward()

        with torch.set_grad_enabled(gradients):
            found.append(counted(compute)[0])
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_in_the_inference_mode_as_much_is_computed_as_without_gradients() -> None:
    x, layer, heads = torch.ones(8, 100), nn.Linear(100, 50), torch.ones(2, 4, 32, 16)
    for call in (lambda: layer(x), lambda: x @ x.t(), lambda: x.t().contiguous(),
                 lambda: scaled_dot_product_attention(heads, heads, heads)):  # fmt: skip
        with torch.no_grad():
            without = counted(call)
        with torch.inference_mode():
            assert counted(call) == without


matrix, batch, vector = torch.ones(32, 32), torch.ones(4, 32, 32), torch.ones(32)
half, ends = torch.ones(2, 32, 32, dtype=torch.bfloat16), torch.tensor([8, 32], dtype=torch.int32)
PRODUCTS: dict[str, tuple[Callable[[], Any], int]] = {
    "addmm_": (lambda: matrix.addmm_(matrix, matrix), 2 * 32**3),
    "baddbmm_": (lambda: batch.baddbmm_(batch, batch), 4 * 2 * 32**3),
    "addbmm": (lambda: torch.addbmm(matrix, batch, batch), 4 * 2 * 32**3),
    "mv": (lambda: matrix @ vector, 2 * 32**2),
    "addmv": (lambda: torch.addmv(vector, matrix, vector), 2 * 32**2),
    "dot": (lambda: vector.dot(vector), 2 * 32),
    "rows in groups": (lambda: torch._grouped_mm(half[0], half, offs=ends), 2 * 32**3),
    "sums in groups": (lambda: torch._grouped_mm(half[0], half[0], offs=ends), 2 * 32**3),
    "columns in groups": (lambda: torch._grouped_mm(half, half[0], offs=ends), 2 * 32**3),
    "matrices": (lambda: torch._grouped_mm(half, half), 2 * 2 * 32**3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_products(name: str) -> None:
    call, flops = PRODUCTS[name]
    try:
        found = counted(call)[0]
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this torch: {error}")
    assert found == flops


# ---- bytes ------------------------------------------------------------------------------------------------------------

table, ids, x, y, ones = torch.ones(5000, 16), torch.arange(8), torch.ones(1000), torch.ones(1000), torch.ones(10, 50)


@pytest.mark.parametrize(("call", "nbytes"), [
    (lambda: nn.functional.embedding(ids, table), 8 * 8 + 2 * 8 * 64),  # numbers of rows; the rows, read and written
    (lambda: table[ids], 8 * 8 + 2 * 8 * 64),
    (lambda: table.index_select(0, ids), 8 * 8 + 2 * 8 * 64),
    (lambda: x.add_(y), 3 * 4000),
    (lambda: torch.add(x, y, out=x), 3 * 4000),
    (lambda: torch.add(x, x, out=y), 3 * 4000),
    (lambda: x.copy_(y), 2 * 4000),
    (lambda: x.zero_(), 4000),
    (lambda: torch.empty(1000), 0),
    (lambda: x.view(10, 100), 0),
    (lambda: linear(x.view(2, 10, 50), ones), 4000 + 2000 + 800),
    (lambda: torch._foreach_mul_([x, y], 2.0), 2 * 2 * 4000),
])  # fmt: skip
def test_what_is_read_and_written_is_counted_and_nothing_else(call: Callable[[], Any], nbytes: int) -> None:
    assert counted(call)[1] == nbytes


def test_an_optimizers_step_is_its_operations() -> None:
    for together in (False, True):
        weight = nn.Parameter(torch.ones(1000))
        weight.grad = torch.ones(1000)
        optimizer = torch.optim.SGD([weight], lr=0.1, foreach=together)
        with Counting() as counting:
            optimizer.step()
        assert counting.take() == (1000, 3 * 4000, 1)


def test_sparse_gradients_are_as_large_as_what_they_hold() -> None:
    rows = nn.Embedding(5000, 16, sparse=True)
    assert counted(lambda: rows(ids).sum().backward())[1] < 5000


# ---- in a simulation --------------------------------------------------------------------------------------------------


def test_blocks_within_one_another_are_paid_once() -> None:
    a = torch.ones(100, 100)  # a product takes 2 us

    def within(comm: Communicator, **numbers: float) -> None:
        with comm.compute("outer"):
            a @ a
            with comm.compute("inner", **numbers):
                a @ a
            a @ a

    for numbers in ({}, {"flops": 2e6}):
        run = d2lps.simulate(lambda comm, numbers=numbers: within(comm, **numbers), star(1, 1e9, 0, CHIP))
        assert run.time == pytest.approx(6e-6)


def test_readers_own_modes_see_backward_passes() -> None:
    def flops(comm: Communicator) -> int:
        a = torch.ones(10, 10, requires_grad=True)
        with FlopCounterMode(display=False) as seen:
            (a @ a).sum().backward()
        return int(seen.get_total_flops())

    assert d2lps.simulate(flops, star(1, 1e9))[0] == 3 * 2 * 10**3
