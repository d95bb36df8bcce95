"""What an evaluation says of the responses to a held-out set: mean reward, pass@k, maj@k, and the same of each source.
Owns what counts as right, which answers are the same, and the metrics' names; samples nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.rewards.boxed import thinks
from actors.rewards.equality import equal_fast
from actors.rewards.maths import read_answer
from config.rewards import RewardOptions
from launch.run.groups import Graded, PromptGroup
from policies.pass_at import majority_at, pass_at

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Votes:
    """Answers of one prompt's responses: how many are right, how many give each wrong answer, how many give none."""

    right: int
    wrong: tuple[int, ...]
    silent: int


def set_metrics(groups: Sequence[PromptGroup], ks: Sequence[int], reward: RewardOptions) -> Metrics:
    """Metrics of the groups of one set: `reward`, `prompt_std`, `length_mean`, `pass@k`, `maj@k`, and reward, pass@k
    and maj@k as `source/<source>/...` if prompts have sources. Means over prompts; nothing if nothing was graded.

    pass@k is left out where no prompt has k graded responses, maj@k also for k = 1 and where no term reads answers.
    """
    metrics = _means(groups, ks, reward)
    if not metrics:
        return {}
    means = [_reward(group) for group in groups if group.graded]
    lengths = [member.rollout.tokens.size for group in groups for member in group.members]
    metrics |= {"prompt_std": float(np.std(means)), "length_mean": float(np.mean(lengths))}
    for source in sorted({group.pick.prompt.source for group in groups} - {""}):
        own = [group for group in groups if group.pick.prompt.source == source]
        metrics |= {f"source/{source}/{name}": value for name, value in _means(own, ks, reward).items()}
    return metrics


def named(sets: Mapping[str, Metrics], *, alone: bool) -> Metrics:
    """All sets' metrics as `eval/<set>/<name>`, and as `eval/<name>` the means over sets of what all have, each set
    counting alike. `alone`: there is one without a name of its own: `eval/<name>` is all."""
    if alone:
        (metrics,) = sets.values()
        return {f"eval/{name}": value for name, value in metrics.items()}
    found: Metrics = {}
    shared = [name for name in next(iter(sets.values())) if all(name in metrics for metrics in sets.values())]
    for name in shared:
        if not name.startswith("source/"):
            found[f"eval/{name}"] = float(np.mean([metrics[name] for metrics in sets.values()]))
    for which, metrics in sets.items():
        found |= {f"eval/{which}/{name}": value for name, value in metrics.items()}
    return found


def right(member: Graded, reward: RewardOptions) -> bool:
    """By the whole reward."""
    return member.grade.value >= reward.right_from - 1e-9


def by_prompt(groups: Sequence[PromptGroup], which: str, reward: RewardOptions) -> list[dict[str, Any]]:
    """The lines of eval_prompts.jsonl: for each prompt with graded responses its success rate and mean reward."""
    return [
        {
            "set": which,
            "uid": group.pick.prompt.uid,
            "responses": len(group.graded),
            "success": sum(right(member, reward) for member in group.graded) / len(group.graded),
            "reward": _reward(group),
        }
        for group in groups
        if group.graded
    ]


def votes_of(group: PromptGroup, reward: RewardOptions) -> Votes | None:
    """The answers as the first math term reads them, right where that term says so; None without such a term.

    Right answers equal the gold answer, so they are one. Wrong ones are the same where that is certain without algebra
    (actors.rewards.equality); one joins the first group, in the order of the samples, whose first member it equals.
    """
    term = next((term for term in reward.terms if term.kind == "math"), None)
    if term is None:
        return None
    right_ones = silent = 0
    wrong: list[tuple[str, int]] = []
    for member in group.graded:
        if member.grade.parts.get(term.label, 0.0) >= 1.0:
            right_ones += 1
            continue
        answer = read_answer(member.text, term.fallback, term.answer, thinking=thinks(group.pick.prompt.text))
        if answer is None:
            silent += 1
            continue
        for index, (known, count) in enumerate(wrong):
            if equal_fast(known, answer):
                wrong[index] = known, count + 1
                break
        else:
            wrong.append((answer, 1))
    return Votes(right_ones, tuple(count for _, count in wrong), silent)


def _means(groups: Sequence[PromptGroup], ks: Sequence[int], reward: RewardOptions) -> Metrics:
    graded = [group for group in groups if group.graded]
    if not graded:
        return {}
    metrics = {"reward": float(np.mean([_reward(group) for group in graded]))}
    votes = [votes_of(group, reward) for group in graded]
    for k in ks:
        counts = [(sum(right(m, reward) for m in group.graded), len(group.graded)) for group in graded]
        if passed := [pass_at(k, count, n) for count, n in counts if n >= k]:
            metrics[f"pass@{k}"] = float(np.mean(passed))
        enough = [v for v, (_, n) in zip(votes, counts, strict=True) if v is not None and n >= k > 1]
        if enough:
            metrics[f"maj@{k}"] = float(np.mean([majority_at(k, v.right, v.wrong, v.silent) for v in enough]))
    return metrics


def _reward(group: PromptGroup) -> float:
    return float(np.mean([member.grade.value for member in group.graded]))
