"""Golden transcripts: a file of events in, the same file with what the machine answered out.

# a comment
options threshold=2
restart term=2 settles_at_s=5
0.1 Idle worker=w0
    Changed worker=w0 before=BUSY after=IDLE reason="out of work"
    = w0 IDLE
3.0
"""

import shlex
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

from config.coordinator import CoordinatorOptions
from contracts import coordinator as events
from coordinator.machine import IllegalTransitionError, Machine, UnknownTargetError
from tests.coordinator.world.invariants import check_invariants

DEFAULTS = {"incarnation": "1", "node": "n0", "group": "g"}


def replay(text: str) -> str:
    """The transcript of the events in `text`; answers that are in it already are not read."""
    return "\n".join(_replayed(text.splitlines())) + "\n"


def _replayed(lines: list[str]) -> Iterator[str]:
    options, start = CoordinatorOptions(), {"term": 1}
    machine: Machine | None = None
    for line in lines:
        if line.startswith("    "):
            continue
        yield line
        word, *rest = shlex.split(line, comments=True) or [""]
        if word == "options":
            options = CoordinatorOptions(**dict(item.split("=") for item in rest))
        elif word == "restart":
            start = {key: int(value) for key, value in (item.split("=") for item in rest)}
        elif word:
            machine = machine or Machine(options, **start)
            yield from _answers(machine, parse(rest) if rest else None, float(word))


def _answers(machine: Machine, event: events.Event | None, now_s: float) -> Iterator[str]:
    """`event`: None: only time passes."""
    try:
        for output in machine.settle(now_s) if event is None else machine.step(event, now_s):
            yield f"    {render(output)}"
    except (IllegalTransitionError, UnknownTargetError) as error:
        yield f"    {type(error).__name__}: {error}"
    check_invariants(machine, now_s)
    books = [f"{w.name} {w.state}" + (f" {w.phase} in {w.session}" if w.phase else "") for w in machine.roster]
    yield f"    = {', '.join(books) or 'nobody'}"


def parse(words: list[str]) -> events.Event:
    """`Idle worker=w0` as an event; what is not said has its default here or in `DEFAULTS`."""
    kind: type[Any] = getattr(events, words[0])
    given = dict(word.split("=", 1) for word in words[1:])
    names = kind.__struct_fields__
    needed = {key: value for key, value in DEFAULTS.items() if key in names and not _defaults(kind, key)}
    if words[0] in ("Drain", "Undrain"):
        needed = {}
    event: events.Event = msgspec.convert(needed | given, kind, strict=False)
    return event


def _defaults(kind: type[Any], key: str) -> bool:
    position = kind.__struct_fields__.index(key) - len(kind.__struct_fields__) + len(kind.__struct_defaults__)
    return position >= 0


def render(output: events.Output) -> str:
    """One line; fields in order, what is empty left out."""
    words = [type(output).__name__]
    for name in output.__struct_fields__:
        value = getattr(output, name)
        text = ",".join(value) if isinstance(value, tuple) else value.value if isinstance(value, Enum) else str(value)
        if text != "":
            words.append(f'{name}="{text}"' if " " in text else f"{name}={text}")
    return " ".join(words)


if __name__ == "__main__":  # python -m tests.coordinator.transcripts: write the transcripts anew, then read them
    from pathlib import Path

    for path in sorted((Path(__file__).parent / "golden").glob("*.txt")):
        path.write_text(replay(path.read_text(encoding="utf-8")), encoding="utf-8")
