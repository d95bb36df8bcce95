"""The whole program with drafter training: it learns in the tails, and nothing else changes.

How many RL steps pass before a trainer is up and finds a tail long enough is a matter of the machine. So a run goes on
until it has shown what is looked for, is then interrupted as by Ctrl-C, and is compared with one as long without.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.reward_pool import RewardPool
from actors.spot.checkpoints import history
from contracts.rollout import EngineWindow
from drafter.eagle import load_eagle
from launch.config import load_config
from launch.drafter.export import export
from launch.drafter.training import DrafterTraining
from launch.fleet import fleet
from launch.run import train
from launch.run.checkpoints import DRAFTERS_DIR
from launch.run.job import Job
from launch.run.rl_step import rl_step
from models.checkpoint import init_model, save_model
from models.config import ModelConfig, read_config
from policies.drafter import payoff
from policies.drafter.canary import Canary, CanaryVerdict
from tests.drafter.published_support import write_head
from tests.train.conftest import Runs
from tests.train.test_determinism import LEARNING

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

MOST_STEPS = 100
TRAINED = (
    "drafter.train=true",
    "drafter.micro_step_tokens=64",
    "drafter.while_it_pays=false",  # on these steps of a second it would take longer than a hundredth of the time
    "rollout.speculation={mode: fixed, strategies: ['eagle:3']}",
)
ADAPTIVE = (*TRAINED[:3], "rollout.speculation={mode: adaptive}")  # every default drafter and arm
FITTED = "drafter.offline={max_steps: 50, samples: 1}"
Records = list[dict[str, Any]]


class LongRuns:
    """Runs of two workers whose responses end by chance, so that one worker is done well before the other."""

    def __init__(self, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runs, self._patch = runs, monkeypatch
        model = runs.root / "long_model"
        if not model.exists():
            shape = json.loads((runs.root / "small/config.json").read_text())
            shape |= {"num_hidden_layers": 3, "max_position_embeddings": 2048}
            (runs.root / "long").mkdir()
            (runs.root / "long/config.json").write_text(json.dumps(shape))
            target = init_model(runs.root / "long", seed=0, dtype=torch.float32, device="cpu", batch_invariant=True)
            save_model(target, model, tokenizer_dir=runs.root / "data/model")
        self._overrides = (
            *(f"model.path={model}", "rollout.workers=2", f"run.steps={MOST_STEPS}", "checkpoint.every=0"),
            *(
                "rollout.prompts_per_step=2",
                "rollout.rollouts_per_prompt=4",
                "data.eval=null",
                "data.max_prompt_tokens=64",
            ),
            "rollout.sampling={max_new_tokens: 700}",
            "rollout.engine={threads: 1, kv_tokens: 16384, max_model_tokens: 1024, progress_every_tokens: 8}",
        )

    def folder(self, name: str) -> Path:
        return self._runs.root / name

    def run(self, name: str, enough: Callable[[], bool], *extra: str, resume: bool = False) -> list[dict[str, Any]]:
        """Its step records, once `enough` was true after a step."""

        def step(job: Job) -> None:
            rl_step(job)
            job.interrupt.requested = enough()

        self._patch.setattr(train, "rl_step", step)
        overrides = self._runs.overrides(name, *self._overrides, *extra)
        config = load_config(self._runs.config, overrides).config
        code = train.train(config, config_source="test", resume=resume)
        assert code == train.EXIT_INTERRUPTED, f"{MOST_STEPS} steps were not enough"
        return self._runs.steps(name)

    def drafter(self, name: str) -> Records:
        """The records of drafter.jsonl."""
        return self._journal(name, "drafter")

    def speculation(self, name: str) -> Records:
        """The records of speculation.jsonl."""
        return self._journal(name, "speculation")

    def _journal(self, name: str, journal: str) -> Records:
        path = self.folder(name) / f"{journal}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has_trained(self, name: str, after: int = 0) -> bool:
        """After RL step `after` there were micro-steps, and then new weights that engines draft with."""
        records = [record for record in self.drafter(name) if record["step"] > after]
        swaps = {record["levels"].get("version") for record in records}
        return any(record["micro_steps"] for record in records) and len(swaps) > 1

    def says(self, name: str, kind: str) -> list[str]:
        events = map(json.loads, (self.folder(name) / "events.jsonl").read_text().splitlines())
        return [event["message"] for event in events if event["kind"] == kind]

    def is_as_untrained(self, name: str) -> None:
        """Its rollouts and its losses are those of a run without speculation, let alone training."""
        rows = self._runs.steps(name)
        alone = self._runs.alone(*self._overrides, "rollout.speculation.mode=off", f"run.steps={len(rows)}")
        assert learned(rows) == learned(alone.rows)
        assert self._runs.texts(name) == alone.texts


@pytest.fixture
def long(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> LongRuns:
    return LongRuns(runs, monkeypatch)


def learned(rows: Records) -> list[dict[str, float | None]]:
    """Without a loss where every group had but one reward."""
    return [{name: row.get(name) for name in LEARNING} for row in rows]


def micro_steps(records: Records) -> list[int]:
    return [update[0] for record in records for update in record["updates"]]


@pytest.mark.long
def test_the_default_chooser_drafts_with_the_drafter_that_it_trains(long: LongRuns) -> None:
    """Adaptive, beside n-gram and suffix, with training, hand-outs and a resume: it once drafted nothing at all."""

    def drafted() -> int:
        uses = [pair for row in long.speculation("adaptive") for pair in row["strategies"].items()]
        return sum(use["drafted"] for arm, use in uses if arm.startswith("eagle:"))

    rows = long.run("adaptive", lambda: long.has_trained("adaptive", 0) and drafted() > 0, *ADAPTIVE, FITTED)
    before = long.drafter("adaptive")
    arms = {arm.partition(":")[0] for row in long.speculation("adaptive") for arm in row["strategies"]}
    assert arms == {"plain", "ngram", "suffix", "eagle", "self"}
    last = int(history(long.folder("adaptive") / "drafter")[-1].name.rpartition("_")[2])
    assert last > 0
    assert any("micro-steps" in line for line in long.says("adaptive", "drafter_fit"))

    # Resumed: from the kept fit in the engines, and from the checkpoint in the trainers. What drafting costs is known
    # by then, and nothing of this random model's is accepted, so no more trials of it are owed.
    more = long.run("adaptive", lambda: long.has_trained("adaptive", len(rows)), *ADAPTIVE, FITTED, resume=True)
    after = [record for record in long.drafter("adaptive") if record["step"] > len(rows)]
    assert [row["step"] for row in more] == list(range(1, len(more) + 1))
    assert long.says("adaptive", "drafter_fit")[-1].startswith("using the drafter fitted before")
    assert micro_steps(before)
    # What was published after that checkpoint may have reached the driver's own.
    assert last < micro_steps(after)[0] <= micro_steps(before)[-1] + 1
    assert not any(row["drafter/failures"] for row in more)

    long.is_as_untrained("adaptive")


def test_a_drafter_that_learns_in_the_tails_changes_no_rollout_and_no_loss(
    runs: Runs, long: LongRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it learn from held-out evaluations (greedy ones, before the first RL step and after each): not one of
    their sequences is in the data buffer, and the canary counts what was drafted in RL steps alone. Training begins by
    the default rule, whose seconds are shortened for steps of a second."""
    windows: list[EngineWindow] = []
    judged: list[int] = []
    window, observe, evaluate = DrafterTraining.window, Canary.observe, train.evaluate_if_due

    def heard(self: DrafterTraining, event: EngineWindow) -> None:
        windows.append(event)
        window(self, event)

    def observed(self: Canary, version: int, strategy: str, drafted: int, accepted: int) -> CanaryVerdict:
        judged.append(drafted)
        return observe(self, version, strategy, drafted, accepted)

    def evaluated(job: Job, *arguments: Any) -> None:
        evaluate(job, *arguments)
        (held,) = job.held_out
        kept = [record for buffer in buffers_of(job) for record in ray.get(buffer.sample.remote(10**9, 0))]
        prompts = {tuple(record.tokens[: record.prompt_length]) for record in kept}
        assert prompts <= {tuple(prompt.tokens) for prompt in job.prompts}
        assert not prompts & {tuple(prompt.tokens) for prompt in held.prompts}
        assert len(kept) <= 8 * job.steps_done

    monkeypatch.setattr(DrafterTraining, "window", heard)
    monkeypatch.setattr(Canary, "observe", observed)
    monkeypatch.setattr(train, "evaluate_if_due", evaluated)
    monkeypatch.setattr(payoff, "BEGINS_S", 0.02)
    monkeypatch.setattr(fleet, "LOOK_S", 0.0)
    monkeypatch.setattr(payoff, "ADVANCE", 100.0)
    evaluations = (f"data.eval={runs.root}/data/eval.jsonl", "eval={every: 1, samples: 2, temperature: 0.0}")
    rows = long.run(
        "fitted", lambda: long.has_trained("fitted"), *TRAINED, "drafter.while_it_pays=true", FITTED, *evaluations
    )
    assert long.says("fitted", "drafter_training")[0].startswith("begins: a worker was out of work for")
    records = long.drafter("fitted")
    versions = [record["levels"]["version"] for record in records if "version" in record["levels"]]
    assert versions == sorted(versions)
    assert {version for record in records for version in record["published"]} <= {0, *micro_steps(records)}
    assert rows[-1]["drafter/recorded_bytes"] > 0
    assert not any(row["drafter/failures"] or row["drafter/rolled_back"] for row in rows)

    assert len(runs.evaluations("fitted")) == len(rows)
    uses = [(window.evaluation, use) for window in windows for use in window.strategies]
    drafted = {kind: sum(use.drafted for of, use in uses if of is kind) for kind in (False, True)}
    assert drafted[False] > 0, "of RL steps"
    assert drafted[True] > 0, "of evaluations, which are drafted for too"
    assert sum(judged) == drafted[False]
    decoded = {kind: sum(w.decode_tokens for w in windows if w.evaluation is kind) for kind in (False, True)}
    assert decoded[False] <= sum(row["tokens/generated"] for row in rows)
    given_up = 16 * 700  # the one after the last step, when the run is told to stop: some of it
    assert 0 < decoded[True] <= sum(16 * found["eval/length_mean"] for found in runs.evaluations("fitted")) + given_up

    long.is_as_untrained("fitted")


@pytest.mark.long
def test_hidden_states_of_the_learners_pass_do_as_well(long: LongRuns) -> None:
    """A fresh EAGLE-3 drafter, which reads three layers."""
    eagle3 = ("drafter.algorithm=eagle3", "drafter.recording.source=learner")
    rows = long.run("from-learner", lambda: long.has_trained("from-learner"), *TRAINED, *eagle3)
    assert all(row["drafter/recorded_bytes"] > 0 for row in rows if row["groups/used"])
    long.is_as_untrained("from-learner")


@pytest.mark.long
def test_a_published_head_is_trained_on_and_written_back(long: LongRuns, tmp_path: Path) -> None:
    """A head in speculators' form, of other widths and of half of the vocabulary: no token and no loss changes, and the
    trained one is exported in its form and read again."""
    target = long.folder("long_model")
    config = ModelConfig.from_hf(read_config(target))
    shape = json.loads((target / "config.json").read_text())
    head = write_head(
        tmp_path / "head",
        "speculators",
        config.vocab_size,
        torch.arange(0, config.vocab_size, 2),
        hidden=config.hidden_size,
        ids=[1, 2, shape["num_hidden_layers"]],
        norm_before_residual=True,
    )
    eagle3 = (f"rollout.speculation.eagle.path={tmp_path}/head", "drafter.algorithm=eagle3")
    long.run("published", lambda: long.has_trained("published"), *TRAINED, *eagle3)
    long.is_as_untrained("published")
    export(long.folder("published"), target, tmp_path / "out", "eagle3", "speculators")
    settings: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "batch_invariant": False}
    trained = load_eagle(tmp_path / "out", config, **settings)
    assert trained.ids is not None
    assert trained.ids.tolist() == list(range(0, config.vocab_size, 2))
    assert not torch.equal(trained.state_dict()["lm_head.weight"], head["lm_head.weight"])


@pytest.mark.long
def test_ctrl_c_in_the_middle_of_a_rollout_costs_no_worker_and_no_drafter(
    long: LongRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of each prompt's responses are in, and wait with their hidden states for the chunk of those that are not."""
    samples, ended = 48, 8
    graded = 0
    submit = RewardPool.submit

    def count(self: RewardPool, *arguments: Any) -> None:
        nonlocal graded
        submit(self, *arguments)
        graded += 1
        if graded == samples + ended:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RewardPool, "submit", count)
    rows = long.run("ctrl-c", lambda: False, *TRAINED, f"rollout.rollouts_per_prompt={samples // 2}")
    assert [row["step"] for row in rows] == [1]
    assert graded < 2 * samples
    assert not any(long.says("ctrl-c", kind) for kind in ("worker_lost", "drafters_not_saved", "recording_failed"))
    (saved,) = (long.folder("ctrl-c") / "checkpoints").iterdir()
    assert any((saved / DRAFTERS_DIR).iterdir())


def buffers_of(job: Job) -> list[Any]:
    assert job.drafter is not None
    return list(job.drafter._actors.buffers.by_node.values())
