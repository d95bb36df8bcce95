"""The parts of docs/reference that follow from the code: `python -m tests.docs.reference` writes them.

Keys of the configuration, options of the commands, and the names of verl and TRL. test_reference.py compares the
committed pages with what the code gives.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from launch.commands.cli import app
from launch.config.foreign.lookup import table
from launch.config.manual import schema_markdown
from launch.config.schema import render

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
COMMAND = "python -m tests.docs.reference"
BEGIN, END = "<!-- tests.docs.reference: begin -->", "<!-- tests.docs.reference: end -->"
_VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


PLAIN_CONFIG = "YAML file (see examples/)"
ABOVE = ("debug", "overrides")  # what the page says once, above all commands
OF_STATUS = ("run", "address", "credentials", "as_json")  # what all commands of the admin service take


def commands_markdown() -> str:
    """A section per command: its usage, what it does, its arguments and options, but what stands elsewhere."""
    made = []
    for command in app.registered_commands:
        function = command.callback
        assert function is not None
        name = command.name or function.__name__.replace("_", "-")
        made.append("\n".join(_command(name, function)))
    return "\n\n".join(made)


def _command(name: str, function: Callable[..., Any]) -> Iterator[str]:
    hints = get_type_hints(function, include_extras=True)
    rows, usage = [], [f"paceline {name}"]
    as_status = "address" in hints and name != "status"
    for parameter in inspect.signature(function).parameters.values():
        kind, info = get_args(hints[parameter.name])[:2]
        assert get_origin(hints[parameter.name]) is Annotated
        assert isinstance(info, ArgumentInfo | OptionInfo)
        if parameter.name == "debug":
            continue
        required = parameter.default is inspect.Parameter.empty
        shown = info.metavar or _value(kind) or parameter.name.upper()
        if isinstance(info, ArgumentInfo):
            usage.append(
                shown if required else f"[{shown.removeprefix('[').replace(']...', ' ...').removesuffix(']')}]"
            )
            label = usage[-1]
        else:
            # Within Annotated the first name stands where the default would.
            names = [str(each) for each in (info.default, *(info.param_decls or ())) if str(each).startswith("-")]
            label = ", ".join(names) + (f" {shown}" if _value(kind) else "")
        if parameter.name in ABOVE or (as_status and parameter.name in OF_STATUS):
            continue
        if label != "CONFIG" or info.help != PLAIN_CONFIG:
            rows.append(f"| `{_cell(label)}` | {_meaning(required, parameter.default, info)} |")
    optional = as_status or any(row.startswith("| `-") for row in rows)
    yield from (f"## `paceline {name}`", "", f"`{' '.join(usage)}{' [OPTIONS]' if optional else ''}`", "")
    shared = " `RUN`, `--address`, `--credentials` and `--json` are those of `paceline status`." if as_status else ""
    yield from (_cell(inspect.getdoc(function) or "") + shared, "")
    if rows:
        yield from ("| argument | meaning |", "|---|---|", *rows)


def _value(kind: Any) -> str:
    """What stands for a value of this type; empty for a switch."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Literal:
        return "/".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    return _VALUES.get(kind, "")


def _meaning(required: bool, value: Any, info: ArgumentInfo | OptionInfo) -> str:
    """The help; of options also "required" or the default, unless that is nothing."""
    if required:
        extra = "required" if isinstance(info, OptionInfo) else ""
    else:
        extra = "" if value in (None, False, "") or value == [] else f"default: {render(value)}"
    return "; ".join(part for part in (_cell(info.help or ""), extra) if part)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


WRITTEN: Mapping[str, Callable[[], str]] = {
    "configuration.md": lambda: schema_markdown().strip(),
    "cli.md": commands_markdown,
    "coming_from.md": lambda: "\n".join(table()),
}


def filled(page: str, content: str) -> str:
    """`page` with `content` between the two marks."""
    block = f"{BEGIN}\n\n{content}\n\n{END}"
    text, count = re.subn(f"{BEGIN}.*?{END}", lambda match: block, page, flags=re.DOTALL)
    assert count == 1, "a page needs one pair of marks"
    return text


def main() -> None:
    for name, content in WRITTEN.items():
        path = FOLDER / name
        path.write_text(filled(path.read_text(encoding="utf-8"), content()), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
