"""The limits of what we write (shared style: short sentences, short pages, 100 columns)."""

from pathlib import Path

import pytest

from tests.docs import pages, prose
from tests.docs.pages import PAGES, ROOT, is_new, name

# The documents of a user: benchmarks/ and experiments/ list scripts, and the changelog is a list of entries.
LIMITED = [
    page
    for page in PAGES
    if is_new(page)
    and (page.parent.name != "experiments" and page.parent.name != "benchmarks")
    and page.name != "CHANGELOG.md"
]


@pytest.mark.parametrize("page", [page for page in LIMITED if page.parent.name != "results"], ids=name)
def test_sentences_are_short(page: Path) -> None:
    measured = prose.of(page)
    assert measured.mean < prose.MEAN_SENTENCE
    assert measured.long < prose.LONG_SENTENCE


@pytest.mark.parametrize("page", [*LIMITED, ROOT / "CHANGELOG.md"], ids=name)
def test_lines_have_at_most_100_columns(page: Path) -> None:
    assert prose.of(page).columns <= prose.MOST_COLUMNS


@pytest.mark.parametrize("page", [page for page in LIMITED if page.parent.name != "reference"], ids=name)
def test_a_page_can_be_read_at_once(page: Path) -> None:
    assert prose.of(page).words <= prose.MOST_WORDS


@pytest.mark.parametrize("page", sorted((ROOT / "docs/results").glob("*.md")), ids=name)
def test_a_record_answers_one_question(page: Path) -> None:
    assert prose.of(page).words <= prose.RESULT_WORDS


def test_the_readme_is_short() -> None:
    assert prose.of(ROOT / "README.md").lines <= prose.README_LINES


def test_the_manual_is_short() -> None:
    counted = [page for page in PAGES if prose.in_manual(page) and is_new(page)]
    assert sum(prose.of(page).words for page in counted) <= prose.MANUAL_WORDS


def test_the_lists_of_a_rewrite_are_emptied() -> None:
    """When the last old page is gone, or the last new one there, its list has to go too."""
    old = [page for page in pages.NOT_YET if (ROOT / page).exists() and "systems/" not in page]  # these stay there
    missing = [page for page in pages.COMING if not (ROOT / page).exists()]
    assert bool(old) == bool(pages.NOT_YET)
    assert bool(missing) == bool(pages.COMING)


def test_a_text_is_measured() -> None:
    text = (
        "# A heading of five words\n\n"
        "One `piece of code` is a word, e.g. this. Two [linked words](page.md) here.\n\n"
        "- An item.\n- Another\n  item of four.\n\n"
        "| a table | is no sentence |\n\n```\nnor is code. Not at all.\n```\n"
        "<!-- script.name: begin -->\nWritten by a script.\n<!-- script.name: end -->\n"
    )
    assert prose.sentences(text) == [
        "One code is a word, e.g this.",
        "Two linked words here.",
        "An item.",
        "Another item of four.",
    ]
    measured = prose.measure(text)
    assert (measured.sentences, measured.mean, measured.long) == (4, 4.25, 7)
    assert measured.columns == 75
