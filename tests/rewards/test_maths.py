r"""The math term: where answers are read, exact numbers, and math-verify behind its deadline."""

import math
import threading
from collections.abc import Iterator
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards import Grade, GradeItem, Grader, build
from actors.rewards.equality import equal_fast
from actors.rewards.gold import UnreadableGoldError, gold_answer
from actors.rewards.maths import MathTerm, read_answer
from actors.rewards.numerals import amount, plain_number
from config.rewards import RewardOptions, RewardTerm


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
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
        (r"\frac {3}{4}", Fraction(3, 4)),
        (r"\frac3{4}", Fraction(3, 4)),
        (r"\frac{30}4", Fraction(15, 2)),
        ("1 1/2", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"10\,000", 10000),
        ("1 000", 1000),
        (r"11,\! 111", 11111),
        ("14 {, }916", 14916),
        ("\u22123", -3),
        ("1e5", 100_000),
        ("6.3E-5", Fraction(63, 1_000_000)),
        (r"-4.5 \times 10^{3}", -4500),
        (r"4.5\cdot 10^{-3}", Fraction(45, 10_000)),
        ("4.5*10^-3", Fraction(45, 10_000)),
        ("4.5\u00d710\u207b\u00b3", Fraction(45, 10_000)),
        ("10^{-2}", Fraction(1, 100)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"1.1\overline{6}", Fraction(7, 6)),
        (r"-0.\dot{1}4285\dot{7}", Fraction(-1, 7)),
        ("-3./2", Fraction(-3, 2)),
    ],
)
def test_plain_numbers(text: str, value: Fraction | int) -> None:
    number = plain_number(text)
    assert number is not None
    assert (number.value, number.percent) == (Fraction(value), False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1,2",
        "1,23",
        "12,3456",
        "1 2",
        "12, 144",
        "11 6/6",
        "1/0",
        "3 cm",
        "3e",
        "1e5000",
        "e5",
        "--1",
        "1, 2, ...",
        "9" * 500,
    ],
)
def test_not_plain_numbers(text: str) -> None:
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100 dollars", 100),
        (r"15\mbox{ cm}^2", 15),
        (r"90^{\circ}", 90),
        ("3 square feet", 3),
        ("60 miles per hour", 60),
        (r"17\text{ of whatever}", 17),
        ("2 million", 2_000_000),
        (r"5^{\text{th}}", 5),
        ("1,000.99m\u00b2", Fraction(100099, 100)),
        (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", Fraction(98, 10)),
        (r"9.8~\text{m}\cdot\text{s}^{-2}", Fraction(98, 10)),
        (r"9.8\,\mathrm{m/s^{2}}", Fraction(98, 10)),
        (r"9.8\ \frac{\text{kg}\cdot\text{m}}{\text{s}^2}", Fraction(98, 10)),
        ("9.8 kg m/s^2", Fraction(98, 10)),
        ("1 kJ/mol", 1),
        (r"6.02\times 10^{23}\ \text{mol}^{-1}", 602 * 10**21),
        ("155 (treats)", 155),
        ("5 dollars and 50 cents", Fraction(11, 2)),
    ],
)
def test_an_amount_is_a_number_with_its_unit(text: str, value: Fraction | int) -> None:
    number = amount(text)
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "3abc",
        "3 abc",
        r"3\mathrm{e}",
        r"2\text{i}",
        r"12\text{ and }13",
        "2 or 3",
        "3 sinh",
        "3N/m",
        "3 N/m",
        "2 x/y",
        "8 (x)",
    ],
)
def test_what_is_no_unit_stays(text: str) -> None:
    assert amount(text) is None


@pytest.mark.parametrize("other", ["25%", r"25\%", "25", "25 percent", "0.25", r"\frac{1}{4}"])
def test_a_percentage_is_its_number_or_its_fraction(other: str) -> None:
    assert equal_fast(r"25\%", other) is True
    assert equal_fast("0.25", "25") is False


@settings(deadline=None)
@given(st.fractions(max_denominator=999), st.fractions(max_denominator=999))
def test_exact_numbers_agree_with_arithmetic(left: Fraction, right: Fraction) -> None:
    texts = [f"{v.numerator}/{v.denominator}".replace("/1", "/1") for v in (left, right)]
    verdict = equal_fast(*texts)
    assert verdict is (left == right)


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_ways_to_write_an_integer(n: int) -> None:
    for text in (f"{n:,}", f"{n}.00", f"${n}$", f" {n} ", f"{n:,}".replace(",", "{,}")):
        assert equal_fast(str(n), text) is True
        assert equal_fast(str(n + 1), text) is False


@settings(deadline=None)
@given(st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=5, unique=True), st.randoms())
def test_a_list_equals_its_members_in_any_order_and_never_a_number(members: list[int], random: Random) -> None:
    shuffled = random.sample(members, len(members))
    for separator in (", ", " and ", "; "):
        assert equal_fast(", ".join(map(str, members)), separator.join(f"{n:,}" for n in shuffled)) is True
    assert equal_fast(", ".join(map(str, members)), ", ".join(map(str, shuffled[:-1]))) is False
    assert equal_fast(", ".join(map(str, members)), "".join(map(str, members)).replace("-", "")) is not True


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("100, 200", "200, 100", True),
        ("120, 130", "130, 120", True),
        ("105, 255", "255, 105", True),
        ("12, 144", "12144", False),
        ("-3, 200", "-3200", False),
        ("32349", "32, 349", False),
        ("32349", r"32,\! 349", True),
        ("81, 256", "81,256", True),
        ("1, 2", "12", False),
        (r"12\text{ and }13", "13, 12", True),
        (r"\{1, 2\}", "2, 1", True),
    ],
)
def test_lists_are_not_numbers(gold: str, answer: str, same: bool) -> None:
    assert equal_fast(gold, answer) is same


@pytest.mark.parametrize("pair", [("12", "1 2"), ("1 1/2", "11/2"), ("ab", "a b")])
def test_inner_spaces_are_not_dropped(pair: tuple[str, str]) -> None:
    assert equal_fast(*pair) is not True


def test_gold_answers() -> None:
    assert gold_answer("3 + 4 = <<3+4=7>>7\n#### 7") == "7"
    assert gold_answer("#### 1\n#### 2") == "2"
    assert gold_answer(r"thus \boxed{\frac12}") == r"\frac12"
    assert gold_answer(r"not \boxed{3} but \fbox{4}.") == "4"
    assert gold_answer(r"\(\boxed{1}\) and \(\boxed{-2}\).") == "1, -2"
    assert gold_answer(" 42 ") == "42"
    assert gold_answer(42) == "42"
    assert gold_answer(0) == "0"
    assert gold_answer(0.5) == "0.5"
    assert gold_answer(0.00001) == "0.00001"


@pytest.mark.parametrize(
    "bad",
    [
        None,
        ["1"],
        True,
        "",
        "  ",
        "####",
        r"\boxed{}",
        r"\boxed{7",
        r"\frac{1}{",
        "}{",
        "?",
        "...",
        "$$",
        "nan",
        math.nan,
    ],
)
def test_a_gold_answer_that_cannot_be_read_is_said_to_be(bad: object) -> None:
    with pytest.raises(UnreadableGoldError):
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
        ("gsm8k", "#### 5</think>#### 6", "6"),
        ("answer_line", "Answer: 5\nthen\n**Answer:** $6$\n", "$6$"),
        ("answer_line", "no such line", None),
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
        ("2", "2 or 3", 0.0),
        ("2", "1, 2, 3", 0.0),
        (r"$x \in [-2,7]$", r"-2 \le x \le 7", 1.0),
        (r"-2 \le x \le 7", r"x \in [-2,7]", 1.0),
        (r"(-\infty,1)\cup(3,\infty)", r"x<1 \text{ or } x>3", 1.0),
        (r"\text{4:30 p.m.}", r"4:30 \text{ p.m.}", 1.0),
        (r"\text{4:30 p.m.}", r"4:30 \text{ a.m.}", 0.0),
        (r"\text{B,C}", "B, C", 1.0),
        ("185", "185\\\\", 1.0),
    ],
)
def test_graded_value(grader: Grader, gold: str, answer: str, value: float) -> None:
    got = grade(grader, gold, rf"so it is \boxed{{{answer}}}" if answer != r"\frac{" else r"\boxed{\frac{")
    assert (got.value, got.error) == (value, None)
    assert got.parts == {"math": value}


def test_the_gold_answer_must_be_there(grader: Grader) -> None:
    got = grader.grade(GradeItem(prompt="", response=r"\boxed{1}", record={"solution": "1", "id": 3}))
    assert got.value == 0.0
    assert got.error is not None
    assert "no field 'answer' (fields: id, solution); set data.answer_field" in got.error


def test_a_bad_record_is_neither_right_nor_wrong_nor_a_failure_and_names_its_place(grader: Grader) -> None:
    for gold in (r"\frac{1}{", None, "", r"\begin{asy}1\end{asy}+"):
        got = grader.grade(
            GradeItem(prompt="", response=r"\boxed{7}", record={"answer": gold}, where="train.jsonl, line 3")
        )
        assert got.bad_record, gold
        assert got.error is not None
        assert "train.jsonl, line 3: record['answer'], the gold answer, cannot be read" in got.error


def test_the_first_box_counts_where_responses_are_stopped_at_it() -> None:
    made = build(RewardOptions(terms=(RewardTerm(kind="math", answer="first"),)))
    assert grade(made, "4", r"\boxed{4}, no, \boxed{5}").value == 1.0
    assert grade(made, "5", r"\boxed{4}, no, \boxed{5}").value == 0.0
    assert grade(made, "5", r"<think>\boxed{4}</think>\boxed{5}").value == 1.0
    made.close()


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


NEVER_ENDING = [r"9^{9^{9^{9}}}", "(" * 1500 + "1" + ")" * 1500]


def test_an_answer_that_never_ends_is_wrong_and_what_has_imported_everything_stays() -> None:
    made = build(RewardOptions(terms=(RewardTerm(kind="math", timeout_s=2.0),)))
    try:
        assert grade(made, "x+1", r"\boxed{1+x}").value == 1.0
        (term,) = [term for term in made._local._terms.values() if isinstance(term, MathTerm)]
        started = term._child._process
        for answer in NEVER_ENDING:
            hanging = grade(made, "x^2", rf"\boxed{{{answer}}}")  # some never return to the interpreter
            assert (hanging.value, hanging.error) == (0.0, None), answer
            assert term._child._process is started, answer  # killed was a fork of it: no second start, no second import
        assert grade(made, "x+1", r"\boxed{1+x}").value == 1.0
    finally:
        made.close()


def test_an_answer_of_a_megabyte_is_not_read() -> None:
    made = build(RewardOptions())
    got = grade(made, "x", r"\boxed{" + "x+" * 500_000 + "1}")
    made.close()
    assert (got.value, got.notes) == (0.0, ("math: an answer of 1000001 characters is not read",))
