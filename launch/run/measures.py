"""Metrics of the responses to a held-out set: mean reward, pass@k, maj@k, and the same for each source.

Owns the definition of right answers, the equality of answers, and the metrics' names. Samples nothing.
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
    """Answers of one prompt's responses: the number of right ones, of each wrong one, and of none."""

    right: int
    wrong: tuple[int, ...]
    silent: int


def set_metrics(groups: Sequence[PromptGroup], ks: Sequence[int], reward: RewardOptions) -> Metrics:
    """Return metrics of one set's groups: `reward`, `prompt_std`, `length_mean`, `pass@k`, `maj@k`. If prompts have
    sources, also reward, pass@k and maj@k as `source/<source>/...`. Means over prompts; empty if nothing was graded.

    pass@k is left out if no prompt has k graded responses. maj@k is also left out for k = 1, and if no term reads
    answers.
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
    """Return all sets' metrics as `eval/<set>/<name>`, and as `eval/<name>` the unweighted means over sets of common
    metrics. `alone`: the only set has no name; then there is only `eval/<name>`."""
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
    """Whether the response is right by its total reward."""
    return member.grade.value >= reward.right_from - 1e-9


def by_prompt(groups: Sequence[PromptGroup], which: str, reward: RewardOptions) -> list[dict[str, Any]]:
    """Return the lines of eval_prompts.jsonl: success rate and mean reward of each prompt with graded responses."""
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
    """Return the answers as the first math term reads them, right if that term says so; None without such a term.

    Right answers equal the gold answer, so they form one group. Wrong ones are equal if that is certain without algebra
    (actors.rewards.equality). Each joins the first group, in the order of the samples, whose first member it equals.
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
