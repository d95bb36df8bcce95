r"""The math term: where answers are read, exact numbers, and math-verify behind its deadline."""

import threading
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards import Grade, GradeItem, Grader, build
from actors.rewards.maths import equal_fast, gold_answer, read_answer
from actors.rewards.numerals import plain_number
from actors.rewards.options import RewardOptions, RewardTerm
from actors.rewards.types import GradingError


@pytest.fixture(scope="module")
def grader():
    made = build(RewardOptions())
    yield made
    made.close()


def grade(grader: Grader, answer: object, response: str) -> Grade:
    return grader.grade(GradeItem(prompt="", response=response, record={"answer": answer}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-7", -7),
        ("+7", 7),
        ("1,450,000", 1450000),
        ("10{,}000", 10000),
        (r"900,\!000", 900000),
        (r"\$18", 18),
        ("$18.50$", Fraction(37, 2)),
        ("18.00", 18),
        ("18.", 18),
        (".5", Fraction(1, 2)),
        ("007", 7),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac34", Fraction(3, 4)),
        ("6/8", Fraction(3, 4)),
    ],
)
def test_plain_numbers(text: str, value: Fraction | int) -> None:
    assert plain_number(text) == (Fraction(value), False)


@pytest.mark.parametrize(
    "text", ["", "x", "1,2", "1,23", "12,3456", "1 2", "1 1/2", r"1\frac{1}{2}", "1/0", "3 cm", "1e5", "--1", "9" * 500]
)
def test_not_plain_numbers(text: str) -> None:
    assert plain_number(text) is None


def test_percent_is_kept_apart() -> None:
    assert plain_number(r"25\%") == plain_number("25%") == (Fraction(25), True)
    assert equal_fast(r"25\%", "25%") is True
    assert equal_fast("25%", "25") is None


@settings(deadline=None)
@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_exact_numbers_agree_with_arithmetic(left: Fraction, right: Fraction) -> None:
    texts = [f"{v.numerator}/{v.denominator}".replace("/1", "/1") for v in (left, right)]
    verdict = equal_fast(*texts)
    assert verdict is (True if left == right else False if left.denominator == right.denominator == 1 else None)


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_ways_to_write_an_integer(n: int) -> None:
    for text in (f"{n:,}", f"{n}.00", f"${n}$", f" {n} ", f"{n:,}".replace(",", "{,}")):
        assert equal_fast(str(n), text) is True
        assert equal_fast(str(n + 1), text) is False


@pytest.mark.parametrize("pair", [("12", "1 2"), ("1 1/2", "11/2"), ("ab", "a b")])
def test_inner_spaces_are_not_dropped(pair: tuple[str, str]) -> None:
    assert equal_fast(*pair) is not True


def test_gold_answers() -> None:
    assert gold_answer("3 + 4 = <<3+4=7>>7\n#### 7") == "7"
    assert gold_answer("#### 1\n#### 2") == "2"
    assert gold_answer(r"thus \boxed{\frac12}") == r"\frac12"
    assert gold_answer(" 42 ") == "42"
    assert gold_answer(42) == "42"
    assert gold_answer(0.5) == "0.5"
    for bad in (None, ["1"], True, "  "):
        with pytest.raises(GradingError, match=r"record\['answer'\]"):
            gold_answer(bad)


@pytest.mark.parametrize(
    ("fallback", "response", "answer"),
    [
        ("none", "it is 7\n#### 7", None),
        ("gsm8k", "it is 3\n#### 7", "7"),
        ("gsm8k", "it is 7", None),
        ("gsm8k", "####", None),
        ("last_number", "3 apples, then 1,234.50 dollars.", "1,234.50"),
        ("last_number", "no number", None),
        ("last_number", r"\boxed{5} and 6", "5"),
        ("gsm8k", r"\boxed{5}" + "\n#### 6", "5"),
    ],
)
def test_where_the_answer_is_read(fallback: str, response: str, answer: str | None) -> None:
    assert read_answer(response, fallback) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("0.5", r"\frac{2}{4}", 1.0),
        (r"4a-2", r"2(2a-1)", 1.0),
        (r"4a-2", r"4a+2", 0.0),
        (r"7\pi", r"7\pi", 1.0),
        (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("(1,2)", "(2,1)", 0.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("25", r"5^2", 1.0),
        ("x=3", "3", 1.0),
        ("3", "4", 0.0),
        (r"\frac{1}{2}", r"\phantom{2}", 0.0),
        ("7", r"\frac{", 0.0),
    ],
)
def test_graded_value(grader: Grader, gold: str, answer: str, value: float) -> None:
    got = grade(grader, gold, rf"so it is \boxed{{{answer}}}" if answer != r"\frac{" else r"\boxed{\frac{")
    assert (got.value, got.error) == (value, None)
    assert got.parts == {"math": value}


def test_the_gold_answer_must_be_there(grader: Grader) -> None:
    got = grader.grade(GradeItem("", r"\boxed{1}", {"solution": "1", "id": 3}))
    assert got.value == 0.0
    assert got.error is not None
    assert "no field 'answer' (fields: id, solution); set data.answer_field" in got.error


def test_works_in_threads(grader: Grader) -> None:
    grades: list[float] = []

    def work(n: int) -> None:
        grades.extend(grade(grader, f"{n}x+{n}", rf"\boxed{{{n}(x+{m})}}").value for m in (1, 2))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(grades) == [0.0] * 4 + [1.0] * 4


def test_an_answer_that_never_ends_is_wrong_and_the_next_is_graded() -> None:
    options = RewardOptions(terms=(RewardTerm(kind="math", timeout_s=1.0),))
    made = build(options)
    try:
        assert grade(made, "x+1", r"\boxed{1+x}").value == 1.0
        hanging = grade(
            made, "x^2", r"\boxed{9^{9^{9^{9}}}}"
        )  # never returns to the interpreter; signals cannot end it
        assert (hanging.value, hanging.error) == (0.0, None)
        assert grade(made, "x+1", r"\boxed{1+x}").value == 1.0
    finally:
        made.close()
