r"""Automata that find an answer in a response, byte by byte: a closed \boxed{...}, a closed fence, or
<answer>...</answer>. They are the grammars of `rollout.abort.marker`, compiled over tokens like stop strings.

Two rules keep them consistent with the rewards (actors.rewards.boxed.first_boxed, actors.rewards.fences.first_fence):

  a marker is found only where the reward has read its answer, and no later text changes what the reward reads
  text of a thinking part is no answer: from <think> (or as the prompt opened it) to its closing tag

Special tokens have no bytes, since the rewards read decoded text without them; so no tag may be one.

A missed marker costs tokens, never a grade. Cases that need many states are therefore missed: boxes with more than
MAX_DEPTH levels of braces, or around a phantom or an empty box.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from actors.data.errors import DataError
from actors.data.stop_strings import marker_over_tokens, special_tokens, vocabulary_bytes
from actors.data.tokenizers import Tokenizer
from config.token_budget import AnswerMarker
from contracts.rollout import Marker

MIXED = (
    "rollout.abort: some prompts end with an opened thinking part and others do not, so one rule cannot decide what "
    "counts as an answer; use one template for all prompts, or rollout.abort.enabled=false"
)
MAX_DEPTH = 5  # of braces in a box
KEY = "rollout.abort.marker"

_THINK = (b"<think>", b"<thinking>", b"<thought>")
_THINK_ENDS = (b"</think>", b"</thinking>", b"</thought>", b"<|end_of_thought|>")
_ANSWER, _ANSWER_ENDS = b"<answer>", b"</answer>"
_BLANK = b" \t\n\r\f\v\x1c\x1d\x1e\x1f"
_WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"

State = Hashable
Step = Callable[[State, int], State]
FOUND: State = "found"


def answer_marker(kind: AnswerMarker, tokenizer: Tokenizer, *, thinking: bool = False) -> Marker:
    """Return the marker of answers. `thinking`: whether prompts end within a thinking part that they opened. Raises
    DataError if the tokenizer's tokens are not bytes, or if one of the tags is a special token."""
    tags = (*_THINK, *_THINK_ENDS, *((_ANSWER, _ANSWER_ENDS) if kind == "answer_tag" else ()))
    special = special_tokens(tokenizer).values()
    if unread := sorted(repr(token) for token in special if any(tag in token.encode() for tag in tags)):
        raise DataError(
            f"rollout.abort: tags of thoughts or answers are special tokens of the tokenizer, {', '.join(unread)}; "
            "rewards read the text without them, so a thought looks like an answer; set "
            '"special": false for them in tokenizer.json (added_tokens) and '
            "tokenizer_config.json (added_tokens_decoder), or rollout.abort.enabled=false"
        )
    return marker_over_tokens(automaton(kind, thinking), vocabulary_bytes(tokenizer, KEY, decoded=True), KEY)


@cache
def automaton(kind: AnswerMarker, thinking: bool = False) -> NDArray[np.int64]:
    """Return [S, 256]: the state after each byte; state 0 is initial, the last is FOUND, and no two states are
    equivalent."""
    step: Step
    begin: State
    match kind:
        case "boxed":
            step, begin = _box, ("out", "")
        case "fence":
            step, begin = _fence, ("line", "")
        case "answer_tag":
            step, begin = _tag, ("text", b"")
        case _:
            assert_never(kind)
    return _minimal(_enumerated(_outside_thoughts(step, begin), ("thinking", b"") if thinking else begin))


def _outside_thoughts(step: Step, begin: State) -> Step:
    """Extend `step` by thinking parts: a state ("thinking", start of a closing tag) ends in `begin`."""

    def read(state: State, byte: int) -> State:
        if isinstance(state, tuple) and state[0] == "thinking":
            found, seen = _search(_THINK_ENDS, state[1], byte)
            return begin if found else ("thinking", seen)
        return step(state, byte)

    return read


@cache
def _search(patterns: tuple[bytes, ...], seen: bytes, byte: int) -> tuple[bytes, bytes]:
    """Return (the pattern that ends here, the longest suffix that starts a pattern); `seen` is such a suffix."""
    text = seen + bytes([byte])
    for pattern in patterns:
        if text.endswith(pattern):
            return pattern, b""
    starts = (text[i:] for i in range(len(text) + 1))
    return b"", next(rest for rest in starts if any(p.startswith(rest) for p in patterns))


# Boxes: ("out", s) outside; ("empty", s) in a box without content so far; ("box", depth, s) in one with an answer. Only
# the innermost of nested boxes is followed. `s`: a possible start: backslashes, part of a macro or of a tag.

_OPENINGS = ("\\boxed", "\\fbox")
_IDLE = ("\\quad", "\\qquad", "\\dots", "\\ldots", "\\cdots")  # macros without visible content
_PHANTOMS = ("\\phantom", "\\hphantom", "\\vphantom")
_SPACES = {0xC2: b"\x85\xa0", 0xE1: b"\x9a", 0xE2: b"\x80\x81", 0xE3: b"\x80"}  # first bytes of the spaces beyond ASCII


def _box(state: State, byte: int) -> State:
    assert isinstance(state, tuple)
    match state:
        case ("out", s):
            return _out_of_box(s, byte)
        case ("empty", s):
            return _in_empty_box(s, byte)
        case (_, depth, s):
            return _in_box(depth, s, byte)
    raise AssertionError(state)


def _out_of_box(s: str, byte: int) -> State:
    c = chr(byte)
    if c == "\\":
        return "out", c
    if s in _OPENINGS and c == "{":
        return "empty", ""
    if going := _macro(s, byte, _OPENINGS):
        return "out", going
    found, seen = _search(_THINK, s.encode() if s.startswith("<") else b"", byte)
    return ("thinking", b"") if found else ("out", seen.decode())


def _in_empty_box(s: str, byte: int) -> State:
    c, filled = chr(byte), ("box", 0, "")
    if s == "":
        if byte in _BLANK or c in "~._$?" or 0x80 <= byte < 0xC0:
            return "empty", ""
        if c == "}":
            return "out", ""
        return ("empty", c) if c == "\\" or byte in _SPACES else _in_box(0, "", byte)
    if not s.startswith("\\"):
        return filled if byte >= 0x80 and byte not in _SPACES[ord(s)] else _in_empty_box("", byte)
    if s == "\\" and c in ",;:!> _$":
        return "empty", ""
    if s in _OPENINGS and c == "{":
        return "empty", ""
    if going := _macro(s, byte, (*_OPENINGS, *_IDLE, *_PHANTOMS)):
        return "empty", going
    if s in _PHANTOMS:
        return _out_of_box("", byte)
    if s in _IDLE and byte not in _WORD:
        return _in_empty_box("", byte)
    return _in_box(0, s if s == "\\" else "", byte)


def _in_box(depth: int, s: str, byte: int) -> State:
    c = chr(byte)
    if c == "\\":  # in a run of backslashes every second one is escaped
        return "box", depth, "\\\\" if s == "\\" else "\\"
    if s in _OPENINGS and c == "{":
        return "empty", ""
    if c in "{}" and s != "\\":
        depth += 1 if c == "{" else -1
        if depth < 0:
            return FOUND
        return ("box", depth, "") if depth <= MAX_DEPTH else ("out", "")
    return "box", depth, _macro("\\" if s == "\\\\" else s, byte, _OPENINGS)


def _macro(s: str, byte: int, names: tuple[str, ...]) -> str:
    """Return `s` plus the next byte if that starts one of `names`, else ""; blanks may follow an opening."""
    if s in _OPENINGS and byte in _BLANK:
        return s
    return s + chr(byte) if s and any(name.startswith(s + chr(byte)) for name in names) else ""


# Fences: ("line", s) at the start of a line, except blanks, ("info", language) behind an opening, ("text", s) in a
# line; ("in", counts, s) in a fence, whose `s` begins with ^ at the start of a line; ("skip",) behind a closed one.

_LANGUAGES = ("py", "ipython")  # or none
_INLINE = ("py", "python", "python3")


def _fence(state: State, byte: int) -> State:
    assert isinstance(state, tuple)
    match state:
        case ("line", s):
            return _line(s, byte)
        case ("info", language):
            return _info(language, byte)
        case ("text", s):
            return _text(s, byte)
        case ("in", counts, s):
            return _in_fence(counts, s, byte)
        case _:
            return ("line", "") if byte == 10 else state


def _line(s: str, byte: int) -> State:
    c = chr(byte)
    if c == "\n":
        return ("in", True, "^") if s == "```" else ("line", "")
    if c == "`" and s != "```":
        return "line", s + c
    if c in " \t\r" and s == "":
        return "line", s
    return _info("", byte) if s == "```" and c != "`" else _text(s, byte)


def _info(language: str, byte: int) -> State:
    c = chr(byte).lower()
    if c == "`":
        return "text", c
    if c == "\n":
        return "in", language in ("", "yes"), "^"
    if language in ("yes", "no") or (c in " \t\r" and language == ""):
        return "info", language
    language += c
    if language in _LANGUAGES:
        return "info", "yes"
    return "info", language if any(name.startswith(language) for name in _LANGUAGES) else "no"


def _text(s: str, byte: int) -> State:
    c = chr(byte).lower() if byte < 0x80 else "\ufffd"
    if c == "\n":
        return ("in", True, "^") if s.strip("` ") in _INLINE else ("line", "")
    if c == "`":
        return "text", ("" if s.strip("`") else s[:3]) + c
    if s.startswith("```") and s != "````":
        word = s.strip("` ")
        if c in " \t\r":
            return "text", f"```{word} " if word == "" or word in _INLINE else ""
        if not (word and s.endswith(" ")) and any(name.startswith(word + c) for name in _INLINE):
            return "text", f"```{word}{c}"
    found, seen = _search(_THINK, s.encode() if s.startswith("<") else b"", byte)
    return ("thinking", b"") if found else ("text", seen.decode())


def _in_fence(counts: bool, s: str, byte: int) -> State:
    c = chr(byte)
    if c == "\n":
        if s.startswith("```"):  # behind the last statement
            return FOUND if counts else ("line", "")
        return "in", counts, "^"
    if c == "`":
        if s == "^``":
            return FOUND if counts else ("skip",)
        return "in", counts, s if s == "```" else s.replace("``` ", "") + c
    if c in " \t\r" and s != "^":
        return "in", counts, "``` " if s.startswith("```") else ""
    return "in", counts, "^" if c in " \t\r" else ""


# Answer tags: ("text", s) outside, ("answer", filled, s) within; `s`: the start of a tag.


def _tag(state: State, byte: int) -> State:
    assert isinstance(state, tuple)
    if state[0] == "text":
        found, seen = _search((*_THINK, _ANSWER), state[1], byte)
        if not found:
            return "text", seen
        return ("answer", False, b"") if found == _ANSWER else ("thinking", b"")
    _, filled, seen = state
    found, rest = _search((_ANSWER_ENDS,), seen, byte)
    if found:
        return FOUND if filled else ("text", b"")
    said = (seen + bytes([byte])).removesuffix(rest)
    return "answer", filled or any(b not in _BLANK for b in said), rest


def _enumerated(step: Step, begin: State) -> NDArray[np.int64]:
    """Return [S, 256]: states in the order of discovery, FOUND last."""
    number: dict[State, int] = {begin: 0}
    rows: list[list[State]] = []
    for state in (waiting := [begin]):
        rows.append([step(state, byte) for byte in range(256)])
        for after in rows[-1]:
            if after != FOUND and after not in number:
                number[after] = len(number)
                waiting.append(after)
    number[FOUND] = len(number)
    return np.array([*([number[after] for after in row] for row in rows), [number[FOUND]] * 256])


def _minimal(moves: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge equivalent states (Moore, 1956), in the order of their first ones."""
    kinds = np.zeros(len(moves), np.int64)
    kinds[-1] = 1
    while True:
        _, first, finer = np.unique(
            np.column_stack((kinds, kinds[moves])), axis=0, return_index=True, return_inverse=True
        )
        if len(first) == kinds.max() + 1:
            break
        kinds = finer.ravel()
    kept = np.sort(first)  # FOUND, alone of its kind, is last
    place = np.empty(len(kept), np.int64)
    place[kinds[kept]] = np.arange(len(kept))
    return place[kinds[moves[kept]]]
