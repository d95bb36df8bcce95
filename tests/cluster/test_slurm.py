"""Slurm: the script with every command replaced. Nothing here talks to a real one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/cluster/slurm.sbatch"
WAIT_S = 60.0
# Each command of the script: writes down how it was called; `python` is the driver.
NOTE = """#!/bin/bash
echo "$(basename "$0") $* address=${RAY_ADDRESS:-} token=${#RAY_AUTH_TOKEN}" >> "$CALLS"
"""
DRIVER = """trap 'echo checkpoint >> "$CALLS"; exit 130' TERM
echo ready >> "$CALLS"
while [ -n "$SLOW" ]; do sleep 0.1; done
"""
COMMANDS = {
    "scontrol": NOTE + "printf 'n1\\nn2\\nn3\\n'\n",
    "srun": NOTE,
    "ray": NOTE,
    "python": NOTE + DRIVER,
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on three nodes."""
    for name, text in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    path_ = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path_, "SLURM_JOB_NODELIST": "n[1-3]", "CALLS": str(tmp_path / "calls")}


def run(job: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    folder = Path(job["CALLS"]).parent
    return subprocess.run(["bash", SCRIPT, *args], cwd=folder, env=job, capture_output=True, text=True, timeout=WAIT_S)


def calls(job: dict[str, str]) -> list[str]:
    return Path(job["CALLS"]).read_text().splitlines() if Path(job["CALLS"]).exists() else []


def test_slurm_starts_a_head_the_other_nodes_and_the_run(job: dict[str, str]) -> None:
    done = run(job, "a.yaml", "run.steps=3")
    assert done.returncode == 0, done.stderr
    (head,) = (call for call in calls(job) if "--nodelist=n1 " in call)
    (others,) = (call for call in calls(job) if "--nodelist=n2,n3 " in call)
    (driver,) = (call for call in calls(job) if call.startswith("python"))
    assert 'ray start --head --port=6379 --resources={"learner": 8} --block address= token=64' in head
    assert 'ray start --address=n1:6379 --resources={"rollout": 8} --block address= token=64' in others
    assert "--nodes=2 --ntasks=2" in others
    assert driver == "python -m launch train a.yaml run.steps=3 address=n1:6379 token=64"


def test_slurms_warning_is_passed_to_the_run_and_its_checkpoint_waited_for(job: dict[str, str]) -> None:
    folder = Path(job["CALLS"]).parent
    process = subprocess.Popen(["bash", SCRIPT, "a.yaml"], cwd=folder, env=job | {"SLOW": "yes"})
    deadline_s = time.monotonic() + WAIT_S
    while "ready" not in calls(job) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 130
    assert calls(job)[-1] == "checkpoint"


def test_slurm_without_a_configuration_or_with_one_node_says_so(job: dict[str, str]) -> None:
    done = run(job)
    assert (done.returncode, "usage" in done.stderr) == (2, True)
    (Path(job["CALLS"]).parent / "bin/scontrol").write_text("#!/bin/bash\necho n1\n")
    done = run(job, "a.yaml")
    assert (done.returncode, "--nodes must be 2 or more" in done.stderr) == (2, True)
