"""Whole runs that train adapters: the same tokens and losses whatever the run does, and few bytes handed over."""

import json
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.train.conftest import SHARP, Alone, Runs
from tests.train.test_in_process import LEARNED

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
LORA = ("learner.lora={rank: 2, alpha: 8}", "learner.optimizer.lr=1e-2", "objective.kl=k3", "objective.kl_coef=0.01")
EVERYTHING = (
    *("rollout.workers=2", "drafter.train=true", "drafter.while_it_pays=false", "drafter.micro_step_tokens=64"),
    "checkpoint.every=1",
    *("cluster.weights=broadcast", "rollout.speculation.strategies=[self:4, eagle:3, suffix:4]"),
)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Alone:
    """In one process: one engine, plain decoding."""
    return runs.alone(SHARP, *LORA)


def learned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in LEARNED} for row in rows]


def test_it_learns_and_the_engine_agrees(alone: Alone, base: list[dict[str, Any]]) -> None:
    assert all(row["grad_norm/mean"] > 0 and row["logprob_gap/mean"] < 1e-6 for row in alone.rows)
    assert 0 <= alone.rows[0]["kl"] < alone.rows[-1]["kl"], "the reference is the base"
    for row, full in zip(alone.rows, base, strict=True):
        assert row["weights/bytes"] < 0.15 * full["weights/bytes"]
    assert alone.rows[0]["reward/mean"] == base[0]["reward/mean"], "fresh adapters change nothing"
    assert alone.rows[-1]["loss/mean"] != base[-1]["loss/mean"]


def test_workers_drafts_drafter_training_hand_over_and_a_resume_change_nothing(
    runs: Runs, alone: Alone, ray_head: str
) -> None:
    runs.run("lora", SHARP, *LORA, *EVERYTHING, "run.steps=3")
    rows = runs.run("lora", SHARP, *LORA, *EVERYTHING, resume=True)
    assert learned(rows) == learned(alone.rows)
    assert runs.texts("lora") == alone.texts
    first, *_, last = runs.evaluations("lora")  # and one where the first session ended
    assert [first, last] == alone.evaluations
    assert all(row["weights/by_store"] == 0 and row["weights/by_broadcast"] == 2 for row in rows[1:])
    folder = runs.root / "lora"
    adapter = json.loads((folder / "model/adapter/adapter_config.json").read_text())
    assert (adapter["r"], adapter["base_model_name_or_path"]) == (2, str(runs.root / "model"))
    merged, base = (load_file(path / "model.safetensors") for path in (folder / "model", runs.root / "model"))
    changed = {name for name in merged if not merged[name].equal(base[name])}
    assert changed == {name for name in merged if name.endswith("_proj.weight")}
    events = (folder / "events.jsonl").read_text()
    assert "parameters of adapters are trained and are handed over" in events
