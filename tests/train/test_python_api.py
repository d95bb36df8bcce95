"""paceline.train in a script: its own function grades in the reward workers of the loop that the command runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import paceline

WORDS = ("off", "so x")

def either(prompt, response, record):
    return float(any(word in response for word in WORDS))

run = paceline.train(sys.argv[1], *sys.argv[2:], rewards=either)
assert run.model.is_dir()
print("STEPS", [row["loss/mean"] for row in run.steps()])
print("HELD OUT", [row["eval/reward"] for row in run.evaluations()])
"""


@pytest.mark.long
def test_a_script_trains_with_its_own_function_as_the_command_does_with_a_pattern(
    runs: Runs, ray_head: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    given = ("run.steps=2", "rollout.prompts_per_step=4")
    done = subprocess.run(
        [sys.executable, str(script), str(runs.config), *runs.overrides("api", *given)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": ray_head, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone = runs.alone(*given)
    assert f"STEPS {[row['loss/mean'] for row in alone.rows]}" in done.stdout
    assert f"HELD OUT {[metrics['eval/reward'] for metrics in alone.evaluations]}" in done.stdout
    assert {row["reward/either"] for row in runs.steps("api")} == {row["reward/mean"] for row in runs.steps("api")}
