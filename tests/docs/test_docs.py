"""What the documentation names exists: links, headings, configuration keys, modules and files."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.config import Config
from launch.config.schema import by_name, generic

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md", "benchmarks/*.md", "experiments/*.md")
    for path in ROOT.glob(pattern)
)
RESULTS = sorted((ROOT / "docs/results").glob("*.md"))  # name commands of older commits
SECTIONS = "|".join(Config.model_fields)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(rf"(?<![\w./-])(?:{SECTIONS})(?:\.[a-z_0-9*]+)+\b(?![(/])")
MODULE = re.compile(
    r"python -m ((?:launch|benchmarks|coordinator|examples|experiments|actors|models|planner|tests)[\w.]*)"
)
SOURCE = re.compile(
    r"(?<![\w./-])(?:actors|benchmarks|config|contracts|coordinator|docs|drafter|examples|experiments|launch|models|native|planner|policies|tests)"
    r"/[\w./-]+\w"
)
FILES = (".jsonl", ".log", ".json", ".md", ".py", ".yaml", ".parquet", ".gz")
MADE = re.compile(r"examples/guess_and_check/data|(?:benchmarks|experiments)/results")  # by a command


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield link


def unknown_keys(text: str) -> Iterator[str]:
    known = by_name()
    for key in KEY.findall(text):
        if not key.endswith(FILES) and generic(key).removesuffix(".*") not in known:
            yield key


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=name)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert re.findall(r"(?<!\w)@@?[A-Z]+\b|TODO|FIXME", page.read_text(encoding="utf-8")) == []


# coming_from.md has other trainers' keys: tests/launch/test_foreign_names.py reads its column of ours.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "coming_from.md"], ids=name)
def test_configuration_keys_exist(page: Path) -> None:
    assert list(unknown_keys(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [module for module in MODULE.findall(text) if importlib.util.find_spec(module) is None] == []
    files = [file for file in SOURCE.findall(text) if not MADE.match(file)]
    there = [ROOT / file.partition("::")[0] for file in files]
    assert [path for path in there if not path.exists() and not path.with_suffix(".py").exists()] == []


def test_every_page_of_the_manual_is_in_its_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == {"README.md"}


def test_every_result_is_in_their_index_and_short() -> None:
    index = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    assert {page.name for page in RESULTS} - set(LINK.findall(index)) == {"README.md"}
    assert [page.name for page in RESULTS if page.read_text(encoding="utf-8").count("\n") > 60] == []


def test_the_checks_themselves_find_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [y](#c) [z](gone.md) [w](https://example.org/gone)", encoding="utf-8")
    assert list(broken_links(page)) == ["#c", "gone.md"]
    text = "`rollout.workers=3`, `reward.terms.0.kind`, `rollout.worker`, `data.jsonl`, `learner.optimizer.lrate=1`"
    assert list(unknown_keys(text)) == ["rollout.worker", "learner.optimizer.lrate"]


TEST = re.compile(r"`(?:(tests/[\w/]+\.py))?::(test_\w+)")


def test_every_test_that_a_table_names_is_there() -> None:
    """`tests/a.py::test_b`, and `::test_c` for another one of the file named before it in the row."""
    missing = []
    for row in (ROOT / "docs/howto/gpu.md").read_text(encoding="utf-8").splitlines():
        file = ""
        for named, test in TEST.findall(row):
            file = named or file
            if not file or not re.search(rf"def {test}\b", (ROOT / file).read_text(encoding="utf-8")):
                missing.append(f"{file}::{test}")
    assert not missing
