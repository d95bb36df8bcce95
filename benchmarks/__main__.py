"""Run short versions of the figures in docs/results: `python -m benchmarks [--rows driver,rollout]`.

Each row of benchmarks/rows.py runs in a separate process with a time limit, regardless of the others' outcome. Writes
`results/bench.json` and `results/bench.md`, with the committed figures for comparison. Exit code 1 if a row failed; a
changed figure is no failure.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import (
    DEMO,
    RESULTS,
    ROOT,
    attempt,
    busy_cores,
    command,
    is_busy,
    load,
    machine,
    markdown,
    write,
)
from benchmarks.rows import BY_HAND, NEEDS, ROWS, Figure, Row
from benchmarks.tools.targets import find_demo

HEAD = ("row", "figure", "committed", "now", "95 % now", "moved")


def main(
    *,
    rows: Annotated[Sequence[str], "only these, with spaces or commas between them"] = (),
    minutes: Annotated[float, "rows that do not begin within it are left out"] = 30.0,
    vllm_python: Annotated[Path | None, "interpreter in which vLLM is installed"] = None,
    trl_python: Annotated[Path | None, "interpreter in which TRL is installed"] = None,
    arctic: Annotated[Path | None, "folder of the package arctic_inference"] = None,
    out: Path = RESULTS / "bench.json",
) -> int:
    names = [name for part in rows for name in part.split(",") if name] or list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        sys.exit(f"no such rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if is_busy():
        print(
            f"{machine()['busy_cores']} cores are busy with other work: no figure of this run is a result", flush=True
        )
    folder, start_s = ROOT / "runs/bench", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    found: dict[str, Any] = {}
    for number, name in enumerate(names, 1):
        left_s = 60 * minutes - (time.monotonic() - start_s)
        given = {"folder": folder, "vllm": vllm_python, "trl": trl_python, "arctic": arctic, "demo": demo(folder)}
        print(f"[{number}/{len(names)}] {name}", end=" ", flush=True)
        found[name] = run(name, ROWS[name], given, folder, left_s)
        print(f"{told(found[name])} ({(time.monotonic() - start_s) / 60:.1f} min in all)", flush=True)
        write(out, "the measured figures in short", {"rows": found}, settings={"rows": names, "minutes": minutes})
        out.with_suffix(".md").write_text(table(found), encoding="utf-8")
    print(table(found))
    return int(any(row["outcome"] == "failed" for row in found.values()))


def prepare(folder: Path) -> None:
    """Make the demo's data. Its warm start, used by many rows and the demo itself, comes with the first run."""
    if not (DEMO / "data/train.jsonl").is_file():
        words = [sys.executable, "-m", "examples.guess_and_check.make_data", "--seed", "0"]
        done = attempt(words, folder / "make_data.log", 300)
        if done.code != 0:
            sys.exit(f"the demo's data could not be made ({done.text}): {done.tail}")


def demo(folder: Path) -> Path | None:
    """Return the model of the row `seeds`, else the newest that a run left, else None."""
    ours = folder / "seed-0/model"
    try:
        return ours if (ours / "tokenizer.json").is_file() else find_demo(None)
    except SystemExit:
        return None


def run(name: str, row: Row, given: Mapping[str, Path | None], folder: Path, left_s: float) -> dict[str, Any]:
    """Run a row. Returns its outcome, and its figures next to the committed ones."""
    words = f"{row.first} {row.options}"
    if missing := [NEEDS[need] for need in NEEDS if f"{{{need}}}" in words and given[need] is None]:
        return {"outcome": "skipped", "why": f"needs {'; '.join(missing)}"}
    if left_s <= 0:
        return {"outcome": "skipped", "why": "no time was left"}
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    out.unlink(missing_ok=True)
    if name == "seeds":
        shutil.rmtree(folder / "seed-0", ignore_errors=True)
    commands = [row.first] if row.first else []
    commands.append(f"-m benchmarks.{row.script} {row.options} --out {out} {'--busy' if row.timed else ''}")
    busy, limit_s, begin_s = busy_cores(), min(row.limit_s, left_s), time.monotonic()
    for text in commands:
        done = attempt([sys.executable, *(part.format(**given) for part in text.split())], log, limit_s)
        limit_s -= done.seconds
        if done.code != 0:
            return {"outcome": "failed", "why": f"{done.text}: {log}", "tail": done.tail}
    try:
        return {
            "outcome": "done",
            "seconds": round(time.monotonic() - begin_s, 1),
            "busy_cores": busy,
            **beside(row, committed(row), load(out)),
        }
    except (OSError, ValueError, KeyError, IndexError) as error:
        return {"outcome": "failed", "why": f"its record could not be read: {error!r}", "tail": ""}


def committed(row: Row) -> dict[str, Any] | None:
    path = RESULTS / f"{row.record or row.script}.json"
    return load(path) if path.is_file() else None


def beside(row: Row, known: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a record next to those of the committed one, if there is one."""
    before = {figure.name: figure for figure in row.figures(known)} if known is not None else {}
    figures = []
    for figure in row.figures(now):
        old = before.get(figure.name)
        moved = None if old is None else figure.moved(old, row.noise)
        figures.append({"now": asdict(figure), "committed": old and asdict(old), "moved": moved})
    return {"cpu_committed": known and cpu(known), "cpu": cpu(now), "figures": figures}


def cpu(record: Mapping[str, Any]) -> str:
    """Return the CPU, from wherever an older record has it."""
    of = record.get("machine") or record.get("device") or next(iter(record.values()))["machine"]
    return str(of["cpu"])


def told(row: Mapping[str, Any]) -> str:
    if row["outcome"] != "done":
        return f"{row['outcome']}: {row['why']}"
    moved = sum(bool(figure["moved"]) for figure in row["figures"])
    return f"{row['seconds']:.0f} s, {moved} of {len(row['figures'])} figures moved"


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Render Markdown."""
    lines: list[Sequence[object]] = []
    notes = [f"{name}: {told(row)}" for name, row in found.items() if row["outcome"] != "done"]
    for name, row in found.items():
        for pair in row.get("figures", ()):
            now, before = (Figure(**pair[key]) if pair[key] else None for key in ("now", "committed"))
            assert now is not None
            change = "" if before is None or not before.value else f" ({now.value / before.value - 1:+.0%})"
            moved = {True: f"**moved**{change}", False: "no", None: "not in the committed record"}[pair["moved"]]
            between = "" if now.low == now.high else f"{digits(now.low)} to {digits(now.high)}"
            lines.append((name, now.name, shown(before), shown(now), between, moved))
    others = sorted(
        name for name, row in found.items() if (row.get("cpu_committed") or row.get("cpu")) != row.get("cpu")
    )
    if others:
        notes.append(f"on another CPU than the committed record: {', '.join(others)}")
    if busy := sorted(name for name, row in found.items() if row.get("busy_cores", 0) > 0.5):
        notes.append(f"beside other work, so no result: {', '.join(busy)}")
    notes.append(f"not run, many whole runs each: {', '.join(f'`python -m experiments.{name}`' for name in BY_HAND)}")
    seconds = sum(row.get("seconds", 0.0) for row in found.values())
    title = f"# The measured figures in short\n\n{machine()['cpu']}, {machine()['cores']} cores, {seconds / 60:.1f} min"
    return "\n".join([f"{title}\n", markdown(HEAD, lines), "", *(f"- {note}" for note in notes), ""])


def shown(figure: Figure | None) -> str:
    return "" if figure is None else f"{digits(figure.value)}{figure.unit}"


def digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
