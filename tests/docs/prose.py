"""Words, sentence length and columns of every page: `python -m tests.docs.prose`. test_prose.py holds the limits.

A word has a letter or a digit. A piece of `code` and a link's text count as they are read: code as one word. Words
count outside fenced blocks and outside what scripts write into a page. Sentences are those of paragraphs and list
items, not of tables and headings.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import PAGES, ROOT, is_new, name, written

MOST_WORDS = 2_000
RESULT_WORDS = 600  # of a page of docs/results: one question, one answer, one table
MOST_COLUMNS = 100
MEAN_SENTENCE = 17.0
LONG_SENTENCE = 30
README_LINES = 80
MANUAL_WORDS = 27_000

LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|Fig|Eq|No)\.", re.IGNORECASE)
END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_]*[A-Z0-9`])")


@dataclass(frozen=True, slots=True)
class Measure:
    words: int
    sentences: int
    mean: float
    long: int  # the 90th percentile of words in a sentence
    columns: int  # the widest line outside tables and fenced blocks
    lines: int


def sentences(text: str) -> list[str]:
    """Of the paragraphs and list items of a page."""
    paragraphs: list[str] = []
    begun = False
    for line in written(text).splitlines():
        bare = line.strip().lstrip("> ")
        if not bare or bare.startswith(("#", "|", "<", "---")):
            begun = False
            continue
        if ITEM.match(line) or not begun:
            paragraphs.append("")
            begun = True
        paragraphs[-1] += " " + ITEM.sub("", bare)
    found: list[str] = []
    for paragraph in paragraphs:
        plain = ABBREVIATION.sub(r"\1", CODE.sub("code", LINK.sub(r"\1", paragraph)))
        found.extend(part.strip() for part in END.split(plain) if part.strip())
    return found


def length(sentence: str) -> int:
    return sum(any(character.isalnum() for character in word) for word in sentence.split())


def measure(text: str) -> Measure:
    counts = sorted(length(sentence) for sentence in sentences(text)) or [0]
    wide = [len(line) for line in written(text).splitlines() if "|" not in line[:4] and " " in line.strip()]
    return Measure(
        length(written(text)),
        len(counts),
        sum(counts) / len(counts),
        counts[math.ceil(0.9 * len(counts)) - 1],
        max(wide, default=0),
        text.count("\n"),
    )


def of(path: Path) -> Measure:
    return measure(path.read_text(encoding="utf-8"))


def in_manual(path: Path) -> bool:
    """Counts for the manual's total: all below docs but what was measured."""
    return path.is_relative_to(ROOT / "docs") and not path.is_relative_to(ROOT / "docs" / "results")


def main() -> None:
    pages = [ROOT / page for page in sys.argv[1:]] or PAGES
    measures = {path: of(path) for path in pages}
    wide = max(len(name(path)) for path in pages)
    print(f"{'page':<{wide}} {'words':>7} {'mean':>6} {'p90':>4} {'columns':>8}")
    for path, page in measures.items():
        note = "" if is_new(path) else "  old"
        print(f"{name(path):<{wide}} {page.words:>7,} {page.mean:>6.1f} {page.long:>4} {page.columns:>8}{note}")
    manual = [page for path, page in measures.items() if in_manual(path)]
    count = sum(page.sentences for page in manual)
    mean = sum(page.mean * page.sentences for page in manual) / max(count, 1)
    print(f"{'manual':<{wide}} {sum(page.words for page in manual):>7,} {mean:>6.1f}")


if __name__ == "__main__":
    main()
