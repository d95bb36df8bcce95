"""The schema, the manual and near misses of keys."""

from pathlib import Path

import pytest

from launch.config import check_environment, load_config
from launch.config.manual import schema_markdown
from launch.config.schema import by_name, keys, nearest
from tests.launch.test_config_check import Write


def test_schema_has_every_key_once_with_a_description() -> None:
    names = [key.name for key in keys()]
    assert len(names) == len(set(names))
    text = schema_markdown()
    assert all(f"`{name}`" in text for name in names)
    kinds = "one of math, code, format, python, judge, environment, reasoning_gym"
    assert by_name()["reward.terms.*.kind"].expected == kinds
    assert by_name()["rollout.engine.threads"].expected == "an integer, >= 1, <= 4096 or null"


def test_a_row_has_default_range_and_choices() -> None:
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in schema_markdown().splitlines()}
    assert "| `16`, from 1 |" in rows["`rollout.prompts_per_step`"]  # a bound against typing errors is left out
    assert "| `0.1`, above 0 to 1 |" in rows["`rollout.abort.min_keep`"]
    assert "| `null`, integer 1 to 4096 |" in rows["`rollout.engine.threads`"]
    assert "| `coupled`, rejection |" in rows["`rollout.speculation.verification`"]
    assert "| `auto`, number above 0 to 1 |" in rows["`rollout.abort.keep`"]
    assert "| `false` |" in rows["`drafter.train`"]


def test_keys_with_the_same_meaning_share_a_row() -> None:
    lines = schema_markdown().splitlines()
    assert "| `eval.sets.*.samples`, " in next(line for line in lines if line.endswith("| default: as in `eval` |"))
    (optimizer,) = (line for line in lines if line.startswith("| `warmup.optimizer.name`"))
    assert optimizer.endswith("|  | as in `learner.optimizer` |")
    assert "`warmup.optimizer.lr`" not in optimizer  # it has another default


def test_lists_are_named_by_what_they_hold() -> None:
    assert by_name()["eval.at"].expected == "a list of integers, >= 1, at least 1 or null"
    assert by_name()["learner.lora.targets"].expected.startswith("a list of q_proj, k_proj")


def test_nearest_key() -> None:
    assert nearest("rollout.worker") == "rollout.workers"
    assert nearest("reward.terms.1.wieght") == "reward.terms.1.weight"
    assert nearest("temperature") in ("rollout.sampling.temperature", "eval.temperature")
    assert nearest("zzzz.qqqq") is None


def test_the_manual_describes_the_tree_as_it_is() -> None:
    manual = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
    assert schema_markdown() in manual.read_text(encoding="utf-8"), "run: python -m tests.docs.reference"


def test_wandb_needs_a_login_or_no_network(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.config.environment.importlib.util.find_spec", lambda name: name)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))

    def found() -> list[str]:
        config = load_config(write_config(), ["observe.wandb_project=p"]).config
        return [issue.remedy for issue in check_environment(config) if issue.key == "observe.wandb_project"]

    (remedy,) = found()
    assert "wandb login" in remedy
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / "netrc").chmod(0o600)
    assert found() == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert len(found()) == 1
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert found() == []
