"""Tables of docs/speculation_measured.md from the records: `python -m benchmarks.tools.doc_tables [BLOCK ...]`.

Owns which block of the page is made of which record: what stands between its `<!-- table: NAME -->` and
`<!-- end: NAME -->`, with the machine that the record is of and its figure. A block whose record is not there stays as
it is. Measures nothing; the words around the blocks are the author's.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from benchmarks.harness import RESULTS, ROOT, command, load
from benchmarks.tools import rollout_report

PAGE = ROOT / "docs/speculation_measured.md"
EXPERIMENTS = ROOT / "experiments/results"
Block = tuple[Path, Callable[[Path], str]]


def _rollout(path: Path) -> str:
    before = path.with_stem("rollout_before")
    return rollout_report.table(load(path), load(before) if before.is_file() else None)


def _machine(record: Path) -> str:
    facts = load(record)["machine"]
    return f"On {facts['cores']} cores of {_article(facts['cpu'])}, without a GPU."


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


BLOCKS: Mapping[str, Block] = {
    "rollout": (RESULTS / "rollout.json", _rollout),
    "self_rollout": (RESULTS / "self_rollout.md", Path.read_text),
    "grid": (EXPERIMENTS / "strategy_grid.md", Path.read_text),
    "self_drafter": (EXPERIMENTS / "self_drafter.md", Path.read_text),
}


def filled(page: str, blocks: Mapping[str, Block]) -> str:
    """The page with every block that has a record made anew. Raises ValueError for one that the page does not have."""
    for name, (path, make) in blocks.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"no <!-- table: {name} --> ... <!-- end: {name} --> in {PAGE.name}")
        if path.is_file():
            made = f"{_machine(path.with_suffix('.json'))}\n\n{make(path).strip()}"
            if (figure := path.with_suffix(".svg")).is_file():
                made += f"\n\n![{name}](../{figure.relative_to(ROOT)})"
            before, after = pattern.split(page)[0], pattern.split(page)[-1]
            page = f"{before}<!-- table: {name} -->\n\n{made}\n\n<!-- end: {name} -->{after}"
    return page


def main(*names: Annotated[str, "blocks; default: all"]) -> None:
    PAGE.write_text(filled(PAGE.read_text(), {name: BLOCKS[name] for name in names or BLOCKS}))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    command(main, timed=False)
