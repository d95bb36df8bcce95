"""Every name of another trainer in the table is answered, with its value, by keys and values that exist here."""

import re
from pathlib import Path

import pytest

from launch.config import ConfigError, load_config
from launch.config.document import Document
from launch.config.foreign import ROWS, names, table
from launch.config.foreign_names.answers import last
from launch.config.load import validate
from launch.config.overrides import apply_overrides
from launch.config.schema import by_name
from tests.docs.test_docs import ROOT, unknown_keys
from tests.launch.test_config_check import Write

EXAMPLES = [example for row in ROWS for example in (*row.verl, *row.trl)]
OURS = re.compile(r"[a-z_]+(?:\.\w+)+=\S+")


def refused(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_name_is_answered_by_what_exists(write_config: Write, example: str) -> None:
    """And whatever overrides the answer gives have a type and range that the tree accepts."""
    name = example.partition("=")[0]
    if name in by_name():
        pytest.skip("it is called so here")
    (issue,) = refused(write_config(), example).issues
    assert issue.key == name
    assert issue.remedy
    assert "did you mean" not in issue.remedy or last(name) == last(issue.ours.partition("=")[0])
    assert list(unknown_keys(issue.remedy)) == []
    if issue.ours:
        document = Document(values={"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": "t"}})
        apply_overrides(document, issue.ours.split())
        assert (document.issues, validate(document, "test")[1]) == ([], [])


def test_values_are_translated_where_units_differ(write_config: Write) -> None:
    path = write_config("run: {name: x}\nmodel: {path: m}\ndata: {train: t}")
    rows = {
        # verl: prompts of an optimizer step; here: optimizer steps of an RL step
        "data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256": "learner.mini_batches=4",
        "generation_batch_size=64 num_generations=16": "rollout.prompts_per_step=4",  # completions; prompts
        "trainer.save_freq=-1": "checkpoint.every=0",
        "actor_rollout_ref.rollout.top_k=-1": "rollout.sampling.top_k=0",
        "actor_rollout_ref.rollout.enforce_eager=True": "rollout.engine.cuda_graphs=false",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum": "objective.aggregation=seq_mean_token_sum",
        "scale_rewards=False": "objective.normalize=none",
        "beta=0.04": "objective.kl=k3 objective.kl_coef=0.04",
        "epsilon=0.1": "objective.clip_low=0.1 objective.clip_high=0.1",
        "data.train_files=[a.parquet]": "data.train=a.parquet",
    }
    for theirs, ours in rows.items():
        assert ours in [issue.ours for issue in refused(path, *theirs.split()).issues], theirs
    assert "leave it out" in str(refused(path, "beta=0.0"))
    assert "no critic" in str(refused(path, "algorithm.adv_estimator=gae"))


def test_a_whole_command_line_of_verls_comes_back_in_our_names(write_config: Write) -> None:
    """Every key by itself, and all that is the same here together, to be pasted."""
    theirs = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=5",
        "trainer.save_freq=20",
        "trainer.nnodes=1",
    ]
    error = refused(write_config(), *theirs, "actor_rollout_ref.actor.unheard_of=1", "rollout.n=[1, 2]")
    assert [issue.key for issue in error.issues] == [
        "rollout.n", "algorithm.adv_estimator", "actor_rollout_ref.rollout.n", "trainer.save_freq", "trainer.nnodes",
    ]  # fmt: skip
    assert error.remedy is not None
    assert error.remedy.startswith("in the names of Paceline: ")
    assert "objective.name=grpo rollout.rollouts_per_prompt=5 checkpoint.every=20" in error.remedy


def test_a_name_that_is_ours_is_never_in_the_table() -> None:
    known = by_name()
    assert [name for name in names() if "." in name and name in known and name != "model.path"] == []


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    lines = "\n".join(table())
    assert lines in page, "run: python -c 'from launch.config.foreign import table; print(*table(), sep=\"\\n\")'"
    here = [line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("|")]
    assert [key for cell in here for key in unknown_keys(cell)] == []
