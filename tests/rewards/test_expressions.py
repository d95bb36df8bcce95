r"""Expressions that algebra compares: none is read in part, numbers agree to significant digits, names keep their case
and order, and whether a record is bad follows from its gold answer alone. More pairs are in public_pairs.tsv."""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards import Grade, GradeItem, Grader, build
from actors.rewards.algebra import approximated
from actors.rewards.equality import equal_fast
from actors.rewards.names import distinct
from actors.rewards.numerals import plain_number, rounded_places
from actors.rewards.relations import solution_set, without_property
from config.rewards import RewardOptions, RewardTerm


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = build(RewardOptions(terms=(RewardTerm(kind="math", timeout_s=60.0),)))
    yield made
    made.close()


def grade(grader: Grader, gold: str, answer: str) -> Grade:
    return grader.grade(GradeItem(prompt="", response=rf"So \boxed{{{answer}}}", record={"answer": gold}))


BEFORE = ["", r"\frac{1}{2}", "x", "7", r"\text{either}", r"\{x \mid x", "E_1", r"\frac15 @", "answer: ["]
JUNK = [r"\to", r"\Rightarrow", r"\neg", "@", r"\# ", r"\vdash", r"\text{ not }", r"\lor", r"\heartsuit", r"\mid"]


@given(
    st.sampled_from(BEFORE),
    st.lists(st.sampled_from(JUNK), min_size=1, max_size=3),
    st.sampled_from(["", "(", "[ ", "is "]),
    st.sampled_from(["", " ]", ".", "@"]),
)
@settings(deadline=None, max_examples=120)
def test_what_cannot_be_read_as_a_whole_is_never_its_last_fraction(
    grader: Grader, before: str, junk: list[str], opening: str, closing: str
) -> None:
    answer = f"{before} {' '.join(junk)} {opening}" + r"\frac{1}{3}" + closing
    assert grade(grader, r"\frac{1}{3}", answer).value == 0.0


def spellings(mantissa: Decimal, exponent: int) -> list[str]:
    return [
        f"{mantissa}e{exponent}",
        f"{mantissa}E{exponent:+d}",
        rf"{mantissa} \times 10^{{{exponent}}}",
        rf"{mantissa}\cdot10^{{{exponent}}}",
        f"{mantissa}*10^{exponent}",
        f"{mantissa} \u00d7 10^{{{exponent}}}",
        f"{mantissa * 10}e{exponent - 1}",
        format(mantissa.scaleb(exponent), "f"),
        rf"{mantissa} \times 10^{{{exponent}}} \mathrm{{~kg}} \cdot \mathrm{{m}} / \mathrm{{s}}^{{2}}",
    ]


@settings(deadline=None)
@given(st.decimals("1.00", "9.98", places=2), st.integers(-40, 40), st.sampled_from([-1, 1]))
def test_a_power_of_ten_is_the_same_number_in_every_spelling_and_one_digit_more_is_another(
    mantissa: Decimal, exponent: int, sign: int
) -> None:
    texts = spellings(sign * mantissa, exponent)
    others = spellings(sign * (mantissa + Decimal("0.01")), exponent) + spellings(sign * mantissa, exponent + 1)
    for text in texts:
        assert all(equal_fast(text, same) is True for same in texts)
        assert all(equal_fast(text, other) is False for other in [*others, "0", "0.0"])


@settings(deadline=None)
@given(st.fractions("1/1000000000", "999/1000", max_denominator=10**9))
def test_below_one_six_significant_digits_decide(value: Fraction) -> None:
    zeros = next(n for n in range(12) if value * 10 ** (n + 1) >= 1)
    unit = Fraction(1, 10 ** (zeros + 6))
    nearest = round(value / unit)
    exact = f"{value.numerator}/{value.denominator}"
    for units, same in ((nearest, True), (nearest + 2, False), (nearest - 2, False)):
        text = format(Decimal(units).scaleb(-(zeros + 6)), "f")
        assert equal_fast(exact, text) is (same or Fraction(text) == value), (exact, text)


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        (r"\sqrt{2} \times 10^{-20}", r"1.41421\times 10^{-20}", 1.0),
        (r"\sqrt{2} \times 10^{-20}", "1.414214e-20", 1.0),
        (r"\sqrt{2} \times 10^{-20}", r"1.41422\times 10^{-20}", 0.0),
        (r"\sqrt{2} \times 10^{-20}", r"1.41421\times 10^{-21}", 0.0),
        (r"\sqrt{2} \times 10^{-20}", "0.0", 0.0),
        (r"\sqrt{2} \times 10^{20}", r"1.41421\times 10^{20}", 0.0),  # six places from 1 on
        (r"\frac{\sqrt{2}}{2000}", "0.000707107", 1.0),
        (r"\frac{\sqrt{2}}{2000}", "0.000707", 0.0),
        (r"\frac{\sqrt{2}}{2000}", "0.000708107", 0.0),
        (r"\pi \times 10^{-20}", r"2 \pi \times 10^{-20}", 0.0),
        (r"\pi \times 10^{-20}", r"\frac{\pi}{10^{20}}", 1.0),
        (r"x + \frac{1}{10^{20}}", "x", 0.0),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0.0),
        (r"(0, 10^{-8})", "(0, 0.0)", 0.0),
        (r"(0, 10^{-8})", r"(0, \frac{1}{10^8})", 1.0),
        (r"\frac{\pi}{2}", "1.570796", 1.0),
        (r"\frac13", "0.333", 0.0),
        ("0.5 x + 0.25 x", "0.75 x", 1.0),
        ("1.571", r"\frac{\pi}{2}", 1.0),
        ("0.0707", r"\frac{\sqrt{2}}{20}", 1.0),
    ],
)
def test_small_numbers_in_expressions(grader: Grader, gold: str, answer: str, value: float) -> None:
    got = grade(grader, gold, answer)
    assert (got.value, got.error) == (value, None)


@pytest.mark.parametrize("gold", ["0.333", "0.0333", "16.67", "6.67e-11"])
def test_a_rounded_gold_answer_is_met_by_what_rounds_to_it(gold: str) -> None:
    places, number = rounded_places(gold), plain_number(gold)
    assert places is not None
    assert number is not None
    half = Fraction(1, 2 * 10**places)
    for value, same in ((number.value + half / 2, True), (number.value + half * 3, False)):
        assert equal_fast(gold, f"{value.numerator}/{value.denominator}") is same


BAD = [r"\begin{asy}1\end{asy}+", r"\begin{cases} \frac12 & x>0 \\ \frac13 & x<0\end{cases}", r"x \to \frac13"]


@pytest.mark.parametrize("gold", BAD)
def test_a_gold_answer_that_cannot_be_read_is_bad_for_every_response(grader: Grader, gold: str) -> None:
    for answer in (gold, "7", r"\frac{1}{3}", r"\text{no}", "x+"):
        got = grade(grader, gold, answer)
        assert got.bad_record, answer
        assert "it is no expression" in (got.error or "")


TEXTS = [
    "10\u548c11\u4e4b\u95f4",
    "\u2460\u2462",
    r"\textcircled{1}\textcircled{3}",
    r"\text{the first, not the second}",
]


@pytest.mark.parametrize("gold", TEXTS)
def test_a_gold_answer_in_words_is_equal_to_itself_and_bad_for_no_response(grader: Grader, gold: str) -> None:
    assert grade(grader, gold, gold).value == 1.0
    for answer in ("7", "x+1", r"\frac{", r"\text{neither}", gold + "x"):
        got = grade(grader, gold, answer)
        assert (got.value, got.error) == (0.0, None), answer


def test_a_record_is_looked_at_once(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    (term,) = grader._local._terms.values()
    asked: list[str] = []
    call = term._child.call  # type: ignore[attr-defined]

    def listen(question: tuple[str, ...], *, timeout_s: float) -> object:
        asked.append(question[0])
        return call(question, timeout_s=timeout_s)

    monkeypatch.setattr(term._child, "call", listen)  # type: ignore[attr-defined]
    for answer in ("z+41", "41+z", "z+42", "z"):
        grade(grader, "z+41", answer)
    assert asked.count("readable") == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"\approx 4.089", ("4.089", "4.089")),
        (r"x \approx 4.089", ("4.089", "4.089")),
        ("about 4.089", ("4.089", "4.089")),
        (r"\frac{92}{22.5} \approx 4.089", (r"\frac{92}{22.5}", "4.089")),
        (r"\pi \approx 3.14", (r"\pi", "3.14")),
        ("4.089", None),
        (r"\approx", None),
    ],
)
def test_what_is_approximately_something(text: str, parts: tuple[str, str] | None) -> None:
    assert approximated(text) == parts


@given(st.text("abcdeiknxyzABCDEIKNXYZ_1+^ ", min_size=1, max_size=12))
@settings(deadline=None)
def test_new_names_are_the_same_on_both_sides_and_never_merge_two_letters(text: str) -> None:
    pair = distinct(text, text)
    assert pair is not None
    assert pair[0] == pair[1]
    swapped = distinct(text, text.swapcase())
    assert swapped is None or text == text.swapcase() or swapped[0].casefold() != swapped[1].casefold()


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        (r"\{x \mid x > 2\}", r"(2, \infty)"),
        (r"\{x \in \mathbb{R} : x \le 2\}", r"(-\infty, 2]"),
        (r"\{x|-2\le x < 1\}", "[-2, 1)"),
        (r"3 < x", r"(3, \infty)"),
        (r"x \ne 3", r"(-\infty, 3) \cup (3, \infty)"),
        (r"\{n \in \mathbb{Z} \mid n > 2\}", None),
        (r"\{x \mid x^2 > 2\}", None),
        ("x > x", None),
    ],
)
def test_a_set_by_its_property_as_an_interval(text: str, interval: str | None) -> None:
    body = without_property(text)
    assert solution_set(body, [body]) == interval
