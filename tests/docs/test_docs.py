"""What the documentation names exists: links, headings, configuration keys, modules and files."""

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.config import Config
from launch.config.schema import by_name, generic
from tests.docs.pages import COMING, FENCE, NOT_YET, PAGES, ROOT, is_new, name

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
RELATIVE = re.compile(r"(?<![\w./-])(\w[\w-]*/(?:[\w-]+/)*[\w-]+\.(?:py|cpp|h))\b")
OTHERS = ("linux/", "model_executor/", "ray/", "vllm/utils/", "vllm/v1/", "vllm/model_executor/")  # not ours
FILES = (".jsonl", ".log", ".json", ".md", ".py", ".yaml", ".parquet", ".gz")
# What a command makes, and metrics, which test_house.py looks up.
MADE = re.compile(r"examples/\w+/data|(?:benchmarks|experiments)/results|drafter/[a-z0-9_]+$")


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() and target.resolve().is_relative_to(ROOT) and name(target.resolve()) in COMING:
            continue
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield link


@cache
def code_files() -> frozenset[str]:
    """Every source file as `/path/from/the/root`."""
    found = (path for path in ROOT.glob("[a-z]*/**/*") if path.suffix in (".py", ".cpp", ".h"))
    return frozenset(f"/{name(path)}" for path in found)


def stale_paths(text: str) -> Iterator[str]:
    """Files written as `folder/file.py`, from wherever the reader is thought to stand, that no folder has."""
    for file in RELATIVE.findall(text):
        if not file.startswith(OTHERS) and not any(path.endswith(f"/{file}") for path in code_files()):
            yield file


def unknown_keys(text: str) -> Iterator[str]:
    known = by_name()
    for key in KEY.findall(text):
        if not key.endswith(FILES) and generic(key).removesuffix(".*") not in known:
            yield key


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert re.findall(r"(?<!\w)@@?[A-Z]+\b|TODO|FIXME", page.read_text(encoding="utf-8")) == []


# These have other trainers' keys; of coming_from.md tests/launch/test_foreign_names.py reads the column of ours.
FOREIGN = ("coming_from.md", "from_verl.md", "from_trl.md")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in FOREIGN], ids=name)
def test_configuration_keys_exist(page: Path) -> None:
    assert list(unknown_keys(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_modules_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [module for module in MODULE.findall(text) if importlib.util.find_spec(module) is None] == []
    files = [file for file in SOURCE.findall(text) if not MADE.match(file)]
    there = [ROOT / file.partition("::")[0] for file in files]
    missing = [path for path in there if not path.exists() and not path.with_suffix(".py").exists()]
    assert [path for path in missing if name(path) not in COMING] == []


@pytest.mark.parametrize("page", [page for page in PAGES if is_new(page)], ids=name)
def test_relative_file_names_exist(page: Path) -> None:
    assert list(stale_paths(page.read_text(encoding="utf-8"))) == []


def test_every_page_of_the_manual_is_in_its_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for link in LINK.findall(index)}
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    old = {page.removeprefix("docs/") for page in NOT_YET}
    results = {page for page in pages if page.startswith("results/")}  # the site's menu lists them
    assert pages - linked - old - results == {"index.md"}


def test_the_checks_themselves_find_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [y](#c) [z](gone.md) [w](https://example.org/gone)", encoding="utf-8")
    assert list(broken_links(page)) == ["#c", "gone.md"]
    text = "`rollout.workers=3`, `reward.terms.0.kind`, `rollout.worker`, `data.jsonl`, `learner.optimizer.lrate=1`"
    assert list(unknown_keys(text)) == ["rollout.worker", "learner.optimizer.lrate"]
    text = "`docs/test_docs.py`, tests/docs/pages.py, `docs/gone.py`, `runs/demo/log.txt`"
    assert list(stale_paths(text)) == ["docs/gone.py"]


TEST = re.compile(r"`(?:(tests/[\w/]+\.py))?::(test_\w+)")


def test_every_test_that_a_table_names_is_there() -> None:
    """`tests/a.py::test_b`, and `::test_c` for another one of the file named before it in the row."""
    missing = []
    page = next(ROOT / page for page in ("docs/howto/gpu.md", "docs/gpu.md") if (ROOT / page).exists())
    for row in page.read_text(encoding="utf-8").splitlines():
        file = ""
        for named, test in TEST.findall(row):
            file = named or file
            if not file or not re.search(rf"def {test}\b", (ROOT / file).read_text(encoding="utf-8")):
                missing.append(f"{file}::{test}")
    assert not missing
