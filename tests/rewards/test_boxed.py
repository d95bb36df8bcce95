r"""\boxed{...} against a character-by-character oracle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rewards.boxed import first_boxed

OPENINGS = (r"\boxed{", r"\fboxed{")


def oracle(text: str) -> str | None:
    """Matches every opening on its own, one character at a time; the one that closes first wins."""
    closed: list[tuple[int, int]] = []
    for i in range(len(text)):
        for opening in OPENINGS:
            if text.startswith(opening, i):
                start = j = i + len(opening)
                depth = 1
                while j < len(text) and depth:
                    if text.startswith(OPENINGS, j):
                        depth += 1
                        j = text.index("{", j) + 1
                        continue
                    if text[j] == "\\" and not text.startswith(OPENINGS, j + 1):
                        j += 2
                        continue
                    depth += {"{": 1, "}": -1}.get(text[j], 0)
                    j += 1
                if depth == 0:
                    closed.append((j, start))
    if not closed:
        return None
    end, start = min(closed)
    return text[start : end - 1].strip()


pieces = st.lists(
    st.sampled_from([*OPENINGS, "{", "}", "\\", r"\{", r"\}", "1", "x ", r"\frac", "\n", "boxed"]), max_size=30
)


@settings(deadline=None)
@given(pieces)
def test_equals_the_oracle(parts: list[str]) -> None:
    text = "".join(parts)
    assert first_boxed(text) == oracle(text)


@settings(deadline=None)
@given(pieces, st.text(alphabet="{}\\ab 1", max_size=20))
def test_stopping_after_the_first_closed_answer_changes_nothing(parts: list[str], more: str) -> None:
    text = "".join(parts)
    answer = first_boxed(text)
    if answer is not None and text.endswith("}"):
        assert first_boxed(text + more) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or \boxed{2}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{x + \boxed{7}}", "7"),
        (r"\boxed{unclosed, then \boxed{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed", None),
        (r"boxed{6}", None),
        ("", None),
    ],
)
def test_examples(text: str, answer: str | None) -> None:
    assert first_boxed(text) == answer


def test_a_flood_of_openings_is_linear() -> None:
    # A quadratic search would need 10^11 steps here; the suite's time limit would end it.
    assert first_boxed(r"\boxed{" * 300_000) is None
