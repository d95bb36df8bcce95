"""Hooks of MkDocs: pages and files outside docs/ that pages link to become part of the site, below repo/.

Owns how a path of the repository maps to one of the site. Used by mkdocs.yml only; imports nothing of Paceline.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r'(?P<head>\]\(|(?:src|srcset|href)=")(?P<path>[^)\s"#:]+)(?P<tail>#[^)\s"]*)?(?=[)"\s])')
FENCE = re.compile(r"( *)(```+)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def source_of(page: str) -> PurePosixPath:
    """The repository's path of a page of the site."""
    return PurePosixPath(page.removeprefix("repo/") if page.startswith("repo/") else f"docs/{page}")


def page_of(source: PurePosixPath) -> str:
    """The site's path of a file of the repository."""
    return str(source.relative_to("docs") if source.parts[0] == "docs" else PurePosixPath("repo") / source)


def target_of(source: PurePosixPath, link: str) -> PurePosixPath | None:
    """The repository's path that a link of a page means; None: it leads out of it, or nowhere."""
    path = PurePosixPath(os.path.normpath(source.parent / link))
    if path.parts[:1] == ("..",):
        return None
    if (ROOT / path).is_dir():
        path /= "README.md"
    return path if (ROOT / path).is_file() else None


def outside(source: PurePosixPath) -> Iterator[PurePosixPath]:
    """Files outside docs/ that a page links to."""
    for found in LINK.finditer((ROOT / source).read_text(encoding="utf-8")):
        target = target_of(source, found["path"])
        if target is not None and target.parts[0] != "docs":
            yield target


def rewritten(markdown: str, page: str) -> str:
    """The text of a page with links of the site, and with lists as Python-Markdown wants them."""
    source = source_of(page)

    def link(found: re.Match[str]) -> str:
        target = target_of(source, found["path"])
        if target is None:
            return found[0]
        path = os.path.relpath(page_of(target), PurePosixPath(page).parent)
        return f"{found['head']}{path}{found['tail'] or ''}"

    return "\n".join(indented(LINK.sub(link, markdown).split("\n")))


def indented(lines: list[str]) -> Iterator[str]:
    """Blocks and paragraphs within list items four columns in, and a blank line between them and the next item."""
    fence, more, blank, within = "", 0, True, False
    for line in lines:
        found = FENCE.match(line)
        space = len(line) - len(line.lstrip())
        if fence:
            if line.strip() == fence:
                fence = ""
        elif found is not None:
            fence, more = found[2], max(0, 4 - len(found[1])) if found[1] else 0
            within = within or bool(found[1])
            yield " " * more + line
            blank = False
            continue
        elif blank and 1 < space < 4:
            more, within = 4 - space, True
        elif not line.startswith(" "):
            more = 0
            if within and ITEM.match(line):
                within = False
                if not blank:
                    yield ""
        yield " " * more + line if line else line
        blank = not line


def on_config(config: Any) -> Any:
    """The menu's last entry lists the pages of measured figures."""
    results = sorted((ROOT / "docs" / "results").glob("*.md"))
    if results:
        config.nav = [*config.nav, {"Results": [f"results/{path.name}" for path in results]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    waiting = [source_of(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    known: set[PurePosixPath] = set()
    while waiting:
        for target in outside(waiting.pop()):
            if target not in known:
                known.add(target)
                if target.suffix == ".md":
                    waiting.append(target)
                files.append(
                    File.generated(
                        config,
                        page_of(target),
                        abs_src_path=str(ROOT / target),
                        inclusion=InclusionLevel.NOT_IN_NAV,
                    )
                )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return rewritten(markdown, page.file.src_uri)
