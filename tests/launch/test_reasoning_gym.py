"""data.reasoning_gym: files that are made once, held-out questions apart, and what is refused beforehand."""

import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.data import DataError, load_prompts, load_set
from config.installed import install_extra
from config.tree import Config
from launch.commands.cli import app
from launch.config import ConfigError, check_environment, gym, load_config
from launch.config.gym import generated
from launch.config.load import load_values

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 different questions
Json = dict[str, Any]


def config(folder: Path, *tasks: Json, **sections: Json) -> Config:
    data = {"reasoning_gym": list(tasks), **sections.pop("data", {})}
    values = {"run": {"name": "own", "dir": str(folder)}, "model": {"path": "hub/model"}, "data": data, **sections}
    return load_values(values, "own.yaml").config


def lines(path: str) -> list[Json]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 100), held=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_questions_are_different_and_the_held_out_ones_apart(tmp_path: Path, size: int, held: int, seed: int) -> None:
    made = generated(config(tmp_path, {"name": "chain_sum", "size": size, "eval": held, "seed": seed, "config": SUMS}))
    (train,) = made.data.sets
    prompts = [record["prompt"] for record in lines(train.path)]
    assert len(prompts) == len(set(prompts)) == size
    apart = [record["prompt"] for one in made.eval.sets for record in lines(one.path)]
    assert len(apart) == len(set(apart)) == held
    assert not set(prompts) & set(apart)
    assert bool(made.eval.sets) == bool(held)


def test_files_are_made_once_and_again_the_same_where_one_is_damaged(tmp_path: Path) -> None:
    """word_ladder chooses from a set of texts, so its questions depend on the seed of Python's hashes."""
    asked = config(tmp_path, {"name": "word_ladder", "size": 5, "eval": 2}, {"name": "sums", "dataset": "chain_sum"})
    out = io.StringIO()
    made = generated(asked, out)
    assert [line.partition(" questions")[0] for line in out.getvalue().splitlines()] == [
        "data.reasoning_gym.0: making 5 + 2 held-out",
        "data.reasoning_gym.1: making 1000 + 64 held-out",
    ]
    assert generated(asked, out) == made
    assert len(out.getvalue().splitlines()) == 2
    train = Path(made.data.sets[0].path)
    before = train.read_text()
    train.write_text(before[:-9])
    assert generated(asked, out) == made
    assert train.read_text() == before
    assert "is damaged" in out.getvalue().splitlines()[2]
    elsewhere = generated(config(tmp_path / "b", {"name": "word_ladder", "size": 5, "eval": 2}))
    assert Path(elsewhere.data.sets[0].path).read_text() == before


def test_what_becomes_of_it_is_sets_with_their_weights_and_a_reward(tmp_path: Path) -> None:
    asked = config(
        tmp_path,
        {"name": "easy", "dataset": "chain_sum", "size": 4, "eval": 2, "weight": 3, "config": SUMS},
        {"name": "gcd", "size": 3, "eval": 0},
        data={"prompt_field": "question", "id_field": "id", "source_field": "kind", "system_prompt": "Number only."},
    )
    assert [(term.kind, term.fallback) for term in asked.reward.terms] == [("reasoning_gym", "auto")]
    assert list(asked.train_sets) == ["data.reasoning_gym.0", "data.reasoning_gym.1"]
    made = generated(asked)
    assert [(one.name, one.weight) for one in made.data.sets] == [("easy", 3.0), ("gcd", 1.0)]
    assert [one.name for one in made.eval.sets] == ["easy"]
    assert made.data.reasoning_gym == ()
    first = lines(made.data.sets[0].path)[0]
    one = made.data.sets[0]
    assert {one.prompt_field, one.answer_field, one.id_field, one.source_field} <= first.keys()
    assert (first["id"], first["reasoning_gym"], first["config"]) == ("chain_sum-0", "chain_sum", SUMS)
    (held,) = made.eval.sets
    assert lines(held.path)[0]["id"] == "chain_sum-1000000"
    assert load_values(json.loads(made.model_dump_json()), "run.yaml").config == made


REFUSED: list[tuple[Json, str, list[str]]] = [
    ({"name": "a", "dataset": "zz"}, "0.dataset", ["no data set 'zz'", "all 106"]),
    ({"name": "chain_sum", "config": {"seed": 3}}, "0.config.seed", ["write seed beside config"]),
    (
        {"name": "chain_sum", "config": {"min_terms": 3, "max_terms": 2}},
        "0.config",
        ["chain_sum refuses it", "max_terms must be >= min_terms", "its defaults: min_terms=2"],
    ),
    ({"name": "chain_sum", "config": {"max_terms": "many"}}, "0.config", ["chain_sum refuses it", "TypeError"]),
    ({"name": "chain_sum", "eval": 300, "config": SUMS}, "0.eval", ["300 is too many", "different questions in"]),
    ({"name": "rearc"}, "0.name", ["records of rearc cannot be kept in a file", "another data set"]),
    ({"name": "composite"}, "0.config", ["composite refuses it", "at least one dataset"]),
]


@pytest.mark.parametrize(
    ("task", "key", "words"),  # each is a process that imports the package
    [
        ({"name": "chain_sums"}, "0.name", ["no data set 'chain_sums'", "did you mean chain_sum", "all 106"]),
        (
            {"name": "chain_sum", "config": {"max_term": 3}},
            "0.config.max_term",
            ["chain_sum has no such key", "did you mean max_terms?", "it has min_terms, max_terms"],
        ),
        (
            {"name": "chain_sum", "size": 500, "config": SUMS},
            "0.size",
            ["500 is too many", "136 different questions that are not held out", "set it to 122 or less", "widen"],
        ),
        *(pytest.param(*row, marks=pytest.mark.long) for row in REFUSED),
    ],
)
def test_what_the_package_refuses_is_told_by_key(tmp_path: Path, task: Json, key: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        generated(config(tmp_path, task))
    (issue,) = caught.value.issues
    assert issue.key == f"data.reasoning_gym.{key}"
    assert all(word in str(issue) for word in words), str(issue)
    assert not list((tmp_path / gym.FOLDER).iterdir())


@pytest.mark.parametrize(
    ("data", "more", "key", "words"),
    [
        ({"train": "x.jsonl"}, {}, "data.train", "so is data.reasoning_gym"),
        ({"sets": [{"name": "a", "path": "x.jsonl"}]}, {}, "data.sets", "so is data.reasoning_gym"),
        ({"eval": "x.jsonl"}, {}, "data.eval", "set eval: 0"),
        (
            {"reasoning_gym": [{"name": "gcd"}, {"name": "gcd"}]},
            {},
            "data.reasoning_gym.1.name",
            "choose another name for this one, with dataset: gcd",
        ),
        ({}, {"eval": {"sets": [{"name": "gcd", "path": "x"}]}}, "data.reasoning_gym.0.name", "two sets are called"),
        ({"reasoning_gym": [{"name": "source", "dataset": "gcd"}]}, {}, "data.reasoning_gym.0.name", "another name"),
        ({"reasoning_gym": [{"name": "gcd", "size": 0}]}, {}, "data.reasoning_gym.0.size", ">= 1"),
        ({"reasoning_gym": [{"name": "gcd", "sise": 1}]}, {}, "data.reasoning_gym.0.sise", "size"),
        ({}, {"rollout": {"abort": {"enabled": True}}}, "reward.terms.0.kind", "reads the whole response"),
        ({}, {"reward": {"terms": [{"kind": "math", "fallback": "auto"}]}}, "reward.terms.0.fallback", "last_number"),
        ({}, {"checkpoint": {"best_metric": "eval/gdc/reward"}}, "checkpoint.best_metric", "eval/gcd/reward"),
    ],
)
def test_contradictions_are_told_before_anything_is_made(
    tmp_path: Path, data: Json, more: Json, key: str, words: str
) -> None:
    sections: Json = {"eval": {"every": 1, "samples": 1, **more.pop("eval", {})}, **more}
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, {"name": "gcd"}, data=data, **sections)
    assert words in {issue.key: str(issue) for issue in caught.value.issues}[key]
    assert not list(tmp_path.iterdir())


def test_without_the_package_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, remedy = config(tmp_path, {"name": "gcd"}), re.escape(install_extra("reasoning-gym"))
    (tmp_path / "broken/reasoning_gym").mkdir(parents=True)
    (tmp_path / "broken/reasoning_gym/__init__.py").write_text("import no_such_dependency")
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path / "broken"))
        with pytest.raises(ConfigError, match=rf"No module named 'no_such_dependency'\n.*{remedy}"):
            generated(asked)
    for name, value, words in (
        ("VERSION", "9.9", "reasoning-gym 0.1.25 is installed, and 9.9 is what is supported"),
        ("PACKAGE", "no-such-package", "no-such-package is not installed"),
    ):
        monkeypatch.setattr(gym, name, value)
        with pytest.raises(ConfigError, match=rf"{words}\n *{re.escape(install_extra(gym.PACKAGE))}"):
            generated(asked)
        (issue,) = [one for one in check_environment(asked) if one.key == "reward.terms.0.kind"]
        assert words in issue.message


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"data.reasoning_gym.0: cannot write .*\n *free space, or set run.dir"):
        generated(config(tmp_path / "runs", {"name": "gcd", "size": 2}))


def test_files_that_are_not_made_are_no_folder(tmp_path: Path) -> None:
    """Whoever loads a configuration without launch.config.hub: an empty path would be the current folder."""
    asked = config(tmp_path, {"name": "gcd"})
    with pytest.raises(DataError, match=r"data\.reasoning_gym: its files are not made yet"):
        load_prompts(asked.data, "train", None)
    ((key, held),) = asked.eval_sets.items()
    with pytest.raises(DataError, match=r"data\.reasoning_gym\.0: its files are not made yet"):
        load_set(asked.data, held, key, "eval", None)


def test_what_config_prints_is_a_configuration_the_first_time_too(tmp_path: Path) -> None:
    data = {"reasoning_gym": [{"name": "gcd", "size": 2, "eval": 1}]}
    own = {"run": {"name": "own", "dir": str(tmp_path)}, "model": {"path": "hub/model"}, "data": data}
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    printed = CliRunner().invoke(app, ["config", str(tmp_path / "own.yaml")]).stdout
    (tmp_path / "printed.yaml").write_text(printed)
    asked = load_config(tmp_path / "own.yaml").config
    assert load_config(tmp_path / "printed.yaml").config == generated(asked)
