"""The harness: options from a signature, turns, intervals, commands with a limit, and the record."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest

from benchmarks import harness


def script(
    *overrides: str,
    sizes: Annotated[Sequence[str], "of the model", ("demo", "20m")] = ("demo",),
    kind: Literal["a", "b"] = "a",
    target: Path | None = None,
    quick: bool = False,
    out_s: float = 1.5,
) -> tuple[object, ...]:
    return overrides, sizes, kind, target, quick, out_s


def placed(source: Path, *, steps: int) -> tuple[Path, int]:
    return source, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    batches: Annotated[Sequence[int], "together"] = (1, 2)
    name: str = "x"


def given(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *words])


def test_a_signature_is_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given(
        monkeypatch, "run.steps=2", "--sizes", "20m", "demo", "--kind", "b", "--quick", "--target", "t", "--out-s", "2"
    )
    made = harness.command(script, timed=False)
    assert made == (("run.steps=2",), ["20m", "demo"], "b", Path("t"), True, 2.0)
    given(monkeypatch)
    assert harness.command(script, timed=False) == ((), ("demo",), "a", None, False, 1.5)
    given(monkeypatch, "here", "--steps", "3")
    assert harness.command(placed, timed=False) == (Path("here"), 3)
    given(monkeypatch, "--batches", "4", "8")
    assert harness.command(Options, timed=False) == Options(batches=[4, 8])


@pytest.mark.parametrize("words", [("--sizes", "7b"), ("--kind", "c"), ("--unknown",), ("--out-s", "x")])
def test_what_the_signature_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    given(monkeypatch, *words)
    with pytest.raises(SystemExit):
        harness.command(script, timed=False)


def test_a_busy_machine_is_refused_unless_told_and_the_record_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "busy_cores", lambda: 1.5)
    harness.machine.cache_clear()
    try:
        given(monkeypatch)
        with pytest.raises(SystemExit):
            harness.command(script)
        assert "1.5 cores are busy" in capsys.readouterr().err
        given(monkeypatch, "--busy")
        harness.command(script)
        harness.write(tmp_path / "deep" / "x.json", "what?", {"rows": [1]}, settings={"seed": 0})
    finally:
        harness.machine.cache_clear()
    record = harness.load(tmp_path / "deep" / "x.json")
    assert (record["question"], record["rows"], record["settings"]) == ("what?", [1], {"seed": 0})
    facts = record["machine"]
    assert facts["busy_cores"] == 1.5
    assert {"device", "cpu", "flags", "cores", "versions", "commit"} <= facts.keys()
    assert json.dumps(record)


def test_contestants_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []
    seconds = harness.in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(of) for name, of in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_interval_of_paired_ratios_covers_their_median() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        found = harness.paired(1.03 * np.exp(rng.normal(0, 0.05, 60)), np.ones(60))
        assert found["low"] <= found["median"] <= found["high"]
        covered += found["low"] <= 1.03 <= found["high"]
    assert covered >= 88  # 95 are expected
    assert harness.interval([1.0] * 60) == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_ratio_of_accept_lengths() -> None:
    """Of sums, over the same requests in each draw: drafters that are equal on every request have no interval."""
    counts = np.array([[10, 5], [40, 10], [9, 9]])
    assert harness.ratio_of_rates(counts, counts) == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert harness.ratio_of_rates(counts, counts * [1, 2]) == {"median": 2.0, "low": 2.0, "high": 2.0}
    mixed = harness.ratio_of_rates(counts, np.array([[10, 5], [40, 40], [9, 9]]))
    assert mixed["low"] < mixed["median"] == 2.25 < mixed["high"]


def test_a_command_past_its_limit_is_killed_with_all_it_started(tmp_path: Path) -> None:
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    parent = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    done = harness.attempt([sys.executable, "-c", parent], tmp_path / "log", limit_s=1.0)
    assert (done.code, done.tail) == (None, "begun")
    assert done.text.startswith("stopped after 1 s")
    failed = harness.attempt([sys.executable, "-c", "print('why'); exit(3)"], tmp_path / "log", limit_s=30)
    assert (failed.code, failed.tail, failed.text) == (3, "why", "exit code 3")
    assert not (tmp_path / "late").exists()
