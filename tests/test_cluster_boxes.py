"""The engines that clusters run, for real on this machine: Slurm, elastic torchrun, Envoy, and what judges Kubernetes' files.

The book does not need them: where one is missing, its tests are skipped with the reason. `.ci/run` installs them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import environment, output_of, until

# Of a test: on a busy machine, starting Python with torch takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BOXES = Path(__file__).parents[1] / "book" / "at_scale" / "cluster"
sys.path.insert(0, str(BOXES))

import elastic_box  # noqa: E402
import host_box  # noqa: E402
import manifests  # noqa: E402
import sidecar_box  # noqa: E402
import slurm_box  # noqa: E402


def losses(text: str) -> dict[int, str]:
    """{step: loss} of what train.py printed; a step that was done twice must have had the same loss."""
    found: dict[int, str] = {}
    for step, loss in re.findall(r"^(?:rank 0 \| )?step (\d+) loss (\S+)$", text, re.MULTILINE):
        assert found.setdefault(int(step), loss) == loss, f"step {step} had another loss when it was done again"
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of one process that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return losses(output_of([sys.executable, str(BOXES / "train.py"), str(folder), "--steps", "14"]))


# ---- Slurm --------------------------------------------------------------------------------------------------------------


class Queue:
    """A job of Slurm's, and what can be done to it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.output, script = folder / "output", str(BOXES / "train.py")
        self.environment = environment | {"PYTHON": sys.executable, "SCRIPT": script}
        told = ["sbatch", "--parsable", f"--output={self.output}", str(BOXES / "job.sbatch"), str(folder / "run")]
        self.job = self.ask(*told, "--steps", "14").strip()

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def state(self) -> str:
        return self.ask("squeue", "--noheader", "--states=all", f"--jobs={self.job}", "--format=%T").strip()

    def said(self, words: str, times: int = 1) -> Callable[[], bool]:
        return lambda: self.output.exists() and self.output.read_text().count(words) >= times

    def start_again(self) -> None:
        """A job that goes back into the queue waits two minutes there, which need not be."""
        assert until(lambda: self.state() == "PENDING", 120), self.state()
        self.ask("scontrol", "update", f"JobId={self.job}", "StartTime=now")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if reason := slurm_box.why_not():
        pytest.skip(reason)
    with slurm_box.slurm_box() as variables:
        yield environment() | variables


def test_a_job_of_slurms_survives_preemption_and_the_loss_of_a_node(
    slurm: dict[str, str], undisturbed: dict[int, str], tmp_path: Path
) -> None:
    queue = Queue(tmp_path, slurm)
    assert until(queue.said("step 3 "), 280), queue.output.read_text()
    queue.ask("scancel", "--signal=USR1", queue.job)  # as --signal does ahead of the end of a job's time
    queue.start_again()
    assert until(queue.said("world size 4", 2), 280), queue.output.read_text()
    queue.ask("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    queue.start_again()
    assert until(lambda: queue.state() in ("COMPLETED", "FAILED"), 280)
    assert queue.state() == "COMPLETED" and "Restarts=2" in queue.ask("scontrol", "show", "job", queue.job)
    found = losses(queue.output.read_text())  # a line may be lost with the node
    assert found.items() <= undisturbed.items() and max(found) == 14


def test_slurm_admits_a_job_whole_or_not_at_all(slurm: dict[str, str]) -> None:
    """A gang: eight processors are there, two jobs want six each, and each needs all of its own."""
    ask = ["sbatch", "--parsable", "--ntasks=6", "--output=/dev/null", "--wrap", "srun sleep 1"]
    jobs = [subprocess.run(ask, env=slurm, check=True, capture_output=True, text=True).stdout.strip() for _ in range(2)]
    states = ["squeue", "--noheader", f"--jobs={','.join(jobs)}", "--sort=i", "--format=%T"]
    seen = set()

    def over() -> bool:
        now = subprocess.run(states, env=slurm, capture_output=True, text=True).stdout.split()
        seen.add(tuple(now))
        return "RUNNING" not in now and "PENDING" not in now

    assert until(over, 120)
    assert ("RUNNING", "PENDING") in seen and ("RUNNING", "RUNNING") not in seen


# ---- Envoy --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pod() -> Iterator[list[str]]:
    if reason := sidecar_box.why_not():
        pytest.skip(reason)
    with sidecar_box.pod() as inside:
        sidecar_box.redirect(inside)
        yield inside


def in_pod(inside: list[str], script: str, *words: str) -> str:
    command = [*inside, sys.executable, str(BOXES / script), *words]
    return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True, timeout=280).stdout


def test_the_store_works_through_a_sidecar_that_it_does_not_know(pod: list[str]) -> None:
    with sidecar_box.sidecar(pod, BOXES / "envoy_tcp.yaml"):
        assert "ms for 4 MB" in in_pod(pod, "push.py")
        counted = dict(re.findall(r"^tcp\.store\.(\w+): (\d+)$", sidecar_box.ask(pod, "stats"), re.MULTILINE))
    assert int(counted["downstream_cx_rx_bytes_total"]) > 30 * 4e6  # all of it went through


def test_a_sidecar_limits_connections_and_their_rate_and_ejects_in_name_only(pod: list[str]) -> None:
    with sidecar_box.sidecar(pod, BOXES / "envoy_tcp.yaml"):
        told = in_pod(pod, "knock.py", "tcp").splitlines()
    rate, limit, gone, back = (line[25:].split() for line in told)
    assert re.fullmatch(r"\.{20,29}x+", rate[0]) and limit == ["........xxxx"]  # 20 a second; 8 at a time
    assert gone[0] == "xxxxx" and back[0] == "....." and gone[-1] == back[-1] == "1"


def test_requests_beyond_a_rate_or_a_number_are_turned_away_and_a_broken_replica_is_left_out(pod: list[str]) -> None:
    with sidecar_box.sidecar(pod, BOXES / "envoy_http.yaml"):
        told = in_pod(pod, "knock.py").splitlines()
    rate, ejected, breaker = (line[25:] for line in told)
    statuses = eval(rate)
    assert set(statuses) == {200, 429} and 60 <= statuses[200] < 100 and sum(statuses.values()) == 100
    assert re.fullmatch(r"\.*(x\.+){3}", ejected)  # one in two, three times, then none
    served = eval(breaker)  # four at a time, and two wait until a connection is there
    assert set(served) == {200, 503} and 4 <= served[200] <= 6 and sum(served.values()) == 12


def test_nothing_is_left_of_the_boxes(pod: list[str]) -> None:
    assert subprocess.run(["pgrep", "envoy"], capture_output=True).returncode == 1
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert [name for name in names.split() if name.startswith("pod-")] == [f"pod-{os.getpid()}"]


# ---- elastic torchrun ---------------------------------------------------------------------------------------------------


def test_elastic_torchrun_goes_on_with_the_machines_that_are_left(undisturbed: dict[int, str], tmp_path: Path) -> None:
    text = output_of([sys.executable, str(BOXES / "elastic_box.py"), str(tmp_path / "run")])
    assert re.findall(r"world size (\d)", text) == ["3", "2"]
    assert losses(text) == undisturbed


# ---- hosts --------------------------------------------------------------------------------------------------------------


def test_a_command_runs_on_each_host_and_ends_with_the_first_that_fails(undisturbed: dict[int, str], tmp_path: Path) -> None:
    if reason := host_box.why_not():
        pytest.skip(reason)
    box = [sys.executable, str(BOXES / "host_box.py"), "3"]
    train = [sys.executable, str(BOXES / "train.py"), str(tmp_path / "run"), "--steps", "14"]
    assert losses(output_of([*box, *train])) == undisturbed
    done = subprocess.run([*box, "sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 1000"], timeout=60)
    assert done.returncode == 7


# ---- Kubernetes ---------------------------------------------------------------------------------------------------------

MANIFESTS = sorted((BOXES / "kubernetes").glob("*.yaml"))


@pytest.fixture(scope="module")
def judged() -> Callable[[Path], list[str]]:
    if reason := manifests.why_not():
        pytest.skip(reason)
    return lambda path: list(manifests.verdicts(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_as_the_published_schemas_say(judged: Callable[[Path], list[str]], path: Path) -> None:
    verdicts = judged(path)
    assert verdicts and all(verdict.endswith(": valid") for verdict in verdicts), verdicts


@pytest.mark.parametrize(
    ("path", "right", "wrong", "told"),
    [
        ("train.yaml", "numNodes", "numNode", "spec.trainer.numNode: no such field"),
        ("train.yaml", "numNodes: 4", "numNodes: four", "numNodes: Input should be a valid integer"),
        ("train.yaml", "{name: node, volumeMounts", "{name: node, volumeMount", "containers.0.volumeMount: no such field"),
        ("servers.yaml", "serviceName", "serviceNam", "'serviceNam' was unexpected"),
        ("tenants.yaml", "value: 1000", "value: high", "'high' is not of type 'integer'"),
    ],
)
def test_a_slip_in_a_manifest_is_named(
    judged: Callable[[Path], list[str]], tmp_path: Path, path: str, right: str, wrong: str, told: str
) -> None:
    text = (BOXES / "kubernetes" / path).read_text()
    assert right in text
    (tmp_path / path).write_text(text.replace(right, wrong))
    assert any(told in verdict for verdict in judged(tmp_path / path)), judged(tmp_path / path)


def test_workers_and_servers_of_the_manifests_find_one_another(tmp_path: Path) -> None:
    """Six processes with what the pods have in their environments; the second job goes on from the file of the first."""
    text = (BOXES / "kubernetes" / "servers.yaml").read_text()
    world = int(re.findall(r'WORLD_SIZE, value: "(\d+)"', text)[0])
    job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    losses = []
    for _ in range(2):
        port = str(elastic_box.free_port())
        command = [sys.executable, str(BOXES / "store.py"), str(tmp_path / "weights.safetensors")]
        pods = [
            subprocess.Popen(command, env=environment(RANK=str(rank), MASTER_PORT=port, **job), stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        told = [pod.communicate(timeout=280)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0] * world
        losses.append(float(told[0].split()[-1]))
    assert losses[1] < losses[0]
