"""The same held-out prompts at a run's first evaluation and at its last: what the model answered, and its reward.

Read from eval_samples.jsonl, where every evaluation keeps the first response to the same prompts (Observer.samples).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from launch.report.tables import text_table

SHOWN = 3  # prompts
MOST_CHARACTERS = 400  # of a prompt or a response that is kept
GAP = " ... "
_WIDEST, _PROMPT_SHARE, _NARROWEST = 100, 1 / 3, 12  # characters of a line; a prompt's share, at most; of a response


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt. Texts are on one line, and shortened to MOST_CHARACTERS."""

    prompt: str
    before: str  # the response; empty: there was no text
    reward_before: float
    after: str
    reward_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Of `prompts` held-out prompts whose first responses both evaluations kept."""

    first_step: int  # RL steps done at the first evaluation
    last_step: int
    prompts: int
    better: int  # with a higher reward at the last evaluation
    worse: int
    examples: Sequence[Example]  # at most SHOWN: the first in order that got better, then the first others


def before_after(samples: Sequence[Mapping[str, Any]]) -> BeforeAfter | None:
    """From the records of eval_samples.jsonl. None: no two evaluations kept a response to the same prompt."""
    by_step: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for sample in samples:
        if sample.get("sample") == 0 and sample.get("reward") is not None:
            by_step.setdefault(sample["step"], {})[str(sample.get("set", "")), str(sample.get("uid", ""))] = sample
    if len(by_step) < 2:
        return None
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    pairs = [_example(sample, last[key]) for key, sample in first.items() if key in last]
    if not pairs:
        return None
    better = [pair for pair in pairs if pair.reward_after > pair.reward_before]
    others = [pair for pair in pairs if pair.reward_after <= pair.reward_before]
    return BeforeAfter(
        first_step=min(by_step),
        last_step=max(by_step),
        prompts=len(pairs),
        better=len(better),
        worse=sum(pair.reward_after < pair.reward_before for pair in others),
        examples=[*better, *others][:SHOWN],
    )


def _example(before: Mapping[str, Any], after: Mapping[str, Any]) -> Example:
    return Example(
        prompt=shortened(str(before.get("asked") or before["prompt"]), MOST_CHARACTERS),
        before=shortened(before["response"], MOST_CHARACTERS),
        reward_before=float(before["reward"]),
        after=shortened(after["response"], MOST_CHARACTERS),
        reward_after=float(after["reward"]),
    )


def shortened(text: str, width: int) -> str:
    """On one line of at most `width` characters (6 or more): its beginning and its end, where answers are."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    tail = (width - len(GAP)) * 2 // 5
    return f"{text[: width - len(GAP) - tail].rstrip()}{GAP}{text[len(text) - tail :].lstrip()}"


def said(found: BeforeAfter) -> str:
    """`before and after 24 RL steps: 5 of 8 held-out prompts got better, 1 worse`."""
    steps = found.last_step - found.first_step
    return (
        f"before and after {steps} RL step{'s' * (steps != 1)}: {found.better} of {found.prompts} held-out "
        f"prompt{'s' * (found.prompts != 1)} got better, {found.worse} worse"
    )


def before_after_table(found: BeforeAfter, width: int) -> Table:
    """For a terminal of `width` columns: two lines for each prompt."""
    width = min(width, _WIDEST)
    prompts = [shortened(example.prompt, round(width * _PROMPT_SHARE)) for example in found.examples]
    marks = [f"{reward:.3g}" for e in found.examples for reward in (e.reward_before, e.reward_after)]
    left = max(width - max(map(len, prompts)) - max(map(len, marks)) - len("before") - 4 * 2, _NARROWEST)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for style, justify in (("", "left"), ("dim", "left"), ("", "right"), ("", "left")):
        table.add_column(style=style, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for prompt, example in zip(prompts, found.examples, strict=True):
        better = "green" if example.reward_after > example.reward_before else ""
        for head, when, reward, response, style in (
            (prompt, "before", example.reward_before, example.before, ""),
            ("", "after", example.reward_after, example.after, better),
        ):
            cells = (head, when, f"{reward:.3g}", shortened(response, left) or "(empty)")
            table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def before_after_html(found: BeforeAfter) -> str:
    """A table for the report; escaped."""
    heads = ("Prompt", "Before", "Reward#", f"After {found.last_step} RL steps", "Reward#")
    rows = [
        (e.prompt, e.before or "(empty)", f"{e.reward_before:.3g}", e.after or "(empty)", f"{e.reward_after:.3g}")
        for e in found.examples
    ]
    return text_table(heads, rows)
