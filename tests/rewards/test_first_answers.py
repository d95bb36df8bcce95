"""Responses that end behind their first answer keep their reward: the readers' laws, and markers beside readers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data.markers import answer_marker, automaton
from actors.data.stop_strings import vocabulary_bytes
from actors.engine.stopping import find_end
from actors.rewards.boxed import boxes, final_part, first_boxed, thinks
from actors.rewards.extraction import extract_code
from actors.rewards.fences import first_fence
from actors.rewards.grader import Grader, build
from config.rewards import RewardOptions, RewardTerm
from config.token_budget import AnswerMarker
from contracts.rewards import GradeItem
from contracts.rollout import FinishReason, Request, SamplingParams, StopRule
from tests.engine.test_stopping import byte_level, wrapped

BOXES = [
    *(
        "\\boxed{",
        "\\fbox {",
        "{",
        "}",
        "}",
        "}",
        "\\",
        "\\}",
        " ",
        "\n",
        "5",
        "x",
        "<",
        "\\quad",
        "\\dots",
        "\\ldots5",
    ),
    *("\\phantom{", "\\frac", "b", "oxed{", "?", "\u00e9", "\u2003", "\u221e", "\u00bd", "\u00a0", "~", "\\_", "\x1c"),
    *("<think>", "</think>", "<thinking>", "</thinking>", "<|end_of_thought|>", "nk>", "\\<thi"),
]
FENCES = [
    *(
        "```",
        "`",
        "\n",
        "\n",
        "py",
        "python",
        "PYTHON3",
        "json",
        "ipython",
        " ",
        "\t",
        "\r\n",
        "x = 1",
        "p",
        "\u00e9",
    ),
    *("```python\n", "\n```", "\n```\n", "~~~\n", "````python\n", "<think>", "</think>", "<", "nk>", "<thi"),
]
READERS: dict[AnswerMarker, Any] = {"boxed": first_boxed, "fence": first_fence}


def texts(pieces: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=25).map("".join)


def end_of(kind: AnswerMarker, text: str, thinking: bool) -> int | None:
    moves, state = automaton(kind, thinking), 0
    for count, byte in enumerate(text.encode(), start=1):
        if (state := int(moves[state, byte])) == len(moves) - 1:
            return count
    return None


def checked(kind: AnswerMarker, text: str, thinking: bool) -> None:
    """Found only where the reader has read what it reads of the whole text."""
    end = end_of(kind, text, thinking)
    if end is not None:
        first = text.encode()[:end].decode(errors="replace")
        answer = READERS[kind](first, thinking=thinking)
        assert answer is not None
        assert READERS[kind](text, thinking=thinking) == answer
    elif kind == "fence":
        assert first_fence(text, thinking=thinking) is None


@settings(deadline=None, max_examples=1000)
@given(texts(BOXES), st.booleans())
def test_a_box_that_is_found_is_the_one_that_is_read(text: str, thinking: bool) -> None:
    checked("boxed", text, thinking)


@settings(deadline=None, max_examples=1000)
@given(texts(FENCES), st.booleans())
def test_the_fence_that_is_read_is_found_and_no_other(text: str, thinking: bool) -> None:
    checked("fence", text, thinking)


TOKENIZER = wrapped(byte_level())
TABLE = vocabulary_bytes(TOKENIZER)
MARKERS = {kind: answer_marker(kind, TOKENIZER) for kind in READERS}
CODE = [*(piece for piece in FENCES if piece not in ("~~~\n", "\u00e9")), "def f():\n    return 1\n", "import os\n"]


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(st.tuples(st.just("boxed"), texts(BOXES)), st.tuples(st.just("fence"), texts(CODE))),
    st.integers(1, 60),
    st.integers(0, 20),
)
def test_a_response_that_its_rule_ends_has_the_answer_of_the_whole_one(
    case: tuple[AnswerMarker, str], poll_from: int, grace: int
) -> None:
    """In tokens, as an engine ends it: after the grace, and not before polling begins."""
    kind, text = case
    tokens = np.array(TOKENIZER.encode(text + " and more", add_special_tokens=False), np.int32)
    request = Request(
        request_id=0,
        prompt_id=0,
        prompt_tokens=np.zeros(1, np.int32),
        noise_key=1,
        sampling=SamplingParams(max_new_tokens=10_000),
        stop=StopRule(answer=MARKERS[kind], poll_from_tokens=poll_from, grace_tokens=grace),
    )
    end = find_end(request, tokens, 10_000)
    if end is None:
        return
    assert end.reason is FinishReason.ANSWERED
    whole, cut = (TOKENIZER.decode(ids.tolist()) for ids in (tokens, tokens[: end.tokens]))
    if kind == "boxed":
        assert first_boxed(cut) == first_boxed(whole) is not None
    else:
        assert extract_code(cut, "first") == extract_code(whole, "first")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("A:\n```python\nx = 1\n```\nB:\n```python\nx = 2\n```\n", "x = 1\n"),
        ("A:\n```\nx = 1\n```\nB:\n```python\nx = 2\n```\n", "x = 1\n"),  # no language is Python too
        ("A:\n```bash\nls\n```\nB:\n```python\nx = 2\n```\n", "x = 2\n"),
        ("A:\n  ```py\n  x = 1\n  ```", "x = 1\n"),
        ("Solution: ```python\r\nx = 1\r\n```\r\n", "x = 1\n"),
        ("```python\nx = 1```\nmore", "x = 1\n"),
        ("<think>\n```\nx = 1\n```\n</think>\n```\nx = 2\n```", "x = 2\n"),
        ("no\n```\nx = 1\n```\n</think>\n```\nx = 2\n```", "x = 1\n"),  # nobody had begun to think
        ("- A: ```python\n  def f():\n      return 1\n  ```\n", "def f():\n    return 1\n"),
        ('```python\ns = """\n  \n"""\n```\n', 's = """\n  \n"""\n'),  # what is not indented stays as it is
        ("```python\nx = 1", None),
        ("x = 1", None),
    ],
)
def test_the_first_closed_fence_is_read_and_without_one_the_last_open_one(text: str, code: str | None) -> None:
    assert first_fence(text) == code
    assert extract_code(text, "first") == (extract_code(text) if code is None else (code, True))


@pytest.mark.parametrize("opening", ["   ````python", "````python", "so: ````py", "~~~python", "a`````python3 "])
def test_four_backticks_and_tildes_open_nothing_for_the_marker_and_the_reader(opening: str) -> None:
    text = f"{opening}\nx = 1\n"
    fence = "```\ny = 2\n```"
    for body in (text + fence, text.replace("\n", "\r\n") + fence):
        assert first_fence(body) == "y = 2\n"
        assert end_of("fence", body, False) == len(body)


def test_a_prompt_may_open_the_thinking_part() -> None:
    assert thinks("<|im_start|>assistant\n<think>\n")
    assert not thinks("Think within <think> </think>, please.")
    text = "perhaps \\boxed{5}</think> no, \\boxed{6}"
    assert (first_boxed(text), first_boxed(text, thinking=True)) == ("5", "6")
    assert first_boxed(f"<think>{text}") == "6"
    assert first_boxed("perhaps \\boxed{5}", thinking=True) is None
    code = "\n```\nx = 1\n```\n</think>```\nx = 2\n```"
    assert (first_fence(code), first_fence(code, thinking=True)) == ("x = 1\n", "x = 2\n")


@given(texts([piece for piece in BOXES if not piece.startswith("<")]))
def test_without_thinking_the_first_box_is_the_one_that_closes_first(text: str) -> None:
    found = boxes(text)
    assert final_part(text) == text
    assert first_boxed(text) == (min(found, key=lambda box: box.end).content if found else None)


def graded(grader: Grader, prompt: str, response: str, record: dict[str, Any]) -> float:
    grade = grader.grade(GradeItem(prompt=prompt, response=response, record=record))
    assert grade.error is None, grade.error
    return grade.value


def test_the_terms_read_the_first_answer_on_request_and_know_what_the_prompt_opened() -> None:
    grader = build(RewardOptions(terms=(RewardTerm(kind="math", answer="first"),)))
    try:
        two, record = "\\boxed{5} \\boxed{6}", {"answer": "5"}
        assert graded(grader, "p", two, record) == 1.0
        assert graded(grader, "p <think>", f"{two}</think> \\boxed{{7}}", record) == 0.0
    finally:
        grader.close()
    grader = build(RewardOptions(terms=(RewardTerm(kind="code", answer="first"),)))
    try:
        first = "```python\ndef f():\n    return 1\n```\n"
        assert graded(grader, "p", f"{first}Or:\n{first.replace('1', '2')}", {"tests": ["assert f() == 1"]}) == 1.0
    finally:
        grader.close()
