"""Hosts in a box: network namespaces of this machine, joined by a bridge, each on a cable of 50 Mb/s; needs Linux and root.

    python host_box.py 3 python train.py runs/a     the command on each of three hosts, as the ranks of one job
    python host_box.py 2 --shape "tbf rate 1gbit burst 1mb latency 40ms" python train.py runs/a

A host has a network stack of its own: addresses, ports, routes. Everything else it shares with this machine: files, processors
and memory. `tc` lets only so many bytes a second into each end of a cable, as a port of a switch would.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

MEGABITS = 50
# A bucket of 32 KB is 5 ms of the link: with less, a busy machine that looks at it too late wastes it; with more, it would
# no longer shape messages of 25 ms. The queue holds 40 ms, 250 KB as that of a switch would, and drops what is more.
SHAPE = f"tbf rate {MEGABITS}mbit burst 32kb latency 40ms"


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


def inside(host: str, command: str) -> None:
    ip(f"netns exec {host} {command}")


def enter(host: str) -> None:
    """Move this process to another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{host}") as namespace:
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")


@contextlib.contextmanager
def shaped_hosts(count: int, shape: str = SHAPE) -> Iterator[list[str]]:
    """So many namespaces, joined by a bridge that lives in one more; nothing of it is left at the end."""
    prefix = f"d2lps-{os.getpid()}"
    switch, hosts = f"{prefix}-switch", [f"{prefix}-host{index}" for index in range(count)]
    try:
        for name in (switch, *hosts):
            ip(f"netns add {name}")
            inside(name, "ip link set lo up")
        inside(switch, "ip link add bridge type bridge")
        inside(switch, "ip link set bridge up")
        for index, host in enumerate(hosts):
            ip(f"link add eth0 netns {host} type veth peer name port{index} netns {switch}")
            inside(host, f"ip address add {address(index)}/24 dev eth0")
            inside(switch, f"ip link set port{index} master bridge")
            for name, end in ((host, "eth0"), (switch, f"port{index}")):
                inside(name, f"ip link set {end} up")
                inside(name, f"tc qdisc add dev {end} root {shape}")
        yield hosts
    finally:
        for name in (*hosts, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@functools.cache
def why_not() -> str:
    """What keeps this machine from having hosts in a box; "" if nothing does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"there is no `{tool}`: install iproute2"
    try:
        with shaped_hosts(2):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` fails: {error.stderr.strip()}"


def on_all(hosts: Sequence[str], command: Sequence[str]) -> int:
    """Run a command on each host, with the variables of a job; the first status that is not 0, and then nobody is left."""
    job = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": address(0), "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": "eth0"}
    processes = [
        subprocess.Popen(["ip", "netns", "exec", host, *command], env=os.environ | job | {"RANK": str(rank)})
        for rank, host in enumerate(hosts)
    ]
    try:
        while None in (states := [process.poll() for process in processes]) and not any(states):
            time.sleep(0.1)
        return next((state for state in states if state), 0)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts", type=int)
    parser.add_argument("--shape", default=SHAPE, help="of each link, in the words of `tc qdisc`")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not (0 < given.hosts < 254 and given.command):
        parser.error(f"a number of hosts from 1 to 253, and a command, not {given.hosts} and {' '.join(given.command) or 'none'}")
    if reason := why_not():
        sys.exit(reason)
    with shaped_hosts(given.hosts, given.shape) as hosts:
        sys.exit(on_all(hosts, given.command))
