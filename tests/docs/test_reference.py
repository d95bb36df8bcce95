"""docs/reference says what the code has: generated parts, names of events and of metrics."""

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT
from tests.docs.reference import COMMAND, FOLDER, WRITTEN, filled

PACKAGES = ("actors", "config", "contracts", "coordinator", "drafter", "launch", "models", "planner", "policies")
# Kinds of events that stand in a variable where they are made.
NAMED_ELSEWHERE = {"checkpoint_damaged", "checkpoint_unverified", "drafter_damaged", "no_reward", "resumed", "started"}
SAYS_AN_EVENT = {"event", "on_event", "_on_event", "_say", "_changed", "changed", "Symptom"}
GAUGES = ("worker/", "phase/", "fleet/now")  # of Prometheus only: docs/howto/observe.md
NO_METRICS = {"tokens/s", "weights/{}/{}"}  # a unit; where ranks meet
HIDDEN = ("recording/", "eval/master_")  # summed up in drafter/recorded_bytes; a prefix of all of an evaluation
KIND = re.compile(r"[a-z]+(?:_[a-z]+)*")
METRIC = re.compile(r"[a-z_]+(?:/[a-z0-9_@<>{}]+)+")
FIRST_CELL = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)


@cache
def trees() -> tuple[ast.Module, ...]:
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in files)


def named_in_tables(page: str) -> set[str]:
    """Everything in backticks in the first column."""
    cells = FIRST_CELL.findall((FOLDER / page).read_text(encoding="utf-8"))
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def kinds_of_events() -> set[str]:
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            kind = node.args[0]
            if name in SAYS_AN_EVENT and isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                found.add(kind.value)
    return {kind for kind in found if KIND.fullmatch(kind)} | NAMED_ELSEWHERE


@cache
def texts() -> frozenset[str]:
    """Every text of the code; `{}` for what an f-string fills in."""
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def same(name: str, other: str) -> bool:
    """Whether two names may be one: `<x>` of the page and {} of an f-string stand for anything."""
    patterns = (re.sub(r"<\w+>|\{\}", ".+", each) for each in (name, other))
    return any(re.fullmatch(pattern, each) for pattern, each in zip(patterns, (other, name), strict=True))


@pytest.mark.parametrize("page", WRITTEN)
def test_generated_parts_are_what_the_code_gives(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    assert text == filled(text, WRITTEN[page]()), f"run: {COMMAND}"


def test_every_event_is_on_its_page_and_no_other() -> None:
    assert named_in_tables("events.md") == kinds_of_events()


def test_every_metric_of_the_code_is_on_its_page() -> None:
    page = named_in_tables("metrics.md")
    families = {name.partition("/")[0] for name in page if "/" in name}
    written = {text for text in texts() if METRIC.fullmatch(text) and text.partition("/")[0] in families}
    written = {text for text in written if not text.startswith((*GAUGES, *HIDDEN))} - NO_METRICS

    def known(text: str) -> bool:  # whole, or the beginning of a name that is put together
        return any(same(name, text) or re.match(rf"{re.escape(text)}([/_]|(?<=_))", name) for name in page)

    assert {text for text in written if not known(text)} == set()


def test_every_metric_of_the_page_is_in_the_code() -> None:
    """Whole, or at least its last part: many are put together of two."""
    written = texts()
    words = {word for text in written for word in re.findall(r"\w+", text)}
    words |= {str(node.arg) for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    put_together = [text for text in written if METRIC.fullmatch(text) and "{}" in text]
    for name in named_in_tables("metrics.md"):
        last = re.split(r"[/@]", name)[-1].removesuffix("_max").removesuffix("_min")  # suffixes of extremes
        if not last.startswith("<") and last not in words | {"K"}:
            assert any(same(name, text) for text in put_together), name
