"""Terms of a reward that cannot work are refused with their key; what is right is not accused."""

from pathlib import Path

import pytest

from launch.config import ConfigError, check_environment, load_config
from launch.config.defaults import JUDGE_S
from tests.launch.test_config_check import Write

JUDGE = "kind: judge, url: 'http://judge:8000/v1', model: m"
TEMPLATE = "template: 'Judge {response}'"


@pytest.mark.parametrize(
    ("term", "key", "words"),
    [
        (f"{{kind: judge, model: m, {TEMPLATE}}}", "url", "required for kind judge"),
        (f"{{kind: judge, url: 'http://j', {TEMPLATE}}}", "model", "required for kind judge"),
        (f"{{{JUDGE}}}", "template", "required for kind judge"),
        (f"{{kind: judge, url: 'judge:8000', model: m, {TEMPLATE}}}", "url", "http"),
        (f"{{{JUDGE}, template: 'Judge it'}}", "template", "has no {response}"),
        (f"{{{JUDGE}, template: '{{response}} {{answer}}'}}", "template", "{answer} is none of {prompt}, {response}"),
        (f"{{{JUDGE}, template: '{{response}} {{'}}", "template", "braces that are text are doubled"),
        (f"{{{JUDGE}, {TEMPLATE}, pattern: 'a('}}", "pattern", "not a regular expression"),
        (f"{{{JUDGE}, {TEMPLATE}, pattern: 'Score'}}", "pattern", "no group"),
        (f"{{{JUDGE}, {TEMPLATE}, function: 'a:b'}}", "function", "only kind python uses it"),
        (f"{{{JUDGE}, {TEMPLATE}, gpus: 1}}", "gpus", "only kind python uses it"),
        ("{kind: math, url: 'http://j'}", "url", "only kind judge uses it"),
        ("{kind: math, batch_size: 2}", "batch_size", "only kind python uses it"),
        ("{kind: format, pattern: a, concurrency: 2}", "concurrency", "only kind python or judge uses it"),
        ("{kind: math, name: mean}", "name", "reward/mean is of the whole reward"),
    ],
)
def test_terms_that_cannot_work(term: str, key: str, words: str, write_config: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), [f"reward.terms=[{term}]"])
    (issue,) = caught.value.issues
    assert issue.key == f"reward.terms.0.{key}"
    assert words in f"{issue.message} {issue.remedy}"


def test_a_judge_has_a_minute_unless_it_is_said(write_config: Write) -> None:
    loaded = load_config(write_config(), [f"reward.terms=[{{{JUDGE}, {TEMPLATE}}}]"])
    assert loaded.config.reward.terms[0].timeout_s == JUDGE_S
    assert loaded.source("reward.terms.0.timeout_s") == "reward.terms.0.kind: judge"
    said = load_config(write_config(), [f"reward.terms=[{{{JUDGE}, {TEMPLATE}, timeout_s: 5}}, {{kind: math}}]"])
    assert [term.timeout_s for term in said.config.reward.terms] == [5.0, 10.0]


def test_a_judge_reads_the_whole_response(write_config: Write) -> None:
    terms = f"reward.terms=[{{kind: math}}, {{{JUDGE}, {TEMPLATE}}}]"
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), ["rollout.abort.enabled=true", terms])
    assert [issue.key for issue in caught.value.issues] == ["reward.terms.1.kind"]


def test_what_this_machine_lacks_for_a_reward(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(term: str) -> list[str]:
        config = load_config(write_config(), [f"reward.terms=[{term}]"]).config
        return [issue.key for issue in check_environment(config) if issue.key.startswith("reward")]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    keyed = f"{{{JUDGE}, {TEMPLATE}, key_env: JUDGE_KEY}}"
    assert found(keyed) == ["reward.terms.0.key_env"]
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert found(keyed) == []
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        model = "{kind: python, function: 'a.b:Model', gpus: 1}"
        assert found(model) == ["reward.terms.0.gpus"]
        monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
        assert found(model) == []
