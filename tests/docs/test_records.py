"""Links of the tables beside result records."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import relinked
from tests.docs.pages import ROOT

COMMITS = re.compile(r"[Cc]ommits?\s+[0-9a-f]{7,40}\b(?:(?:,| and)\s+[0-9a-f]{7,40}\b)*")
HASH = re.compile(r"\b[0-9a-f]{7,40}\b")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_links_beside_a_record_lead_to_files() -> None:
    pages = [*ROOT.glob("experiments/results/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    assert pages
    links = [(page, to) for page in pages for to in LINK.findall(page.read_text(encoding="utf-8"))]
    lost = [f"{page.name}: {to}" for page, to in links if not (page.parent / to).exists()]
    assert lost == []


def test_commits_of_result_pages_are_in_the_history() -> None:
    """A rebase renames commits; a page names one that a reader can check out."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("needs a clone with its history")
    named = {
        (page.name, commit)
        for page in (ROOT / "docs/results").glob("*.md")
        for words in COMMITS.findall(page.read_text(encoding="utf-8"))
        for commit in HASH.findall(words)
    }
    assert len(named) > 20
    known = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=True).stdout.splitlines()
    beginnings = {one[:length] for one in known for length in {len(commit) for _, commit in named}}
    assert sorted((page, commit) for page, commit in named if commit not in beginnings) == []


def test_a_pages_text_goes_beside_a_record() -> None:
    page, beside = Path("/r/docs/results/page.md"), Path("/r/experiments/results/page.md")
    assert (
        relinked("[DAS](../systems/das.md), [a](b.md)", page, beside) == "[DAS](../../docs/systems/das.md), [a](b.md)"
    )
