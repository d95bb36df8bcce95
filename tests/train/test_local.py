"""paceline.train(..., backend="local"): what it refuses, how it stops, and how it fails. Starts no Ray."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import paceline
from launch.errors import UsageError
from launch.local.job import LocalDispatcher
from tests.train.conftest import Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_what_one_process_cannot_do_is_refused_or_said(runs: Runs) -> None:
    def refused(*overrides: str, **arguments: Any) -> str:
        with pytest.raises(paceline.PacelineError) as caught:
            paceline.train(runs.config, *runs.overrides("refused", *overrides), backend="local", **arguments)
        return str(caught.value)

    assert "learner.ranks: 2, but a run in one process is one rank" in refused("learner.ranks=2")
    assert "tensor_parallel: 2, but one process is one rank" in refused("rollout.engine.tensor_parallel=2")
    assert "rollout.engine.threads: 1, but the learner has 2" in refused("learner.threads=2")
    assert "writes no checkpoints to resume from" in refused(resume=True)
    with pytest.raises(UsageError, match="backend is 'here'"):
        paceline.train(runs.config, backend="here")
    assert not (runs.root / "refused").exists()
    with pytest.raises(UsageError, match="one process has the same threads"):
        runs.alone("learner.threads=2")


def test_a_stopped_local_run_leaves_its_complete_steps(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, rounds = LocalDispatcher.begin, list[int]()

    def run(self: LocalDispatcher, *given: Any, **named: Any) -> Any:
        rounds.append(len(rounds))
        if len(rounds) == 3:  # the evaluation before, and two steps
            signal.raise_signal(signal.SIGINT)
        return sampled(self, *given, **named)

    monkeypatch.setattr(LocalDispatcher, "begin", run)
    with pytest.raises(KeyboardInterrupt, match="the run was stopped"):
        paceline.train(
            runs.config, *runs.overrides("stopped", "rollout.workers=2", "rollout.lookahead=always"), backend="local"
        )
    assert [row["step"] for row in runs.steps("stopped")] == [1]
    events = [json.loads(line) for line in (Path(runs.root) / "stopped/events.jsonl").read_text().splitlines()]
    said = {event["kind"]: event["message"] for event in events}
    assert said["local"] == (
        "one process, without Ray: no checkpoints, one engine instead of 2 workers, nothing is sampled ahead "
        "(rollout.lookahead)"
    )
    assert said["interrupted"] == "a run in one process writes no checkpoints: start it again"


def test_an_error_in_a_local_run_is_raised_as_it_is(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger stops where it is; the run's folder says it too."""
    (tmp_path / "fragile.py").write_text(
        "def loss(inputs):\n"
        "    from paceline.extend import TokenLosses\n"
        "    assert inputs.logprobs.numel() < 20, 'too many tokens'\n"
        "    return TokenLosses(-inputs.logprobs * inputs.advantages, {})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="fragile:loss raised AssertionError: too many tokens") as caught:
        paceline.train(runs.config, *runs.overrides("fragile", "objective.loss=fragile:loss"), backend="local")
    assert isinstance(caught.value.__cause__, AssertionError)
    assert "too many tokens" in (runs.root / "fragile/events.jsonl").read_text()
