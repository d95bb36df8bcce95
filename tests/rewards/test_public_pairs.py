r"""What public graders of mathematics hold equal and different, as one table: public_pairs.tsv, graded end to end.

The lines are facts from their tests and a few of our own; what we decline of them is in docs/reference/grading.md.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rewards import GradeItem, Grader, build
from actors.rewards.algebra import question
from actors.rewards.equality import equal_fast
from config.rewards import RewardOptions, RewardTerm

TABLE = Path(__file__).with_name("public_pairs.tsv")
PAIRS = [line.split("\t") for line in TABLE.read_text("ascii").splitlines() if not line.startswith("# ")]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = build(RewardOptions(terms=(RewardTerm(kind="math", timeout_s=60.0),)))
    yield made
    made.close()


@pytest.mark.parametrize(("gold", "answer", "value"), PAIRS, ids=[f"{gold} | {answer}" for gold, answer, _ in PAIRS])
def test_pairs(grader: Grader, gold: str, answer: str, value: str) -> None:
    if "\\\\" in answer[-2:] or answer.endswith("\\"):
        assert equal_fast(gold, answer) is (value == "1")  # a closing brace behind it would be escaped
        return
    got = grader.grade(GradeItem(prompt="", response=rf"So it is $\boxed{{{answer}}}$.", record={"answer": gold}))
    assert (got.value, got.error) == (float(value), None)


@pytest.mark.parametrize(("gold", "answer", "value"), PAIRS, ids=[f"{gold} | {answer}" for gold, answer, _ in PAIRS])
def test_every_text_equals_itself_and_what_is_certain_is_certain_both_ways(gold: str, answer: str, value: str) -> None:
    assert equal_fast(gold, gold) is equal_fast(answer, answer) is True
    assert not (equal_fast(answer, gold) is True and value == "0")


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        (r"$[-3,2]$", r"It is $\boxed{[-3, 2]}$. I apologise: $\boxed{(-\infty, -3] \cup [2, \infty)}$.", 0.0),
        (r"$[-3,2]$", r"It is $\boxed{(-\infty, -3]}$. I apologise: $\boxed{[-3, 2]}$.", 1.0),
        ("(2,1),(1,2),(-1,-20)", r"\[\boxed{(1, 2)}, \boxed{(2, 1)}, \boxed{(-1, -20)}\]", 1.0),
        (r"\(\boxed{1}\) and \(\boxed{-2}\).", r"$\boxed{-2,1}$.", 1.0),
        (r"$n = \boxed{1,-2}.$", r"<think>\boxed{3}</think> \[ \boxed{-2} \quad \text{and} \quad \boxed{1}. \]", 1.0),
        ("$${1,2,3}$$", r"\boxed{1} and \boxed{2} and \boxed{3}", 1.0),
        (r"$$k = 45, n = 2$$", r"$$\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}$$", 1.0),
        (r"which is $x=1/5$, or $\boxed{20}$ percent.", r"$$\frac{1}{5}=\boxed{20 \%}.$$", 1.0),
        (r"between $\boxed{12\text{ and }13}$. To be more precise, less than 13.", r"$\boxed{12 $ and $13 }. $", 1.0),
        (r"$28\%$", r"$\boxed{28}$ pct", 1.0),
        (r"15 \text{ cm}^2", r"the area is $$\frac{1}{2}\times 3 \times 10 = \boxed{15\mbox{ cm}^2}.$$", 1.0),
        ("0", r"Answer: \boxed{0}", 1.0),
        (r"\boxed{42}", r"answer: \boxed{42}", 1.0),
        ("42", "just 42", 0.0),
        ("42", r"\boxed{42", 0.0),
        ("42", r"\boxed{wrong}", 0.0),
        ("x", r"\boxed{\text{}}", 0.0),
        ("1000.99", "\\boxed{1,000.99\u20ac}", 1.0),
        ("1000.99", "\\boxed{1,000.99m\u00b2}", 1.0),
        ("-3", "\\boxed{\u22123}", 1.0),
        ("-1/2", "\\boxed{\u2212\\frac{1}{2}}", 1.0),
    ],
)  # fmt: skip
def test_responses(grader: Grader, gold: str, response: str, value: float) -> None:
    assert grader.grade(GradeItem(prompt="", response=response, record={"answer": gold})).value == value


FRAGMENTS = [
    "a",
    "-",
    "a-",
    "..",
    ". ",
    ",",
    "(,",
    "1,1",
    "123 ",
    r"\text{",
    r"\text{and} ",
    "or ",
    "x<",
    "=",
    "_{",
    "a_{a}^{b}",
    r"\langle 1,",
    r"\{x \mid ",
    r"\text{m}\cdot ",
    "9 (apples",
    "1.0 kg m/",
    "x = 2, ",
    "x_{1} ",
    r"\dot{1} ",
    "10^",
    "1e5",
    r"\pm ",
    r"\approx ",
]


@pytest.mark.parametrize(
    "fragment", [*FRAGMENTS, r"\sqrt", "cm ", "1:30 ", r"\forall a,", r"\frac1", "{}", "A. ", "1 1/2 "]
)
def test_no_answer_occupies_the_reward_worker_itself(fragment: str) -> None:
    # It has no deadline of its own: a pattern that backtracks would end this test by the suite's time limit.
    for opening, closing in (("", ""), ("a", "!"), ("(", "!"), ("x = ", "")):
        text = (opening + fragment * 4096)[:4080] + closing
        for gold, answer in ((text, "x"), ("x^2+1", text)):
            if equal_fast(gold, answer) is None:
                question(gold, answer)


def test_no_code_runs_in_the_grader(grader: Grader, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    call = f'__import__("pathlib").Path("{mark}").touch()'
    for answer in (call, rf"x + {call}", rf"\text{{{call}}}", f"({call}, 1)", f"[{call} for x in (1,)]"):
        assert (
            grader.grade(GradeItem(prompt="", response=rf"\boxed{{{answer}}}", record={"answer": "x^2"})).value == 0.0
        )
    assert not mark.exists()
