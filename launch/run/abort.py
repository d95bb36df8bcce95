"""The rules of `rollout.abort` for the next responses, and the outcome of the last ones.

Owns the window of natural lengths, and the number of ended responses, for the warm-up. The thresholds are
policies.token_budget's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from config.token_budget import AbortOptions
from contracts.rollout import FinishReason, Marker, Rollout, StopRule
from launch.run.groups import PromptGroup
from policies.token_budget.abort import Thresholds, thresholds
from policies.token_budget.window import LengthWindow


@dataclass(frozen=True, slots=True)
class Lateness:
    """When a response is late, and how many more tokens late ones take."""

    give_up_at: int  # tokens
    answered_by: int  # tokens by which answered responses have ended
    excess_tokens: float  # mean tokens that late responses take beyond it if they are not given up
    mean_tokens: float  # natural length of all responses

    @property
    def natural_tokens(self) -> float:
        """The mean natural length of late responses."""
        return self.give_up_at + self.excess_tokens


class AbortRule:
    """The rules for a round's responses, from complete rounds before it."""

    def __init__(self, options: AbortOptions, marker: Marker, max_new_tokens: int) -> None:
        self._options, self._marker, self._max_new_tokens = options, marker, max_new_tokens
        self._window = LengthWindow(options.window)
        self._ended = 0

    @property
    def lateness(self) -> Lateness | None:
        """The lateness behind `rules`; None while no response is given up."""
        at, mean = self._thresholds(), self._window.mean()
        if at is None or at.give_up_at is None or not mean:
            return None
        beyond = at.give_up_at + self._options.grace_tokens
        return Lateness(at.give_up_at, beyond, self._window.mean_excess(at.give_up_at), mean)

    def held_up(self, responses: int) -> float:
        """Return the seconds of a late token over those of others, >= 1, in a round of `responses`."""
        lateness = self.lateness
        return 1.0 if lateness is None else self._window.held_up(lateness.give_up_at, responses)

    def rules(self, stop: StopRule | None, keeps: Sequence[float]) -> list[StopRule | None]:
        """Return `stop` with the answer rule added, for each of `keeps`; `stop` itself during the warm-up."""
        if (at := self._thresholds()) is None:
            return [stop] * len(keeps)
        rule = replace(
            stop or StopRule(),
            answer=self._marker,
            poll_from_tokens=at.poll_from,
            grace_tokens=self._options.grace_tokens,
            give_up_at_tokens=at.give_up_at,
        )
        return [replace(rule, keep=keep) for keep in keeps]

    def metrics(self) -> dict[str, float]:
        """Return the planned abort/*; unknown values are left out."""
        at = self._thresholds()
        known = {
            "poll_from": None if at is None else at.poll_from,
            "give_up_at": None if at is None else at.give_up_at,
            "natural_mean": self._window.mean(),
            "natural_p50": self._window.quantile(0.5),
            "natural_p90": self._window.quantile(0.9),
        }
        return {f"abort/{name}": float(value) for name, value in known.items() if value is not None}

    def observe(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Take the outcome of the last `rules`. Returns metrics.

        abort/saved_tokens estimates what given-up responses would still have taken, from the late ones in the window.
        It leaves out answered responses, whose continuation is unknown.
        """
        rollouts = [member.rollout for group in groups for member in group.members]
        if not rollouts:
            return {}
        lateness, asked = self.lateness, len(rollouts)
        self._ended += asked
        kept = [r for r in rollouts if r.finish_reason is not FinishReason.GIVEN_UP]
        given_up = asked - len(kept)
        kept_late, saved = 0, 0.0
        if lateness is not None:
            kept_late = sum(is_late(r, lateness.answered_by) for r in kept)
            saved = given_up * lateness.excess_tokens
        self._learn_lengths(groups)
        return {
            "abort/answered_share": sum(r.finish_reason is FinishReason.ANSWERED for r in rollouts) / asked,
            "abort/given_up_share": given_up / asked,
            "abort/kept_late_share": kept_late / asked,
            "abort/surcharge": sum(r.propensity**-2 for r in kept) / asked,
            "abort/saved_tokens": saved,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"ended": self._ended, "window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._ended = int(state["ended"])
        self._window.load_state_dict(state["window"])

    def _learn_lengths(self, groups: Sequence[PromptGroup]) -> None:
        """Add kept responses, each weighted by the responses that it stands for. Prompts count alike, whatever their
        counts."""
        sizes = [len(group.members) for group in groups if group.members]
        mean_size = sum(sizes) / max(len(sizes), 1)
        for group in groups:
            for rollout in (member.rollout for member in group.members):
                if rollout.finish_reason is not FinishReason.GIVEN_UP:
                    alike = mean_size / len(group.members)
                    self._window.add(rollout.tokens.size, alike / rollout.propensity)

    def _thresholds(self) -> Thresholds | None:
        return thresholds(self._options, self._window, self._ended, self._max_new_tokens)


def is_late(rollout: Rollout, beyond: int) -> bool:
    """Whether the rule's coin was tossed for a response, as far as visible. It was if the response was given up, has a
    propensity below 1, or is longer than `beyond`, where answered ones have ended (the only sign at probability 1)."""
    given_up = rollout.finish_reason is FinishReason.GIVEN_UP
    return given_up or rollout.propensity < 1 or rollout.tokens.size > beyond
