"""Loading: typed tree, overrides, places, and every fault at once with key, place, nearest key and what is expected."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.placement_plan import plan
from launch.config import Config, ConfigError, Issue, load_config
from launch.config.document import dump, parse_value
from launch.config.show import resolved_lines, to_yaml
from tests.launch.conftest import MINIMAL

Write = Callable[..., Path]
FOLDER = Path(__file__).parents[2] / "examples"
# Not Kubernetes', Prometheus' or the simulator's.
EXAMPLES = sorted(p for p in FOLDER.rglob("*.yaml") if "\nrun:" in p.read_text(encoding="utf-8"))


def faults(path: Path, *overrides: str) -> dict[str, Issue]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return {issue.key: issue for issue in caught.value.issues}


def test_minimal_file_gets_defaults(write_config: Write) -> None:
    config = load_config(write_config()).config
    assert (config.run.name, config.run.steps, config.rollout.rollouts_per_prompt) == ("demo", 5, 8)


def test_every_fault_is_reported_at_once_with_its_line(write_config: Write) -> None:
    path = write_config(
        "run:\n  name: demo\n  stpes: 5\nmodel:\n  path: m\n  dtype: float16\ndata:\n  train: t\n  train: u\n"
        'rollout:\n  workers: "two"\n  sampling: {temperature: 99}\nlearner:\n  lr: 1e-3\nreward:\n  terms:\n'
        "    - kind: maths\n"
    )
    found = faults(path, "rollout.enginee.threads=2", "nonsense")
    assert {key: issue.where.removeprefix(f"{path}:") for key, issue in found.items()} == {
        "run.stpes": "3",
        "model.dtype": "6",
        "data.train": "9",
        "rollout.workers": "11",
        "rollout.sampling.temperature": "12",
        "rollout.enginee": "override",
        "learner.lr": "14",
        "reward.terms.0.kind": "17",
        "": "override",
    }
    assert found["run.stpes"].remedy == "did you mean run.steps?"
    assert found["rollout.enginee"].remedy == "did you mean rollout.engine?"
    assert found["learner.lr"].remedy == "did you mean learner.optimizer.lr=0.001?"
    assert found["data.train"].message == f"duplicate key, first given at {path}:8"
    assert found["rollout.workers"].message == "expected an integer, >= 1, <= 10000, or a section; got 'two'"
    assert found["rollout.sampling.temperature"].message == "expected a number, >= 0, <= 10; got 99"
    assert found["model.dtype"].message == "expected one of float32, bfloat16; got 'float16'"


def test_missing_keys_are_named(write_config: Write) -> None:
    found = faults(write_config("run: {steps: 3}\ndata: {train: x}\n"))
    assert set(found) == {"run.name", "model"}
    assert "required and missing" in found["run.name"].message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("- a\n", "must be a mapping"),
        ("run: [1\n", "not valid YAML"),
        ("run: !!python/object:os.system x\n", "is not allowed"),
        ("a: &x {b: *x}\n", "may not contain itself"),
        ("base: &b {name: x}\nrun:\n  <<: *b\n", "merge keys are not supported"),
        ("? [1, 2]\n: x\n", "a key must be a plain word"),
    ],
)
def test_files_that_are_no_configuration(write_config: Write, text: str, message: str) -> None:
    assert any(message in issue.message for issue in faults(write_config(text)).values())


def test_no_such_file_lists_those_there(write_config: Write, tmp_path: Path) -> None:
    write_config()
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "confg.yaml")
    assert "config.yaml" in (caught.value.remedy or "")


def test_overrides_win_and_are_typed(write_config: Write) -> None:
    path = write_config(MINIMAL + "reward:\n  terms:\n    - {kind: math}\n    - {kind: format, pattern: a}\n")
    config = load_config(
        path,
        [
            "run.steps=7", "run.steps=9", "run.name=2024", "learner.optimizer.lr=1e-3", "observe.live=false",
            "data.eval=null", "rollout.sampling.stop_token_ids=[1, 2]", "learner.optimizer.betas.1=0.99",
            "reward.terms.1.weight=0.5", "reward.terms.2={kind: code}",
        ],
    ).config  # fmt: skip
    assert (config.run.steps, config.run.name, config.learner.optimizer.lr) == (9, "2024", 1e-3)
    assert (config.observe.live, config.data.eval) == (False, None)
    assert config.rollout.sampling.stop_token_ids == (1, 2)
    assert config.learner.optimizer.betas == (0.9, 0.99)
    assert [(t.kind, t.weight) for t in config.reward.terms] == [("math", 1.0), ("format", 0.5), ("code", 1.0)]


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("reward.terms.5.weight=1", "reward.terms.5.weight", "no position of a list of 1"),
        ("run.steps.more=1", "run.steps.more", "has no parts"),
        ("run.steps=off", "run.steps", "expected an integer"),
        ("observe.live=yes", "observe.live", "expected true or false; got 'yes'"),
        ("run.steps=2.5", "run.steps", "expected an integer"),
        ("run.steps='7'", "run.steps", "expected an integer"),
        ("run.name=a/b", "run.name", "matching"),
        ("warmup.steps=3", "warmup.data", "required and missing"),
        ("run.seed=[", "run.seed", "not a YAML value"),
        ("data.chat_template={% for m in messages %}", "data.chat_template", "a text needs quotes within the shell's"),
    ],
)
def test_bad_overrides(write_config: Write, override: str, key: str, message: str) -> None:
    assert message in faults(write_config(), override)[key].message


def test_sources_of_values(write_config: Write) -> None:
    path = write_config()
    loaded = load_config(path, ["run.seed=3"])
    assert loaded.source("run.steps") == f"{path}:3"
    assert loaded.source("run.seed") == "override"
    assert loaded.source("run.dir") == "default"
    sources = {line.strip(): source for line, source in resolved_lines(loaded)}
    assert sources["seed: 3"] == "override"
    assert sources["- kind: math"] == "default"
    assert sources["rollout:"] == ""


def test_an_objective_brings_its_defaults_and_says_so(write_config: Write) -> None:
    given = ["objective.name=dapo", "objective.clip_high=0.3", "rollout.sampling.max_new_tokens=200"]
    loaded = load_config(write_config(), given)
    sources = {line.strip(): source for line, source in resolved_lines(loaded)}
    assert sources["name: dapo"] == "override"
    assert sources["clip_high: 0.3"] == "override"
    assert sources["clip_dual: 10.0"] == "objective.name: dapo"
    assert sources["max_rounds: 10"] == "objective.name: dapo"
    assert sources["buffer_tokens: 40"] == "rollout.sampling.max_new_tokens"
    assert load_config(write_config(), [*given, "objective.name=dr_grpo"]).config.objective.sum_divisor == 200


def test_replacing_a_section_forgets_its_old_places(write_config: Write) -> None:
    loaded = load_config(write_config(), ["run={name: other}"])
    assert loaded.config.run.steps == Config.model_fields["run"].annotation.model_fields["steps"].default  # type: ignore[union-attr]
    assert (loaded.source("run.steps"), loaded.source("run.name")) == ("default", "override")


def test_printed_tree_and_run_yaml_read_back_equal(write_config: Write, tmp_path: Path) -> None:
    loaded = load_config(
        write_config(), ["learner.optimizer.lr=3e-4", "data.system_prompt='yes: [no]'", "run.name=1e6"]
    )
    printed = tmp_path / "printed.yaml"
    printed.write_text("\n".join(line for line, _ in resolved_lines(loaded)))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(to_yaml(loaded.config))
    assert load_config(printed).config == loaded.config
    assert load_config(dumped).config == loaded.config


def test_relative_paths_current_directory_first_then_the_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (there / "only.jsonl").touch()
    (there / "c.yaml").write_text(
        "run: {name: r}\nmodel: {path: nowhere}\ndata: {train: both.jsonl, eval: only.jsonl}\n"
    )
    monkeypatch.chdir(here)
    config = load_config(there / "c.yaml").config
    assert config.data.train == str(here / "both.jsonl")
    assert config.data.eval == str(there / "only.jsonl")
    assert config.model.path == "nowhere"
    assert config.run.dir == str(here / "runs")


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("abc:#-{}[]'\"0 1.e", max_size=8)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc-x", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES, st.booleans())
def test_values_survive_yaml(value: object, flow: bool) -> None:
    assert parse_value(dump(value, flow=flow)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E3", 1000.0), (".5", 0.5), ("1_000", 1000), ("0x10", 16), ("012", 12), ("yes", "yes"),
        ("on", "on"), ("2024-01-01", "2024-01-01"), ("1:30", "1:30"), ("~", None), ("'1'", "1"), ("", None),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("path", EXAMPLES, ids=[str(p.relative_to(p.parents[2])) for p in EXAMPLES])
def test_every_example_parses_and_can_be_placed(path: Path) -> None:
    config = load_config(path).config
    workers, ranks = config.rollout.workers.min, config.learner.ranks
    placed = plan(config.cluster, workers=workers, ranks=ranks, available_cpus=2)
    assert (len(placed.workers), len(placed.learners)) == (workers, ranks)
