"""Copies the packages of this checkout below `paceline/` for a wheel, since a user may own the names `models` and
`actors`.

The build (CMakeLists.txt) runs `python native/wheel_layout.py SOURCE DESTINATION`. In a checkout the packages are at
the top and import each other as `from actors.engine import ...`; in a wheel that is `from paceline.actors.engine`. Only
imports are rewritten, found in the syntax tree, each on its own line, so that line numbers stay. A plain `import
actors.engine`, which binds the name `actors`, is refused. No module names another in a text: imports by name at run
time start from `__package__`.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

PACKAGES = ("actors", "config", "contracts", "coordinator", "drafter", "launch", "models", "planner", "policies")
PUBLIC = "paceline"
SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", ".*")


def rewritten(source: str, name: str) -> str:
    """Return the text of a module as it is in a wheel. `name`: for messages. Raises ValueError."""
    lines = source.splitlines(keepends=True)
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        if isinstance(node, ast.ImportFrom):
            if node.level == 0 and _is_ours(node.module or ""):
                lines[node.lineno - 1] = _prefixed(lines[node.lineno - 1], node.col_offset, "from")
        elif any(_is_ours(alias.name) for alias in node.names):
            if len(node.names) > 1 or node.names[0].asname is None:
                raise ValueError(f"{name}, line {node.lineno}: write `from ... import ...`, or one `import ... as ...`")
            lines[node.lineno - 1] = _prefixed(lines[node.lineno - 1], node.col_offset, "import")
    return "".join(lines)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _prefixed(line: str, byte_column: int, keyword: str) -> str:
    """Put the package's name behind the keyword, which begins at that byte of `line`."""
    before = line.encode()[:byte_column].decode()
    return before + re.sub(rf"^({keyword}\s+)", rf"\1{PUBLIC}.", line[len(before) :], count=1)


def lay_out(source: Path, destination: Path) -> None:
    """Copy the public package and all others into `destination`/paceline. Raises ValueError for an import that
    cannot be rewritten."""
    top = destination / PUBLIC
    shutil.copytree(source / PUBLIC, top, ignore=SKIPPED, dirs_exist_ok=True)
    for package in PACKAGES:
        shutil.copytree(source / package, top / package, ignore=SKIPPED, dirs_exist_ok=True)
    for path in top.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(rewritten(text, str(path.relative_to(top))), encoding="utf-8")


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]), Path(sys.argv[2]))
