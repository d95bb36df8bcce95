"""Calibrations between runs: found by what they are of, merged by whoever writes at once, refused by name."""

import json
import threading
from pathlib import Path

import pytest

from actors.engine.calibrated import model_shape
from contracts.rollout import PassesDrifted, PassesKnown, PassesRefined
from launch.calibrations import (
    FOLDER,
    WRITE_S,
    CalibrationStore,
    add_to_folder,
    calibration_issues,
    calibrations_folder,
    drift_text,
    file_of,
    merged,
    read_calibration,
)
from launch.config import Config
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, DraftCost, PassCost
from tests.context import Heard
from tests.engine.support import write_config


def config_of(tmp_path: Path, **speculation: object) -> Config:
    model = write_config(tmp_path / "model")
    return Config.model_validate(
        {
            "run": {"name": "r", "dir": str(tmp_path / "runs"), "steps": 2},
            "model": {"path": str(model)},
            "data": {"train": "train.jsonl"},
            "rollout": {"speculation": speculation},
        }
    )


def key_of(config: Config, device: str = "cpu a", precision: str = "float32") -> CalibrationKey:
    return CalibrationKey(model=model_shape(config.model.path), precision=precision, device=device)


def calibration(key: CalibrationKey, seconds: float = 1e-3, requests: tuple[int, ...] = (1, 4, 16)) -> Calibration:
    passes = tuple(PassCost(requests=n, rows=n, context_tokens=64 * n, seconds=seconds * n, count=8) for n in requests)
    return Calibration(key=key, passes=passes, drafts=(DraftCost(strategy="suffix:8", requests=1, seconds=1e-5),))


def test_a_run_hands_out_what_fits_its_model_and_precision_for_every_device(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = calibrations_folder(config)
    assert folder == tmp_path / "runs" / FOLDER
    other_model = CalibrationKey(model="another", precision="float32", device="cpu a")
    for key in (
        key_of(config),
        key_of(config, "cpu b"),
        key_of(config, precision="float32 w8a8"),
        key_of(config, precision="bfloat16"),
        other_model,
    ):
        add_to_folder(folder, calibration(key))
    assert len(list(folder.glob("*.json"))) == 5
    store = CalibrationStore.of(config, Heard())
    assert {one.key.device for one in store.given} == {"cpu a", "cpu b"}
    assert {(one.key.model, one.key.precision) for one in store.given} == {(key_of(config).model, "float32")}
    assert store.path == ""
    low = config.model_copy(update={"rollout": config.rollout.model_copy(update={"quantization": "w8a8"})})
    assert [one.key.precision for one in CalibrationStore.of(low, Heard()).given] == ["float32 w8a8"]


@pytest.mark.parametrize("speculation", [{"calibration": "off"}, {"mode": "off"}])
def test_off_hands_out_nothing_and_keeps_nothing(tmp_path: Path, speculation: dict[str, object]) -> None:
    config = config_of(tmp_path, **speculation)
    folder = calibrations_folder(config)
    path = add_to_folder(folder, calibration(key_of(config)))
    before = path.read_bytes()
    store = CalibrationStore.of(config, Heard())
    assert store.given == ()
    store.heard("rollout-0", PassesRefined(calibration(key_of(config), 5e-3)))
    store.write()
    assert path.read_bytes() == before


def test_what_engines_learn_is_what_the_next_run_begins_with(tmp_path: Path) -> None:
    """Nobody has calibrated: run 1 measures in passing, run 2 says that it begins with that."""
    config, said = config_of(tmp_path), Heard()
    key = key_of(config)
    first = CalibrationStore.of(config, said)
    assert first.given == ()
    first.heard("rollout-0", PassesKnown(key, 0))
    first.heard("rollout-0", PassesRefined(calibration(key)))
    first.write()
    second = CalibrationStore.of(config, said)
    (given,) = second.given
    assert CostModel(given).step_s(4, 4, 256) == pytest.approx(4e-3, rel=0.05)
    second.heard("rollout-0", PassesKnown(key, len(given.passes)))
    second.heard("rollout-1", PassesKnown(key, len(given.passes)))
    assert [kind for kind, _ in said] == ["calibration", "calibration"]
    assert "measured in passing" in said[0][1]
    assert said[1][1] == f"rollout-0 begins with 3 measured passes for cpu a: {file_of(first.folder, key)}"


def test_what_engines_learn_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    now = [100.0]
    config = config_of(tmp_path)
    store = CalibrationStore.of(config, Heard())
    store.clock = lambda: now[0]
    path = file_of(store.folder, key_of(config))
    store.heard("rollout-0", PassesRefined(calibration(key_of(config))))
    assert not path.exists()
    now[0] += WRITE_S
    store.heard("rollout-1", PassesRefined(calibration(key_of(config), requests=(64,))))
    assert {one.requests for one in read_calibration(path).passes} == {1, 4, 16, 64}


def test_merging_weighs_by_how_often_and_keeps_what_only_one_has(tmp_path: Path) -> None:
    key = key_of(config_of(tmp_path))
    often = Calibration(key=key, passes=(PassCost(requests=4, rows=4, context_tokens=256, seconds=4e-3, count=900),))
    once = Calibration(
        key=key,
        passes=(
            PassCost(requests=4, rows=4, context_tokens=256, seconds=8e-3, count=100),
            PassCost(requests=32, rows=32, context_tokens=2048, seconds=2e-2, count=3),
        ),
        drafts=(DraftCost(strategy="ngram:3", requests=2, seconds=2e-5, count=4),),
    )
    for both in (merged(often, once), merged(once, often)):
        costs = {one.requests: one.seconds for one in both.passes}
        assert costs[4] == pytest.approx(4e-3 * 2**0.1, rel=0.02)
        assert costs[32] == pytest.approx(2e-2, rel=0.02)
        assert [one.strategy for one in both.drafts] == ["ngram:3"]
    again = merged(merged(often, once), merged(often, once))
    assert len(again.passes) == 2  # it does not grow with every run


def test_runs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    key = key_of(config_of(tmp_path))
    folder = tmp_path / "shared"
    barrier = threading.Barrier(8)

    def write(requests: int) -> None:
        barrier.wait()
        for _ in range(3):
            add_to_folder(folder, calibration(key, requests=(requests,)))

    threads = [threading.Thread(target=write, args=(2**i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_calibration(file_of(folder, key))
    assert {one.requests for one in found.passes} == {2**i for i in range(8)}
    assert [path.name for path in folder.iterdir() if path.name.endswith((".new", ".corrupt"))] == []


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"version": 1, "key": 3}', b"[]"])
def test_a_damaged_file_is_set_aside_with_a_warning_and_measured_again(tmp_path: Path, damage: bytes) -> None:
    config, said = config_of(tmp_path), Heard()
    key = key_of(config)
    path = add_to_folder(calibrations_folder(config), calibration(key))
    path.write_bytes(damage)
    store = CalibrationStore.of(config, said)
    assert store.given == ()
    assert [kind for kind, _ in said] == ["calibration_corrupt"]
    assert path.with_name(f"{path.name}.corrupt").read_bytes() == damage
    store.heard("rollout-0", PassesRefined(calibration(key)))
    store.write()
    assert [one.key for one in CalibrationStore.of(config, said).given] == [key]


def test_one_of_a_later_release_is_left_out_and_said(tmp_path: Path) -> None:
    config, said = config_of(tmp_path), Heard()
    path = add_to_folder(calibrations_folder(config), calibration(key_of(config)))
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    assert CalibrationStore.of(config, said).given == ()
    (kind, message), *rest = said
    assert (kind, rest) == ("calibration_refused", [])
    assert "version is 9" in message


def test_a_demanded_file_is_taken_and_never_written(tmp_path: Path) -> None:
    made = config_of(tmp_path)
    path = add_to_folder(tmp_path / "elsewhere", calibration(key_of(made, "gpu x")))
    config = config_of(tmp_path, calibration=str(path))
    assert list(calibration_issues(config)) == []
    store = CalibrationStore.of(config, Heard())
    assert ([one.key.device for one in store.given], store.path) == (["gpu x"], str(path))
    before = path.read_bytes()
    store.heard("rollout-0", PassesRefined(calibration(key_of(made, "gpu x"), 9.0)))
    store.write()
    assert path.read_bytes() == before
    assert not store.folder.exists()


def test_a_demanded_file_of_another_model_or_precision_is_refused_by_name(tmp_path: Path) -> None:
    made = config_of(tmp_path)
    other = CalibrationKey(model="llama, 2 layers", precision="bfloat16", device="cpu a")
    path = add_to_folder(tmp_path / "elsewhere", calibration(other))
    (issue,) = calibration_issues(config_of(tmp_path, calibration=str(path)))
    assert issue.key == "rollout.speculation.calibration"
    assert f"model is 'llama, 2 layers', not '{key_of(made).model}'" in issue.message
    assert "precision is 'bfloat16', not 'float32'" in issue.message
    assert "paceline calibrate" in issue.remedy


def test_a_demanded_file_that_is_none_is_refused_where_it_lies(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text, reason in (
        (None, "no such file"),
        ("{", "no calibration of this release"),
        ("{}", "key: Field required"),
    ):
        if text is not None:
            bad.write_text(text)
        (issue,) = calibration_issues(config_of(tmp_path, calibration=str(bad)))
        assert reason in issue.message
        assert text is None or bad.read_text() == text


def test_drift_is_an_event_that_says_what_it_means(tmp_path: Path) -> None:
    said = Heard()
    store = CalibrationStore.of(config_of(tmp_path), said)
    store.heard("rollout-1", PassesDrifted(1.8, 1.0))
    ((kind, message),) = said
    assert kind == "calibration_drift"
    assert message.startswith("rollout-1: engine steps take 1.80x what the calibration says: something else uses")
    assert "was busy when it was measured" in drift_text(0.6, 1.0)
    assert "again (before: 1.80x)" in drift_text(1.05, 1.8)


def test_file_names_are_readable_and_differ(tmp_path: Path) -> None:
    key = key_of(config_of(tmp_path), "Intel(R) Xeon(R) Platinum 8481C, amx, 1 thread")
    names = {
        file_of(tmp_path, key).name,
        file_of(tmp_path, key.model_copy(update={"device": key.device.replace("1 thread", "2 threads")})).name,
        file_of(tmp_path, key.model_copy(update={"device": key.device.replace("amx, ", "amx ")})).name,
    }
    assert len(names) == 3
    assert all(name.startswith("qwen3-2-layers-of-32") and name.endswith(".json") for name in names)
