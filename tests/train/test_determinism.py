"""Two runs of one seed: the same tokens and the same losses, bit for bit, whatever did the work."""

from typing import Any

import pytest

from tests.train.conftest import SHARP, STEPS, Runs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LEARNING = ("loss/mean", "grad_norm/mean", "reward/mean", "logprob_gap/mean", "length/mean", "groups/used")


def learning(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: row[name] for name in LEARNING} for row in steps]


def test_a_run_learns_on_every_step_and_agrees_with_its_engine(base: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in base] == list(range(1, STEPS + 1))
    assert all(row["groups/used"] > 0 and row["grad_norm/mean"] > 0 for row in base)
    assert all(0 <= row["logprob_gap/mean"] <= row["logprob_gap/max"] < 1e-4 for row in base)


def test_without_speculation_and_with_three_workers_the_same_is_learned(runs: Runs, base: list[dict[str, Any]]) -> None:
    rows = runs.run("off", SHARP, "rollout.workers=3", "rollout.speculation.mode=off")
    assert not any(key.startswith("speculation/") for row in rows for key in row)
    assert all("speculation/share" in row for row in base)
    is_the_same(runs, "off", rows, base)


@pytest.mark.long
def test_trees_of_drafts_change_nothing_that_is_learned(runs: Runs, base: list[dict[str, Any]]) -> None:
    """Chains, and other drafters: test_ruled_runs.py, in one process."""
    fixed = "rollout.speculation={mode: fixed, strategies: ['suffix:4x2/8']}"
    rows = runs.run("tree", SHARP, fixed, "rollout.workers=2")
    assert all(row["speculation/share"] > 0 for row in rows)
    assert max(row["speculation/accept_length"] for row in rows) > 1
    is_the_same(runs, "tree", rows, base)


def is_the_same(runs: Runs, name: str, rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    assert learning(rows) == learning(base)
    assert runs.texts(name) == runs.texts("base")
    assert runs.evaluations(name) == runs.evaluations("base")


@pytest.mark.long
def test_two_learner_ranks_give_the_losses_of_one(runs: Runs, base: list[dict[str, Any]]) -> None:
    """Within float tolerance, and over the first steps only: rounding may then change a sampled token."""
    steps = runs.run("ranks2", SHARP, "learner.ranks=2", "run.steps=2")
    for got, want in zip(steps, base, strict=False):
        for name in ("loss/mean", "grad_norm/mean"):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5)


def test_exported_model_is_loaded_by_transformers(runs: Runs, base: list[dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = runs.root / "base/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("1", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()
