"""`ray job submit --working-dir . -- python -m launch ...`, as docs/tutorials/cluster.md has it, to a head
with a token."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 240.0
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())"]

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Head:
    url: str
    environment: dict[str, str]

    def submit(self, *command: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
        """Submit the checkout with `command`, follow the job to its end; the exit code is the job's.

        A head accepts jobs only some seconds after it answers: what it then says means "try again".
        """
        environment = self.environment if token is None else self.environment | {"RAY_AUTH_TOKEN": token}
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            done = subprocess.run(
                [*RAY, "job", "submit", "--address", self.url, "--working-dir", str(ROOT), "--", *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=JOB_TIMEOUT_S,
                check=False,
            )
            if "No available agent" not in done.stdout + done.stderr or time.monotonic() > deadline_s:
                return done
            time.sleep(1)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    pytest.fail(f"the head did not come up in {START_TIMEOUT_S:.0f} s: {log.read_text()}")


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    temp_dir = Path(tempfile.mkdtemp(prefix="pljob"))
    # Ports of its own, the agents' too: the head of the test session holds Ray's default one.
    port, dashboard, agent = free_ports(3)
    options = {"port": port, "dashboard-port": dashboard, "dashboard-agent-listen-port": agent, "temp-dir": temp_dir}
    options |= {"node-ip-address": "127.0.0.1", "num-cpus": 16, "object-store-memory": 256 * 2**20}
    flags = [f"--{name}={value}" for name, value in options.items()]
    log = temp_dir / "head.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*RAY, "start", "--head", "--block", *flags], env=environment, stdout=stream, stderr=stream
        )
    try:
        wait_for(dashboard, process, log)
        yield Head(f"http://127.0.0.1:{dashboard}", environment)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(temp_dir, ignore_errors=True)


def test_a_submitted_job_runs_our_code_on_the_cluster(head: Head) -> None:
    done = head.submit("python", "-m", "launch", "config", "examples/cluster/qwen2.5-7b-gsm8k.yaml", "run.steps=3")
    assert "rollout_resource: rollout" in done.stdout, done.stdout + done.stderr
    assert "steps: 3" in done.stdout
    assert "error: model.path" in done.stdout + done.stderr, "the model is not on this cluster"
    assert done.returncode != 0


def test_a_submitted_job_that_ends_well_says_so(head: Head) -> None:
    done = head.submit("python", "-m", "launch", "--version")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout + done.stderr


@pytest.mark.long
def test_a_wrong_key_fails_the_job_and_the_log_says_why(head: Head) -> None:
    done = head.submit("python", "-m", "launch", "config", "examples/cluster/qwen2.5-7b-gsm8k.yaml", "run.stepz=3")
    assert done.returncode != 0
    assert "run.stepz" in done.stdout + done.stderr


def test_without_the_token_nothing_is_accepted(head: Head) -> None:
    done = head.submit("python", "-c", "print('ran anyway')", token="0" * 64)
    assert done.returncode != 0
    assert "ran anyway" not in done.stdout


@pytest.mark.long
def test_training_as_a_job(head: Head, tmp_path: Path) -> None:
    """Two RL steps on the submitted cluster: the run attaches to it, and its files land where run.dir says."""
    config = {
        "run": {"name": "job", "dir": str(tmp_path / "runs"), "steps": 2},
        "model": {"path": str(tmp_path / "data/model")},
        "data": {"train": str(tmp_path / "data/train.jsonl"), "id_field": "id", "template": "plain"},
        "warmup": {"data": str(tmp_path / "data/demos.jsonl"), "init": "random", "steps": 30, "batch_size": 4},
        "rollout": {
            "prompts_per_step": 2,
            "rollouts_per_prompt": 4,
            "sampling": {"max_new_tokens": 24},
            "engine": {"threads": 1, "kv_tokens": 4096},
        },
        "learner": {"threads": 1},
        "objective": {"drop_zero_variance": False},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    make_data = f"python -m examples.guess_and_check.make_data --demonstrations 200 {tmp_path / 'data'}"
    done = head.submit("sh", "-c", f"{make_data} && python -m launch train {tmp_path / 'job.yaml'}")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/job"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]
    assert (run / "model/model.safetensors").is_file()
    assert (run / "report.html").is_file()
