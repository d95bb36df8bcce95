"""Whole runs of episodes: the same tokens and losses with any workers, whoever is lost, with and without drafts."""

import json
from pathlib import Path

import pytest
import ray

from contracts.rollout import Request
from launch.errors import PacelineError
from tests.train.conftest import SHARP, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FACTORY = "tests.environments.played:Replying"
SHORT = (SHARP, "run.steps=3", "objective.kl=k3", "objective.kl_coef=0.05")
LEARNING = ("loss/mean", "grad_norm/mean", "reward/mean", "entropy", "kl", "length/mean", "turns/mean", "groups/used")


def environment(max_turns: int = 4, **options: object) -> list[str]:
    said = {"factory": FACTORY, "max_turns": max_turns, "max_turn_tokens": 10, "workers": 2, "options": options}
    return [f"environment={json.dumps(said)}", "reward.terms=[{kind: environment}]"]


def worker_named(name: str) -> str:
    """As Ray calls it now: runs before this one had such a worker too."""
    known = [actor for actor in ray.util.list_named_actors() if actor == name or actor.startswith(f"{name}.")]
    return max(known, key=lambda actor: int(actor.removeprefix(name).lstrip(".") or 1))


@pytest.fixture(scope="module")
def alone(runs: Runs) -> tuple[list[dict[str, float]], list[str]]:
    """In this process: one engine, plain decoding."""
    done = runs.alone(*SHORT, *environment())
    assert all(1.5 < row["turns/mean"] <= 4 for row in done.rows)
    assert all(row["logprob_gap/max"] < 1e-4 and row["grad_norm/mean"] > 0 for row in done.rows)
    # A turn computes what is new to it: the engine has the rest.
    assert all(row["turns/prefilled_tokens"] < 12 < row["length/mean"] for row in done.rows)
    return [{name: row[name] for name in LEARNING} for row in done.rows], done.texts


@pytest.mark.ray
def test_workers_drafts_and_lost_processes_change_nothing(
    runs: Runs,
    alone: tuple[list[dict[str, float]], list[str]],
    ray_head: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three workers draft by suffixes. In the middle of episodes an environment's process ends, and a worker that plays
    them is killed; in the middle of a step a rollout worker is."""
    from launch.run import episodes

    heard = {"turns": 0}
    submit = episodes.Episodes._sample

    def sample(self: episodes.Episodes, running: episodes._Running) -> Request:
        turn = submit(self, running)
        heard["turns"] += 1
        if (name := {30: "environment-0", 60: "rollout-1"}.get(heard["turns"])) is not None:
            ray.kill(ray.get_actor(worker_named(name)))
        return turn

    monkeypatch.setattr(episodes.Episodes, "_sample", sample)
    fixed = "rollout.speculation={mode: fixed, strategies: ['suffix:4']}"
    rows = runs.run("turns", *SHORT, fixed, "rollout.workers=3", *environment(dies=str(tmp_path / "died")))
    assert (tmp_path / "died").exists()
    events = [json.loads(line) for line in (runs.root / "turns/events.jsonl").read_text().splitlines()]
    replaced = [event["message"] for event in events if event["kind"] == "environment_worker_replaced"]
    assert len(replaced) == 1, replaced
    assert "environment worker 0" in replaced[0]
    # One worker is killed. Its stream may end before Ray says that the actor died: then its loss is told in two parts.
    assert sum(row["workers/lost"] for row in rows) in (1, 2)
    lost = [event["message"] for event in events if event["kind"] == "worker_lost"]
    assert all(message.startswith("rollout-1: ") for message in lost), lost
    assert all(row["speculation/share"] > 0 for row in rows)
    learned, texts = alone
    assert [{name: row[name] for name in LEARNING} for row in rows] == learned
    assert runs.texts("turns") == texts
    evaluated = (runs.root / "turns/eval_samples.jsonl").read_text().splitlines()
    assert {turn["role"] for line in evaluated for turn in json.loads(line)["turns"]} == {"assistant", "user"}


def test_an_episode_that_used_up_its_turns_was_not_cut_and_is_learned_from(runs: Runs) -> None:
    """Two turns of at most 10 tokens never fill the 48 that there is room for."""
    rows = runs.alone(*SHORT, "objective.mask_truncated=true", *environment(max_turns=2)).rows
    assert [(row["rollouts/truncated"], row["rollouts/masked"]) for row in rows] == [(0, 0)] * 3
    assert all(row["turns/limited"] > 0 for row in rows)
    assert all(row["turns/limited_share"] == row["turns/limited"] / 24 for row in rows)


def test_a_failure_names_the_record_of_its_episode(runs: Runs) -> None:
    failing = environment()[0].replace("Replying", "Counting").replace("}}", '}, "max_failures_per_step": 0}')
    with pytest.raises(PacelineError, match=r"rollout \d+ \(\S+eval.jsonl, line \d+\): KeyError: 'x'"):
        runs.alone(*SHORT, failing, "reward.terms=[{kind: environment}]")
