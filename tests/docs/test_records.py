"""Links of the tables beside result records."""

import re
from pathlib import Path

from benchmarks.harness import relinked
from tests.docs.pages import ROOT

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_links_beside_a_record_lead_to_files() -> None:
    pages = [*ROOT.glob("experiments/results/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    assert pages
    links = [(page, to) for page in pages for to in LINK.findall(page.read_text(encoding="utf-8"))]
    lost = [f"{page.name}: {to}" for page, to in links if not (page.parent / to).exists()]
    assert lost == []


def test_a_pages_text_goes_beside_a_record() -> None:
    page, beside = Path("/r/docs/results/page.md"), Path("/r/experiments/results/page.md")
    assert (
        relinked("[DAS](../systems/das.md), [a](b.md)", page, beside) == "[DAS](../../docs/systems/das.md), [a](b.md)"
    )
