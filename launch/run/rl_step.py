"""One RL step: prompts, rollouts, rewards, advantages, learner, weights. Owns their order and their metrics."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from actors.engine.types import FinishReason
from actors.training.types import StepResult, TrainSequence
from launch.batch import Batch
from launch.config import Config
from launch.errors import PacelineError
from launch.observe import Span, StepRecord
from launch.run.agreement import check_agreement
from launch.run.collect import Round
from launch.run.groups import Graded, natural_mean, signal, training_sequences, with_kl
from launch.run.job import Job
from launch.run.publish import Published
from launch.run.skip import PASSED_OVER, next_picks, observe, skip_metrics
from policies.dynamic_sampling import prompts_to_sample


class NoRolloutsError(PacelineError):
    """Not one response of an RL step could be graded: going on would learn nothing, and say nothing."""


def rl_step(job: Job) -> None:
    """Do the next RL step, record it, and leave its weights on every worker.

    Raises Interrupted only before the weights change; NoRolloutsError, DisagreementError, and what the workers, the
    reward pool and the learner raise.
    """
    config, start_s = job.config, time.monotonic()
    if job.speculation is not None:
        job.dispatcher.settle()
        job.speculation.begin()
    job.memory.decode()
    tick(job)
    rounds = sample(job)
    tick(job)
    groups = [group for collected in rounds for group in collected.groups]
    asked = sum(collected.stats.requests for collected in rounds)
    uneven = config.rollout.budget.on or config.rollout.abort.enabled
    sequences, group_metrics = training_sequences(
        groups,
        config.objective,
        prompts_per_step=config.rollout.prompts_per_step,
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        asked=asked if uneven else None,
    )
    if config.objective.dynamic_sampling.max_rounds > 1:
        group_metrics |= refill_metrics(rounds)
    learn_s = time.monotonic()
    job.observer.progress("learn", 0, len(sequences))
    job.memory.learn()
    if config.objective.kl_in_reward:
        kl = job.learner.reference_kl(sequences, job.steps_done + 1)
        sequences, kl_metrics = with_kl(sequences, kl, config.objective)
        group_metrics |= kl_metrics
    boundary, job.boundary = job.boundary, None
    try:
        result = learn(job, sequences, asked)
    except Exception:
        if job.learner.rewind():
            job.boundary = boundary
        raise
    check_agreement(config, job.steps_done + 1, result.metrics)
    if job.drafter is not None:
        job.drafter.learned(result)
    tick(job)
    publish_s = time.monotonic()
    job.observer.progress("publish")
    job.steps_done += 1
    job.boundary = job.state_dict()
    handed = Published()
    try:
        handed = job.publish()
    finally:  # the step is complete without it: whoever resumes from here finds its record
        end_s = time.monotonic()
        members = [member for group in groups for member in group.members]
        speculation = job.speculation.take(verified(members)) if job.speculation is not None else None
        responses = [member.sample(group.pick) for group in groups for member in group.members]
        learner_metrics, learner_seconds = job.learner.take()
        job.observer.samples(job.steps_done, responses)
        job.observer.step(
            StepRecord(
                step=job.steps_done,
                metrics=rollout_metrics(rounds, uneven=uneven)
                | group_metrics
                | result.metrics
                | handed.metrics
                | learner_metrics
                | (job.fleet.take() if job.fleet is not None else {})
                | (job.notices.take() if job.notices is not None else {}),
                seconds={
                    "rollout": sum(collected.rollout_s for collected in rounds),
                    "reward_wait": sum(collected.reward_wait_s for collected in rounds),
                    "learn": publish_s - learn_s,
                    **handed.seconds,
                    **learner_seconds,
                    "step": end_s - start_s,
                },
                lengths=[member.rollout.tokens.size for member in members],
                rollouts_per_prompt=rollouts_per_prompt(config, rounds),
                speculation=speculation,
                drafter=job.drafter.take(job.steps_done, speculation) if job.drafter is not None else None,
            )
        )


def tick(job: Job) -> None:
    """Between two phases: workers may come and go."""
    if job.notices is not None:
        job.notices.tick()
    if job.fleet is not None:
        job.fleet.tick()


def sample(job: Job) -> list[Round]:
    """The rollouts of one RL step, graded: of its prompts, and with dynamic sampling of further ones in the prompt
    order, until `rollout.prompts_per_step` groups have signal or `objective.dynamic_sampling.max_rounds` are done.

    What a round asks for follows from the rewards before it, so it is the same wherever the step runs, and a step that
    is given up leaves the prompt order of the checkpoint as it was. Raises NoRolloutsError for the first round only:
    what one brings can be learned from without the next.
    """
    wanted, objective = job.config.rollout.prompts_per_step, job.config.objective
    rounds = [sample_round(job, wanted)]
    require_some(rounds[0], job.steps_done + 1)
    while len(rounds) < objective.dynamic_sampling.max_rounds:
        groups = [group for collected in rounds for group in collected.groups]
        found = sum(signal(group, objective) for group in groups)
        if not (count := prompts_to_sample(wanted, found, len(groups))):
            break
        rounds.append(sample_round(job, count, first_id=sum(collected.stats.requests for collected in rounds)))
    return rounds


def sample_round(job: Job, prompts: int, *, first_id: int = 0) -> Round:
    """The next `prompts` prompts of the order, sampled and graded. `first_id`: how many requests of this RL step went
    before, 0 in its first round."""
    picks, passed_over = next_picks(job.order, job.prompts, prompts, job.skip)
    expected = [job.lengths.expected_tokens(pick.prompt.prompt_id) for pick in picks]
    plan = job.budget.plan(picks)
    batch = Batch(
        picks,
        plan.counts,
        job.sampling,
        seed=job.config.run.seed,
        expected_tokens=expected,
        stop=plan.stop,
        first_id=first_id,
    )
    phase = "refill" if first_id else "rollout"
    with spare_time(job) as (decoding, sampled):
        collected = job.collector.run(batch, phase, same_step=first_id > 0, decoding=decoding, sampled=sampled)
    for group in collected.groups:
        if group.members:
            lengths = [member.rollout.tokens.size for member in group.members]
            job.lengths.observe(group.pick.prompt.prompt_id, float(np.mean(lengths)))
    if job.skip is not None:
        observe(job.skip, collected.groups)
        collected.metrics[PASSED_OVER] = float(passed_over)
    collected.metrics.update(plan.metrics | job.budget.observe(collected.groups))
    return collected


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


def rollouts_per_prompt(config: Config, rounds: Sequence[Round]) -> list[int]:
    """Asked for, in the order of the prompts; [] where nothing but rollout.rollouts_per_prompt decides that."""
    planned = config.rollout.budget.on or config.rollout.abort.enabled
    return [count for collected in rounds for count in collected.counts] if planned else []


def verified(members: Sequence[Graded]) -> list[tuple[int, int]]:
    """(tokens, verifications) of the rollouts that one worker sampled from end to end."""
    return [(m.rollout.tokens.size, m.rollout.verifications) for m in members if not m.reissued]


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


def learn(job: Job, sequences: list[TrainSequence], asked: int) -> StepResult:
    """The learner's part, drawn on the timeline. An empty batch (every group dropped) changes nothing."""
    step = job.steps_done + 1
    result = job.learner.train_step(sequences, step, asked=asked)
    begin_s = result.started_s
    for phase, seconds in result.seconds.items():
        if seconds > 0:
            job.observer.span(Span("learner", phase, begin_s, begin_s + seconds, step))
        begin_s += seconds
    return result


def rollout_metrics(rounds: Sequence[Round], *, uneven: bool = False) -> dict[str, float]:
    """reward/*, tokens and failures of an RL step's rounds. Failed rollouts are counted, never averaged in.

    `uneven`: prompts were asked for different numbers of responses, or responses may have been given up: reward/* are
    then estimates of what they are without that, see natural_mean.
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
    for collected in rounds:
        metrics |= collected.metrics
    metrics |= skip_metrics(rounds)
    parts = sorted({name for member in graded for name in member.grade.parts})
    if rewards.size and uneven:
        mean = natural_mean(groups, lambda member: member.grade.value)
        square = natural_mean(groups, lambda member: member.grade.value**2)
        metrics |= {"reward/mean": mean, "reward/std": math.sqrt(max(0.0, square - mean**2))}
        for part in parts:
            metrics[f"reward/{part}"] = natural_mean(groups, partial(_part, part))
    elif rewards.size:
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for part in parts:
            values = [member.grade.parts[part] for member in graded if part in member.grade.parts]
            metrics[f"reward/{part}"] = float(np.mean(values))
    return metrics


def _part(name: str, member: Graded) -> float | None:
    return member.grade.parts.get(name)


def refill_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    """What dynamic sampling asked for beyond the step's own prompts."""
    further = rounds[1:]
    return {
        "groups/rounds": float(len(rounds)),
        "groups/refilled": float(sum(len(collected.groups) for collected in further)),
        "tokens/refilled": float(sum(collected.stats.tokens for collected in further)),
    }
