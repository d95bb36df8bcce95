"""The effect of `rollout.budget` and `rollout.abort` on an RL step: responses per prompt, and the rule that ends them.

Owns the state kept from step to step; policies.token_budget has the formulas. Everything is decided from complete
earlier rounds (with dynamic sampling a step has several), in the canonical order of their prompts and samples. So a
step's requests are the same wherever it runs, and after a resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from config.objective import Aggregation
from contracts.rollout import FinishReason, Marker, Rollout, StopRule
from launch.batch import Pick
from launch.config import Config
from launch.run.abort import AbortRule, Lateness, is_late
from launch.run.groups import PromptGroup
from policies.token_budget.allocation import allocate, bound, variance
from policies.token_budget.cost import ExpectedLengths, Visit
from policies.token_budget.keep import LateModel, best_keep, price_of_equal
from policies.token_budget.spread import Floats, SpreadModel, squares, visit_variance


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlan:
    """The requests of one round of an RL step."""

    counts: list[int]  # responses of each pick
    stop: StopRule | list[StopRule | None] | None  # of every response, or one for each pick
    metrics: dict[str, float]  # budget/* and abort/*, as planned


class TokenBudget:
    """Plans rounds, and learns from their groups."""

    def __init__(self, config: Config, stop: StopRule | None, answer: Marker | None = None) -> None:
        """`stop`: applies to every response, whatever is planned here. `answer`: of rollout.abort, if enabled."""
        self._options, self._stop, self._aggregation = config.rollout, stop, config.objective.aggregation
        self._spread = SpreadModel()
        self._costs = ExpectedLengths(config.rollout.sampling.max_new_tokens / 2)
        self._late = LateModel()
        self._abort: AbortRule | None = None
        if answer is not None:
            self._abort = AbortRule(config.rollout.abort, answer, config.rollout.sampling.max_new_tokens)

    @property
    def _learns(self) -> bool:
        return self._options.budget.on or self._options.abort.enabled

    def plan(self, picks: Sequence[Pick]) -> BudgetPlan:
        """Plan the next picks."""
        counts, price, metrics = [self._options.rollouts_per_prompt] * len(picks), None, dict[str, float]()
        ids = [pick.prompt.prompt_id for pick in picks]
        if self._options.budget.on:
            counts, price, metrics = self._allocate(ids)
        if self._abort is None:
            return BudgetPlan(counts=counts, stop=self._stop, metrics=metrics)
        metrics |= self._abort.metrics()
        lateness = self._abort.lateness
        keeps = self._keeps(ids, counts, price, lateness)
        if keeps and lateness is not None:
            metrics |= {"abort/keep_min": min(keeps), "abort/keep_mean": float(np.mean(keeps))}
        return BudgetPlan(counts=counts, stop=self._abort.rules(self._stop, keeps), metrics=metrics)

    def observe(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Learn from the collected groups of a plan. Returns metrics of its outcome."""
        if not self._learns:
            return {}
        lateness = None if self._abort is None else self._abort.lateness  # as planned
        metrics = {} if self._abort is None else self._abort.observe(groups)
        self._costs.observe([visit(group) for group in groups if group.members])
        for group in groups:
            graded, prompt_id = group.graded, group.pick.prompt.prompt_id
            if len(graded) < 2:  # one response alone shows no spread
                continue
            rollouts = [member.rollout for member in graded]
            size = sizes([rollout.tokens.size for rollout in rollouts], self._aggregation)
            contributed = squares([member.grade.value for member in graded], size / size.mean()).tolist()
            if lateness is not None:
                late = [i for i, rollout in enumerate(rollouts) if is_late(rollout, lateness.answered_by)]
                self._late.observe(prompt_id, [kept_square(contributed[i], rollouts[i]) for i in late])
                for i in late:
                    contributed[i] = self._late.square(prompt_id) or 0.0
            square = visit_variance(contributed, [rollout.propensity for rollout in rollouts])
            self._spread.observe(prompt_id, square, len(graded))
        if self._options.budget.on:
            metrics["budget/spent_tokens"] = float(sum(m.rollout.tokens.size for g in groups for m in g.members))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; empty if there is neither a budget nor a rule."""
        if not self._learns:
            return {}
        abort = {} if self._abort is None else {"abort": self._abort.state_dict(), "late": self._late.state_dict()}
        return {"spread": self._spread.state_dict(), "costs": self._costs.state_dict()} | abort

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; from scratch if that run had neither."""
        if self._learns and state:
            self._spread.load_state_dict(state["spread"])
            self._costs.load_state_dict(state["costs"])
            if self._abort is not None and "abort" in state:
                self._abort.load_state_dict(state["abort"])
                self._late.load_state_dict(state["late"])

    def _keeps(
        self, prompt_ids: Sequence[int], counts: Sequence[int], price: float | None, lateness: Lateness | None
    ) -> list[float]:
        """Return, for each pick, the probability with which its late responses continue. `price`: of the counts; None:
        counts are equal.

        Until a late response has been seen, late ones are assumed to contribute as much as others of their prompt.
        """
        if (keep := self._options.abort.keep) != "auto":
            return [keep] * len(prompt_ids)
        if lateness is None:
            return [1.0] * len(prompt_ids)
        spread, tokens = self._expected(prompt_ids)
        if price is None:
            price = price_of_equal(spread, tokens, self._options.rollouts_per_prompt)
        if self._options.abort.price == "time" and self._abort is not None:
            price *= self._abort.held_up(sum(counts))
        keeps = []
        for prompt_id, count, own, size in zip(
            prompt_ids, counts, spread.tolist(), sizes(tokens, self._aggregation).tolist(), strict=True
        ):
            known = self._late.square(prompt_id)
            square = own**2 * self._late_size(lateness) if known is None else known * size
            least = self._options.abort.min_keep
            keeps.append(best_keep(square, lateness.excess_tokens, price, count, least=least))
        return keeps

    def _late_size(self, lateness: Lateness) -> float:
        """Return the size of a late response, relative to that of a response of mean length."""
        late, mean = sizes([lateness.natural_tokens, lateness.mean_tokens], self._aggregation)
        return float(late / mean)

    def _expected(self, prompt_ids: Sequence[int]) -> tuple[Floats, Floats]:
        """Return (spreads, tokens per response) of prompts. A prompt's stored spread is relative to the size of its
        responses, which follows from its tokens. So a prompt with short responses does not get the size of the pool's
        long ones."""
        tokens = np.array([self._costs.expected_tokens(prompt_id) for prompt_id in prompt_ids])
        relative = np.array([self._spread.spread(prompt_id) for prompt_id in prompt_ids])
        return relative * np.sqrt(sizes(tokens, self._aggregation)), tokens

    def _allocate(self, prompt_ids: Sequence[int]) -> tuple[list[int], float, dict[str, float]]:
        """Return counts, their price, and the planned budget/*. Before anything is known, all prompts get
        equal counts."""
        options, usual = self._options.budget, self._options.rollouts_per_prompt
        spread, tokens = self._expected(prompt_ids)
        if options.tokens_per_step is not None:
            budget_tokens = float(options.tokens_per_step)
        else:
            assert options.share is not None  # BudgetOptions.on
            budget_tokens = options.share * usual * float(tokens.sum()) * self._costs.natural
        most = max(options.max_rollouts or 4 * usual, options.min_rollouts)
        counts, price = allocate(spread, tokens, budget_tokens, least=options.min_rollouts, most=most)
        planned = float((counts * tokens).sum())
        equal = np.full(len(prompt_ids), planned / float(tokens.sum()))
        return (
            counts.tolist(),
            price,
            {
                "budget/tokens": budget_tokens,
                "budget/planned_tokens": planned,
                "budget/rollouts_min": float(counts.min()),
                "budget/rollouts_mean": float(counts.mean()),
                "budget/rollouts_max": float(counts.max()),
                "budget/lambda": price,
                "budget/variance": variance(spread, counts),
                "budget/variance_uniform": variance(spread, equal),
                "budget/bound": bound(spread, tokens),
                "budget/spread_mean": float(spread.mean()),
            },
        )


def sizes(tokens: Sequence[float] | Floats, aggregation: Aggregation) -> Floats:
    """Return [n]: mean square of the scores of responses with these tokens. For a sum over tokens it is their number,
    for a mean the inverse (policies.token_budget.spread.squares)."""
    lengths = np.asarray(tokens, dtype=np.float64)
    return 1 / lengths if aggregation == "seq_mean_token_mean" else lengths


def kept_square(square: float, rollout: Rollout) -> float:
    """Return a response's weight in the mean contribution of late responses as if none were given up."""
    return 0.0 if rollout.finish_reason is FinishReason.GIVEN_UP else square / rollout.propensity


def visit(group: PromptGroup) -> Visit:
    """Return what a group with members shows about lengths."""
    rollouts = [member.rollout for member in group.members]
    given_up = [rollout.finish_reason is FinishReason.GIVEN_UP for rollout in rollouts]
    propensities = [rollout.propensity for rollout in rollouts]
    return Visit(group.pick.prompt.prompt_id, [rollout.tokens.size for rollout in rollouts], propensities, given_up)
