"""One RL step: prompts, rollouts, rewards, advantages, learner, weights. Owns their order and their metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from actors.engine.types import FinishReason
from actors.training.types import StepResult, TrainSequence
from launch.errors import PacelineError
from launch.observe import Span, StepRecord
from launch.run.agreement import check_agreement
from launch.run.batch import Batch, Pick
from launch.run.collect import Round
from launch.run.groups import training_sequences
from launch.run.job import Job


class NoRolloutsError(PacelineError):
    """Not one response of an RL step could be graded: going on would learn nothing, and say nothing."""


def rl_step(job: Job) -> None:
    """Do the next RL step, record it, and leave its weights on every worker.

    Raises Interrupted only before the weights change; NoRolloutsError, DisagreementError, and what the workers, the
    reward pool and the learner raise.
    """
    config, start_s = job.config, time.monotonic()
    rollout = config.rollout
    picks = [Pick(epoch, job.prompts[index]) for epoch, index in job.order.take(rollout.prompts_per_step)]
    expected = [job.lengths.expected_tokens(pick.prompt.prompt_id) for pick in picks]
    counts = [rollout.rollouts_per_prompt] * len(picks)
    batch = Batch(picks, counts, job.sampling, seed=config.run.seed, expected_tokens=expected)
    if job.speculation is not None:
        job.dispatcher.settle()
        job.speculation.begin()
    with spare_time(job) as (decoding, sampled):
        collected = job.collector.run(batch, "rollout", decoding=decoding, sampled=sampled)
    require_some(collected, job.steps_done + 1)
    for group in collected.groups:
        if group.members:
            lengths = [member.rollout.tokens.size for member in group.members]
            job.lengths.observe(group.pick.prompt.prompt_id, float(np.mean(lengths)))
    sequences, group_metrics = training_sequences(collected.groups, config.objective)
    learn_s = time.monotonic()
    job.observer.progress("learn", 0, len(sequences))
    job.boundary = None
    result = learn(job, sequences)
    check_agreement(config, job.steps_done + 1, result.metrics)
    if job.drafter is not None:
        job.drafter.learned(result)
    publish_s = time.monotonic()
    job.observer.progress("publish")
    job.steps_done += 1
    job.boundary = job.state_dict()
    handed: dict[str, float] = {}
    try:
        handed = job.publish()
    finally:  # the step is complete without it: whoever resumes from here finds its record
        end_s = time.monotonic()
        speculation = job.speculation.take(verified(collected)) if job.speculation is not None else None
        responses = [m.sample(group.pick) for group in collected.groups for m in group.members]
        job.observer.samples(job.steps_done, responses)
        job.observer.step(
            StepRecord(
                step=job.steps_done,
                metrics=rollout_metrics(collected) | group_metrics | result.metrics,
                seconds={
                    "rollout": collected.rollout_s,
                    "reward_wait": collected.reward_wait_s,
                    "learn": publish_s - learn_s,
                    **handed,
                    "step": end_s - start_s,
                },
                lengths=[member.rollout.tokens.size for member in collected.members],
                speculation=speculation,
                drafter=job.drafter.take(job.steps_done, speculation) if job.drafter is not None else None,
            )
        )


Call = Callable[[], None]


@contextmanager
def spare_time(job: Job) -> Iterator[tuple[Call, Call]]:
    """Around a rollout. Yields what to call when all workers have work, and when nothing is left to sample: between the
    two, and longer where that disturbs nobody, workers without work may train the drafter."""
    drafter, step = job.drafter, job.steps_done + 1
    if drafter is None:
        yield lambda: None, lambda: None
        return
    try:
        yield lambda: drafter.begin(step, job.dispatcher), lambda: drafter.reached("sampled", step)
    finally:
        drafter.reached("graded", step)
    drafter.make_room(job.dispatcher)


def verified(collected: Round) -> list[tuple[int, int]]:
    """(tokens, verifications) of the rollouts that one worker sampled from end to end."""
    return [(m.rollout.tokens.size, m.rollout.verifications) for m in collected.members if not m.reissued]


def require_some(collected: Round, step: int) -> None:
    """Raise NoRolloutsError if nothing was graded, with the first reason."""
    if any(group.graded for group in collected.groups):
        return
    lost = [f"rollout {failure.request_id}: {failure.reason}" for failure in collected.stats.failed]
    ungraded = [f"rollout {m.rollout.request_id}: {m.grade.error}" for m in collected.members]
    first = [*lost, *ungraded][0]
    raise NoRolloutsError(
        f"step {step}: none of {collected.stats.requests} rollouts could be sampled and graded ({first})",
        remedy="all reasons are in events.jsonl; prompts longer than the engine takes: lower data.max_prompt_tokens",
    )


def learn(job: Job, sequences: list[TrainSequence]) -> StepResult:
    """The learner's part, drawn on the timeline. An empty batch (every group dropped) changes nothing."""
    step = job.steps_done + 1
    result = job.learner.train_step(sequences, step)
    begin_s = result.started_s
    for phase, seconds in result.seconds.items():
        if seconds > 0:
            job.observer.span(Span("learner", phase, begin_s, begin_s + seconds, step))
        begin_s += seconds
    return result


def rollout_metrics(collected: Round) -> dict[str, float]:
    """reward/*, tokens and failures of one round. Failed rollouts are counted, never averaged in."""
    graded = [member for group in collected.groups for member in group.graded]
    rewards = np.array([member.grade.value for member in graded])
    truncated = sum(m.rollout.finish_reason == FinishReason.LENGTH for m in collected.members)
    metrics = {
        "tokens/generated": float(collected.stats.tokens),
        "tokens_per_s": collected.stats.tokens / max(collected.rollout_s, 1e-9),
        "rollouts/failed": float(collected.failed),
        "rollouts/reissued": float(collected.stats.reissued),
        "rollouts/truncated": float(truncated),
        "rollouts/truncated_share": truncated / max(len(collected.members), 1),
        "workers/lost": float(collected.stats.lost_workers),
    }
    if rewards.size:
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for part in sorted({name for member in graded for name in member.grade.parts}):
            values = [member.grade.parts[part] for member in graded if part in member.grade.parts]
            metrics[f"reward/{part}"] = float(np.mean(values))
    return metrics
