"""What a reader copies out of a page works: configurations are valid, commands and their options exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from launch.commands.cli import app
from launch.config import Config, ConfigError, load_config
from launch.config.load import load_values
from tests.docs.pages import PAGES, ROOT, blocks, is_new, name

NEW = [page for page in PAGES if is_new(page)]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TARGETS = frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PROGRAMS = re.compile(r"^(?:\$ )?(?:\w+=\S* )*(?:\S*/)?(paceline|make|python3? -m (?:paceline|launch)) ?(.*)$")
QUOTED = re.compile(r"(?<!`)`((?:paceline|make|python -m (?:paceline|launch)) [a-z][^`\n]*)`(?!`)")
OVERRIDE = re.compile(r"[a-z_]+(?:\.[\w]+)*=")
SHELLS = ("", "bash", "sh", "shell", "console")
BASE = {
    "run": {"name": "page"},
    "model": {"path": "m"},
    "data": {"train": "t.jsonl", "eval": "e.jsonl"},
    "rollout": {"workers": 2},
}


def commands(text: str) -> Iterator[str]:
    """Of fenced blocks, continued lines joined, and of pieces of code in sentences."""
    for language, content in blocks(text):
        if language in SHELLS:
            for line in content.replace("\\\n", " ").splitlines():
                if PROGRAMS.match(line.strip()):
                    yield line.strip()
    yield from QUOTED.findall(text)


def faults(command: str) -> Iterator[str]:
    """What of a command does not exist: the program's command, an option, a key, a target of make."""
    found = PROGRAMS.match(command)
    assert found is not None
    try:
        words = shlex.split(found[2], comments=True)
    except ValueError as error:
        yield f"{command}: {error}"
        return
    words = [word for word in words if not word.startswith("[")]
    for end in ("|", ">", "&&", ";", "<", "2>&1"):
        words = words[: words.index(end)] if end in words else words
    if found[1] == "make":
        yield from (f"make {word}" for word in words if "=" not in word and word not in TARGETS)
        return
    if not words or words[0] in ("--help", "-h", "..."):
        return
    if words[0] not in COMMANDS:
        yield f"paceline {words[0]}"
        return
    known = {option for parameter in COMMANDS[words[0]].params for option in parameter.opts}
    known |= {"--help", "-h"}
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("-")]
    yield from (f"paceline {words[0]} {option}" for option in options if option not in known)
    if not command.startswith("$ "):  # with what it prints, which may be a refusal
        yield from invalid(words)


def invalid(words: list[str]) -> Iterator[str]:
    """Faults of an example's configuration with the overrides of a command."""
    files = [word for word in words[1:] if word.startswith("examples/") and word.endswith(".yaml")]
    if words[0] in ("check-cluster", "simulate") or not files:
        return
    overrides = [word for word in words[1:] if OVERRIDE.match(word) and "..." not in word]
    try:
        load_config(ROOT / files[0], overrides, training=words[0] == "train")
    except ConfigError as error:
        yield f"{' '.join(words)}: {error}"


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    sections = {key for key in base.keys() & over.keys() if isinstance(base[key], dict) and isinstance(over[key], dict)}
    both = {key: merged(base[key], over[key]) for key in sections}
    return {**base, **over, **both}


def configurations(text: str) -> Iterator[dict[str, Any]]:
    """Whole ones, and sections of one, which stand in a small configuration."""
    for language, content in blocks(text):
        if language != "yaml":
            continue
        for document in yaml.safe_load_all(content):
            if isinstance(document, dict) and document and set(document) <= set(Config.model_fields):
                whole = {"model", "data"} <= set(document)
                yield document if whole else merged(BASE, document)


@pytest.mark.parametrize("page", NEW, ids=name)
def test_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [fault for command in commands(text) for fault in faults(command)] == []


@pytest.mark.parametrize("page", NEW, ids=name)
def test_configurations_are_valid(page: Path) -> None:
    for values in configurations(page.read_text(encoding="utf-8")):
        load_values(values, name(page))


@pytest.mark.parametrize("page", NEW, ids=name)
def test_python_compiles(page: Path) -> None:
    for language, content in blocks(page.read_text(encoding="utf-8")):
        if language == "python" and "..." not in content.replace(": ...", ""):
            compile(content, name(page), "exec")


def test_the_checks_themselves_find_faults() -> None:
    text = (
        "`paceline trian X`, `make demos`, and\n```\npaceline train examples/smollm/config.yaml --resumes \\\n"
        "  rollout.workerz=3 # a comment\n.venv/bin/paceline chat RUN --single < prompts.txt\nmake demo SEED=1\n```\n"
    )
    found = [fault for command in commands(text) for fault in faults(command)]
    assert found[0] == "paceline train --resumes"
    assert "rollout.workerz" in found[1]
    assert found[2:] == ["paceline trian", "make demos"]
    yaml_block = "```yaml\nrollout: {workerz: 3}\n```\n"
    (values,) = configurations(yaml_block)
    with pytest.raises(ConfigError):
        load_values(values, "page")
    assert list(configurations("```yaml\nkind: RayJob\n```\n")) == []
