"""The package reasoning-gym in its own process: writes questions to files (`python -P gym.py`, a request on stdin) and
scores answers (`scorer`, for child_main.py). Loaded by its path: imports nothing of Paceline.

Several of its scorers evaluate an answer as Python, so a model's text would run as code. Here they read literals and
formulas only (`_guard`).
"""

import ast
import dataclasses
import difflib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

HELD_OUT_SEED = 1_000_000  # added to the seed. Question i uses seed + i, so the splits' draws never overlap
MOST_DRAWS = 10  # draws per wanted question, plus _DRAWS, until there are enough different ones
_DRAWS, _PROBED = 1000, 8
_SAY_S = 10.0  # between two progress messages
_OURS = ("seed", "size")  # keys of a configuration that have their own options beside it
_FORMULA = re.compile(r"[\s\w+\-*/^().,!]*", re.ASCII)
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*", re.ASCII)
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
        *("exp", "log", "ln", "sqrt", "pi", "factorial", "binomial", "Abs"),
    )
)
_LITERAL_MODULES = (
    *("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.binary_matrix"),
    "games.n_queens",
)
_FORMULA_MODULES = ("games.countdown", "games.puzzle24")  # and the callers of sympy.parse_expr


class RefusedError(Exception):
    """A request that cannot be met: the key below data.reasoning_gym, the fault, the remedy."""

    def __init__(self, key: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.said = {"key": key, "message": message, "remedy": remedy}


def scorer() -> Callable[[Any], Any]:
    """Return a function from (data set, its configuration, answer, entry) to [score, a note or None].

    Raises what the data set raises for its own answer: then the record is at fault, not the response."""
    _guard()
    made: dict[str, Any] = {}

    def score(asked: tuple[str, dict[str, Any], str, dict[str, Any]]) -> list[Any]:
        name, config, answer, entry = asked
        key = json.dumps([name, config], sort_keys=True)
        if key not in made:
            made[key] = dataset(name, config)
        try:
            return [float(made[key].score_answer(answer, entry)), None]
        except Exception as error:
            made[key].score_answer(entry["answer"], entry)
            return [0.0, f"{name} cannot read the answer {answer[:40]!r}: {type(error).__name__}: {error}"]

    return score


def dataset(name: str, config: dict[str, Any], **own: int) -> Any:
    """Create a data set of reasoning-gym. `own`: seed and size. Raises RefusedError."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 5, 0.5)
        every = "python -c 'from reasoning_gym.factory import DATASETS; print(*DATASETS)'"
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise RefusedError("dataset", f"reasoning-gym has no data set {name!r}", f"{hint}all {len(DATASETS)}: {every}")
    made_by, options = DATASETS[name]
    defaults = {field.name: _default(field) for field in dataclasses.fields(options)}
    known = [key for key in defaults if key not in _OURS]
    for key in config:
        if key in _OURS:
            raise RefusedError(f"config.{key}", "is not the data set's own here", f"write {key} beside config")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RefusedError(f"config.{key}", f"{name} has no such key", f"{hint}it has {', '.join(known) or 'none'}")
    values = {k: tuple(v) if isinstance(defaults[k], tuple) and isinstance(v, list) else v for k, v in config.items()}
    try:
        return made_by(config=options(**values, **{key: value for key, value in own.items() if key in defaults}))
    except Exception as error:
        said = ", ".join(f"{key}={defaults[key]!r}" for key in known)
        raise RefusedError("config", f"{name} refuses it: {_text(error)}", f"its defaults: {said}") from error


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def make(request: dict[str, Any]) -> Iterator[str]:
    """Write train.jsonl and, if held-out questions are asked for, eval.jsonl into request["folder"]: one record per
    line, all questions different. Yields now and then how far it is. Raises RefusedError."""
    name, config, folder = request["dataset"], request["config"], Path(request["folder"])
    seen: set[str] = set()
    for split, key, offset in (("eval", "eval", HELD_OUT_SEED), ("train", "size", 0)):
        wanted = request[key]
        if not wanted:
            continue
        draws = MOST_DRAWS * wanted + _DRAWS
        source = dataset(name, config, seed=request["seed"] + offset, size=draws)
        told_s = time.monotonic()
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            found = 0
            for number, entry in islice(_different(source, draws, seen), wanted):
                if found < _PROBED:
                    _require_usable(name, source, entry)
                record = {
                    "id": f"{name}-{request['seed'] + offset + number}",
                    "prompt": entry["question"],
                    "answer": entry["answer"],
                    "metadata": entry["metadata"],
                    "reasoning_gym": name,
                    "config": config,
                }
                file.write(json.dumps(record) + "\n")
                found += 1
                if time.monotonic() - told_s > _SAY_S:
                    told_s = time.monotonic()
                    yield f"{found} of {wanted} questions ({split})"
        if found < wanted:
            what = "different questions that are not held out" if split == "train" else "different questions"
            fewer = f"set it to {max(int(0.9 * found), 1)} or less" if found else "take another data set"
            message = f"{wanted} is too many: {name} gave {found} {what} in {draws} draws"
            raise RefusedError(key, message, f"{fewer}, or widen config")


def _different(source: Any, draws: int, seen: set[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, entry) of questions that are not in `seen`, and add them."""
    for number in range(draws):
        try:
            entry = source[number]
        except IndexError:  # a data set with a fixed number of questions
            return
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield number, entry


def _require_usable(name: str, source: Any, entry: dict[str, Any]) -> None:
    """Check that the score survives a file, which turns the data set's tuples into lists."""
    try:
        back = json.loads(json.dumps(entry))
        same = source.score_answer(entry["answer"], entry) == source.score_answer(back["answer"], back)
    except (TypeError, ValueError) as error:
        same, why = False, f": {error}"
    else:
        why = ""
    if not same or not isinstance(entry["question"], str):
        raise RefusedError(
            "dataset", f"records of {name} cannot be kept in a file and graded from it{why}", "take another data set"
        )


def _guard() -> None:
    """Restrict scorers that evaluate answers as Python to literals and formulas."""
    import importlib

    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    def formula(text: str, *arguments: Any, **named: Any) -> Any:
        words = _WORD.findall(text)
        plain = _FORMULA.fullmatch(text) and not _ATTRIBUTE.search(text)
        if not plain or any(len(word) > 1 and word not in _FUNCTIONS for word in words):
            raise ValueError("not a formula")
        return parse_expr(text, *arguments, **named)

    sympy.parse_expr = formula
    for name in (*_LITERAL_MODULES, *_FORMULA_MODULES):
        module: Any = importlib.import_module(f"reasoning_gym.{name}")
        if name in _LITERAL_MODULES:
            module.eval = ast.literal_eval
        else:
            module.parse_expr = formula


def main() -> None:
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the package's prints
    warnings.simplefilter("ignore")

    def tell(**said: Any) -> None:
        print(json.dumps(said), file=answers, flush=True)

    try:
        for text in make(request):
            tell(text=text)
    except RefusedError as error:
        tell(refused=error.said)


if __name__ == "__main__":
    main()
