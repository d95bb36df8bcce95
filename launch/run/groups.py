"""Graded responses by prompt, as plain data, and what the learner gets of them. Owns which groups and responses train,
and with which advantages; the formulas are in policies. Knows nothing of workers, rounds or Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.engine.types import Rollout
from actors.rewards.types import Grade
from actors.training.types import TrainSequence
from launch.observe.records import Sample
from launch.run.batch import Pick
from policies.advantages import group_advantages
from policies.options import ObjectiveOptions


@dataclass(frozen=True, slots=True)
class Graded:
    """One response with its grade. `text` is decoded without special tokens."""

    rollout: Rollout
    grade: Grade
    text: str
    worker: int = 0  # index of the rollout worker that finished it
    reissued: bool = False  # more than one worker sampled it

    def sample(self, pick: Pick) -> Sample:
        return Sample(
            prompt=pick.prompt.text,
            response=self.text,
            reward=self.grade.value,
            tokens=int(self.rollout.tokens.size),
            finish_reason=self.rollout.finish_reason,
            answer=str(pick.prompt.record.get("answer", "")),
            parts=self.grade.parts,
            error=self.grade.error,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """All responses to one prompt that arrived, in the order of their samples."""

    pick: Pick
    members: list[Graded]

    @property
    def graded(self) -> list[Graded]:
        """Without those whose grading failed; none if the record says nothing about any of them."""
        return [] if self.bad_record else [member for member in self.members if member.grade.error is None]

    @property
    def bad_record(self) -> bool:
        """Whether the record cannot grade anything (reward events: bad_record)."""
        return any(member.grade.bad_record for member in self.members)


def training_sequences(
    groups: Sequence[Group], objective: ObjectiveOptions
) -> tuple[list[TrainSequence], dict[str, float]]:
    """What the learner gets of `groups`, in their order, and `groups/*`: total, used, varied (with two different
    rewards), zero_variance, ungraded (less than 2 grades), bad_record (of these, whose record says nothing)."""
    sequences: list[TrainSequence] = []
    zero_variance = ungraded = used = 0
    for group in groups:
        members = group.graded
        if len(members) < 2:
            ungraded += 1
            continue
        advantages = group_advantages([m.grade.value for m in members], normalize_std=objective.normalize == "group")
        zero_variance += advantages.zero_variance
        if advantages.zero_variance and objective.drop_zero_variance and not objective.teaches_without_advantage:
            continue
        used += 1
        sequences.extend(
            sequence(group.pick, member, float(advantage))
            for member, advantage in zip(members, advantages.advantages, strict=True)
        )
    return sequences, {
        "groups/total": float(len(groups)),
        "groups/used": float(used),
        "groups/varied": float(len(groups) - ungraded - zero_variance),
        "groups/zero_variance": float(zero_variance),
        "groups/ungraded": float(ungraded),
        "groups/bad_record": float(sum(group.bad_record for group in groups)),
    }


def sequence(pick: Pick, member: Graded, advantage: float) -> TrainSequence:
    """One response as the learner sees it."""
    return TrainSequence(
        prompt_tokens=pick.prompt.tokens,
        response_tokens=member.rollout.tokens,
        sampler_logprobs=member.rollout.logprobs,
        sampler_logprobs_t1=member.rollout.logprobs_t1,
        advantage=advantage,
        sampler=member.worker,
    )
