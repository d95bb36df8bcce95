"""One RL step: prompts, rollouts, rewards, advantages, learner, weights. Owns their order and their metrics."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from actors.learner_group import StepUnderWay
from contracts.rollout import FinishReason
from contracts.training import StepResult
from launch.batch import Batch
from launch.config import Config
from launch.errors import PacelineError
from launch.observe import Span, StepRecord
from launch.run.agreement import check_agreement
from launch.run.collect import Round
from launch.run.groups import Graded, Group, natural_mean, signal, training_sequences, with_kl
from launch.run.job import Job
from launch.run.partial import goes_on, segments, settled
from launch.run.publish import Published
from launch.run.skip import PASSED_OVER, next_picks, observe, skip_metrics
from policies.dynamic_sampling import prompts_to_sample

STALENESS = "staleness/mean"


class NoRolloutsError(PacelineError):
    """Not one response of an RL step could be graded: going on would learn nothing, and say nothing."""


def rl_step(job: Job) -> None:
    """Do the next RL step, record it, and leave its weights on every worker.

    With `rollout.staleness` its responses were sampled within the step before, and those of the next one are sampled
    while it is learned, with the weights that workers have: all is over when they get the new ones.
    Raises Interrupted only before the weights change; NoRolloutsError, DisagreementError, and what the workers, the
    reward pool and the learner raise.
    """
    config, start_s, step = job.config, time.monotonic(), job.steps_done + 1
    if job.speculation is not None:
        job.dispatcher.settle()
        job.speculation.begin()
    sampled: list[Round] = []  # within this call
    if job.ahead is None:
        job.memory.decode()
        tick(job)
        sampled += sample(job, step)
    rounds = job.ahead or list(sampled)
    tick(job)
    groups = [group for collected in rounds for group in collected.groups]
    partial_ = config.rollout.partial.tokens_per_step is not None
    asked = sum(sum(collected.counts) if partial_ else collected.stats.requests for collected in rounds)
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
        kl = job.learner.reference_kl(sequences, step)
        sequences, kl_metrics = with_kl(sequences, kl, config.objective)
        group_metrics |= kl_metrics
    boundary, job.boundary = job.boundary, None
    ahead: list[Round] | None = None
    try:
        under_way = job.learner.begin_step(sequences, step, asked=asked)
        if config.rollout.staleness and step < config.run.steps:
            first_id = sum(collected.stats.requests for collected in sampled)  # of responses of the same weights
            ahead = sample(job, step + 1, first_id=first_id, to_the_end=True)
            sampled += ahead
        result = learned(job, under_way)
    except Exception:
        if job.learner.rewind():
            job.boundary = boundary
        raise
    stale = stale_metrics(config, groups, step - 1)
    check_agreement(config, step, result.metrics, sequences, stale=stale.get(STALENESS, 0.0) > 0)
    if job.drafter is not None:
        job.drafter.learned(result)
    tick(job)
    publish_s = time.monotonic()
    job.observer.progress("publish")
    job.steps_done, job.ahead = step, ahead
    job.boundary = job.state_dict()
    handed = Published()
    try:
        handed = job.publish()
    finally:  # the step is complete without it: whoever resumes from here finds its record
        end_s = time.monotonic()
        members = [member for group in groups for member in group.members]
        drawn = [member for collected in sampled for member in collected.members]
        speculation = job.speculation.take(verified(drawn)) if job.speculation is not None else None
        responses = [member.sample(group.pick) for group in groups for member in group.members]
        learner_metrics, learner_seconds = job.learner.take()
        meanwhile_s = sum(collected.rollout_s + collected.reward_wait_s for collected in ahead or ())
        job.observer.samples(job.steps_done, responses)
        job.observer.step(
            StepRecord(
                step=job.steps_done,
                metrics=rollout_metrics(rounds, uneven=uneven)
                | group_metrics
                | stale
                | carried_metrics(job)
                | result.metrics
                | handed.metrics
                | learner_metrics
                | (job.fleet.take() if job.fleet is not None else {})
                | (job.notices.take() if job.notices is not None else {}),
                seconds={
                    "rollout": sum(collected.rollout_s for collected in sampled),
                    "reward_wait": sum(collected.reward_wait_s for collected in sampled),
                    "learn": publish_s - learn_s - meanwhile_s,
                    **({"overlap": min(sum(result.seconds.values()), meanwhile_s)} if ahead else {}),
                    **handed.seconds,
                    **learner_seconds,
                    "step": end_s - start_s,
                },
                lengths=[member.rollout.tokens.size for member in members],
                versions=[member.versions for member in members] if stale else [],
                rollouts_per_prompt=rollouts_per_prompt(config, rounds),
                speculation=speculation,
                drafter=job.drafter.take(job.sampled_step, speculation) if job.drafter is not None else None,
            )
        )


def tick(job: Job) -> None:
    """Between two phases: workers may come and go."""
    if job.notices is not None:
        job.notices.tick()
    if job.fleet is not None:
        job.fleet.tick()


def sample(job: Job, step: int, *, first_id: int = 0, to_the_end: bool = False) -> list[Round]:
    """The rollouts of RL step `step`, graded: of its prompts, and with dynamic sampling of further ones in the prompt
    order, until `rollout.prompts_per_step` groups have signal or `objective.dynamic_sampling.max_rounds` are done.

    What a round asks for follows from the rewards before it, so it is the same wherever the step runs, and a step that
    is given up leaves the prompt order of the checkpoint as it was. Raises NoRolloutsError for the first round only:
    what one brings can be learned from without the next. `first_id`, `to_the_end`: see Batch, Collector.run.
    """
    wanted, objective = job.config.rollout.prompts_per_step, job.config.objective
    rounds: list[Round] = []
    count = wanted
    while count:
        asked = first_id + sum(collected.stats.requests for collected in rounds)
        rounds.append(sample_round(job, count, step, first_id=asked, refill=bool(rounds), to_the_end=to_the_end))
        if len(rounds) == 1 and not job.carried:
            require_some(rounds[0], step)
        if len(rounds) == objective.dynamic_sampling.max_rounds:
            break
        groups = [group for collected in rounds for group in collected.groups]
        count = prompts_to_sample(wanted, sum(signal(group, objective) for group in groups), len(groups))
    return rounds


def sample_round(
    job: Job, prompts: int, step: int, *, first_id: int = 0, refill: bool = False, to_the_end: bool = False
) -> Round:
    """The next `prompts` prompts of the order, sampled and graded for RL step `step`. `refill`: not the first ones."""
    partial_, carried = job.config.rollout.partial, job.carried
    fresh, passed_over = next_picks(job.order, job.prompts, prompts, job.skip)
    picks = [*(group.pick for group in carried), *fresh]
    plan = job.budget.plan(fresh)
    batch = Batch(
        picks,
        [*[job.config.rollout.rollouts_per_prompt] * len(carried), *plan.counts],
        job.sampling,
        seed=job.config.run.seed,
        expected_tokens=[job.lengths.expected_tokens(pick.prompt.prompt_id) for pick in picks],
        stop=plan.stop,
        first_id=first_id,
    )
    if parted := partial_.tokens_per_step is not None or bool(carried):
        batch = segments(batch, carried, partial_, last=step >= job.config.run.steps)
    phase = "refill" if refill else "rollout"
    with spare_time(job, step) as (decoding, sampled):
        collected = job.collector.run(
            batch, phase, step=step, same_step=refill, to_the_end=to_the_end, decoding=decoding, sampled=sampled
        )
    if parted:
        collected, job.carried = settled(collected, batch, carried)
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
def spare_time(job: Job, step: int) -> Iterator[tuple[Call, Call]]:
    """Around a rollout for RL step `step`. Yields what to call when all workers have work, and when nothing is left to
    sample: between the two, and longer where that disturbs nobody, workers without work may train the drafter."""
    drafter = job.drafter
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
    return [(m.rollout.tokens.size, m.rollout.verifications) for m in members if not (m.reissued or m.begun)]


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


def learned(job: Job, under_way: StepUnderWay) -> StepResult:
    """The learner's part, drawn on the timeline. An empty batch (every group dropped) changes nothing."""
    result = under_way.result()
    begin_s = result.started_s
    for phase, seconds in result.seconds.items():
        if seconds > 0:
            job.observer.span(Span("learner", phase, begin_s, begin_s + seconds, job.steps_done + 1))
        begin_s += seconds
    return result


def carried_metrics(job: Job) -> dict[str, float]:
    """What goes on in the next sampling; {} without rollout.partial."""
    if job.config.rollout.partial.tokens_per_step is None:
        return {}
    going = [member for group in job.carried for member in group.members.values() if goes_on(member)]
    return {
        "partial/groups": float(len(job.carried)),
        "partial/responses": float(len(going)),
        "partial/tokens": float(sum(member.rollout.tokens.size for member in going)),
    }


def stale_metrics(config: Config, groups: Sequence[Group], learner_version: int) -> dict[str, float]:
    """How many updates older than the learner's weights those are that sampled what it learns from, over tokens; {}
    where none can be."""
    parts = [part for group in groups for member in group.members for part in member.versions]
    ages, tokens = [learner_version - version for version, _ in parts], [tokens for _, tokens in parts]
    possible = config.rollout.staleness or config.rollout.partial.tokens_per_step is not None
    if not ages or not (possible or any(ages)):
        return {}
    mean = float(np.average(ages, weights=tokens))
    return {STALENESS: mean, "staleness/min": float(min(ages)), "staleness/max": float(max(ages))}


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
    if any(member.episode is not None for member in members):
        limited = sum(m.rollout.finish_reason == FinishReason.TURNS for m in members)
        metrics |= {"turns/limited": float(limited), "turns/limited_share": limited / len(members)}
    for collected in rounds:
        metrics |= collected.metrics
    metrics |= skip_metrics(rounds) | of_sets(groups)
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


def of_sets(groups: Sequence[Group]) -> dict[str, float]:
    """Prompts and reward of each of data.sets: the mean over prompts of their mean reward."""
    metrics = {}
    for name in dict.fromkeys(group.pick.prompt.set for group in groups if group.pick.prompt.set):
        own = [group for group in groups if group.pick.prompt.set == name]
        metrics[f"data/{name}/prompts"] = float(len(own))
        if not math.isnan(reward := natural_mean(own, lambda member: member.grade.value)):
            metrics[f"data/{name}/reward"] = reward
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
