"""What CONTRIBUTING asks of every module, and that what docstrings and comments name exists: files, modules,
configuration keys, and each identifier in backticks.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.config.schema import by_name, generic
from tests.docs.pages import PAGES, ROOT, is_new, name
from tests.docs.test_docs import FILES, SOURCE, stale_paths, unknown_keys

PACKAGES = (
    "actors",
    "config",
    "contracts",
    "coordinator",
    "drafter",
    "launch",
    "models",
    "paceline",
    "planner",
    "policies",
)
GENERATED = {ROOT / "coordinator/admin/admin_pb2.py"}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path not in GENERATED)
MOST_LINES = 500
MOST_POSITIONAL = 5
IN_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.[a-z_]\w*)+")
ELSEWHERE = {"apply_scaling", "masked_whiten", "EDACB"}  # the names of others, and an answer
METRIC = re.compile(
    r"`((?:budget|data|drafter|eval|groups|logprob_gap|ratio|reward|rollouts|speculation|turns|weights)/[a-z_0-9/]+)`"
)
DANGLING = re.compile(r"design\.md|notes/[\w.]+")  # what only its author had


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def with_docstring(tree: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None)


def prose(text: str) -> Iterator[str]:
    """Docstrings and comments; comments on lines that follow each other are one."""
    yield from (str(ast.get_docstring(node)) for node in with_docstring(ast.parse(text)))
    block, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if token.start[0] == last + 1:
                block += " " + words
            else:
                yield block
                block = words
            last = token.start[0]
    yield block


@cache
def identifiers() -> frozenset[str]:
    """Every name that code of this repository says, in Python or C++: none of them in a docstring or a comment."""
    said: set[str] = set()
    for folder in (*PACKAGES, "benchmarks", "experiments", "examples", "tests"):
        for path in {*(ROOT / folder).rglob("*.py")} - {Path(__file__)}:
            tree = parsed(path)
            docstrings = {id(node.body[0].value) for node in with_docstring(tree) if isinstance(node.body[0], ast.Expr)}
            said.update(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(tree):
                for field in ("id", "attr", "arg", "name", "asname", "module"):
                    value = getattr(node, field, None)
                    if isinstance(value, str):
                        said.update(value.split("."))
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                    said.update(re.findall(r"\w+", node.value))
    for path in (*(ROOT / "native").glob("*.cpp"), *(ROOT / "native").glob("*.h")):
        said.update(re.findall(r"\w+", re.sub(r"//.*", "", path.read_text(encoding="utf-8"))))
    return frozenset(said)


def dangling(text: str) -> Iterator[str]:
    """What prose names and nobody has."""
    yield from DANGLING.findall(text)
    for key in unknown_keys(text):
        if not key.startswith("model.") and not exists(key):  # a network has `model.layers` too
            yield key
    for file in SOURCE.findall(text):
        pattern = f"{file}*" if f"{file}*" in text else f"{file}.*"
        if not (ROOT / file).exists() and not any(ROOT.glob(pattern)):
            yield file
    yield from (file for file in stale_paths(text) if not SOURCE.fullmatch(file))
    for module in MODULE.findall(text):
        known = module.endswith(FILES) or generic(module) in by_name()
        if not known and not exists(module):
            yield module
    for quoted in IN_BACKTICKS.findall(text):
        if IDENTIFIER.fullmatch(quoted) and not set(quoted.split(".")) <= identifiers() | ELSEWHERE:
            yield f"`{quoted}`"


def exists(dotted: str) -> bool:
    """A module, or what one has."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return set(parts[count:]) <= set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    return False


def fields_of(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, bool, int]]:
    """Of each dataclass: whether it takes keywords only, and how many fields it states."""
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else []:
            options = decorator.keywords if isinstance(decorator, ast.Call) else []
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(node, ast.ClassDef) and ast.unparse(called).rpartition(".")[2] == "dataclass":
                count = sum(isinstance(part, ast.AnnAssign) for part in node.body)
                yield node, any(option.arg == "kw_only" for option in options), count


@pytest.mark.parametrize("package", PACKAGES)
def test_a_dataclass_of_six_fields_or_more_is_made_with_keywords(package: str) -> None:
    """A field added in the middle of positional ones shifts all others, silently where their types agree."""
    assert [
        f"{name(path)}: {node.name}"
        for path in MODULES
        if path.is_relative_to(ROOT / package)
        for node, keywords, count in fields_of(parsed(path))
        if count > MOST_POSITIONAL and not keywords
    ] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_are_short_and_say_what_they_own(package: str) -> None:
    modules = [path for path in MODULES if path.is_relative_to(ROOT / package)]
    assert [name(path) for path in modules if ast.get_docstring(parsed(path)) is None] == []
    assert [name(path) for path in modules if path.read_text("utf-8").count("\n") > MOST_LINES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_what_docstrings_and_comments_name_exists(package: str) -> None:
    found = {
        name(path): sorted({item for text in prose(path.read_text(encoding="utf-8")) for item in dangling(text)})
        for path in MODULES
        if path.is_relative_to(ROOT / package)
    }
    assert {path: items for path, items in found.items() if items} == {}


@pytest.mark.parametrize("page", [page for page in PAGES if is_new(page)], ids=name)
def test_metrics_that_pages_name_exist(page: Path) -> None:
    """Each part of a metric's name is written somewhere in the code."""
    metrics = METRIC.findall(page.read_text(encoding="utf-8"))
    assert [metric for metric in metrics if not set(re.findall(r"\w+", metric)) <= identifiers()] == []


def test_the_checks_themselves_find_faults() -> None:
    text = "See design.md, `fell_off_the_tree`, `launch.gone`, launch/gone.py, launch.config.gone and `rollout.worker`."
    assert list(dangling(text)) == [
        "design.md",
        "rollout.worker",
        "launch/gone.py",
        "launch.gone",
        "launch.config.gone",
        "`fell_off_the_tree`",
    ]
    assert (
        list(dangling("`Rollout`, docs/concepts/engine.md, `rollout.workers`, launch.config.load_config, `a + b`"))
        == []
    )
    shape = "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    f{i}: int\n" for i in range(6))
    assert [(keywords, count) for _, keywords, count in fields_of(ast.parse(shape))] == [(False, 6)]
