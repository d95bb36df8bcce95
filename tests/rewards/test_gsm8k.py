"""GSM8K's 1,319 test problems: gold answers are right, gold answers of other problems are wrong."""

import gzip
import itertools
import json
from fractions import Fraction
from pathlib import Path

import pytest

from actors.rewards import GradeItem, build
from config.rewards import RewardOptions, RewardTerm

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl.gz"
pytestmark = pytest.mark.skipif(not DATA.is_file(), reason="../shared/data/gsm8k_test.jsonl.gz is not here")


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    with gzip.open(DATA, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def gold(record: dict[str, str]) -> str:
    """The reference reading, independent of the grader."""
    return record["answer"].rsplit("####", 1)[1].strip()


def test_gold_answers_are_right(records: list[dict[str, str]]) -> None:
    assert len(records) == 1319
    boxed, text = build(RewardOptions()), build(RewardOptions(terms=(RewardTerm(kind="math", fallback="gsm8k"),)))
    for record in records:
        assert boxed.grade(GradeItem(prompt="", response=rf"\boxed{{{gold(record)}}}", record=record)).value == 1.0
        assert (
            boxed.grade(GradeItem(prompt="", response=rf"It is $\boxed{{\${gold(record)}.00}}$.", record=record)).value
            == 1.0
        )
        assert text.grade(GradeItem(prompt="", response=record["answer"], record=record)).value == 1.0
        assert (
            boxed.grade(GradeItem(prompt="", response=record["answer"], record=record)).value == 0.0
        )  # no \boxed, no fallback
    boxed.close()
    text.close()


def test_gold_answers_of_other_problems_are_wrong(records: list[dict[str, str]]) -> None:
    grader = build(RewardOptions())
    compared = 0
    for i, record in enumerate(records):
        for other in (records[(i + shift) % len(records)] for shift in (1, 7, 100, 659)):
            if Fraction(gold(record).replace(",", "")) != Fraction(gold(other).replace(",", "")):
                compared += 1
                assert (
                    grader.grade(GradeItem(prompt="", response=rf"\boxed{{{gold(other)}}}", record=record)).value == 0.0
                )
    assert compared > 4 * 1200
    grader.close()


def test_other_golds_are_wrong_for_math_verify_too(records: list[dict[str, str]]) -> None:
    # The same through the slow path: an expression that is not a plain number.
    grader = build(RewardOptions())
    for record, other in itertools.pairwise(records[:61]):
        mine, others = gold(record).replace(",", ""), gold(other).replace(",", "")
        assert grader.grade(GradeItem(prompt="", response=rf"\boxed{{{mine}+0}}", record=record)).value == 1.0
        assert grader.grade(GradeItem(prompt="", response=rf"\boxed{{{others}+0}}", record=record)).value == float(
            int(mine) == int(others)
        )
    grader.close()
