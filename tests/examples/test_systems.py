"""The example of each system is a configuration that says what it means, and the plan of the large one is what its
comment promises. Whole runs: tests/train/test_systems.py."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from config.tree import Config
from launch.config import load_config
from planner.plan_step import StepReport, step_report
from policies.speculation.build import build_policy
from tests.launch.test_memory import EXAMPLES, write_model

SYSTEMS = sorted((EXAMPLES / "systems").glob("*.yaml"))
LARGE = EXAMPLES / "cluster/qwen2.5-32b-8x8xh100.yaml"
RANKS = EXAMPLES / "cluster/qwen2.5-32b-tp4.yaml"


def loaded(name: str) -> Config:
    return load_config(EXAMPLES / f"systems/{name}.yaml").config


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.stem)
def test_an_example_stands_on_the_demos_task_and_is_listed(path: Path) -> None:
    config, demo = load_config(path).config, load_config(EXAMPLES / "guess_and_check/config.yaml").config
    assert config.run.name == path.stem
    for section in ("model", "data", "warmup", "eval"):
        ours, theirs = getattr(config, section), getattr(demo, section)
        assert not differing(ours, theirs, path.parent, EXAMPLES / "guess_and_check"), section
    assert [term.kind for term in config.reward.terms] == [term.kind for term in demo.reward.terms]
    assert config.learner.optimizer == demo.learner.optimizer
    assert config.rollout.sampling == demo.rollout.sampling
    for page in ("examples/systems/README.md", "docs/systems/README.md"):
        assert f"{path.stem}.yaml" in (EXAMPLES.parent / page).read_text(encoding="utf-8")
    assert path.stem == "everything" or (EXAMPLES.parent / f"docs/systems/{path.stem}.md").is_file()


def differing(ours: BaseModel, theirs: BaseModel, folder: Path, demos: Path) -> list[str]:
    """Names of the fields that differ. Paths begin at a configuration's folder, also where the data has not been made
    and nothing is there yet: then they are kept as they are written."""

    def differ(own: object, other: object) -> bool:
        paths = isinstance(own, str) and isinstance(other, str) and "/" in own
        return own != other and not (paths and (folder / str(own)).resolve() == (demos / str(other)).resolve())

    return [name for name in type(ours).model_fields if differ(getattr(ours, name), getattr(theirs, name))]


def test_tlts_own_selector_is_one_key_away_and_has_a_choice_in_every_bucket() -> None:
    options = load_config(EXAMPLES / "systems/tlt.yaml", ["rollout.speculation.mode=paper"]).config.rollout.speculation
    policy = build_policy(options, ["eagle", "ngram"])
    assert policy is not None
    assert options.running_limit == 32
    assert all(len(policy.arms_at(running)) >= 2 for running in range(1, options.running_limit + 1))


def test_each_system_is_on_in_its_own_example_and_alone() -> None:
    on = {
        "spot training": lambda c: c.drafter.train,
        "lengths": lambda c: c.rollout.speculation.budget == "length_aware",
        "roofline": lambda c: c.rollout.speculation.mode == "roofline",
        "budget": lambda c: c.rollout.budget.on,
        "abort": lambda c: c.rollout.abort.enabled,
        "low bits": lambda c: c.rollout.quantization != "none" and c.learner.quantization == "rollout",
    }
    found = {path.stem: {name for name, is_on in on.items() if is_on(loaded(path.stem))} for path in SYSTEMS}
    assert found == {
        "tlt": {"spot training"},
        "das": {"lengths"},
        "efficient_rollout": {"roofline"},
        "duet": {"budget", "abort"},
        "qarl": {"low bits"},
        "everything": set(on) - {"roofline"},  # its drafter is no cheaper than an eight-bit target
    }
    drafters = {name: {text.partition(":")[0] for text in strategies(name)} - {"plain"} for name in found}
    assert drafters["tlt"] == {"eagle", "ngram"}
    assert drafters["das"] == {"suffix"}
    assert drafters["efficient_rollout"] == {"self"}


def strategies(name: str) -> list[str]:
    return list(loaded(name).rollout.speculation.strategies or ())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> StepReport:
    model = write_model(tmp_path_factory.mktemp("model") / "32b", "32b")
    return step_report(load_config(LARGE, [f"model.path={model}"]).config, None)


def test_the_32b_cluster_has_64_gpus_and_fits_them(plan: StepReport) -> None:
    config = load_config(LARGE).config
    assert config.learner.ranks + config.rollout.workers.max == 8 * 8
    assert plan.device == "H100"
    assert plan.misfit is None
    assert not plan.note
    assert not plan.engines_sleep, "they share nothing with the learner"
    assert {memory.place for memory in plan.memory} == {"rollout", "learner"}


def test_the_32b_clusters_comment_says_what_plan_step_predicts(plan: StepReport) -> None:
    text = " ".join(line.strip("# ") for line in LARGE.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    steps = {(row.batch, row.context): row for row in plan.steps}
    gib = {memory.place: memory.worst.total_bytes / 2**30 for memory in plan.memory}
    assert plan.learner is not None
    for expected in (
        f"an engine step of 32 requests x 1,024 tokens takes {steps[32, 1024].plain_ms:.1f} ms "
        f"({steps[32, 1024].tokens_s:,.0f} tokens/s)",
        f"of 8 requests x 8,192 tokens {steps[8, 8192].plain_ms:.1f} ms",
        f"of 1 request x 8,192 tokens {steps[1, 8192].plain_ms:.1f} ms",
        f"at most {gib['rollout']:.1f} GiB of {plan.device_bytes / 2**30:.1f} full, a learner's {gib['learner']:.1f}",
        f"{plan.learner.tokens_s:,.0f} tokens/s are learned",
        f"new weights take {plan.learner.hand_over_s['direct']:.1f} s",
        f"8,192 x {steps[1, 8192].plain_ms:.1f} ms = {8192 * round(steps[1, 8192].plain_ms, 1) / 1000:.0f} s",
    ):
        assert expected in text, re.sub(r"\s+", " ", expected)


def test_engines_of_four_ranks_are_what_their_file_says(tmp_path: Path) -> None:
    """They fit, they need all 64 GPUs, and they decode faster than one rank could."""
    model = write_model(tmp_path / "32b", "32b")
    config = load_config(RANKS, [f"model.path={model}"]).config
    report = step_report(config, None)
    assert report.misfit is None
    assert report.ranks == config.engine_ranks == 4
    assert config.learner.ranks + 4 * config.rollout.workers.max == 8 * 8
    text = " ".join(line.strip("# ") for line in RANKS.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    steps = {(row.batch, row.context): row for row in report.steps}
    gib = {memory.place: memory.worst.total_bytes / 2**30 for memory in report.memory}
    assert report.learner is not None
    for expected in (
        f"of 128 requests x 1,024 tokens takes {steps[128, 1024].plain_ms:.1f} ms "
        f"({steps[128, 1024].tokens_s:,.0f} tokens/s)",
        f"of 8 requests x 8,192 tokens {steps[8, 8192].plain_ms:.1f} ms",
        f"of 1 request x 8,192 tokens {steps[1, 8192].plain_ms:.1f} ms",
        f"at most {gib['rollout']:.1f} GiB of {report.device_bytes / 2**30:.1f} full, a learner's {gib['learner']:.1f}",
        f"new weights take {report.learner.hand_over_s['direct']:.1f} s",
        f"{steps[1, 8192].launches} launches",
    ):
        assert expected in text, expected
    one = [f"model.path={model}", "cluster.gpus_per_worker=1", "rollout.engine.kv_tokens=9216"]
    alone = {(row.batch, row.context): row for row in step_report(load_config(RANKS, one).config, None).steps}
    assert steps[1, 8192].plain_ms < alone[1, 8192].plain_ms / 1.5
