"""The user's loss, advantages and drafters are tried out before a run, in a child process, and named after it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import load_config
from launch.own_code import own_code_issues, own_code_text
from launch.report.summary import print_summary
from launch.run.resume import ResumeError, check_resume

EXAMPLE = Path("examples/own_parts/config.yaml")
MODULE = """
from paceline.extend import Drafter, LossInputs, TokenLosses

def loss(inputs: LossInputs, *, scale: float) -> TokenLosses:
    return TokenLosses(-scale * inputs.advantages * inputs.logprobs, {})

def first(inputs):
    return TokenLosses(inputs.logprobs[0] * inputs.logprobs, {})

def mean(rewards, lengths):
    return [group.mean() for group in rewards]

def leaves(rewards, lengths):
    raise SystemExit("enough")

class Forgets(Drafter):
    pass
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """What is wrong with the example under these overrides, by key."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("raise SystemExit('a package of a user in place of ours')")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *o: [(issue.key, issue.message) for issue in own_code_issues(load_config(EXAMPLE, o).config)]


def test_the_example_and_a_users_folder_pass(said: Callable[..., list[tuple[str, str]]]) -> None:
    assert said("objective.loss=mine:loss", "objective.loss_arguments={scale: 0.5}") == []


def test_each_fault_stands_at_its_key(said: Callable[..., list[tuple[str, str]]], tmp_path: Path) -> None:
    found = said(
        "objective.loss=mine:loss",
        "objective.advantages=mine:mean",
        "objective.advantages_arguments={}",
        "rollout.speculation.drafters=[{name: echo, function: 'mine:Forgets'}]",
    )
    keys = ("objective.loss", "objective.advantages", "rollout.speculation.drafters.0.function")
    assert tuple(key for key, _ in found) == keys
    (_, loss), (_, advantages), (_, drafter) = found
    assert "mine:loss raised TypeError" in loss
    assert "unexpected keyword argument 'most'" in loss
    assert advantages == "mine:mean returned shape [] for group 0 of 3 responses, not [3]"
    assert "mine:Forgets cannot be made with slots and max_tokens: TypeError" in drafter
    (_, empty), (_, absent) = said(
        "objective.loss=mine:first", "objective.loss_arguments={}", "objective.advantages=mines:mean"
    )
    assert "No module named 'mines'; looked in " in absent
    assert str(tmp_path) in absent
    assert "raised IndexError" in empty  # of the tokens of a rank without work


def test_code_that_ends_its_process_is_said_too(said: Callable[..., list[tuple[str, str]]]) -> None:
    ((key, message),) = said(
        "objective.loss=mine:first", "objective.loss_arguments={}", "objective.advantages=mine:leaves"
    )
    assert key == "objective.loss"
    assert message == "the process that tried it out ended: enough"


def test_the_summary_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(EXAMPLE).config
    text = own_code_text(json.loads(config.model_dump_json()))
    assert text == (
        "loss examples.own_parts.loss:tapered; advantages examples.own_parts.advantages:rare_successes; "
        "drafter echo, examples.own_parts.drafter:Echo"
    )
    assert (
        own_code_text(json.loads(load_config("examples/guess_and_check/config.yaml").config.model_dump_json())) is None
    )
    (tmp_path / "config.yaml").write_text(config.model_dump_json())
    assert print_summary(tmp_path).own_code == text
    assert "your own code" in capsys.readouterr().out


def test_another_loss_is_another_experiment_and_another_drafter_is_not(tmp_path: Path) -> None:
    config = load_config(EXAMPLE).config
    (tmp_path / "config.yaml").write_text(config.model_dump_json())
    swapped = load_config(EXAMPLE, ["rollout.speculation={}"]).config
    assert {d.key.split(".")[1] for d in check_resume(tmp_path, swapped)} == {"speculation"}
    changed = load_config(EXAMPLE, ["objective.loss=mine:loss"]).config
    with pytest.raises(ResumeError, match=r"objective\.loss: examples.own_parts.loss:tapered -> mine:loss"):
        check_resume(tmp_path, changed)
    assert check_resume(tmp_path, changed, ["objective.loss"])
