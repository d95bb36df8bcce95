"""What a resume may change: speed, place and length. Anything that would make one curve of two experiments is refused,
and a refusal leaves the run's folder as it was."""

import json
from pathlib import Path

import pytest

from actors.training.checkpoint import check
from launch.config import Config, load_config
from launch.config.schema import by_name, keys
from launch.config.show import to_yaml
from launch.observe.journal import read
from launch.run import train as train_module
from launch.run.resume import HARMFUL, HARMLESS, ResumeError, check_resume, differences, find_checkpoint
from launch.run.train import train
from tests.checkpoints import write_checkpoint

TEXT = """
run: {name: demo, steps: 5, seed: 1}
model: {path: model}
data: {train: train.jsonl, eval: eval.jsonl}
reward: {terms: [{kind: python, function: "mine:grade"}]}
"""


def load(root: Path, *overrides: str) -> Config:
    (root / "c.yaml").write_text(TEXT)
    return load_config(root / "c.yaml", [f"run.dir={root}/runs", *overrides]).config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a checkpoint, as it was made with TEXT."""
    folder = tmp_path / "runs/demo"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(load(tmp_path)))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "step"}) + "\n")
    write_checkpoint(folder / "checkpoints", 1, lambda _: None, {"steps_done": 1}, keep=1)
    return folder


def test_the_same_configuration_goes_on(tmp_path: Path, run_dir: Path) -> None:
    assert check_resume(run_dir, load(tmp_path)) == []
    assert find_checkpoint(run_dir, None, check).checkpoint.name == "step_000001"


@pytest.mark.parametrize(
    "override",
    [
        *("run.steps=9", "observe.tensorboard=false", "rollout.workers=3", "rollout.engine.threads=2"),
        *(
            "checkpoint.every=1",
            "cluster.cpus_per_worker=2.0",
            "rollout.speculation.mode=off",
            "drafter.micro_step_tokens=99",
        ),
        *(
            "learner.micro_batch_tokens=99",
            "reward.workers=2",
            "reward.terms.0.gpus=1.0",
            "eval.every=1",
            "rollout.stall_timeout_s=9.0",
        ),
    ],
)
def test_what_only_changes_speed_place_or_length_passes(tmp_path: Path, run_dir: Path, override: str) -> None:
    (difference,) = check_resume(run_dir, load(tmp_path, override))
    assert difference.key == override.partition("=")[0]
    assert difference.now == override.partition("=")[2]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward.terms.0.function='other:grade'", "reward.terms.0.function"),
        ("reward.terms.0.weight=2", "reward.terms.0.weight"),
        ("learner.optimizer.lr=1e-4", "learner.optimizer.lr"),
        ("learner.mini_batches=2", "learner.mini_batches"),
        ("data.train=other.jsonl", "data.train"),
        ("data.prompt_field=question", "data.prompt_field"),
        ("objective.clip_high=0.3", "objective.clip_high"),
        ("model.path=llama", "model.path"),
        ("run.seed=2", "run.seed"),
        ("rollout.sampling.temperature=0.7", "rollout.sampling.temperature"),
        ("rollout.prompts_per_step=4", "rollout.prompts_per_step"),
        ("rollout.engine.max_model_tokens=3000", "rollout.engine.max_model_tokens"),
        ("rollout.speculation.verification=rejection", "rollout.speculation.verification"),
        ("eval.samples=1", "eval.samples"),
        ("rollout.quantization=w8a8", "rollout.quantization"),
        ("learner.quantization=none", "learner.quantization"),
    ],
)
def test_another_experiment_is_refused_unless_its_key_is_allowed(
    tmp_path: Path, run_dir: Path, override: str, key: str
) -> None:
    other = load(tmp_path, override)
    with pytest.raises(ResumeError) as caught:
        check_resume(run_dir, other)
    assert f"  {key}: " in caught.value.message
    assert f"--resume --allow {key}" in str(caught.value.remedy)
    assert [d.key for d in check_resume(run_dir, other, [key])] == [key]
    assert [d.key for d in check_resume(run_dir, other, [key.partition(".")[0]])] == [key]
    with pytest.raises(ResumeError):
        check_resume(run_dir, other, [key[:-1]])  # no key, nor a section


def test_added_and_removed_terms_are_differences(tmp_path: Path, run_dir: Path) -> None:
    more = differences(run_dir, load(tmp_path, "reward.terms.1={kind: math}"))
    assert ("reward.terms.1.kind", "none", "math") in [(d.key, d.before, d.now) for d in more]


def test_the_same_input_in_another_place_is_the_same(tmp_path: Path, run_dir: Path) -> None:
    """A file with the same content, a copy of the model directory, a path in a job's next copy of the checkout."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.jsonl").write_text("{}\n")
        (tmp_path / name / "config.json").write_text("{}")
    (run_dir / "config.yaml").write_text(to_yaml(load(tmp_path, "data.train=old/t.jsonl", "model.path=old")))
    assert differences(run_dir, load(tmp_path, "data.train=new/t.jsonl", "model.path=new")) == []
    (tmp_path / "new/t.jsonl").write_text('{"a": 1}\n')
    found = differences(run_dir, load(tmp_path, "data.train=new/t.jsonl", "model.path=new"))
    assert [d.key for d in found] == ["model.path", "data.train"]
    cache = "/ray/working_dir_files/_ray_pkg_"
    (run_dir / "config.yaml").write_text(to_yaml(load(tmp_path, f"data.train={cache}1/data/t.jsonl")))
    assert differences(run_dir, load(tmp_path, f"data.train={cache}2/data/t.jsonl")) == []
    assert len(differences(run_dir, load(tmp_path, f"data.train={cache}2/data/other.jsonl"))) == 1


@pytest.mark.parametrize("text", ["run: {nmae: x}", "{", None])
def test_a_configuration_that_cannot_be_compared_is_refused(tmp_path: Path, run_dir: Path, text: str | None) -> None:
    (run_dir / "config.yaml").unlink()
    if text is not None:
        (run_dir / "config.yaml").write_text(text)
    with pytest.raises(ResumeError, match=r"config\.yaml: "):
        check_resume(run_dir, load(tmp_path))
    assert check_resume(run_dir, load(tmp_path), ["config.yaml"])


def test_every_name_is_a_key() -> None:
    """And no learner option is harmless without having been thought of."""
    sections = {key.name for key in keys()}
    assert set(HARMLESS + HARMFUL) <= sections == set(by_name())


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_refused_resume_changes_nothing(tmp_path: Path, run_dir: Path) -> None:
    before = snapshot(tmp_path / "runs")
    with pytest.raises(ResumeError, match="not the configuration that the run was made with"):
        train(load(tmp_path, "learner.optimizer.lr=1e-4"), config_source="c.yaml", resume=True)
    with pytest.raises(ResumeError, match="there is no checkpoint in") as caught:
        train(load(tmp_path, "run.name=other"), config_source="c.yaml", resume=True)
    assert "start without --resume" in str(caught.value.remedy)
    after = snapshot(tmp_path / "runs")
    assert {path: after[path] for path in before} == before
    assert all(path.endswith(".lock") for path in set(after) - set(before))
    assert run_dir.is_dir()


def test_what_was_allowed_and_what_was_moved_leave_an_event(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        pass

    def stop(**_: object) -> None:
        raise StopError

    monkeypatch.setattr(train_module, "ray_session", stop)
    monkeypatch.setattr(train_module, "load_inputs", lambda _: None)
    monkeypatch.setattr(train_module, "usable", lambda config, inputs, path: check(path))
    quiet = ["observe.live=false", "observe.tensorboard=false"]
    changed = load(tmp_path, "learner.optimizer.lr=1e-4", *quiet)
    with pytest.raises(StopError):
        train(changed, config_source="c.yaml", resume=True, allowed=["learner"])
    events = {event["kind"]: event["message"] for event in read(run_dir / "events.jsonl")}
    assert "learner.optimizer.lr: 1e-06 -> 0.0001" in events["changed_configuration"]
    assert load_config(run_dir / "config.yaml").config.learner.optimizer.lr == 1e-4
    with pytest.raises(StopError):
        train(changed, config_source="c.yaml", resume=False)
    events = {event["kind"]: event["message"] for event in read(run_dir / "events.jsonl")}
    assert events["set_aside"].endswith("runs/demo.1")
