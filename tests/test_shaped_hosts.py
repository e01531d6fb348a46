"""Predicted and measured on real hosts: Linux network namespaces, joined by a bridge, each link shaped to 50 Mb/s.

A cluster in a box. Every host has a network stack of its own and runs one process of an env:// job, as it would under
torchrun; `tc tbf` lets only so many bytes a second into each end of its cable. So few that the machine's processor does not
matter: the kernel passes them on, and a process that must wait for a core when a message ends loses some milliseconds of a
step of 80 or more. Needs root, and a kernel with the parts.
This file is both: the test, and (run as a script) the job on the hosts.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import d2lps
from d2lps import Communicator
from d2lps.collectives import all_reduce

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "at_scale" / "cluster"))

from host_box import MEGABITS, SHAPE, address, enter, inside, shaped_hosts, why_not  # noqa: E402, F401

pytestmark = pytest.mark.slow

QUIET = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses without names: no news
FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame, and of our data in it: tbf counts the former
SIZES = [3, 5, 8]  # how many of the hosts take part
BANDWIDTH = MEGABITS / 8 * 1e6 * PAYLOAD / FRAME
# How many elements each algorithm adds up, so that it takes about a second; and how often it is measured.
ELEMENTS = {"ring": 1_000_000, "one_server": 200_000, "all_servers": 300_000}
REPEATED = {"ring": 3, "one_server": 1, "all_servers": 1}


# ---- what the ranks do, in both worlds ----------------------------------------------------------------------------------


def ring(comm: Communicator, device: str) -> None:
    all_reduce(comm, torch.ones(ELEMENTS["ring"], device=device), algorithm="ring")


def one_server(comm: Communicator, device: str) -> None:
    """All others send to rank 0, which adds up and sends the sum back."""
    tensor, others = torch.ones(ELEMENTS["one_server"], device=device), range(1, comm.size)
    if comm.rank:
        comm.send(tensor, 0)
        comm.recv(tensor, 0)
        return
    received = [torch.empty_like(tensor) for _ in others]
    for work in [comm.irecv(into, src) for into, src in zip(received, others, strict=True)]:
        work.wait()
    for incoming in received[1:]:
        comm.combine(received[0], incoming)
    for work in [comm.isend(received[0], dst) for dst in others]:
        work.wait()


def all_servers(comm: Communicator, device: str) -> None:
    all_reduce(comm, torch.ones(ELEMENTS["all_servers"], device=device), algorithm="blockwise")


def ping_pong(comm: Communicator, device: str) -> float:
    """Seconds that a message of four bytes takes from rank 0 to rank 1."""
    ball, trips = torch.zeros(1), []
    for _ in range(40):
        start = comm.now()
        for src in (0, 1):
            if comm.rank == src:
                comm.send(ball, 1 - src)
            elif comm.rank < 2:
                comm.recv(ball, src)
        trips.append((comm.now() - start) / 2)
    return statistics.median(trips)


ALGORITHMS: dict[str, Callable[[Communicator, str], None]] = {"ring": ring, "one_server": one_server, "all_servers": all_servers}


def job(rank: int, size: int, host: str) -> dict[str, float]:
    """One host's process: the latency, and the median time of each algorithm."""
    become(rank, size, host, 29400 + size)
    measured = {"hosts": size, "latency": d2lps.run(ping_pong, size, "cpu").results[0]}
    for name, algorithm in ALGORITHMS.items():
        # Of several, the fastest: whatever else this machine does can only add to it.
        measured[name] = min(d2lps.run(algorithm, size, "cpu").time for _ in range(REPEATED[name]))
    return measured


def become(rank: int, size: int, host: str, port: int) -> None:
    """Make this process that rank of a job whose first one listens at `port`, and move it to its host."""
    enter(host)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address(0), "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    # TCP that backs off when packets are dropped, and that every kernel has; each namespace has its own setting.
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    torch.set_num_threads(1)


def forked(jobs: Iterable[Callable[[], Any]]) -> None:
    """Do each in a process of its own (torch is imported once), and print what the first one gives."""
    children = []
    for rank, each in enumerate(jobs):
        children.append(os.fork())
        if not children[-1]:
            measured = each()
            if rank == 0:
                print(json.dumps(measured), flush=True)
            os._exit(0)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)


def main(hosts: list[str]) -> None:
    """For some of the hosts, and for more."""
    for size in SIZES:
        forked(partial(job, rank, size, host) for rank, host in enumerate(hosts[:size]))


def on_hosts(script: str, count: int, shape: str) -> None:
    """Start a script again, on shaped hosts, whose names it is told."""
    print(shape, flush=True)
    with shaped_hosts(count, shape) as hosts:
        subprocess.run([sys.executable, script, "hosts", *hosts], env=os.environ | QUIET, check=True, timeout=600)


def measure(hosts: list[str], script: str = __file__) -> list[dict[str, float]]:
    """Run a file, or this one, as the job on the hosts: what came of it, of this one by size."""
    command = [sys.executable, script, *hosts]
    process = subprocess.Popen(command, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=250)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.exit()


# ---- the tests ------------------------------------------------------------------------------------------------------------

import pytest  # noqa: E402

from d2lps.simulator import simulate  # noqa: E402
from d2lps.topology import star  # noqa: E402


@pytest.fixture(scope="module")
def all_measured() -> list[dict[str, float]]:
    if reason := why_not():
        pytest.skip(reason)
    with shaped_hosts(max(SIZES)) as hosts:
        return measure(hosts)


@pytest.fixture(params=SIZES)
def measured(request: pytest.FixtureRequest, all_measured: list[dict[str, float]]) -> dict[str, float]:
    return all_measured[SIZES.index(request.param)]


def predicted(name: str, measured: dict[str, Any]) -> float:
    cluster = star(measured["hosts"], BANDWIDTH, measured["latency"] / 2)
    return simulate(ALGORITHMS[name], cluster, "meta", device="meta", trace=False).time


@pytest.mark.parametrize("name", ["ring", "one_server"])
def test_real_hosts_take_as_long_as_predicted(name: str, measured: dict[str, float]) -> None:
    assert measured[name] == pytest.approx(predicted(name, measured), rel=0.1)


def test_incast_makes_blockwise_slower_than_predicted(measured: dict[str, float]) -> None:
    # n - 1 streams meet at each host, and overrun its link's queue: TCP backs off, which no max-min fairness knows of.
    assert measured["all_servers"] > predicted("all_servers", measured)


@pytest.mark.usefixtures("all_measured")
def test_nothing_of_the_hosts_is_left() -> None:
    with pytest.raises(ZeroDivisionError), shaped_hosts(2) as hosts:
        assert set(hosts) <= namespaces()
        raise ZeroDivisionError  # not even when something goes wrong
    assert not [name for name in namespaces() if name.startswith(f"d2lps-{os.getpid()}")]


def namespaces() -> set[str]:
    """The names of all network namespaces of this machine."""
    return set(os.listdir("/var/run/netns"))
