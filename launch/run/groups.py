"""Graded responses by prompt, as plain data, and the training sequences made of them.

Owns which groups and responses train, and with which advantages; policies have the formulas. Independent of workers,
rounds and Ray.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from config.objective import ObjectiveOptions
from contracts.rewards import Grade
from contracts.rollout import FinishReason, Rollout
from contracts.training import TrainSequence
from launch.batch import Pick
from launch.observe.records import Sample
from launch.run.episodes import Episode
from policies.advantages import GroupAdvantages, batch_advantages, has_zero_variance, kl_in_reward
from policies.dynamic_sampling import has_signal
from policies.overlong import concise_rewards, overlong_penalties
from policies.own_advantages import own_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """One graded response. `text` is decoded without special tokens."""

    rollout: Rollout
    grade: Grade
    text: str
    worker: str = ""  # the rollout worker that finished it
    reissued: bool = False  # more than one worker sampled it
    episode: Episode | None = None  # whose model turns are in `rollout` and `text`
    begun: tuple[tuple[int, int], ...] = ()  # (version, tokens) sampled in earlier RL steps

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(weights version, tokens sampled with it), in the order of the tokens."""
        newest = self.rollout.tokens.size - sum(tokens for _, tokens in self.begun)
        return (*self.begun, (self.rollout.weights_version, newest))

    def sample(self, pick: Pick, held_out: str = "", number: int | None = None) -> Sample:
        """`held_out`: the evaluation's set. `number`: index of the response to its prompt, from 0."""
        return Sample(
            uid=pick.prompt.uid,
            set=held_out,
            prompt=pick.prompt.text if self.episode is None else self.episode.prompt,
            response=self.text,
            reward=self.grade.value,
            tokens=int(self.rollout.tokens.size),
            finish_reason=self.rollout.finish_reason,
            answer=str(pick.prompt.record.get("answer", "")),
            parts=self.grade.parts,
            notes=self.grade.notes,
            error=self.grade.error,
            version=self.rollout.weights_version,
            turns=() if self.episode is None else self.episode.said,
            asked=pick.prompt.asked,
            sample=number,
        )


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """All responses to one prompt that arrived, ordered by sample."""

    pick: Pick
    members: list[Graded]

    @property
    def graded(self) -> list[Graded]:
        """The members without failed gradings; empty if the record cannot grade any."""
        return [] if self.bad_record else [member for member in self.members if member.grade.error is None]

    @property
    def bad_record(self) -> bool:
        """Whether the record cannot grade any response (reward events: bad_record)."""
        return any(member.grade.bad_record for member in self.members)


def signal(group: PromptGroup, objective: ObjectiveOptions) -> bool:
    """Whether dynamic sampling counts the group. It stops once rollout.prompts_per_step groups count."""
    members = group.graded
    return has_signal([m.grade.value for m in members], sum(_trains(m, objective) for m in members))


def training_sequences(
    groups: Sequence[PromptGroup],
    objective: ObjectiveOptions,
    *,
    prompts_per_step: int,
    max_new_tokens: int,
    asked: int | None = None,
) -> tuple[list[TrainSequence], dict[str, float]]:
    """Return the learner's sequences from `groups`, in their order, and metrics (docs/reference/metrics.md).

    A response counts in its group's baseline with its shaped reward even if it does not train itself
    (`objective.mask_truncated`), as in DAPO and TRL. With dynamic sampling the first `prompts_per_step` groups with
    signal are used, as in DAPO; the others neither train nor enter the batch's statistics. With KL in the reward,
    advantages are not whitened yet: see `with_kl`.

    `asked`: responses requested in all of `groups`, if prompts may have different numbers of them or some are given up.
    None: all weights are 1. Otherwise response j of prompt i has the weight (asked / len(groups) / n_i) /
    propensity_ij, with n_i graded responses of the prompt. So prompts count alike, whatever their number of responses
    (DUET, eq. 6, without its lower clip, which would make small groups count less). Responses that survived a coin toss
    also count for those that did not. Given-up responses do not train, but enter the baseline of the others, which is
    unbiased for a leave-one-out baseline (DUET, A.2.6).
    """
    least = 2 if objective.baseline in ("group", "leave_one_out") else 1  # a group of one has no baseline
    graded = [(group, members) for group in groups if len(members := group.graded) >= least]
    rewards, metrics = _shaped([members for _, members in graded], objective, max_new_tokens)
    chosen = list(range(len(graded)))
    if dynamic := objective.dynamic_sampling.max_rounds > 1:
        signals = [i for i in chosen if signal(graded[i][0], objective)]
        chosen = signals[:prompts_per_step]
        metrics["groups/surplus"] = float(len(signals) - len(chosen))
    made = _advantages(
        [rewards[i] for i in chosen],
        [[_trains(m, objective) * m.rollout.tokens.size for m in graded[i][1]] for i in chosen],
        objective,
    )
    moves_anyway = objective.teaches_without_advantage or objective.kl_in_reward
    sequences: list[TrainSequence] = []
    used = masked = 0
    for i, advantages in zip(chosen, made, strict=True):
        group, members = graded[i]
        if advantages.zero_variance and objective.drop_zero_variance and not moves_anyway:
            continue
        share = 1.0 if asked is None else asked / len(groups) / len(members)
        weights = [share if asked is None else share / member.rollout.propensity for member in members]
        trained = [
            sequence(group.pick, member, float(advantage), weight)
            for member, advantage, weight in zip(members, advantages.advantages, weights, strict=True)
            if _trains(member, objective)
        ]
        masked += sum(_masked(member, objective) for member in members)
        used += bool(trained)
        sequences.extend(trained)
    zero_variance = sum(has_zero_variance(values) for values in rewards)
    if dynamic:
        varied = len(signals)
    elif objective.baseline in ("group", "leave_one_out"):
        varied = len(graded) - zero_variance
    elif objective.normalize == "whiten":  # any difference in the batch gives signal to all of it
        varied = len(graded) if graded and not has_zero_variance(np.concatenate(rewards)) else 0
    else:
        varied = sum(bool(advantages.advantages.any()) for advantages in made)
    if objective.mask_truncated:
        metrics["rollouts/masked"] = float(masked)
    return sequences, metrics | {
        "groups/total": float(len(groups)),
        "groups/used": float(used),
        "groups/varied": float(varied),
        "groups/zero_variance": float(zero_variance),
        "groups/ungraded": float(len(groups) - len(graded)),
        "groups/bad_record": float(sum(group.bad_record for group in groups)),
    }


def _advantages(
    rewards: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], objective: ObjectiveOptions
) -> list[GroupAdvantages]:
    if objective.advantages is not None:
        return own_advantages(rewards, lengths, path=objective.advantages, arguments=objective.advantages_arguments)
    return batch_advantages(
        rewards,
        lengths,
        baseline=objective.baseline,
        normalize="none" if objective.kl_in_reward and objective.normalize == "whiten" else objective.normalize,
    )


def sequence(pick: Pick, member: Graded, advantage: float, weight: float = 1.0) -> TrainSequence:
    """Make the learner's sequence of one response."""
    episode = member.episode
    return TrainSequence(
        prompt_tokens=pick.prompt.tokens if episode is None else episode.prompt_tokens,
        response_tokens=member.rollout.tokens if episode is None else episode.response_tokens,
        drawn=None if episode is None else episode.drawn,
        sampler_logprobs=member.rollout.logprobs,
        sampler_logprobs_t1=member.rollout.logprobs_t1,
        advantage=advantage,
        sampler=member.worker,
        weight=weight,
    )


def natural_mean(groups: Sequence[PromptGroup], part: str | None = None, *, power: int = 1) -> float:
    """Mean over prompts of the mean of a grade's `part` (None: all of it) to the `power` over their graded responses,
    as if each had ended by itself: those that were given up count as 0, those that a coin let go on 1 / propensity
    times. Unbiased, so a prompt's mean may leave the range of its values. NaN if no response has that part."""
    means = []
    for group in groups:
        having = [member for member in group.graded if part is None or part in member.grade.parts]
        values = [member.grade.value if part is None else member.grade.parts[part] for member in having]
        if having:
            pairs = zip(having, values, strict=True)
            means.append(sum(0.0 if given_up(m) else of**power / m.rollout.propensity for m, of in pairs) / len(having))
    return float(np.mean(means)) if means else math.nan


def given_up(member: Graded) -> bool:
    """Whether its rule ended it without an answer."""
    return member.rollout.finish_reason == FinishReason.GIVEN_UP


def with_kl(
    sequences: Sequence[TrainSequence], kl: Sequence[NDArray[np.float32]], objective: ObjectiveOptions
) -> tuple[list[TrainSequence], dict[str, float]]:
    """Return the sequences with per-token advantages, and the metric `kl`. Each token's advantage has the KL from that
    token on subtracted. `kl`: of every token, [T] each, in their order (LearnerGroup.reference_kl)."""
    if not sequences:
        return [], {}
    made = kl_in_reward(
        [float(s.advantage) for s in sequences],
        kl,
        coef=objective.kl_coef,
        whitened=objective.normalize == "whiten",
    )
    taken = [replace(s, advantage=advantages) for s, advantages in zip(sequences, made, strict=True)]
    return taken, {"kl": float(np.concatenate(kl).astype(np.float64).mean())}


def _trains(member: Graded, objective: ObjectiveOptions) -> bool:
    return not (given_up(member) or _masked(member, objective))


def _masked(member: Graded, objective: ObjectiveOptions) -> bool:
    return objective.mask_truncated and member.rollout.finish_reason == FinishReason.LENGTH


def _shaped(
    groups: Sequence[Sequence[Graded]], objective: ObjectiveOptions, max_new_tokens: int
) -> tuple[list[list[float]], dict[str, float]]:
    """Return the rewards for the advantages, and metrics of shaping if they differ from the grader's."""
    rewards = [[m.grade.value for m in members] for members in groups]
    metrics = dict[str, float]()
    if groups and objective.length_penalty:
        lengths = [[m.rollout.tokens.size for m in members] for members in groups]
        strength = objective.length_penalty
        rewards = [
            concise_rewards(own, tokens, strength=strength).tolist()
            for own, tokens in zip(rewards, lengths, strict=True)
        ]
        metrics["length_penalty/reward"] = float(np.mean([value for values in rewards for value in values]))
    if not (buffer_tokens := objective.overlong.buffer_tokens):
        return rewards, metrics
    penalties = [
        overlong_penalties(
            [m.rollout.tokens.size for m in members],
            max_tokens=max_new_tokens,
            buffer_tokens=buffer_tokens,
            penalty=objective.overlong.penalty,
        )
        for members in groups
    ]
    shaped = [(np.array(own) + penalty).tolist() for own, penalty in zip(rewards, penalties, strict=True)]
    if not shaped:
        return shaped, metrics
    lost = -np.concatenate(penalties)
    return shaped, metrics | {
        "overlong/share": float((lost > 0).mean()),
        "overlong/penalty": float(lost.mean()),
        "overlong/reward": float(np.mean([value for values in shaped for value in values])),
    }
