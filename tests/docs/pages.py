"""The pages of the manual: which there are, which are not written anew yet, and what a page consists of."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "examples/*/*.md", "benchmarks/*.md", "experiments/*.md")
PAGES = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})


def _pages(names: str) -> frozenset[str]:
    return frozenset(f"docs/{page}.md" for page in names.split())


# Pages of the old manual. The limits of prose.py and the checks of test_examples.py do not hold for them.
# `test_the_lists_of_a_rewrite_are_emptied` fails once the last one is gone and this still names them.
NOT_YET: frozenset[str] = frozenset()
# Pages of the new manual that other changes bring. A link to one of them may lead nowhere until then.
COMING: frozenset[str] = frozenset()
FENCE = re.compile(r"^( *)(```+|~~~+)[ \t]*([\w-]*)[^\n]*\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
# What a script writes into a page: `<!-- experiments.turns: begin -->` or `<!-- table: rollout -->`.
GENERATED = re.compile(
    r"<!-- ([\w.]+): begin -->.*?<!-- \1: end -->|<!-- table: (\w+) -->.*?<!-- end: \2 -->", re.DOTALL
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_new(path: Path) -> bool:
    return name(path) not in NOT_YET


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block, without the indentation of the fence."""
    for indent, _, language, content in FENCE.findall(text):
        yield language, re.sub(rf"^{indent}", "", content, flags=re.MULTILINE)


def written(text: str) -> str:
    """The text without fenced blocks and without what scripts write."""
    return FENCE.sub("", GENERATED.sub("", text))
