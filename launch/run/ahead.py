"""Responses as a file of a checkpoint: of the next RL step (`rollout.staleness`), or that go on in it
(`rollout.partial`). Their weights are gone: nobody could sample them again. Owns the file; what is in it is others'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from actors.data import Prompt
from actors.training.checkpoint import CheckpointError
from contracts.rewards import Grade
from contracts.rollout import FinishReason, Rollout, Sampled
from launch.arrays import Packed, flat, parts, read_arrays, write_arrays
from launch.batch import Pick
from launch.dispatch import DispatchStats
from launch.run.collect import Round
from launch.run.groups import Graded, Group
from launch.run.partial import Carried

AHEAD_FILE = "ahead.npz"  # in a checkpoint; missing where there are none


@dataclass(frozen=True, slots=True)
class Responses:
    """`ahead`: of the next RL step, graded; None: they are sampled when it comes. `carried`: that go on."""

    ahead: list[Round] | None = None
    carried: list[Carried] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.ahead is not None or bool(self.carried)


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
    begun: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """A `Round` whose groups are (epoch, prompt id, members)."""

    groups: list[tuple[int, int, list[_Member]]]
    stats: DispatchStats
    rollout_s: float
    reward_wait_s: float
    metrics: dict[str, float]
    counts: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Responses:
    """`carried`: (epoch, prompt id, samples, members)."""

    ahead: list[_Round] | None
    carried: list[tuple[int, int, list[int], list[_Member]]]


_RESPONSES = TypeAdapter(list[_Responses], config=ConfigDict(ser_json_inf_nan="constants"))


def write_ahead(path: Path, responses: Responses) -> None:
    """Raises OSError."""
    write_arrays(path, pack(responses))


def read_ahead(checkpoint: Path, prompts: Sequence[Prompt]) -> Responses:
    """What `write_ahead` wrote into a checkpoint, if it did. Raises CheckpointError."""
    path = checkpoint / AHEAD_FILE
    if not path.is_file():
        return Responses()
    try:
        return unpack(read_arrays(path), {prompt.prompt_id: prompt for prompt in prompts})
    except (OSError, KeyError, ValueError, BadZipFile, ValidationError) as error:
        raise CheckpointError(
            f"{path}, the responses that the next step goes on from, cannot be read with these prompts: {error!r}"
        ) from error


def pack(responses: Responses) -> Packed:
    """Tokens and log-probs as flat arrays, all else as JSON."""
    rounds = responses.ahead or []
    members = [member for collected in rounds for member in collected.members]
    members += [member for carried in responses.carried for member in carried.members.values()]
    sampled = [member.rollout.sampled for member in members]
    own = [s.logprobs_t1 for s in sampled if s.logprobs_t1 is not None]
    plain = _Responses(
        ahead=None if responses.ahead is None else [_round(collected) for collected in rounds],
        carried=[
            (c.pick.epoch, c.pick.prompt.prompt_id, list(c.members), [_member(m) for m in c.members.values()])
            for c in responses.carried
        ],
    )
    return {
        "lengths": np.array([len(s) for s in sampled], np.int64),
        "tokens": flat([s.tokens for s in sampled], np.int32),
        "logprobs": flat([s.logprobs for s in sampled], np.float32),
        "has_logprobs_t1": np.array([s.logprobs_t1 is not None for s in sampled], np.bool_),
        "logprobs_t1": flat(own, np.float32),
        "responses": np.frombuffer(_RESPONSES.dump_json([plain]), np.uint8),
    }


def unpack(packed: Packed, prompts: Mapping[int, Prompt]) -> Responses:
    """What was packed, with every number as it was. `prompts`: by id; KeyError: there is no such one."""
    lengths, has_t1 = packed["lengths"].tolist(), packed["has_logprobs_t1"].tolist()
    of_t1 = iter(parts(packed["logprobs_t1"], [n for n, has in zip(lengths, has_t1, strict=True) if has]))
    arrays = iter(
        Sampled(tokens, logprobs, next(of_t1) if has else None)
        for tokens, logprobs, has in zip(
            parts(packed["tokens"], lengths), parts(packed["logprobs"], lengths), has_t1, strict=True
        )
    )
    (plain,) = _RESPONSES.validate_json(packed["responses"].tobytes())

    def group(epoch: int, prompt_id: int, members: Sequence[_Member]) -> Group:
        return Group(Pick(epoch, prompts[prompt_id]), [_graded(member, next(arrays)) for member in members])

    ahead = None if plain.ahead is None else [_collected(of, [group(*g) for g in of.groups]) for of in plain.ahead]
    carried = list[Carried]()
    for epoch, prompt_id, samples, members in plain.carried:
        of = group(epoch, prompt_id, members)
        carried.append(Carried(of.pick, dict(zip(samples, of.members, strict=True))))
    return Responses(ahead, carried)


def _round(collected: Round) -> _Round:
    return _Round(
        groups=[(g.pick.epoch, g.pick.prompt.prompt_id, [_member(m) for m in g.members]) for g in collected.groups],
        stats=collected.stats,
        rollout_s=collected.rollout_s,
        reward_wait_s=collected.reward_wait_s,
        metrics=collected.metrics,
        counts=collected.counts,
    )


def _collected(plain: _Round, groups: list[Group]) -> Round:
    return Round(
        groups=groups,
        stats=plain.stats,
        rollout_s=plain.rollout_s,
        reward_wait_s=plain.reward_wait_s,
        metrics=plain.metrics,
        counts=plain.counts,
    )


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
        begun=member.begun,
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
    return Graded(
        rollout=rollout,
        grade=member.grade,
        text=member.text,
        worker=member.worker,
        reissued=member.reissued,
        begun=member.begun,
    )
