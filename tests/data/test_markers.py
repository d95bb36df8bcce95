r"""Automata of answers: against regular expressions on texts cut into tokens anyhow, with real tokenizers, in size."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data.errors import DataError
from actors.data.markers import MAX_DEPTH, answer_marker, automaton
from actors.data.stop_strings import marker_over_tokens, vocabulary_bytes
from actors.engine.stopping import NOWHERE, run
from actors.rewards.boxed import first_boxed
from config.token_budget import AnswerMarker
from contracts.rollout import Marker
from examples.guess_and_check.make_data import build_tokenizer
from tests.engine.test_stopping import byte_level, sentencepiece, wrapped

KINDS: list[AnswerMarker] = ["boxed", "fence", "answer_tag"]
OPENING = r"\\(?:boxed|fbox)\s*\{"
# An escaped character, unless it is a box's opening or the backslash of one: those are never swallowed.
CHARACTER = rf"(?:[^{{}}\\]|(?!{OPENING})\\(?!{OPENING})[\s\S])"


def nested(depth: int) -> str:
    return rf"(?:{CHARACTER}|\{{{nested(depth - 1)}\}})*" if depth else f"{CHARACTER}*"


BOX = re.compile(rf"(?={OPENING}(?P<content>{nested(MAX_DEPTH)})\}})")
BLANK = re.compile(r"(?:[ \t\n~._$?]|\\ )*")
FENCE = re.compile(
    r"(?:^|\n)[ \t\r]*```[ \t\r]*(?:(?:py|ipython)[^`\n]*)?\n(?:(?!(?:[ \t\r]*```)|[^\n]*```[ \t\r]*\n)[^\n]*\n)*"
    r"(?:[ \t\r]*```|[^\n]*```[ \t\r]*\n)"
)


def end_of_box(text: str) -> int | None:
    """Where the first box ends that has something but blanks and dots in it, and no box."""
    ends = [m.end("content") + 1 for m in BOX.finditer(text) if not BLANK.fullmatch(m["content"])]
    return min(ends, default=None)


def end_in_bytes(moves: np.ndarray[Any, Any], data: bytes) -> int | None:
    state = 0
    for count, byte in enumerate(data, start=1):
        if (state := int(moves[state, byte])) == len(moves) - 1:
            return count
    return None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted({p for p in places if p < len(data)}), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def found_by_tokens(moves: np.ndarray[Any, Any], parts: list[bytes]) -> tuple[int, Marker]:
    """With how many of the parts, each a token of its own, the marker is complete."""
    vocabulary = [*sorted(set(parts)), b"a"]
    marker = marker_over_tokens(moves, vocabulary)
    return run(marker, np.array([vocabulary.index(part) for part in parts], np.int32))[1], marker


def same_in_tokens(moves: np.ndarray[Any, Any], data: bytes, places: list[int], end: int | None) -> None:
    parts = cut(data, places)
    lengths = np.cumsum([len(part) for part in parts])
    wanted = NOWHERE if end is None else int(np.searchsorted(lengths, end)) + 1
    assert found_by_tokens(moves, parts)[0] == wanted


PLACES = st.lists(st.integers(0, 80), max_size=30)
BOXES = st.lists(
    st.sampled_from(
        [r"\boxed{", r"\fbox {", r"\boxed", "{", "}", "}", "\\", "\\\\", " ", "\n", "5", "?", "b", "oxed{"]
    ),
    max_size=20,
).map("".join)


@settings(deadline=None, max_examples=400)
@given(BOXES, PLACES)
def test_a_box_is_found_where_a_regular_expression_finds_it_however_it_is_cut_into_tokens(
    text: str, places: list[int]
) -> None:
    end = end_of_box(text)
    assert end_in_bytes(automaton("boxed"), text.encode()) == end
    same_in_tokens(automaton("boxed"), text.encode(), places, end)


FENCES = st.lists(
    st.sampled_from(["```", "`", "\n", "\n", "py", "python3", "PY", " ", "\t", "x = 1", "```python\n", "\n```", "c"]),
    max_size=14,
).map("".join)


@settings(deadline=None, max_examples=400)
@given(FENCES, PLACES)
def test_of_texts_with_one_plain_opening_the_fence_is_found_where_a_regular_expression_finds_it(
    body: str, places: list[int]
) -> None:
    text = "so:\n```py\n" + body
    found = FENCE.search(text)
    end = found.end() if found else None
    assert end_in_bytes(automaton("fence"), text.encode()) == end
    same_in_tokens(automaton("fence"), text.encode(), places, end)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", "<", "<ans", " ", "\n", "4", "</", "wer>"])), PLACES)
def test_an_answer_tag_is_found_where_it_closes_around_something(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    found = (m for m in re.finditer(r"<answer>([\s\S]*?)</answer>", text) if m[1].strip())
    end = next((m.end() for m in found), None)
    assert end_in_bytes(automaton("answer_tag"), text.encode()) == end
    same_in_tokens(automaton("answer_tag"), text.encode(), places, end)


EXAMPLES = [
    ("boxed", r"so \boxed{\dfrac{1}{\sqrt{2}}}", True),
    ("boxed", r"within \boxed{}, \boxed{...}, \boxed{ \quad\dots }, \boxed{\phantom{0}}", False),
    ("boxed", "\\boxed{\u221e}", True),
    ("boxed", "\\boxed{\u662f}", True),
    ("boxed", "\\boxed{\u00a0\u2003}", False),
    ("boxed", r"\boxed{\{1, 2\}}", True),
    ("boxed", r"\boxed{\{1, 2\}", False),
    ("boxed", r"\boxed{5\\}", True),  # an escaped backslash escapes no brace
    ("boxed", r"\boxed{x + \boxed{7}", True),
    ("boxed", r"<think>perhaps \boxed{5}", False),
    ("boxed", r"<think>perhaps \boxed{5}</think>\boxed{6}", True),
    ("boxed", "\\boxed{" + "{" * MAX_DEPTH + "1" + "}" * MAX_DEPTH + "}", True),
    ("boxed", "\\boxed{" + "{" * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1) + "}", False),  # missed, not wrong
    ("fence", "Here:\n```python\nx = 1\n```", True),
    ("fence", "Here: ```python\nx = 1\n```", True),
    ("fence", "```python\nx = 1```\n", True),
    ("fence", "```python\nx = 1```", False),  # it may go on in this line
    ("fence", "```bash\nls\n```\nand\n```\nx = 1\n```", True),
    ("fence", "```bash\nls\n```\n", False),
    ("fence", "<thought>\n```python\nx = 1\n```\n", False),
    ("answer_tag", "<answer>4</answer>", True),
    ("answer_tag", "in <answer> </answer> tags", False),
]


@pytest.mark.parametrize(("kind", "text", "complete"), EXAMPLES)
def test_what_an_answer_looks_like(kind: AnswerMarker, text: str, complete: bool) -> None:
    end = end_in_bytes(automaton(kind), text.encode())
    assert (end is not None) == complete
    if text.count("{") != MAX_DEPTH + 2 and complete:
        assert end == len(text.encode())
    inside = end_in_bytes(automaton(kind, True), b"all this is a thought: " + text.replace("</think>", "").encode())
    assert inside is None
    behind = end_in_bytes(automaton(kind, True), b"</think>" + text.encode())
    assert behind == (None if end is None else end + len(b"</think>"))


PIECES: dict[AnswerMarker, list[str]] = {
    "boxed": ["\n\\boxed{", "\n\\boxed{", "}", "3", "13", "\n"],
    "fence": ["```", "```", "\n", "\n", "python", "x = 1"],
    "answer_tag": ["<answer>", "</answer>", "</answer>", " a", "\n"],
}


@pytest.mark.parametrize("make", [lambda: wrapped(byte_level()), lambda: wrapped(sentencepiece()), build_tokenizer])
@pytest.mark.parametrize("kind", KINDS)
def test_in_the_tokens_of_a_tokenizer_an_answer_is_complete_with_the_last_of_them(
    make: Any, kind: AnswerMarker
) -> None:
    tokenizer = make()
    marker, table = answer_marker(kind, tokenizer), vocabulary_bytes(tokenizer, decoded=True)
    pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in PIECES[kind]]
    rng, found = np.random.default_rng(0), 0
    for _ in range(300):
        words = [pieces[i] for i in rng.integers(0, len(pieces), 12)]
        tokens = np.array([token for word in words for token in word], np.int32)
        end = end_in_bytes(automaton(kind), b"".join(table[token] for token in tokens))
        lengths = np.cumsum([len(table[token]) for token in tokens])
        wanted = NOWHERE if end is None else int(np.searchsorted(lengths, end)) + 1
        assert run(marker, tokens)[1] == wanted
        found += end is not None
    assert (found > 10) == (kind == "boxed" or make is not build_tokenizer)  # which has words for boxes only


def test_a_marker_stays_small_for_a_large_vocabulary() -> None:
    """It travels with every request. Pieces of our own sources stand for a vocabulary of code and mathematics."""
    pieces: dict[bytes, None] = dict.fromkeys(bytes([byte]) for byte in range(256))
    for path in sorted(Path(__file__).parent.parent.rglob("*.py"))[:60]:
        for word in re.findall(rb" ?\w+| ?[^\w\s]+|\s+", path.read_bytes()):
            pieces.update(dict.fromkeys(word[:n] for n in range(1, min(len(word), 10) + 1)))
    marker = marker_over_tokens(automaton("boxed"), list(pieces))
    assert len(pieces) > 10_000
    assert len(marker.tokens) < len(pieces) / 10
    assert marker.moves.nbytes < 100_000
    assert len({row.tobytes() for row in (*marker.moves, marker.rest)}) == len(marker.moves) + 1


def test_equal_markers_have_equal_keys_and_others_do_not() -> None:
    tokenizer = build_tokenizer()
    keys = [answer_marker(kind, tokenizer, thinking=thinking).key for kind in KINDS for thinking in (False, True)]
    assert keys == [answer_marker(kind, tokenizer, thinking=t).key for kind in KINDS for t in (False, True)]
    assert len(set(keys)) > len(KINDS)


@pytest.mark.parametrize(
    ("special", "kind", "refused"),
    [
        ("</think>", "boxed", True),
        ("<think>\n", "fence", True),
        ("<|end_of_thought|>", "answer_tag", True),
        ("<answer>", "answer_tag", True),
        ("<answer>", "boxed", False),
        ("<|im_end|>", "boxed", False),
    ],
)
def test_a_tag_that_decoding_skips_is_refused(special: str, kind: AnswerMarker, refused: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([special])
    if not refused:
        answer_marker(kind, wrapped(tokenizer))
        return
    with pytest.raises(DataError, match=r"rollout\.abort: .*special token.*\"special\": false"):
        answer_marker(kind, wrapped(tokenizer), thinking=True)
    ordinary = byte_level()
    ordinary.add_tokens([special])
    answer_marker(kind, wrapped(ordinary), thinking=True)


def test_what_decoding_skips_fills_no_box_and_stands_between_nothing() -> None:
    backend = byte_level()
    backend.add_special_tokens(["<|image|>"])
    backend.add_tokens(["<|seen|>"])
    tokenizer = wrapped(backend)
    marker = answer_marker("boxed", tokenizer)
    for text, complete in (
        ("\\boxed{<|image|>}", False),
        ("\\boxed{<|seen|>}", True),
        ("\\box<|image|>ed{4}", True),
        ("\\boxed{4}<|image|>", True),
    ):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert (run(marker, np.array(tokens, np.int32))[1] != NOWHERE) == complete
        assert (first_boxed(tokenizer.decode(tokens, skip_special_tokens=True)) is not None) == complete


def test_a_marker_that_cannot_be_numbered_is_refused_by_its_key() -> None:
    many_states = np.broadcast_to(np.int64(0), (2**16 + 1, 256))
    with pytest.raises(DataError, match=r"some\.key: .* 2 tokens of this tokenizer .* 65537 states"):
        marker_over_tokens(many_states, [b"a", b"b"], "some.key")
    rng = np.random.default_rng(0)
    shuffles = rng.permuted(np.tile(np.arange(12)[:, None], 256), axis=0)  # each byte another order of the states
    words = [rng.bytes(4) for _ in range(2**16 + 100)]
    with pytest.raises(DataError, match=r"some\.key: .* kinds of tokens"):
        marker_over_tokens(shuffles, words, "some.key")


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused_by_the_key_of_the_marker() -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "<eos>": 2}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match=r"rollout\.abort\.marker: .*WordPiece"):
        answer_marker("boxed", wrapped(tokenizer))
