"""A whole run with rewards of every form: by name in the metrics, the same with Ray as in one process, and errors of a
user's function told where people look.
"""

import json

import pytest

from tests.rewards.stand_in import endpoint, reply, said, term_of
from tests.train.conftest import SHARP, Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow]
FUNCTIONS = "tests.rewards.sample_functions"


def test_a_run_with_groups_batches_awaited_calls_a_class_a_judge_and_a_function_that_raises(
    runs: Runs, ray_head: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with endpoint(lambda body, asked: reply(f"Score: {len(said(body)) % 3}")) as there:
        terms = [
            {"kind": "format", "pattern": "off|so x"},
            {"kind": "python", "function": f"{FUNCTIONS}:raises_sometimes", "name": "raising", "weight": 0.1},
            {"kind": "python", "function": f"{FUNCTIONS}:rank", "name": "rank", "weight": 0.1},
            {"kind": "python", "function": f"{FUNCTIONS}:normalised", "name": "relative", "batch_size": 1},
            {"kind": "python", "function": f"{FUNCTIONS}:Model", "name": "model", "batch_size": 4, "weight": 0.01},
            {"kind": "python", "function": f"{FUNCTIONS}:Called", "name": "called"},
            {"name": "judge", **term_of(there.url, weight=0.5)},
        ]
        overrides = (SHARP, "run.steps=2", f"reward.terms={json.dumps(terms)}", "reward.max_failures_per_step=24")
        alone = runs.alone(*overrides)
        capfd.readouterr()
        rows = runs.run("graded", *overrides, "reward.workers=2")
    assert runs.texts("graded") == alone.texts
    names = ("format", "raising", "rank", "relative", "model", "called", "judge")
    shown = ["reward/mean", *(f"reward/{name}" for name in names)]
    assert [[row[key] for key in shown] for row in rows] == [[row[key] for key in shown] for row in alone.rows]
    assert all(row["groups/used"] > 0 and row["rollouts/failed"] > 0 for row in rows)
    assert [e["eval/reward"] for e in runs.evaluations("graded")] == [e["eval/reward"] for e in alone.evaluations]

    line = "    return float(1 / (len(response) % 3))  # the line that raises\n"
    terminal = "".join(capfd.readouterr())
    assert terminal.count(line) == 1
    events = [json.loads(text) for text in (runs.root / "graded" / "events.jsonl").read_text().splitlines()]
    (told,) = [event["message"] for event in events if event["kind"] == "reward_error"]
    assert line in told
    assert "actors/rewards" not in told
    assert "a line of a reward function" in (runs.root / "graded" / "logs" / "reward-0.log").read_text()
