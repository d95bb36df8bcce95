r"""Makes names in expressions distinct for math-verify, which takes capitals for small letters, and Euler's E for a
number where it has an index. Owns the renaming, and the order of named values.
"""

import re

# These keep their letters: commands, and the braces of some.
_KEPT = r"\\(?:text\w*|math\w+|operatorname\*?|begin|end|[mh]box)\s*\{[^{}]*\}|\\[A-Za-z]+"
_LETTER = re.compile(rf"{_KEPT}|([A-Za-z])")
_INDEXED = re.compile(rf"{_KEPT}|([EeIi])(?=_)")
_COMMAND_INDEX = re.compile(r"(\\[A-Za-z]+|[A-Za-z])_(?:\{\s*\\([A-Za-z]+)\s*\}|\\([A-Za-z]+))")
_WORD_INDEX = re.compile(r"_\{\s*\\(?:text\w*|mathrm|mathit|mbox)\s*\{\s*([A-Za-z0-9]+)\s*\}\s*\}")
# math-verify takes both for a function or for Euler's constant.
_GAMMA = re.compile(r"\\(?:(gamma)(?![A-Za-z])|Gamma(?![A-Za-z]|\s*\())\s*")
_SPARE = [r"\Xi", r"\Upsilon", r"\Lambda", r"\Theta", r"\Phi", r"\Psi", r"\eta", r"\kappa", r"\nu", r"\tau"]
_RUN = re.compile(rf"{_KEPT}|([A-Za-z]{{2,3}})(?![A-Za-z])")
_WORDS_WITH_I = {"sin", "min", "lim", "dim", "pi", "psi", "phi", "chi", "xi", "in", "if", "is", "int", "inf", "tri"}
_VALUE = re.compile(r"(\\?[A-Za-z]+(?:_(?:\{[^{}=]*\}|\w))?)\s*(?<![<>!])=\s*([^=<>]+)")


def distinct(gold: str, answer: str) -> tuple[str, str] | None:
    """Rename letters that occur both as a capital and small, on both sides; None if there are not enough names."""
    sides = [_COMMAND_INDEX.sub(_plain_index, _WORD_INDEX.sub(r"_{\1}", text)) for text in (gold, answer)]
    sides = [
        _RUN.sub(_spaced, _GAMMA.sub(lambda match: r"\varsigma " if match[1] else r"\vartheta ", text))
        for text in sides
    ]
    letters = {match[1] for text in sides for match in _LETTER.finditer(text) if match[1]}
    twice = {letter for letter in letters if letter.isupper() and letter.lower() in letters}
    indexed = {match[1] for text in sides for match in _INDEXED.finditer(text) if match[1]}
    spare = [name for name in _SPARE if not any(name.casefold() in text.casefold() for text in sides)]
    renamed = sorted(twice | indexed)
    if len(renamed) > len(spare):
        return None
    names = dict(zip(renamed, spare, strict=False))
    for letter, name in names.items():
        index = r"(?=_)" if letter not in twice else ""
        pattern = re.compile(rf"{_KEPT}|({letter}){index}")
        sides = [pattern.sub(lambda match: _new(match, name), text) for text in sides]  # noqa: B023
    return sides[0], sides[1]


def _new(match: re.Match[str], name: str) -> str:
    follows = match.string[match.end() : match.end() + 1]
    return name + " " * follows.isalpha() if match[1] else match[0]


def _plain_index(match: re.Match[str]) -> str:
    r"""Write `M_{\odot}` as `M_{odot}`; the index of a command is a formula: `\log_\pi`."""
    return match[0] if match[1].startswith("\\") else rf"{match[1]}_{{{match[2] or match[3]}}}"


def _spaced(match: re.Match[str]) -> str:
    """Write `it` as `i t`, so that i is seen on both sides or on none."""
    run = match[1]
    return " ".join(run) if run and "i" in run and run.lower() not in _WORDS_WITH_I else match[0]


def named_values(members: list[str]) -> dict[str, str] | None:
    """Return names and values of `x = 2, y = 3`, in their order; None unless there are at least two, with different
    letters."""
    found = [_VALUE.fullmatch(member) for member in members]
    values = {match[1]: match[2].strip() for match in found if match}
    letters = {name.partition("_")[0] for name in values}
    return values if all(found) and len(letters) == len(members) > 1 else None
