"""Parameter servers in a job of torchrun, or of any launcher, on one machine and on several."""

# ruff: noqa: F401, F811 - fixtures are imported, and named again as parameters

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import zmq
from launching import ending, environment, script, until
from test_hosts import HOSTS, cables, start

from d2lps import kvstore
from d2lps.comm import RankHung
from d2lps.kvstore import Request
from d2lps.kvstore.network.deployment import deploy
from d2lps.kvstore.network.serving import serving
from d2lps.kvstore.network.sockets import connect
from d2lps.kvstore.network.wire import Wire

SCRIPT = """
import json, os, sys
import torch
from d2lps import kvstore
from d2lps.topology import star

def worker(kv, steps):
    big, small = torch.zeros(300, 100), torch.zeros(3)
    kv.init("big", big)
    kv.init("small", small)
    kv.set_optimizer("sgd", lr=0.5, momentum=0.9)
    for step in range(steps):
        kv.push("big", torch.full((300, 100), float(kv.rank + step)))
        kv.push("small", torch.full((3,), 0.1 * (kv.rank + 1)))
        kv.clock()
        kv.pull("big", big).wait()
        kv.pull("small", small).wait()
    if kv.rank == 0:
        kv.comm.send(small, dst=1)
    elif kv.rank == 1:
        kv.comm.recv(small, src=0)
    return big.unique().tolist(), small.tolist()

def told(**options):
    try:
        kvstore.run(worker, WORKERS, SERVERS, 1, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    refused = [told(durability="log"), told(saboteur=print), told(address="tcp://1.2.3.4")]
    run = kvstore.run(worker, WORKERS, SERVERS, 4, split=10_000, **options)
    wanted = kvstore.simulate(worker, star(WORKERS + SERVERS, 1e9, 1e-6), WORKERS, SERVERS, 4, split=10_000)
    values = all(torch.equal(run.values[key], wanted.values[key]) for key in wanted.values)
    sent = [server.sent for server in run.servers] == [server.sent for server in wanted.servers]
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as notes:
        json.dump([run.results == wanted.results, values, sent, run.time > 0, refused], notes)
"""


def notes(folder: Path, ranks: int) -> list[list[object]]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


def prepared(folder: Path, workers: int, servers: int, options: dict[str, str]) -> list[str]:
    code = SCRIPT.replace("WORKERS", str(workers)).replace("SERVERS", str(servers))
    return [*script(folder / "job.py", code)[1:], str(folder), json.dumps(options)]


def served(patience: float, living: float) -> kvstore.ServerReport:
    """A server without a coordinator, whose only worker comes, says hello, and `living` seconds later has gone without a word."""
    plan = deploy(1, 1, address="tcp")

    def visit(endpoint: str) -> None:
        with zmq.Context[zmq.Socket[bytes]]() as context:
            socket = connect(context, endpoint, b"0.0", plan.largest, plan.keys)
            for sequence, op in ((1, "barrier"), *([(2, "leave")] if living else [])):
                sleep(living if op == "leave" else 0)
                socket.send_multipart(next(Wire(plan.limit).packed([Request(op, sequence=sequence)])))
                while socket.recv_multipart() == [b""]:  # is anybody there?
                    pass
            socket.close()

    with serving(plan, 0, plan.endpoint(0)) as server:
        thread = threading.Thread(target=visit, args=[server.endpoint])
        thread.start()
        try:
            return server.serve(patience)
        finally:
            thread.join()


def test_a_server_ends_when_its_workers_are_out_of_reach() -> None:
    with pytest.raises(RankHung, match=r"server 0: nothing has come for 1 s, and workers \[0\] are out of reach"):
        served(patience=1, living=0)


def test_a_server_waits_for_a_worker_that_is_only_silent() -> None:
    assert served(patience=0.2, living=2).requests == {"barrier": 1, "leave": 1}


def test_roles_by_rank_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "5"]
    clean = environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    subprocess.run([*torchrun, *prepared(tmp_path, 3, 2, {})], check=True, env=clean, timeout=250)
    for same, values, sent, time, (durability, saboteur, address) in notes(tmp_path, 5):
        assert same and values and sent and time
        assert "durability='log': under a launcher, which starts nobody again" in durability
        assert "saboteur=<built-in function print>: under a launcher, which starts nobody again" in saboteur
        assert "each server listens where its machine is reached" in address


@pytest.mark.parametrize("budget", [None, 1000])
def test_a_job_that_fails_leaves_no_folder(tmp_path: Path, budget: int | None) -> None:
    """A launcher ends the other processes, a server's among them, by a signal."""
    code = f"""
        import torch
        from d2lps import kvstore

        def worker(kv):
            for key in "abc":
                kv.init(key, torch.zeros(200))
            kv.pushpull("a", torch.ones(200), torch.zeros(200)).wait()
            raise ArithmeticError("that is the end")

        if __name__ == "__main__":
            kvstore.run(worker, 1, 1, memory_budget={budget})
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options: dict[str, Any] = {"env": environment(OMP_NUM_THREADS="1", TMPDIR=str(temporary)), "timeout": 250}
    told = subprocess.run([*torchrun, *script(tmp_path / "job.py", code)[1:]], stderr=subprocess.PIPE, text=True, **options)
    assert told.returncode and "that is the end" in told.stderr
    assert until(lambda: not list(temporary.glob("d2lps-*"))), list(temporary.iterdir())


def test_hosts_that_meet_by_the_other_internet_protocol(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    code = """
        import os, torch
        from d2lps import kvstore

        def worker(kv):
            kv.init("w", w := torch.zeros(3))
            kv.pushpull("w", torch.ones(3), w).wait()
            return w.tolist()

        if __name__ == "__main__":
            print(kvstore.run(worker, 2, 1).results)
    """
    with socket.socket(socket.AF_INET6) as free:
        free.bind(("::1", 0))
        port = str(free.getsockname()[1])
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "::1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = script(tmp_path / "job.py", code)
    processes = [subprocess.Popen(command, env=environment(RANK=str(rank), **job), **options) for rank in range(3)]
    with ending(processes):
        told = [process.communicate(timeout=100)[0] for process in processes]
    assert told == ["[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]\n"] * 3


SAVING = """
import json, os, signal, sys
import torch
from d2lps import kvstore
from d2lps.kvstore.core import saving

folder, rank = sys.argv[1], os.environ["RANK"]

def die(path, tensors, meta):
    with saving.disk.drafted(saving.Path(path)) as draft:
        draft.write_text("half of it")
        os.kill(os.getpid(), signal.SIGKILL)

def worker(kv):
    heard, out = [], torch.zeros(4)
    kv.init("w", torch.ones(4))
    for what, name in [("save", "missing/file"), ("load", "nothing"), ("save", "file"), ("load", "file")]:
        try:
            getattr(kv, what)(f"{folder}/{name}")
            heard.append("returned")
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    kv.pull("w", out).wait()
    return [*heard, out.tolist()]

def killed(kv):
    kv.init("w", torch.ones(4))
    kv.barrier()
    saving.write = die
    kv.save(f"{folder}/killed")

if __name__ == "__main__":
    found = kvstore.run(worker, 3, 2).results
    with open(f"{folder}/{rank}", "w") as notes:
        json.dump(found, notes)
    kvstore.run(killed, 3, 2)
"""


def test_all_hear_what_came_of_a_save_and_of_one_that_is_killed_nothing_is_left(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "5"]
    options: dict[str, Any] = {"env": environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)), "timeout": 250}
    command = [*torchrun, *script(tmp_path / "job.py", SAVING)[1:], str(saved)]
    told = subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)
    assert told.returncode and "Signal 9 (SIGKILL)" in told.stderr
    for found in notes(saved, 5):
        assert found == [found[0]] * 3
        missing, nothing, *well = found[0]
        assert missing.startswith("FileNotFoundError: ") and "missing" in missing
        assert nothing.startswith("FileNotFoundError: ") and "nothing" in nothing
        assert well == ["returned", "returned", [1.0] * 4]
    assert until(lambda: sorted(path.name for path in saved.iterdir()) == [*"01234", "file"]), list(saved.iterdir())


def test_on_several_machines_with_a_secret_of_the_jobs_own(cables: None, tmp_path: Path) -> None:
    processes = start([sys.executable, *prepared(tmp_path, 2, HOSTS - 2, {})])
    with ending(processes):
        assert [process.wait(100) for process in processes] == [0] * HOSTS
    for same, values, sent, time, _ in notes(tmp_path, HOSTS):
        assert same and values and sent and time
