"""Graded groups for tests, made of what matters there: rewards, lengths, why a response ended."""

from collections.abc import Sequence

import numpy as np

from actors.data import Prompt
from contracts.rewards import Grade
from contracts.rollout import FinishReason, Rollout, Sampled
from launch.batch import Pick
from launch.dispatch import DispatchStats
from launch.dispatch.ledger import FailedRequest
from launch.run.groups import Graded, PromptGroup

CUT, GIVEN_UP = FinishReason.LENGTH, FinishReason.GIVEN_UP


def prompt_of(prompt_id: int) -> Prompt:
    """Its first token is its id."""
    return Prompt(
        prompt_id=prompt_id,
        uid=str(prompt_id),
        text=f"prompt {prompt_id}",
        tokens=np.array([prompt_id, 2], np.int32),
        record={},
    )


def group_of(
    rewards: Sequence[float],
    *,
    prompt: int = 0,
    lengths: Sequence[int] | None = None,
    reasons: Sequence[FinishReason | None] | None = None,
    propensities: Sequence[float] | None = None,
) -> PromptGroup:
    """One response per reward; by default one token each, and none of them cut or given up."""
    pick = Pick(0, prompt_of(prompt))
    members = []
    for i, reward in enumerate(rewards):
        size = lengths[i] if lengths else 1
        reason = (reasons[i] if reasons else None) or FinishReason.STOP
        logprobs = np.zeros(size, np.float32)
        rollout = Rollout(
            request_id=i,
            sampled=Sampled(np.full(size, 5, np.int32), logprobs, logprobs.copy()),
            finish_reason=reason,
            weights_version=0,
            started_s=0.0,
            finished_s=1.0,
            propensity=propensities[i] if propensities else 1.0,
        )
        members.append(Graded(rollout=rollout, grade=Grade(value=reward), text="", worker=i % 2))
    return PromptGroup(pick, members)


def groups_of(*rewards: Sequence[float]) -> list[PromptGroup]:
    """One group for each list of rewards; prompts count from 0."""
    return [group_of(values, prompt=index) for index, values in enumerate(rewards)]


def stats_of(requests: int, *failed: FailedRequest) -> DispatchStats:
    """Of a round in which everything but these went well, at ten tokens a response."""
    finished = requests - len(failed)
    return DispatchStats(
        requests=requests,
        finished=finished,
        failed=failed,
        reissued=0,
        lost_workers=0,
        duplicates=0,
        tokens=10 * finished,
        preempted=0,
        seconds=1.0,
        sampled_by={},
    )
