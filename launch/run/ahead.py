"""The next RL step's graded responses as a file of a checkpoint: with `rollout.staleness` they were sampled before this
step's weights were there, and could not be sampled again. Owns the file; what is in it is `collect`'s and `groups`'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from actors.data import Prompt
from actors.engine.types import FinishReason, Rollout, Sampled
from actors.rewards.types import Grade
from actors.training.checkpoint import CheckpointError
from launch.arrays import Packed, flat, parts, read_arrays, write_arrays
from launch.batch import Pick
from launch.dispatch import DispatchStats
from launch.run.collect import Round
from launch.run.groups import Graded, Group

AHEAD_FILE = "ahead.npz"  # in a checkpoint; missing where nothing was sampled ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A `Graded` but for its arrays."""

    request_id: int
    finish_reason: FinishReason
    weights_version: int
    started_s: float
    finished_s: float
    verifications: int
    propensity: float
    grade: Grade
    text: str
    worker: str
    reissued: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """A `Round` whose groups are (epoch, prompt id, members)."""

    groups: list[tuple[int, int, list[_Member]]]
    stats: DispatchStats
    rollout_s: float
    reward_wait_s: float
    metrics: dict[str, float]
    counts: list[int]


_ROUNDS = TypeAdapter(list[_Round], config=ConfigDict(ser_json_inf_nan="constants"))


def write_ahead(path: Path, rounds: Sequence[Round]) -> None:
    """Raises OSError."""
    write_arrays(path, pack(rounds))


def read_ahead(checkpoint: Path, prompts: Sequence[Prompt]) -> list[Round] | None:
    """None: nothing was sampled ahead. Raises CheckpointError."""
    path = checkpoint / AHEAD_FILE
    if not path.is_file():
        return None
    try:
        return unpack(read_arrays(path), {prompt.prompt_id: prompt for prompt in prompts})
    except (OSError, KeyError, ValueError, BadZipFile, ValidationError) as error:
        raise CheckpointError(
            f"{path}, the responses that the next step is learned from, cannot be read: {error}. Resume from an older "
            "checkpoint, with the prompts that the run had"
        ) from error


def pack(rounds: Sequence[Round]) -> Packed:
    """Tokens and log-probs as flat arrays, all else as JSON."""
    sampled = [member.rollout.sampled for collected in rounds for member in collected.members]
    own = [s.logprobs_t1 for s in sampled if s.logprobs_t1 is not None]
    plain = [
        _Round(
            groups=[(g.pick.epoch, g.pick.prompt.prompt_id, [_member(m) for m in g.members]) for g in collected.groups],
            stats=collected.stats,
            rollout_s=collected.rollout_s,
            reward_wait_s=collected.reward_wait_s,
            metrics=collected.metrics,
            counts=collected.counts,
        )
        for collected in rounds
    ]
    return {
        "lengths": np.array([len(s) for s in sampled], np.int64),
        "tokens": flat([s.tokens for s in sampled], np.int32),
        "logprobs": flat([s.logprobs for s in sampled], np.float32),
        "has_logprobs_t1": np.array([s.logprobs_t1 is not None for s in sampled], np.bool_),
        "logprobs_t1": flat(own, np.float32),
        "rounds": np.frombuffer(_ROUNDS.dump_json(plain), np.uint8),
    }


def unpack(packed: Packed, prompts: Mapping[int, Prompt]) -> list[Round]:
    """What was packed, with every number as it was. `prompts`: by id; KeyError: there is no such one."""
    lengths, has_t1 = packed["lengths"].tolist(), packed["has_logprobs_t1"].tolist()
    of_t1 = iter(parts(packed["logprobs_t1"], [n for n, has in zip(lengths, has_t1, strict=True) if has]))
    arrays = iter(
        Sampled(tokens, logprobs, next(of_t1) if has else None)
        for tokens, logprobs, has in zip(
            parts(packed["tokens"], lengths), parts(packed["logprobs"], lengths), has_t1, strict=True
        )
    )
    return [
        Round(
            groups=[
                Group(Pick(epoch, prompts[prompt_id]), [_graded(member, next(arrays)) for member in members])
                for epoch, prompt_id, members in plain.groups
            ],
            stats=plain.stats,
            rollout_s=plain.rollout_s,
            reward_wait_s=plain.reward_wait_s,
            metrics=plain.metrics,
            counts=plain.counts,
        )
        for plain in _ROUNDS.validate_json(packed["rounds"].tobytes())
    ]


def _member(member: Graded) -> _Member:
    rollout = member.rollout
    return _Member(
        request_id=rollout.request_id,
        finish_reason=rollout.finish_reason,
        weights_version=rollout.weights_version,
        started_s=rollout.started_s,
        finished_s=rollout.finished_s,
        verifications=rollout.verifications,
        propensity=rollout.propensity,
        grade=member.grade,
        text=member.text,
        worker=member.worker,
        reissued=member.reissued,
    )


def _graded(member: _Member, sampled: Sampled) -> Graded:
    rollout = Rollout(
        request_id=member.request_id,
        sampled=sampled,
        finish_reason=member.finish_reason,
        weights_version=member.weights_version,
        started_s=member.started_s,
        finished_s=member.finished_s,
        verifications=member.verifications,
        propensity=member.propensity,
    )
    return Graded(rollout=rollout, grade=member.grade, text=member.text, worker=member.worker, reissued=member.reissued)
