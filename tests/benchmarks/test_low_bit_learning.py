"""The record of low-bit learning: what fails by the rule fixed beforehand, what is paired, what is not run again."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import low_bit_learning as bench
from benchmarks.harness import load, save

MACHINE = {"cores": 2, "cpu": "a CPU", "versions": {"torch": "2.13"}}


def step(number: int, reward: float) -> dict[str, Any]:
    return {
        **{"kind": "step", "step": number, "reward/mean": reward, "tokens/generated": 100.0, "entropy": 0.5},
        **{"logprob_gap/mean": 1e-3, "logprob_gap/k3": 1e-6, "kl_old": 1e-5, "clip_fraction": 0.1},
        "ratio/token_max": 1.0 + number,
    }


def evaluation(number: int, reward: float) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "eval/reward": reward, "eval/prompt_std": 0.3}


def run(arm: str, seed: int, before: float, after: float) -> bench.Run:
    last = evaluation(2, after) | ({} if arm == "fp32" else {bench.MASTERS: 0.9})
    found = bench.summarise([evaluation(0, before), step(1, 0.4), step(2, 0.6), last])
    return {"arm": arm, "seed": seed, "exit_code": 0, "wall_s": 1.0, "commit": "c"} | found


def broken(arm: str, seed: int) -> bench.Run:
    return {"arm": arm, "seed": seed, "exit_code": 1, "wall_s": 1.0, "commit": "c", "tail": "NonFiniteError"}


RUNS = [
    run("fp32", 0, 0.4, 0.7),
    run("fp32", 1, 0.5, 0.8),
    run("w2a8 unaligned", 0, 0.1, 0.39),  # gains, and is still below the warm start of its seed
    run("w2a8 unaligned", 1, 0.1, 0.6),
    run("w2a8 aligned", 0, 0.1, 0.69),
    broken("w2a8 aligned", 1),
]


def test_the_rule_of_failure_is_the_one_fixed_beforehand() -> None:
    base = bench.by_arm(RUNS)["fp32"]
    assert [bench.failed(one, base[one["seed"]]) for one in RUNS] == [False, False, True, False, False, True]


def test_long_runs_are_compared_with_long_ones() -> None:
    assert {bench.base_of(arm) for arm in bench.ARMS if "long" in arm} == {"fp32 long"}
    assert {bench.base_of(arm) for arm in bench.ARMS if "long" not in arm} == {"fp32"}
    text = bench.table([run("fp32 long", 0, 0.4, 0.8), run("w2a8 unaligned long", 0, 0.3, 0.2)], MACHINE)
    assert "| w2a8 unaligned long | 1 | 0.300 | 0.200 | -0.600 | 1 |" in text
    assert "| warm start | 0.400 |" in text


def test_differences_are_paired_by_seed_and_leave_out_what_did_not_finish() -> None:
    arms = bench.by_arm(RUNS)
    assert bench.paired(arms["w2a8 unaligned"], arms["fp32"]) == pytest.approx([-0.31, -0.2])
    assert bench.paired(arms["w2a8 aligned"], arms["w2a8 unaligned"]) == pytest.approx([0.3])


def test_the_table_has_every_run_and_marks_failures(tmp_path: Path) -> None:
    text = bench.table(RUNS, MACHINE)
    assert "| w2a8 unaligned | 2 | 0.100 | 0.495 | -0.255 +- 0.055 | 1 | 0.900 |" in text
    assert "| w2a8 aligned less w2a8 unaligned | 1 | +0.300 | 1 |" in text
    assert "| w2a8 aligned | 0.690 | * |" in text
    assert "| w2a8 unaligned | 0.390* | 0.600 |" in text
    bench.figure(RUNS, tmp_path / "figure.svg")
    assert "w2a8" in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_arms_of_a_seed_differ_in_their_own_keys_only(tmp_path: Path) -> None:
    def words(arm: str) -> list[str]:
        found = bench.words_of(arm, 3, tmp_path, Path("c.yaml"), ["eval.samples=1"])
        return [word for word in found if not word.startswith("run.name=")]

    for arm, keys in bench.ARMS.items():
        assert [word for word in words(arm) if word not in words(bench.BASE)] == list(keys)


def test_what_is_in_the_record_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, int]] = []

    def make(arm: str, seed: int, *_: object) -> bench.Run:
        made.append((arm, seed))
        return run(arm, seed, 0.4, 0.7)

    monkeypatch.setattr(bench, "run", make)
    out = tmp_path / "record.json"
    arms = ("fp32", "w8a8 aligned")
    bench.main(arms=arms, seeds=(0,), run_dir=tmp_path, out=out)
    bench.main(arms=arms, seeds=(0, 1), run_dir=tmp_path, out=out)
    assert made == [(arm, seed) for seed in (0, 1) for arm in arms]
    with pytest.raises(SystemExit, match="other settings"):
        bench.main("eval.samples=1", arms=arms, seeds=(0,), run_dir=tmp_path, out=out)
    save(out, load(out) | {"machine": MACHINE})
    bench.main(table_only=True, out=out)
    assert "a CPU; torch 2.13" in capsys.readouterr().out
