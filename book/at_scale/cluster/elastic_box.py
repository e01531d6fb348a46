"""Elastic torchrun in a box: an agent for each machine, all of them here; one is killed, and may come back.

    python elastic_box.py runs/a                three agents; the third is killed with kill -9, and its worker with it
    python elastic_box.py runs/a --back         and a new agent joins later; when it is in, the first is killed: that is the end

An agent starts this machine's workers and watches them. When one is lost, all agents stop their workers, agree on who is there
(the rendezvous), and start them again with new numbers: the script then goes on from its checkpoint. Agent 1 keeps the store in
which they meet: without it, or the machine that it is on, the job is over.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import psutil

TRAIN = Path(__file__).with_name("train.py")
# Without the first, agents and workers share the store in which agents meet, and a new round finds the old one's addresses there.
QUIET = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
# torchrun, which waits for a word when it is loaded: the two that are left should not train for as long as the third loads torch.
TORCHRUN = "import sys; from torch.distributed.run import main; sys.stdin.readline(); main()"
PATIENCE = "last_call_timeout=10,join_timeout=90,keep_alive_interval=1,keep_alive_max_attempt=3"


class Agent:
    """A torchrun, and what its workers print, with the number of the agent before it."""

    def __init__(self, number: int, port: int, lines: Queue[str], script: list[str]) -> None:
        self.number = number
        command = [sys.executable, "-c", TORCHRUN, "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=9"]
        command += ["--rdzv-backend=c10d", "--rdzv-id=box", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += [f"--rdzv-conf={PATIENCE},is_host={number == 1}", "--local-addr=127.0.0.1", *script]
        self.words = tempfile.TemporaryFile("w+")  # its own, and its workers' errors
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.words}
        self.process = subprocess.Popen(command, text=True, env=os.environ | QUIET, **pipes)
        threading.Thread(target=self._read, args=[lines], daemon=True).start()

    def _read(self, lines: Queue[str]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.put(line.rstrip())

    def join(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        """As if the machine had lost its power: the agent and its workers at once, without a word."""
        with contextlib.suppress(psutil.NoSuchProcess):
            everybody = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for process in everybody:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        self.words.seek(0)
        return self.words.read()[-2000:]


def free_port() -> int:
    with socket.socket() as finder:
        finder.bind(("127.0.0.1", 0))
        return finder.getsockname()[1]


def until(lines: Queue[str], word: str, seconds: float) -> Iterator[str]:
    """The lines up to the first that has this word; TimeoutError if it does not come."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimeoutError(f"nobody said {word!r} within {seconds:g} s") from None
        yield line
        if word in line:
            return


def main(folder: str, steps: int, back: bool) -> None:
    lines: Queue[str] = Queue()
    port, script = free_port(), [str(TRAIN), folder, f"--steps={steps}", "--every=4"]
    agents = [Agent(number, port, lines, script) for number in ((1, 2, 3, 4) if back else (1, 2, 3))]
    try:
        for agent in agents[:3]:
            agent.join()
        show(until(lines, "step 6 ", 280))
        print("(kill -9: agent 3 and its worker)", flush=True)
        agents[2].kill()
        show(until(lines, "step 10 ", 280))
        if back:
            print("(a new agent joins)", flush=True)
            agents[3].join()
            show(until(lines, "world size 3", 280))
            show(until(lines, "step ", 280))
            lose_the_store(agents)
        else:
            show(until(lines, f"step {steps} ", 280))
    except (TimeoutError, subprocess.TimeoutExpired):
        for agent in agents:
            print(f"(agent {agent.number} said last)\n{agent.last_words()}", file=sys.stderr)
        raise
    finally:
        for agent in agents:
            agent.kill()


def lose_the_store(agents: list[Agent]) -> None:
    """Kill agent 1, and say what the others that live have to say to it."""
    left = [agent for agent in agents[1:] if agent.process.poll() is None]
    print("(kill -9: agent 1, which keeps the store)", flush=True)
    agents[0].kill()
    for agent in left:
        status = agent.process.wait(280)
        error = re.findall(r"\w+Error\b", agent.last_words())[-1:]
        print(f"(agent {agent.number} ends with status {status}:", *error, end=")\n", flush=True)


def show(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--back", action="store_true", help="until three are there again: steps enough for that")
    given = parser.parse_args()
    if Path(given.folder).exists() and os.listdir(given.folder):
        parser.error(f"a new folder: {given.folder} has a run in it already, which would only go on")
    main(given.folder, 100_000 if given.back else given.steps, given.back)
