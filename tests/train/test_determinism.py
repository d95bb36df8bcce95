"""Two runs of one seed: the same tokens and the same losses, bit for bit, whatever did the work."""

from typing import Any

import pytest

from tests.train.conftest import STEPS, Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LEARNING = ("loss/mean", "grad_norm/mean", "reward/mean", "logprob_gap/mean", "length/mean", "groups/used")


def learning(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: row[name] for name in LEARNING} for row in steps]


@pytest.fixture(scope="module")
def base(runs: Runs) -> list[dict[str, Any]]:
    return runs.run("base")


def test_a_run_learns_on_every_step_and_agrees_with_its_engine(base: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in base] == list(range(1, STEPS + 1))
    assert all(row["groups/used"] > 0 and row["grad_norm/mean"] > 0 for row in base)
    assert all(0 <= row["logprob_gap/mean"] <= row["logprob_gap/max"] < 1e-4 for row in base)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_number_of_workers_changes_nothing(runs: Runs, base: list[dict[str, Any]], workers: int) -> None:
    name = f"workers{workers}"
    assert learning(runs.run(name, f"rollout.workers={workers}")) == learning(base)
    assert runs.texts(name) == runs.texts("base")


ALWAYS = "rollout.speculation={mode: fixed, strategies: ['suffix:6']}"


SHARP = "rollout.sampling.temperature=0.3"  # an untrained network repeats itself then, and drafts are accepted


@pytest.fixture(scope="module")
def without_speculation(runs: Runs) -> list[dict[str, Any]]:
    return runs.run("speculation-off", SHARP, "rollout.speculation.mode=off")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("adaptive", ["rollout.workers=2"]),
        ("chain", ["rollout.speculation={mode: fixed, strategies: ['suffix:6']}"]),
        ("tree", ["rollout.speculation={mode: fixed, strategies: ['suffix:4x2/8']}", "rollout.workers=2"]),
    ],
)
def test_speculation_changes_nothing_that_is_learned(
    runs: Runs, without_speculation: list[dict[str, Any]], name: str, overrides: list[str]
) -> None:
    rows = runs.run(f"speculation-{name}", SHARP, *overrides)
    assert learning(rows) == learning(without_speculation)
    assert runs.texts(f"speculation-{name}") == runs.texts("speculation-off")
    assert runs.evaluations(f"speculation-{name}") == runs.evaluations("speculation-off")
    assert not any(key.startswith("speculation/") for row in without_speculation for key in row)
    assert all("speculation/share" in row for row in rows)
    if name != "adaptive":  # which decides by the clock; these must have drafted, and some drafts were right
        assert all(row["speculation/share"] > 0 for row in rows)
        assert max(row["speculation/accept_length"] for row in rows) > 1
    assert all(row["groups/used"] > 0 for row in rows)


def test_another_seed_is_another_run(runs: Runs, base: list[dict[str, Any]]) -> None:
    assert learning(runs.run("seed1", "run.seed=1", "run.steps=1")) != learning(base[:1])


def test_two_learner_ranks_give_the_losses_of_one(runs: Runs, base: list[dict[str, Any]]) -> None:
    """Within float tolerance, and over the first steps only: rounding may then change a sampled token."""
    steps = runs.run("ranks2", "learner.ranks=2", "run.steps=2")
    for got, want in zip(steps, base, strict=False):
        for name in ("loss/mean", "grad_norm/mean"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5)


def test_exported_model_is_loaded_by_transformers(runs: Runs, base: list[dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs.root / "base/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("1", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()
