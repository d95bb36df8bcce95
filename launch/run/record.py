"""The record of an RL step: measurements made during it, and the metrics reported of it.

Owns the names of metrics and their sums over rounds. Changes nothing in the run.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from contracts.rollout import FinishReason
from contracts.training import StepResult
from launch.config import Config
from launch.observe import StepDrafter, StepRecord
from launch.run.collect import Round
from launch.run.groups import Graded, PromptGroup, natural_mean
from launch.run.job import Job
from launch.run.partial import goes_on
from launch.run.publish import Published
from launch.run.rounds import early_metrics
from launch.run.skip import skip_metrics

STALENESS = "staleness/mean"


@dataclass(slots=True, kw_only=True)
class StepNotes:
    """Notes on an RL step from its begin to its end; times are time.monotonic()."""

    start_s: float = field(default_factory=time.monotonic)
    learn_s: float = 0.0  # when the learner's turn began ...
    publish_s: float = 0.0  # ... and ended
    rounds: list[Round] = field(default_factory=list)  # rounds that it learns from
    sampled: list[Round] = field(default_factory=list)  # rounds sampled within it: its own, or the next step's
    ahead: list[Round] = field(default_factory=list)  # those of them that belong to the next step
    groups: dict[str, float] = field(default_factory=dict)  # metrics of training_sequences and with_kl
    stale: dict[str, float] = field(default_factory=dict)
    learned: dict[str, float] = field(default_factory=dict)  # the learner's metrics
    learner_s: float = 0.0  # seconds of the learner's work
    uneven: bool = False  # see rollout_metrics

    @property
    def members(self) -> list[Graded]:
        """Responses that the step learns from, by prompt."""
        return [member for collected in self.rounds for member in collected.members]

    @property
    def requests(self) -> int:
        """The number of requests sampled within it so far."""
        return sum(collected.stats.requests for collected in self.sampled)

    def took(self, result: StepResult) -> None:
        """Take the learner's result of the step."""
        self.learned, self.learner_s = dict(result.metrics), sum(result.seconds.values())


def record_step(job: Job, notes: StepNotes, handed: Published) -> None:
    """Pass the observer the step that `job.steps_done` has just counted. `handed`: publication of its weights."""
    end_s = time.monotonic()
    groups = [group for collected in notes.rounds for group in collected.groups]
    drawn = [member for collected in notes.sampled for member in collected.members]
    speculation = job.speculation.take(verified(drawn)) if job.speculation is not None else None
    drafter = None
    if job.drafter is not None:
        drafter = job.drafter.take(job.sampled_step, end_s - notes.start_s, speculation)
        job.dispatcher.drafters.record(job.drafter.records)
        job.learner.records = job.drafter.records
    learner_metrics, learner_seconds = job.learner.take()
    meanwhile_s = sum(collected.rollout_s + collected.reward_wait_s for collected in notes.ahead)
    job.observer.samples(job.steps_done, [member.sample(group.pick) for group in groups for member in group.members])
    job.observer.step(
        StepRecord(
            step=job.steps_done,
            metrics=rollout_metrics(notes.rounds, uneven=notes.uneven)
            | notes.groups
            | notes.stale
            | carried_metrics(job)
            | notes.learned
            | handed.metrics
            | learner_metrics
            | (job.fleet.take() if job.fleet is not None else {})
            | (job.notices.take() if job.notices is not None else {})
            | looked_ahead(job, end_s - notes.start_s, drafter)
            | (early_metrics(job.dispatcher.early.take()) if job.rounds is not None else {}),
            seconds={
                "rollout": sum(collected.rollout_s for collected in notes.sampled),
                "reward_wait": sum(collected.reward_wait_s for collected in notes.sampled),
                "learn": notes.publish_s - notes.learn_s - meanwhile_s,
                **({"overlap": min(notes.learner_s, meanwhile_s)} if notes.ahead else {}),
                **handed.seconds,
                **learner_seconds,
                "step": end_s - notes.start_s,
            },
            lengths=[member.rollout.tokens.size for member in notes.members],
            versions=[member.versions for member in notes.members] if notes.stale else [],
            rollouts_per_prompt=rollouts_per_prompt(job.config, notes.rounds),
            speculation=speculation,
            drafter=drafter,
        )
    )


def looked_ahead(job: Job, step_s: float, drafter: StepDrafter | None) -> dict[str, float]:
    """Return the metrics of early samples; {} without lookahead. A changed decision is an event."""
    if job.lookahead is None:
        return {}
    metrics, news = job.lookahead.take(step_s, len(job.dispatcher.workers()), drafter)
    if news:
        job.observer.event("lookahead", news)
    return metrics


def rollouts_per_prompt(config: Config, rounds: Sequence[Round]) -> list[int]:
    """Return the requested responses by prompt, in order; [] if only rollout.rollouts_per_prompt decides them."""
    planned = config.rollout.budget.on or config.rollout.abort.enabled
    return [count for collected in rounds for count in collected.counts] if planned else []


def verified(members: Sequence[Graded]) -> list[tuple[int, int]]:
    """Return (tokens, verifications) of the rollouts that one worker sampled from start to end."""
    return [(m.rollout.tokens.size, m.rollout.verifications) for m in members if not (m.reissued or m.begun)]


def carried_metrics(job: Job) -> dict[str, float]:
    """Return metrics of what the next sampling continues; {} without rollout.partial."""
    if job.config.rollout.partial.tokens_per_step is None:
        return {}
    going = [member for group in job.carried for member in group.members.values() if goes_on(member)]
    return {
        "partial/groups": float(len(job.carried)),
        "partial/responses": float(len(going)),
        "partial/tokens": float(sum(member.rollout.tokens.size for member in going)),
    }


def stale_metrics(config: Config, groups: Sequence[PromptGroup], learner_version: int) -> dict[str, float]:
    """Return how many updates older than the learner's weights the sampling weights are, over tokens; {} if they cannot
    be older."""
    parts = [part for group in groups for member in group.members for part in member.versions]
    ages, tokens = [learner_version - version for version, _ in parts], [tokens for _, tokens in parts]
    possible = config.rollout.staleness or config.rollout.partial.tokens_per_step is not None
    if not ages or not (possible or any(ages)):
        return {}
    mean = float(np.average(ages, weights=tokens))
    return {STALENESS: mean, "staleness/min": float(min(ages)), "staleness/max": float(max(ages))}


def rollout_metrics(rounds: Sequence[Round], *, uneven: bool = False) -> dict[str, float]:
    """Return reward/*, tokens and failures of an RL step's rounds. Failed rollouts are counted, never averaged in.

    `uneven`: prompts have different numbers of responses, or responses may have been given up. Then reward/* estimate
    the values without that, see natural_mean.
    """
    members = [member for collected in rounds for member in collected.members]
    groups = [group for collected in rounds for group in collected.groups]
    graded = [member for group in groups for member in group.graded]
    rewards = np.array([member.grade.value for member in graded])
    truncated = sum(m.rollout.finish_reason == FinishReason.LENGTH for m in members)
    tokens = sum(collected.stats.tokens for collected in rounds)
    metrics = {
        "tokens/generated": float(tokens),
        "tokens_per_s": tokens / max(sum(collected.rollout_s for collected in rounds), 1e-9),
        "rollouts/failed": float(sum(collected.failed for collected in rounds)),
        "rollouts/reissued": float(sum(collected.stats.reissued for collected in rounds)),
        "rollouts/truncated": float(truncated),
        "rollouts/truncated_share": truncated / max(len(members), 1),
        "workers/lost": float(sum(collected.stats.lost_workers for collected in rounds)),
    }
    if any(member.episode is not None for member in members):
        limited = sum(m.rollout.finish_reason == FinishReason.TURNS for m in members)
        metrics |= {"turns/limited": float(limited), "turns/limited_share": limited / len(members)}
    for collected in rounds:
        metrics |= collected.metrics
    metrics |= skip_metrics(rounds) | of_sets(groups)
    parts = sorted({name for member in graded for name in member.grade.parts})
    if rewards.size and uneven:
        mean = natural_mean(groups)
        square = natural_mean(groups, power=2)
        metrics |= {"reward/mean": mean, "reward/std": math.sqrt(max(0.0, square - mean**2))}
        for part in parts:
            metrics[f"reward/{part}"] = natural_mean(groups, part)
    elif rewards.size:
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for part in parts:
            values = [member.grade.parts[part] for member in graded if part in member.grade.parts]
            metrics[f"reward/{part}"] = float(np.mean(values))
    return metrics


def of_sets(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return prompts and reward of each of data.sets: the mean over prompts of their mean reward."""
    metrics = {}
    for name in dict.fromkeys(group.pick.prompt.set for group in groups if group.pick.prompt.set):
        own = [group for group in groups if group.pick.prompt.set == name]
        metrics[f"data/{name}/prompts"] = float(len(own))
        if not math.isnan(reward := natural_mean(own)):
            metrics[f"data/{name}/reward"] = reward
    return metrics


def refill_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    """Return what dynamic sampling requested beyond the step's own prompts."""
    further = rounds[1:]
    return {
        "groups/rounds": float(len(rounds)),
        "groups/refilled": float(sum(len(collected.groups) for collected in further)),
        "tokens/refilled": float(sum(collected.stats.tokens for collected in further)),
    }
