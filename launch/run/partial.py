"""Responses that take several RL steps (`rollout.partial`): a limited number of tokens per step, each with newer
weights.

Owns what is carried from step to step, and which version sampled which token. A group trains when all its responses
have ended. Source: partial rollouts with a fixed token budget, Kimi k1.5 (arXiv 2501.12599), section 2.6.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from config.rollout import PartialOptions
from contracts.rewards import Grade
from contracts.rollout import FinishReason
from launch.batch import Batch, Pick
from launch.run.collect import Round
from launch.run.groups import Graded, PromptGroup

_UNFINISHED = Grade(value=0.0, error="unfinished")


@dataclass(frozen=True, slots=True)
class Carried:
    """The responses to one prompt, by sample, of which some continue. Those are ABORT, and not graded."""

    pick: Pick
    members: dict[int, Graded]


def goes_on(member: Graded) -> bool:
    return member.rollout.finish_reason is FinishReason.ABORT


def segments(batch: Batch, carried: Sequence[Carried], options: PartialOptions, *, last: bool) -> Batch:
    """Return the requests of `batch` to sample in this step, with their limits. Its first picks are those of `carried`.
    `last`: sample to the end, since no step follows."""
    requests = []
    for request in batch.requests:
        index, sample = batch.place(request.request_id)
        parts = 0
        if index < len(carried):
            member = carried[index].members.get(sample)
            if member is None or not goes_on(member):  # it failed, or has ended
                continue
            parts, request = len(member.versions), replace(request, prefix=member.rollout.sampled)
        if not last and parts + 1 < options.max_steps:
            sampled = 0 if request.prefix is None else len(request.prefix)
            limit = min(request.sampling.max_new_tokens, sampled + (options.tokens_per_step or 0))
            request = replace(
                request,
                sampling=replace(request.sampling, max_new_tokens=limit),
                expected_tokens=min(request.expected_tokens, limit),
            )
        requests.append(request)
    return batch.only(requests)


def settled(collected: Round, batch: Batch, carried: Sequence[Carried]) -> tuple[Round, list[Carried]]:
    """Return the round with its complete groups, and what the others carry on, both in the order of the picks. Versions
    cover every part."""
    groups, counts, rest = list[PromptGroup](), list[int](), list[Carried]()
    for index, pick in enumerate(batch.picks):
        before = carried[index].members if index < len(carried) else {}
        members = {sample: member for sample, member in before.items() if not goes_on(member)}
        for member in collected.groups[index].members:
            members[batch.place(member.rollout.request_id)[1]] = member
        open_ = [i for i in batch.ids(index) if i in collected.unfinished]
        for i in open_:
            rollout = replace(collected.unfinished[i], finish_reason=FinishReason.ABORT)
            members[batch.place(i)[1]] = Graded(
                rollout=rollout, grade=_UNFINISHED, text="", worker=collected.stats.sampled_by[i]
            )
        for sample, member in members.items():
            if (old := before.get(sample)) is not None and goes_on(old):
                members[sample] = replace(member, begun=old.versions)
        ordered = {sample: members[sample] for sample in sorted(members)}
        if open_:
            rest.append(Carried(pick, ordered))
        else:
            groups.append(PromptGroup(pick, list(ordered.values())))
            counts.append(len(batch.ids(index)))
    return replace(collected, groups=groups, counts=counts, unfinished={}), rest
