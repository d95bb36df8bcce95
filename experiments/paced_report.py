"""The table of `experiments.paced_run`'s record, and the page that shows it. Measures nothing.

Owns `experiments/results/paced_run.md` and the text between `<!-- experiments.paced_run: begin -->` and its end in
docs/results/paced.md.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from benchmarks.harness import ROOT, interval, load, markdown, relinked, replace_block

MOST_LATE = 0.05  # share of a run's parts; a run with more is void
FIRST = 3  # RL steps shown individually
WARM = 1  # RL steps excluded from ratios
PAGE = ROOT / "docs/results/paced.md"
NAMES = {
    "off": "plain decoding",
    "ngram": "n-gram",
    "suffix": "suffix",
    "retrieval": "n-gram and suffix",
    "eagle-trained": "EAGLE, trained on idle workers",
    "eagle-planned": "EAGLE, trained while it is measured to pay",
    "eagle-scratch": "EAGLE, trained from random weights",
    "eagle-frozen": "EAGLE, as fitted before RL",
    "self": "self-drafter",
    "das": "[DAS](../systems/das.md)",
    "efficient_rollout": "[EfficientRollout](../systems/efficient_rollout.md)",
    "tlt": "[TLT](../systems/tlt.md)",
    "default": "default: all drafters",
    "default-not-ahead": "default without lookahead",
    "lookahead": "lookahead, no drafts",
    "das-lookahead": "DAS and lookahead",
    "das-auto": "DAS, lookahead: auto",
    "rounds": "[rounds by length](../concepts/rounds.md), no drafts",
    "das-rounds": "DAS and rounds by length",
    "one-step-off": "[one step off](../concepts/staleness.md), default drafters",
}
FROZEN, TRAINED = "eagle-frozen", ("eagle-trained", "eagle-planned", "eagle-scratch")
REORDERED = ("rounds", "das-rounds")  # other tokens in each RL step, so sums over all of them are compared
STALE = ("one-step-off",)  # they sample the next RL step while the learner works, so the last one samples nothing
OTHER_TOKENS = (*REORDERED, *STALE)
HEAD = (
    "arm | seeds | rollout, times faster | RL step, times faster | first RL steps | accept length | "
    "saved, said | saved, measured | late"
)
TRAINED_HEAD = (
    "over the frozen head | seeds | rollout, times faster | second half | "
    "accept length, second half: frozen, trained | micro-steps | of the workers' time"
)
Row = Mapping[str, Any]


def write_pages(record: Path) -> str:
    """Write the pages from the record, and return the table. Only results/paced_run.json has a page."""
    found = load(record)
    text = table(found["runs"], found["settings"], found["machine"])
    beside = record.with_suffix(".md")
    beside.write_text(f"# Paced runs\n\n{relinked(text, PAGE, beside)}\n", encoding="utf-8")
    if record == ROOT / "experiments/results/paced_run.json" and PAGE.exists():
        replace_block(PAGE, "experiments.paced_run", f"\n{text}\n")
    return text


def table(runs: Sequence[Row], settings: Row, machine: Row) -> str:
    """Render Markdown: a line per arm, over its seeds, and its basis."""
    valid = {(row["arm"], row["seed"]): row for row in runs if is_valid(row)}
    arms = [name for name in NAMES if any(row["arm"] == name for row in runs)]
    lines = [line for name in arms if (line := _line(name, valid)) is not None]
    parts = [markdown(HEAD, lines)] if lines else []
    if trained := [line for name in TRAINED if (line := _over_frozen(name, valid)) is not None]:
        parts.append(markdown(TRAINED_HEAD, trained))
    for row in runs:
        if not is_valid(row):
            why = f"{row['late_share']:.1%} of its parts late" if is_late(row) else f"other tokens: {row['differs']}"
            parts.append(f"Void: {row['arm']}, seed {row['seed']} ({why}).")
    parts += [said for name in STALE if (said := _reward_line(name, valid)) is not None]
    steps = {row["steps"] for row in runs}
    words = (
        f"{settings['setting'].strip(' ,')}; {max(steps, default=0)} RL steps each, "
        "from 2 on in ratios, paired by RL step: median (95 % bootstrap interval). First RL steps: ratios of the first "
        f"{FIRST}, means over seeds. Seconds saved: of all engines, per run, in seconds of this machine. Late: parts "
        f"that took this machine longer than their pace, the worst seed. Of sums: of all RL steps, least and most over "
        f"seeds. {machine['cores']} cores of {machine['cpu']}, "
        f"no GPU; commit {machine['commit']}. Written by `python -m experiments.paced_run`."
    )
    return "\n\n".join([*parts, fill(words, 100)])


def is_late(row: Row) -> bool:
    return bool(row["late_share"] > MOST_LATE)


def is_valid(row: Row) -> bool:
    """Whether it was in time, and has plain decoding's tokens."""
    return not is_late(row) and row["differs"] is None


def _line(arm: str, valid: Mapping[tuple[str, int], Row]) -> list[str] | None:
    pairs = [(valid["off", seed], row) for (name, seed), row in valid.items() if name == arm and ("off", seed) in valid]
    if not pairs:
        return None
    lengths = [value for _, row in pairs for value in row["accept_length"][WARM:] if value is not None]
    seeds = ", ".join(str(row["seed"]) for _, row in pairs)
    late = f"{max(row['late_share'] for _, row in pairs):.1%}"
    if arm == "off":
        share = fmean(sum(row["rollout_s"]) / (sum(row["rollout_s"]) + sum(row["learn_s"])) for _, row in pairs)
        return [NAMES[arm], seeds, "1", "1", f"rollout {share:.0%} of both", "", "", "", late]
    said = fmean(row["saved_s"] for _, row in pairs)
    measured = fmean(off["engine_s"] - row["engine_s"] for off, row in pairs)
    firsts = [fmean(off["rl_s"][i] / row["rl_s"][i] for off, row in pairs) for i in range(FIRST)]
    whole, last = arm in REORDERED, -1 if arm in STALE else None
    return [
        NAMES[arm],
        seeds,
        "" if arm in STALE else _ratio(pairs, "rollout_s", whole=whole),
        _ratio(pairs, "rl_s", whole=whole, last=last),
        " ".join(f"{ratio:.2f}" for ratio in firsts),
        f"{fmean(lengths):.1f}" if lengths else "-",
        f"{said:.1f} s",
        f"{measured:.1f} s",
        late,
    ]


def _reward_line(arm: str, valid: Mapping[tuple[str, int], Row]) -> str | None:
    """Return the staleness of an arm with other tokens, and its rewards beside plain decoding's of the same seeds."""
    pairs = [(valid["off", seed], row) for (name, seed), row in valid.items() if name == arm and ("off", seed) in valid]
    if not pairs:
        return None
    (off, own), ages = (
        [fmean(value for row in rows for value in row["reward"][WARM:]) for rows in zip(*pairs, strict=True)],
        [value for _, row in pairs for value in row["staleness"][WARM:] if value is not None],
    )
    return f"{NAMES[arm]}: staleness {fmean(ages):.1f}, mean reward {own:.3f} beside {off:.3f}, RL steps from 2 on."


def _over_frozen(arm: str, valid: Mapping[tuple[str, int], Row]) -> list[str] | None:
    """Return the line of a trained head beside the frozen one, paired by RL step."""
    found = {seed: row for (name, seed), row in valid.items() if name == arm and (FROZEN, seed) in valid}
    pairs = [(valid[FROZEN, seed], row) for seed, row in found.items()]
    if not pairs:
        return None
    half = len(pairs[0][0]["rollout_s"]) // 2
    lengths = [
        fmean(value for pair in pairs for value in pair[at]["accept_length"][half:] if value is not None)
        for at in range(2)
    ]
    spent = [(sum(row["trained_s"]), sum(row["rollout_s"]) * row["workers"]) for _, row in pairs]
    return [
        NAMES[arm],
        ", ".join(str(row["seed"]) for _, row in pairs),
        _ratio(pairs, "rollout_s", whole=False),
        _ratio(pairs, "rollout_s", whole=False, since=half),
        " ".join(f"{length:.2f}" for length in lengths),
        f"{fmean(row['micro_steps'] for _, row in pairs):.0f}",
        f"{sum(trained for trained, _ in spent) / sum(total for _, total in spent):.1%}",
    ]


def _ratio(
    pairs: Sequence[tuple[Row, Row]], key: str, *, whole: bool, since: int = WARM, last: int | None = None
) -> str:
    """Return the ratio. `whole`: of sums over all RL steps of a seed, else of each step with an index from `since` on
    and before `last`."""
    if whole:
        sums = sorted(sum(off[key]) / sum(row[key]) for off, row in pairs)
        return f"{fmean(sums):.2f} ({sums[0]:.2f} to {sums[-1]:.2f}) of sums"
    each = [zip(off[key][since:last], row[key][since:last], strict=True) for off, row in pairs]
    found = interval([a / b for steps in each for a, b in steps])
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
