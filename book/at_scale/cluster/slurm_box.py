"""Slurm in a box: a controller and some nodes, all of them processes of this machine, for as long as a command runs.

    python slurm_box.py sbatch --wait job.sbatch        four nodes of two processors; needs root
    apt-get install slurmctld slurmd slurm-client munge     what it needs, from Debian

Everything is real but the nodes: each is a slurmd with a name and a port of its own on the loopback interface, where a cluster
has one on each machine. What they write lies in a folder that goes with them.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo")
CONFIGURATION = """
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
# No control groups and no accounting: a container may have neither.
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# A node that has been silent for six seconds is down, and its jobs go back into the queue.
SlurmdTimeout=6
ReturnToService=2
KillWait=2
MinJobAge=300
SlurmdParameters=config_overrides
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=2000
PartitionName=all Nodes=n[1-{nodes}] Default=YES State=UP
"""


def why_not() -> str:
    """What keeps this machine from having Slurm in a box; "" if nothing does."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "only root can start Slurm's daemons"


@contextlib.contextmanager
def slurm_box(nodes: int = 4, port: int = 16817) -> Iterator[dict[str, str]]:
    """The environment for commands of Slurm, while its daemons run; RuntimeError, with what their logs say, if they don't."""
    if reason := why_not():
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        write_configuration(folder, nodes, port)
        for command in daemons(folder, nodes):
            ends.enter_context(daemon(command, environment))
        wait_for_nodes(nodes, environment, folder)
        yield environment


def write_configuration(folder: Path, nodes: int, port: int) -> None:
    for below in ("state", "munge", *(f"n{number}" for number in range(1, nodes + 1))):
        (folder / below).mkdir()
    folder.chmod(0o755)  # munged wants a folder that nobody else can write
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    host = os.uname().nodename.split(".")[0]
    told = CONFIGURATION.format(folder=folder, host=host, nodes=nodes, port=port, first=port + 1, last=port + nodes)
    (folder / "slurm.conf").write_text(told)


def daemons(folder: Path, nodes: int) -> Iterator[list[str]]:
    """Each in the foreground (-D, -F), so that it is our child, and ends when it is told."""
    files = {name: folder / "munge" / name for name in ("key", "socket", "pid", "log", "seed")}
    options = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
    yield ["munged", "--foreground", "--force", *(f"--{options[name]}={path}" for name, path in files.items())]
    yield ["slurmctld", "-D"]
    for number in range(1, nodes + 1):
        yield ["slurmd", "-D", "-N", f"n{number}"]


@contextlib.contextmanager
def daemon(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(command, env=environment, **options)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_nodes(nodes: int, environment: dict[str, str], folder: Path, seconds: float = 30.0) -> None:
    ask, deadline = ["sinfo", "--noheader", "--Node", "--states=idle"], time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = subprocess.run(ask, env=environment, capture_output=True, text=True)
        if len(answer.stdout.splitlines()) == nodes:
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text()[-1000:] for path in sorted(folder.glob("*.log")))
    raise RuntimeError(f"after {seconds} s not all of {nodes} nodes are idle:\n{answer.stdout}{answer.stderr}{logs}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} COMMAND...")
    if reason := why_not():
        sys.exit(reason)
    with slurm_box() as environment:
        sys.exit(subprocess.run(sys.argv[1:], env=environment).returncode)
