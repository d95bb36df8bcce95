"""The `rollout.rounds:` section of the configuration. Names and ranges only."""

from typing import Annotated

from pydantic import BaseModel, Field

from config.rules import NotWith, OnlyWith

_ROUNDS = OnlyWith("factor", remedy="set rollout.rounds.factor, or all of rollout.rounds={}")


def _not_with(key: str, on: str, why: str) -> NotWith:
    return NotWith(on, said=f"{{value}}, but {why}", remedy=f"leave one of rollout.rounds.factor and {key} out")


class RoundsOptions(BaseModel, frozen=True, extra="forbid"):
    """Short rounds put long prompts off; long rounds repay them (docs/concepts/rounds.md). Biased: order."""

    factor: Annotated[
        float | None,
        Field(
            gt=1,
            le=8,
            description="prompts sampled in a short round per prompt learned from; the others are put off; null: off",
        ),
        _not_with("environment", "environment", "responses are episodes, whose turns are not put off"),
        _not_with(
            "rollout.staleness", "rollout.staleness", "with rollout.staleness={other} a step is sampled before its turn"
        ),
        _not_with(
            "rollout.partial.tokens_per_step",
            "rollout.partial.tokens_per_step",
            "rollout.partial has long responses go on in the next step already",
        ),
        _not_with("rollout.budget", "rollout.budget.on", "rollout.budget decides by every prompt that is sampled"),
        _not_with("rollout.abort", "rollout.abort.enabled", "rollout.abort ends long responses already"),
        _not_with("rollout.skip", "rollout.skip.on", "rollout.skip does not learn from each prompt equally often"),
        _not_with(
            "objective.dynamic_sampling",
            "objective.dynamic_sampling.on",
            "objective.dynamic_sampling chooses groups by rewards, and rounds by lengths",
        ),
    ] = None
    quantile: Annotated[
        float,
        Field(gt=0, lt=1, description="quantile of groups' longest responses from which a prompt is long"),
        _ROUNDS,
    ] = 0.8
    window: Annotated[
        int, Field(ge=1, le=10**6, description="newest groups learned from that the quantile is of"), _ROUNDS
    ] = 1024
