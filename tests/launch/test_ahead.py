"""Responses that were sampled ahead come back from a checkpoint with every number as it was."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data import Prompt
from actors.training.checkpoint import CheckpointError
from contracts.rewards import Grade
from contracts.rollout import FinishReason, Rollout, Sampled
from launch.batch import Pick
from launch.dispatch import DispatchStats
from launch.dispatch.ledger import FailedRequest
from launch.run.ahead import AHEAD_FILE, Responses, read_ahead, write_ahead
from launch.run.collect import Round
from launch.run.groups import Graded, PromptGroup
from launch.run.partial import Carried

PROMPTS = [
    Prompt(prompt_id=i, tokens=np.array([i], np.int32), text=f"p{i}", record={}, where="", uid=f"u{i}") for i in (3, 9)
]
NUMBERS = st.floats(allow_nan=False, allow_subnormal=False)


@st.composite
def members(draw: st.DrawFn) -> Graded:
    length = draw(st.integers(1, 5))

    def logprobs() -> np.ndarray:
        return np.array(draw(st.lists(st.floats(-50, 0, width=32), min_size=length, max_size=length)), np.float32)

    error = draw(st.none() | st.text())
    rollout = Rollout(
        request_id=draw(st.integers(0, 2**40)),
        sampled=Sampled(np.arange(length, dtype=np.int32), logprobs(), logprobs() if draw(st.booleans()) else None),
        finish_reason=draw(st.sampled_from(FinishReason)),
        weights_version=draw(st.integers(0, 9)),
        started_s=draw(NUMBERS),
        finished_s=draw(NUMBERS),
        verifications=draw(st.integers(0, 9)),
        propensity=draw(st.floats(0.01, 1)),
    )
    grade = Grade(
        value=draw(NUMBERS),
        parts=draw(st.dictionaries(st.text(), NUMBERS, max_size=2)),
        error=error,
        bad_record=draw(st.booleans()),
        notes=("a note",),
        trace=error,
    )
    return Graded(
        rollout=rollout,
        grade=grade,
        text=draw(st.text()),
        worker=draw(st.sampled_from(["", "rollout-1"])),
        reissued=draw(st.booleans()),
        begun=((3, 1), (4, 2)),
    )


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    groups = [
        PromptGroup(
            Pick(draw(st.integers(0, 5)), draw(st.sampled_from(PROMPTS))), draw(st.lists(members(), max_size=3))
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    stats = DispatchStats(
        requests=7,
        finished=6,
        failed=(FailedRequest(4, "too long"),),
        reissued=2,
        lost_workers=1,
        duplicates=1,
        tokens=99,
        preempted=3,
        seconds=draw(NUMBERS),
        sampled_by={0: "rollout-0", 12: ""},
        reissued_ids=frozenset({0, 5}),
    )
    metrics = {"budget/x": draw(st.sampled_from([math.inf, 0.1]))}
    return Round(groups=groups, stats=stats, rollout_s=draw(NUMBERS), reward_wait_s=0.1, metrics=metrics, counts=[2])


def plain(value: object) -> object:
    """With arrays as lists, so that it can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Prompt):
        return value.prompt_id
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


@st.composite
def carried(draw: st.DrawFn) -> Carried:
    samples = draw(st.sets(st.integers(0, 7), max_size=3))
    return Carried(Pick(draw(st.integers(0, 5)), PROMPTS[0]), {sample: draw(members()) for sample in sorted(samples)})


@settings(max_examples=40, deadline=None)
@given(st.none() | st.lists(rounds(), min_size=1, max_size=2), st.lists(carried(), max_size=2))
def test_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory, ahead: list[Round] | None, going: list[Carried]
) -> None:
    folder, made = tmp_path_factory.mktemp("checkpoint"), Responses(ahead, going)
    assert not read_ahead(folder, PROMPTS)
    write_ahead(folder / AHEAD_FILE, made)
    assert plain(read_ahead(folder, PROMPTS)) == plain(made)


def test_a_file_of_an_earlier_version_is_refused_by_its_format(tmp_path: Path) -> None:
    """Format 1 named no format; a later one names its own."""
    np.savez(tmp_path / AHEAD_FILE, responses=np.zeros(3, np.uint8))
    with pytest.raises(CheckpointError, match="is in format 1; this version of Paceline reads format 2"):
        read_ahead(tmp_path, PROMPTS)
    np.savez(tmp_path / AHEAD_FILE, format=np.array([3]))
    with pytest.raises(CheckpointError, match="is in format 3"):
        read_ahead(tmp_path, PROMPTS)


@settings(max_examples=20, deadline=None)
@given(st.lists(rounds(), min_size=1, max_size=2), st.integers(0, 10**6))
def test_a_file_that_lacks_something_is_refused(
    tmp_path_factory: pytest.TempPathFactory, ahead: list[Round], number: int
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_ahead(folder / AHEAD_FILE, Responses(ahead))
    with np.load(folder / AHEAD_FILE) as archive:
        columns = {name: archive[name] for name in archive.files}
    name = sorted(columns.keys() - {"format"})[number % (len(columns) - 1)]
    np.savez(folder / AHEAD_FILE, **{key: column for key, column in columns.items() if key != name})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_ahead(folder, PROMPTS)


def test_prompts_that_are_gone_are_refused(tmp_path: Path) -> None:
    write_ahead(tmp_path / AHEAD_FILE, Responses(None, [Carried(Pick(0, PROMPTS[0]), {})]))
    with pytest.raises(CheckpointError, match="cannot be read with these prompts"):
        read_ahead(tmp_path, PROMPTS[1:])
