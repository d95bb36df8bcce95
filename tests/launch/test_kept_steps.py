"""What the learner was given is kept exactly, in bounded memory, and leaves nothing behind."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.codec import Codec
from contracts.training import StepResult, TrainSequence
from launch.failover.kept import KeptSteps

SEQUENCES = Codec(TrainSequence)
RESULT = StepResult(losses=(0.25, 0.5), grad_norms=(1.5, 2.5), metrics={}, tokens=7, seconds={})
FLOATS = st.floats(width=32, allow_nan=False)


@st.composite
def sequences(draw: Any) -> TrainSequence:
    length = draw(st.integers(1, 5))

    def values(dtype: type, elements: Any = FLOATS) -> Any:
        return np.array(draw(st.lists(elements, min_size=length, max_size=length)), dtype)

    return TrainSequence(
        prompt_tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=4)), np.int32),
        response_tokens=values(np.int32, st.integers(0, 2**31 - 1)),
        sampler_logprobs=values(np.float32),
        sampler_logprobs_t1=draw(st.sampled_from([None, values(np.float32)])),
        advantage=draw(st.one_of(st.floats(allow_nan=False), st.just(values(np.float64)))),
        sampler=draw(st.sampled_from(["", "rollout-0", "rollout-11"])),
        weight=draw(st.floats(0, 4)),
    )


def same(one: TrainSequence, other: TrainSequence) -> bool:
    for name in one.__slots__:
        a, b = getattr(one, name), getattr(other, name)
        if type(a) is not type(b):
            return False
        if isinstance(a, np.ndarray) and not (a.dtype == b.dtype and a.tobytes() == b.tobytes()):
            return False
        if not isinstance(a, np.ndarray) and a != b:
            return False
    return True


@given(st.lists(sequences(), max_size=4))
def test_every_number_and_its_type_come_back(given: list[TrainSequence]) -> None:
    found = SEQUENCES.unpack(SEQUENCES.pack(given))
    assert len(found) == len(given)
    assert all(same(*pair) for pair in zip(given, found, strict=True))


def batch(step: int) -> list[TrainSequence]:
    source = np.random.default_rng(step)
    return [
        TrainSequence(
            prompt_tokens=source.integers(0, 99, 5).astype(np.int32),
            response_tokens=source.integers(0, 99, 50).astype(np.int32),
            sampler_logprobs=source.random(50).astype(np.float32),
            sampler_logprobs_t1=None,
            advantage=float(source.random()),
        )
        for _ in range(4)
    ]


def test_beyond_the_limit_steps_are_on_disk_and_come_back_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    one = sum(array.nbytes for array in SEQUENCES.pack(batch(1)).values())
    steps = KeptSteps(folder, in_memory_bytes=2 * one)
    for step in range(1, 6):
        steps.add(step, batch(step), step + 4, RESULT)
    assert sorted(path.name for path in folder.iterdir()) == [f"step_00000{i}.npz" for i in (3, 4, 5)]
    assert steps.bytes == 5 * one
    for step, found in enumerate(steps, 1):
        assert (found.step, found.asked, found.losses) == (step, step + 4, RESULT.losses)
        assert all(same(*pair) for pair in zip(batch(step), found.sequences, strict=True))
    steps.clear()
    assert (len(steps), steps.bytes, folder.exists()) == (0, 0, False)
    steps.add(6, batch(6), None, RESULT)
    assert [found.step for found in steps] == [6]
    assert not folder.exists()  # there is memory again


def test_what_is_kept_does_not_hold_on_to_the_arrays_that_it_was_given(tmp_path: Path) -> None:
    """They are views into the object store."""
    steps, given = KeptSteps(tmp_path / "kept"), batch(1)
    steps.add(1, given, None, RESULT)
    [found] = steps
    for name in ("prompt_tokens", "response_tokens", "sampler_logprobs"):
        assert not np.shares_memory(getattr(found.sequences[0], name), getattr(given[0], name))


def test_a_full_disk_is_an_error_that_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sum(array.nbytes for array in SEQUENCES.pack(batch(1)).values())
    steps = KeptSteps(tmp_path / "kept", in_memory_bytes=one)
    steps.add(1, batch(1), None, RESULT)

    def full(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        steps.add(2, batch(2), None, RESULT)
    assert [found.step for found in steps] == [1]
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_a_killed_driver_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/step_000001.npz").write_bytes(b"old")
    KeptSteps(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
