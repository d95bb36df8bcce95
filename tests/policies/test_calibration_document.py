"""The calibration file: what is written is read, another engine's is refused by name, a damaged one is set aside."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.calibration.document import (
    Calibration,
    CalibrationKey,
    CalibrationRefusedError,
    DraftCost,
    PassCost,
)

KEY = CalibrationKey(model="decoder 4x64", precision="float32", device="a processor, 1 thread")
seconds = st.floats(1e-7, 10.0)
passes = st.lists(
    st.builds(
        PassCost,
        requests=st.integers(1, 128),
        rows=st.integers(1, 4096),
        context_tokens=st.integers(0, 1 << 20),
        seconds=seconds,
        count=st.integers(1, 1000),
    ),
    max_size=6,
)
drafts = st.lists(
    st.builds(
        DraftCost,
        strategy=st.sampled_from(["suffix:8", "eagle:4x2/6", "self:3"]),
        requests=st.integers(1, 128),
        seconds=seconds,
        count=st.integers(1, 1000),
    ),
    max_size=6,
)


def small() -> Calibration:
    return Calibration.measured(KEY, [PassCost(requests=1, rows=1, context_tokens=64, seconds=1e-3, count=9)])


@settings(deadline=None, max_examples=25)
@given(passes=passes, drafts=drafts)
def test_what_is_written_is_read(
    passes: list[PassCost], drafts: list[DraftCost], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("calibrations") / "deep" / "one.json"
    calibration = Calibration.measured(KEY, passes, drafts)
    calibration.save(path)
    assert Calibration.load(path, KEY) == calibration
    assert [one.name for one in path.parent.iterdir()] == ["one.json"]


@pytest.mark.parametrize("field", list(CalibrationKey.model_fields))
def test_another_engines_is_refused_by_the_field_and_both_values(field: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    small().save(path)
    with pytest.raises(CalibrationRefusedError) as refused:
        Calibration.load(path, KEY.model_copy(update={field: "something else"}))
    for text in (str(path), field, repr(getattr(KEY, field)), "'something else'"):
        assert text in str(refused.value)
    assert path.exists(), "it is somebody's"


def test_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(small().model_dump_json().replace('"version":1', '"version":2'))
    with pytest.raises(CalibrationRefusedError, match="version is 2, this program reads 1"):
        Calibration.load(path, KEY)
    assert path.exists()


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"[]", b'{"version": 1}', b"null", b'{"version": 1, "key":'])
def test_a_damaged_one_is_set_aside_and_counts_as_none(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(damage)
    assert Calibration.load(path, KEY) is None
    assert not path.exists()
    assert (tmp_path / "one.json.corrupt").read_bytes() == damage
    assert Calibration.load(path, KEY) is None, "there is none now"


@pytest.mark.parametrize("change", [("0.001", "0"), ("0.001", "-1.0"), ("0.001", "NaN"), (":64", ":-3"), (":9", ":0")])
def test_impossible_values_are_damage(change: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    text = small().model_copy(update={"fitted": None}).model_dump_json()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    assert Calibration.load(path, KEY) is None
    assert (tmp_path / "one.json.corrupt").exists()
