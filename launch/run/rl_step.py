"""One RL step: prompts, rollouts, rewards, advantages, learner, weights. Owns their order; launch.run.record owns the
record.
"""

import time

import numpy as np

from contracts.training import StepResult, TrainSequence
from launch.batch import Batch
from launch.errors import PacelineError
from launch.observe import Span
from launch.run.agreement import check_agreement
from launch.run.collect import Round
from launch.run.groups import signal, training_sequences, with_kl
from launch.run.job import Job
from launch.run.partial import segments, settled
from launch.run.publish import Published
from launch.run.record import STALENESS, StepNotes, record_step, refill_metrics, stale_metrics
from launch.run.skip import PASSED_OVER, next_picks, observe
from policies.dynamic_sampling import prompts_to_sample


def rl_step(job: Job) -> None:
    """Do the next RL step, record it, and leave its weights on every worker.

    With `rollout.staleness` its responses were sampled within the step before, and those of the next one are sampled
    while it is learned, with the weights that workers have: all is over when they get the new ones.
    Raises Interrupted only before the weights change; PacelineError where nothing was graded, or an engine disagrees
    with the learner; and what the workers, the reward pool and the learner raise.
    """
    step, notes = job.steps_done + 1, StepNotes()
    if job.speculation is not None:
        job.dispatcher.settle()
        job.speculation.begin()
    if job.ahead is None:
        job.memory.decode()
        notes.sampled += sample(job, step)
    notes.rounds = job.ahead or list(notes.sampled)
    sequences, asked = advantages(job, notes)
    result = learn(job, sequences, step, asked, notes)
    check_agreement(job.config, step, result.metrics, sequences, stale=notes.stale.get(STALENESS, 0.0) > 0)
    if job.drafter is not None:
        job.drafter.learned(result)
    notes.publish_s = time.monotonic()
    job.observer.progress("publish")
    job.steps_done, job.ahead = step, notes.ahead or None
    job.boundary = job.state_dict()
    handed = Published()
    try:
        handed = job.publish()
    finally:  # the step is complete without it, and a resume from here finds its record
        record_step(job, notes, handed)


def advantages(job: Job, notes: StepNotes) -> tuple[list[TrainSequence], int]:
    """Return the learner's sequences from the step's rounds, and the number of responses requested in them."""
    config, rounds = job.config, notes.rounds
    parted = config.rollout.partial.tokens_per_step is not None or config.rollout.rounds.factor is not None
    asked = sum(sum(collected.counts) if parted else collected.stats.requests for collected in rounds)
    notes.uneven = config.rollout.budget.on or config.rollout.abort.enabled
    sequences, notes.groups = training_sequences(
        [group for collected in rounds for group in collected.groups],
        config.objective,
        prompts_per_step=config.rollout.prompts_per_step,
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        asked=asked if notes.uneven else None,
    )
    if config.objective.dynamic_sampling.max_rounds > 1:
        notes.groups |= refill_metrics(rounds)
    return sequences, asked


def learn(job: Job, sequences: list[TrainSequence], step: int, asked: int, notes: StepNotes) -> StepResult:
    """Do the learner's turn; with `rollout.staleness` the next step is sampled meanwhile. If an update fails halfway,
    the learner returns to the previous step's state where it can."""
    config = job.config
    notes.learn_s = time.monotonic()
    job.observer.progress("learn", 0, len(sequences))
    job.memory.learn()
    if config.objective.kl_in_reward:
        kl = job.learner.reference_kl(sequences, step)
        sequences[:], metrics = with_kl(sequences, kl, config.objective)
        notes.groups |= metrics
    boundary, job.boundary = job.boundary, None
    try:
        job.learner.begin_step(sequences, step, asked=asked)
        if config.rollout.staleness and step < config.run.steps:
            notes.ahead = sample(job, step + 1, first_id=notes.requests, to_the_end=True)  # of the same weights
            notes.sampled += notes.ahead
        result = learned(job)
    except Exception:
        if job.learner.rewind():
            job.boundary = boundary
        raise
    notes.stale = stale_metrics(config, [group for of in notes.rounds for group in of.groups], step - 1)
    notes.took(result)
    return result


def sample(job: Job, step: int, *, first_id: int = 0, to_the_end: bool = False) -> list[Round]:
    """Return the graded rollouts of RL step `step`. With dynamic sampling, further prompts of the order are sampled
    until `rollout.prompts_per_step` groups have signal or `objective.dynamic_sampling.max_rounds` rounds are done.

    What a round asks for follows from the rewards before it, so it is the same wherever the step runs, and a step that
    is given up leaves the prompt order of the checkpoint as it was. Raises PacelineError for the first round only:
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
    """Sample and grade the order's next `prompts` prompts for RL step `step`. `refill`: not the step's first ones."""
    partial_, carried = job.config.rollout.partial, job.carried
    if job.rounds is not None:
        round_plan, fresh = job.rounds.picks(job.order)
        passed_over = 0
    else:
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
    race = None
    if job.rounds is not None:
        batch, race = job.rounds.begin(round_plan, batch)
    if job.lookahead is not None:
        trains = job.drafter is not None and job.drafter.due(step)
        looks = job.lookahead.plan(job.order, job.lengths, step, trains=trains)
        if job.drafter is not None:
            job.drafter.yields = looks
    phase = "refill" if refill else "rollout"
    collected = job.collector.run(
        batch, phase, step=step, same_step=refill, to_the_end=to_the_end, spare=True, race=race
    )
    if job.rounds is not None:
        collected = job.rounds.settled(collected, round_plan, batch, race)
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


def require_some(collected: Round, step: int) -> None:
    """Raise PacelineError if nothing was graded, with the first reason."""
    if any(group.graded for group in collected.groups):
        return
    lost = [f"rollout {failure.request_id}: {failure.reason}" for failure in collected.stats.failed]
    ungraded = [f"rollout {m.rollout.request_id}: {m.grade.error}" for m in collected.members]
    first = [*lost, *ungraded][0]
    raise PacelineError(
        f"step {step}: none of {collected.stats.requests} rollouts could be sampled and graded ({first})",
        remedy="all reasons are in events.jsonl; prompts longer than the engine takes: lower data.max_prompt_tokens",
    )


def learned(job: Job) -> StepResult:
    """Return the learner's result, drawn on the timeline. An empty batch (every group dropped) changes nothing."""
    result = job.learner.step_result()
    begin_s = result.started_s
    for phase, seconds in result.seconds.items():
        if seconds > 0:
            job.observer.span(Span("learner", phase, begin_s, begin_s + seconds, job.steps_done + 1))
        begin_s += seconds
    return result
