"""The `rollout.budget:`, `rollout.abort:` and `rollout.skip:` sections. Names and ranges only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from config.rules import Bounded, NotWith, OnlyWith

AnswerMarker = Literal["boxed", "fence", "answer_tag"]
# An override with an empty section switches off a feature for which a file sets several keys.
_BUDGET = OnlyWith(
    "on", said="is set, but there is no budget", remedy="set rollout.budget.share, or all of rollout.budget={}"
)
_ABORT = OnlyWith("enabled", remedy="set rollout.abort.enabled=true, or all of rollout.abort={}")


class BudgetOptions(BaseModel, frozen=True, extra="forbid"):
    """Token budget of an RL step, allocated among its prompts (DUET, section 3.1)."""

    tokens_per_step: Annotated[int | None, Field(ge=1, description="response tokens of an RL step; null: by share")] = (
        None
    )
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="the same, as a share of rollouts_per_prompt responses to every prompt; null: no budget",
        ),
        NotWith(
            "tokens_per_step",
            said="{value}, but rollout.budget.tokens_per_step={other} says how large the budget is",
        ),
    ] = None
    min_rollouts: Annotated[int, Field(ge=2, le=10**5, description="responses per prompt at least"), _BUDGET] = 2
    max_rollouts: Annotated[
        int | None,
        Field(ge=2, le=10**5, description="responses per prompt at most; null: 4 x rollouts_per_prompt"),
        _BUDGET,
        Bounded(">=", "min_rollouts", when="on", remedy="raise it, or leave it out"),
    ] = None

    @property
    def on(self) -> bool:
        return self.tokens_per_step is not None or self.share is not None


class AbortOptions(BaseModel, frozen=True, extra="forbid"):
    """Stops responses after their answer, and most late responses without one (DUET, section 3.2)."""

    enabled: Annotated[
        bool,
        Field(description="stop answered and late responses early"),
        NotWith(
            "environment",
            said="ends responses behind their answer, and gives late ones up, by lengths of single responses; "
            "environment is set",
            remedy="set it to false",
        ),
    ] = False
    marker: Annotated[
        AnswerMarker | None,
        Field(description="mark of an answer; null: by the reward's terms"),
        _ABORT,
    ] = None
    keep: Annotated[
        Literal["auto"] | Annotated[float, Field(gt=0, le=1)],
        Field(description="probability that a late response continues; auto: minimises gradient variance per token"),
        _ABORT,
    ] = "auto"
    min_keep: Annotated[
        float,
        Field(gt=0, le=1, description="smallest probability with keep: auto"),
        _ABORT,
        OnlyWith("keep", ("auto",), when="enabled"),
    ] = 0.1
    price: Annotated[
        Literal["tokens", "time"],
        Field(
            description="with keep: auto, what a late token costs; tokens: as much as any; time: the seconds for which "
            "it holds the RL step up"
        ),
        _ABORT,
        OnlyWith("keep", ("auto",), when="enabled"),
    ] = "tokens"
    grace_tokens: Annotated[int, Field(ge=0, description="tokens between the answer and the stop"), _ABORT] = 16
    poll_quantile: Annotated[
        float,
        Field(ge=0, le=1, description="quantile of lengths before which no answered response stops"),
        _ABORT,
        Bounded("<", "abort_quantile", when="enabled"),
    ] = 0.2
    abort_quantile: Annotated[
        float,
        Field(gt=0, le=1, description="quantile of lengths, plus grace_tokens, after which a response is late"),
        _ABORT,
    ] = 0.8
    window: Annotated[
        int, Field(ge=1, description="newest kept responses that the quantiles are computed from"), _ABORT
    ] = 1024
    warmup_responses: Annotated[
        int, Field(ge=1, description="responses that must end before any is stopped"), _ABORT
    ] = 64


class SkipOptions(BaseModel, frozen=True, extra="forbid"):
    """Skips most prompts that teach little: by `after`, prompts always or never solved (GRESO, arXiv 2506.02177); by
    `target`, prompts far from a success rate. Biased."""

    after: Annotated[
        int | None,
        Field(ge=1, description="groups in a row with equal rewards, after which a prompt is skipped; null: off"),
        NotWith(
            "target",
            said="is set, and so is rollout.skip.target, by which prompts that are settled are rare already",
        ),
    ] = None
    target: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="in place of after: preferred success rate",
        ),
    ] = None
    keep: Annotated[
        float,
        Field(gt=0, le=1, description="smallest probability that a prompt is sampled in its turn"),
    ] = 0.25

    @property
    def on(self) -> bool:
        return self.after is not None or self.target is not None
