"""Faults where responses end early, have a budget, or come from an older policy: a part of launch.config.check.

Owns which answer markers the reward's terms imply. A response that ends early must keep its reward, and what is learned
from it must not depend on its length.
"""

import math
from collections.abc import Iterator

from config.rewards import RewardTerm
from config.token_budget import AnswerMarker, BudgetOptions
from config.tree import Config
from launch.config.issues import Issue

_ABORT, _BUDGET = "rollout.abort", "rollout.budget"
_OFF = f"{_ABORT}={{}}"  # enabled=false would leave the section's other keys, which are then ignored
_MARKERS: dict[str, AnswerMarker] = {"math": "boxed", "code": "fence"}  # by the kind of a reward term


def length_issues(c: Config) -> Iterator[Issue]:
    """Yield faults of combinations; pure."""
    yield from _abort(c)
    yield from _budget(c)
    yield from _staleness(c)


def markers_of(config: Config) -> list[AnswerMarker]:
    """Return the answer markers that the reward's terms read; a python term implies none."""
    return sorted({_MARKERS[term.kind] for term in config.reward.terms if term.kind in _MARKERS})


def _abort(c: Config) -> Iterator[Issue]:
    """Check for rewards and objectives that early ends do not allow."""
    abort = c.rollout.abort
    if not abort.enabled:
        return
    for index, term in enumerate(c.reward.terms):
        yield from _term(f"reward.terms.{index}", term)
    read = markers_of(c)
    if len(read) > 1:
        yield Issue(
            "reward.terms",
            f"read answers of {len(read)} kinds ({' and '.join(read)}), and {_ABORT} ends responses by one",
            remedy=f"use terms of one kind, or set {_OFF}",
        )
    elif abort.marker is None:
        said = "is not written, and no term of the reward says what an answer looks like"
        yield Issue(
            f"{_ABORT}.marker", said, remedy="set it to boxed, fence or answer_tag, as the function reads answers"
        )
    elif read and abort.marker != read[0]:
        said = f"{abort.marker}, but the reward reads {read[0]}: a response could end before its answer"
        yield Issue(f"{_ABORT}.marker", said, remedy="leave it out")
    if c.objective.overlong.buffer_tokens != 0:
        yield Issue(
            "objective.overlong.buffer_tokens",
            f"lowers the reward of long responses, and {_ABORT} shortens them",
            remedy=f"set it to 0, or {_OFF}",
        )


def _term(key: str, term: RewardTerm) -> Iterator[Issue]:
    """Check a term that needs more of a response than its answer."""
    if term.kind in ("format", "judge", "reasoning_gym"):
        said = f"{term.kind} reads the whole response, and {_ABORT} stops it after the answer"
        yield Issue(f"{key}.kind", said, remedy=f"leave the term out, or set {_OFF}")
    elif term.kind == "python" and not term.prefix_sufficient:
        yield Issue(
            f"{key}.prefix_sufficient",
            f"false: the function may read the whole response, and {_ABORT} stops it after the answer",
            remedy=f"set it to true if what follows the first complete answer never counts, or set {_OFF}",
        )
    elif term.kind == "math" and term.fallback != "none":
        said = f"{term.fallback} reads the end of a response without a box, and {_ABORT} stops such responses"
        yield Issue(f"{key}.fallback", said, remedy=f"set it to none, or {_OFF}")
    if term.kind in _MARKERS and term.answer == "last":
        said = f"last, but {_ABORT} stops responses after their first answer, which could change the last one"
        yield Issue(f"{key}.answer", said, remedy=f"leave it out (first), or set {_OFF}")


def _budget(c: Config) -> Iterator[Issue]:
    """Check for sizes that contradict each other or that cannot be met."""
    key, b, usual = "rollout.budget", c.rollout.budget, c.rollout.rollouts_per_prompt
    if not b.on:
        return
    if b.tokens_per_step is None and b.share is not None and b.share * usual < b.min_rollouts * (1 - 1e-9):
        yield Issue(
            f"{key}.share",
            f"{b.share:g} of rollout.rollouts_per_prompt={usual} is {b.share * usual:g} to each prompt, but "
            f"{key}.min_rollouts={b.min_rollouts} of them it gets",
            remedy=f"raise it to {b.min_rollouts / usual:g}, or lower rollout.prompts_per_step instead"
            if b.min_rollouts <= usual
            else f"raise rollout.rollouts_per_prompt to {math.ceil(b.min_rollouts / b.share)}"
            + (f", or lower {key}.min_rollouts" if usual >= BudgetOptions.model_fields["min_rollouts"].default else ""),
        )
    elif b.tokens_per_step is not None and b.tokens_per_step < (least := b.min_rollouts * c.rollout.prompts_per_step):
        yield Issue(
            f"{key}.tokens_per_step",
            f"{b.tokens_per_step}, but {c.rollout.prompts_per_step} prompts get {b.min_rollouts} responses each at "
            f"least, which is {least} of them",
            remedy="raise it, or lower rollout.prompts_per_step",
        )
    each = b.max_rollouts or 4 * usual
    most = c.rollout.prompts_per_step * each * c.rollout.sampling.max_new_tokens
    if b.tokens_per_step is not None and b.tokens_per_step > most:
        yield Issue(
            f"{key}.tokens_per_step",
            f"{b.tokens_per_step}, but an RL step cannot spend more than {most}: every prompt would get "
            f"{each} responses, whatever it needs",
            remedy=f"lower it, or raise {key}.max_rollouts",
        )
    if b.tokens_per_step is not None and b.max_rollouts is None and each < b.min_rollouts:
        yield Issue(
            f"{key}.min_rollouts",
            f"{b.min_rollouts} is more than one prompt gets at most: 4 x rollout.rollouts_per_prompt = {each}",
            remedy=f"lower it, or write {key}.max_rollouts",
        )
    elif b.max_rollouts is not None and b.share is not None and b.min_rollouts <= b.max_rollouts < b.share * usual:
        yield Issue(
            f"{key}.max_rollouts",
            f"{b.max_rollouts} to each prompt is less than the budget: {b.share:g} of {usual}",
            remedy="raise it, or leave it out",
        )
    if c.objective.dynamic_sampling.max_rounds > 1:
        yield Issue(
            "objective.dynamic_sampling.max_rounds",
            f"{c.objective.dynamic_sampling.max_rounds}, but {key} is spent in one round: further ones would be beyond "
            "it",
            remedy=f"set objective.dynamic_sampling.max_rounds=1, or {key}={{}}; a budget gives prompts without signal "
            "the fewest responses by itself",
        )


def _staleness(c: Config) -> Iterator[Issue]:
    """Check for settings that would learn from an older policy as if it were the current one."""
    partial = c.rollout.partial
    if not c.rollout.staleness and partial.tokens_per_step is None:
        return
    if c.objective.sampler_correction.weights == "none":
        partly = "rollout.partial.tokens_per_step", partial.tokens_per_step
        key, value = ("rollout.staleness", c.rollout.staleness) if c.rollout.staleness else partly
        yield Issue(
            "objective.sampler_correction.weights",
            f"none, but with {key}={value} tokens are of an older policy than the one that learns",
            remedy=f"leave it out (token), or set it to sequence or geometric; or leave {key} out",
        )
