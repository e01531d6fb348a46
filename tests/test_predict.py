"""Steps predicted: against what runs, what is simulated message by message, and what was published."""

from __future__ import annotations

import pytest

import d2lps
from d2lps.parallel import measured
from d2lps.topology import Device, star


def test_a_described_machine_is_measured_as_described() -> None:
    wanted = star(4, 3e9, 2e-4, Device(5e10, 1e9, 1e10))
    found = d2lps.simulate(measured, wanted, trace=False)[3]
    assert found.bandwidth == pytest.approx(wanted.bandwidth, rel=1e-9)
    assert found.latency == pytest.approx(wanted.latency, rel=1e-9)
    device = found.device("gpu3")
    assert (device.flops, device.memory_bandwidth) == pytest.approx((5e10, 1e10), rel=1e-9)


def test_one_rank_alone_has_no_link_to_measure() -> None:
    with pytest.raises(ValueError, match="one rank alone"):
        d2lps.simulate(measured, star(1, 1e9))
