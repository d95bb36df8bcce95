"""Compare responses and rewards of the same held-out prompts at a run's first evaluation and at its last.

Every evaluation keeps the first response to the same prompts in eval_samples.jsonl (Observer.samples). The counts come
from every prompt's mean reward in eval_prompts.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from launch.report.tables import text_table

SHOWN = 3  # prompts
MOST_CHARACTERS = 400  # kept of a prompt or a response
GAP = " ... "
_WIDEST, _PROMPT_SHARE, _NARROWEST = 100, 1 / 3, 12  # of a line; of a prompt, at most; of a response


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt. Texts are on one line and shortened to MOST_CHARACTERS."""

    prompt: str
    before: str  # the response; empty: it had no text
    reward_before: float
    after: str
    reward_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Comparison of all held-out prompts that both evaluations graded."""

    first_step: int  # RL steps done at the first evaluation
    last_step: int
    prompts: int
    better: int  # with a higher mean reward at the last evaluation
    worse: int
    examples: Sequence[Example]  # at most SHOWN: the first in order that got better, then the first others


def before_after(samples: Sequence[Mapping[str, Any]], prompts: Sequence[Mapping[str, Any]]) -> BeforeAfter | None:
    """Compare the records of eval_samples.jsonl and eval_prompts.jsonl. None without two evaluations, or without a
    prompt whose first response both kept."""
    rewards = _by_step(prompts)
    kept = _by_step([sample for sample in samples if sample.get("sample") == 0])
    if len(rewards) < 2 or not {min(rewards), max(rewards)} <= kept.keys():
        return None
    first, last = min(rewards), max(rewards)
    changes = [
        rewards[last][key]["reward"] - row["reward"] for key, row in rewards[first].items() if key in rewards[last]
    ]
    pairs = [
        _example(kept[first][key], kept[last][key])
        for key in rewards[first]
        if key in kept[first] and key in kept[last]
    ]
    if not pairs:
        return None
    better = [pair for pair in pairs if pair.reward_after > pair.reward_before]
    others = [pair for pair in pairs if pair.reward_after <= pair.reward_before]
    return BeforeAfter(
        first_step=first,
        last_step=last,
        prompts=len(changes),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        examples=[*better, *others][:SHOWN],
    )


def _by_step(records: Sequence[Mapping[str, Any]]) -> dict[int, dict[tuple[str, str], Mapping[str, Any]]]:
    """Group records by step, and by set and prompt, in order; those without a reward are left out."""
    found: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for record in records:
        if isinstance(record.get("reward"), int | float):
            key = str(record.get("set", "")), str(record.get("uid", ""))
            found.setdefault(record["step"], {})[key] = record
    return found


def _example(before: Mapping[str, Any], after: Mapping[str, Any]) -> Example:
    return Example(
        prompt=shortened(str(before.get("asked") or before["prompt"]), MOST_CHARACTERS),
        before=shortened(before["response"], MOST_CHARACTERS),
        reward_before=float(before["reward"]),
        after=shortened(after["response"], MOST_CHARACTERS),
        reward_after=float(after["reward"]),
    )


def shortened(text: str, width: int) -> str:
    """Shorten to one line of at most `width` characters (6 or more): beginning and end, where answers are."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    tail = (width - len(GAP)) * 2 // 5
    return f"{text[: width - len(GAP) - tail].rstrip()}{GAP}{text[len(text) - tail :].lstrip()}"


def said(found: BeforeAfter) -> str:
    """Return `before and after 24 RL steps: 5 of 8 held-out prompts got better, 1 worse`."""
    steps = found.last_step - found.first_step
    return f"before and after {steps} RL step{'s' * (steps != 1)}: {counts(found)}"


def counts(found: BeforeAfter) -> str:
    """Return `5 of 8 held-out prompts got better, 1 worse`."""
    prompts = f"prompt{'s' * (found.prompts != 1)}"
    return f"{found.better} of {found.prompts} held-out {prompts} got better, {found.worse} worse"


def before_after_lines(found: BeforeAfter, width: int, names: tuple[str, str] = ("before", "after")) -> list[Text]:
    """Format for a terminal of `width` columns: two lines per prompt, labelled by `names`. They follow the prompt on
    its line if all prompts are short, else stand below it."""
    width = min(width, _WIDEST)
    prompts = [shortened(example.prompt, width) for example in found.examples]
    beside = max(map(len, prompts)) <= width * _PROMPT_SHARE
    indent = max(map(len, prompts)) + 2 if beside else 2
    marks = [f"{reward:.3g}" for e in found.examples for reward in (e.reward_before, e.reward_after)]
    name, mark = max(map(len, names)), max(map(len, marks))
    left = max(width - indent - name - mark - 2 * 2, _NARROWEST)
    lines: list[Text] = []
    for prompt, example in zip(prompts, found.examples, strict=True):
        better = "green" if example.reward_after > example.reward_before else ""
        heads = (prompt, "") if beside else ("", "")
        if not beside:
            lines.append(Text(prompt))
        for head, when, reward, response, style in (
            (heads[0], names[0], example.reward_before, example.before, ""),
            (heads[1], names[1], example.reward_after, example.after, better),
        ):
            said = (
                (f"{when:<{name}}  ", "dim"),
                f"{reward:>{mark}.3g}  ",
                (shortened(response, left) or "(empty)", style),
            )
            lines.append(Text.assemble(f"{head:<{indent}}", *said))
    return lines


def before_after_html(found: BeforeAfter) -> str:
    """Render a table for the report; escaped."""
    heads = ("Prompt", "Before", "Reward#", f"After {found.last_step} RL steps", "Reward#")
    rows = [
        (e.prompt, e.before or "(empty)", f"{e.reward_before:.3g}", e.after or "(empty)", f"{e.reward_after:.3g}")
        for e in found.examples
    ]
    return text_table(heads, rows)
