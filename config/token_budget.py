"""The `rollout.budget:` and `rollout.abort:` sections of the configuration. Owns names and ranges
only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from config.rules import Bounded, NotWith, OnlyWith

AnswerMarker = Literal["boxed", "fence", "answer_tag"]
# An empty section by override switches off what a file has several keys of.
_BUDGET = OnlyWith(
    "on", said="is set, but there is no budget", remedy="set rollout.budget.share, or all of rollout.budget={}"
)
_ABORT = OnlyWith("enabled", remedy="set rollout.abort.enabled=true, or all of rollout.abort={}")


class BudgetOptions(BaseModel, frozen=True, extra="forbid"):
    """Tokens per RL step, and how they are shared among its prompts (DUET, section 3.1). Off without a size."""

    tokens_per_step: Annotated[
        int | None, Field(ge=1, description="response tokens of an RL step; null: see share")
    ] = None
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="of what rollouts_per_prompt responses to each prompt would cost if none were given up; null: "
            "no budget",
        ),
        NotWith(
            "tokens_per_step",
            said="{value}, but rollout.budget.tokens_per_step={other} says how large the budget is",
        ),
    ] = None
    min_rollouts: Annotated[int, Field(ge=2, le=10**5, description="responses that every prompt gets"), _BUDGET] = 2
    max_rollouts: Annotated[
        int | None,
        Field(ge=2, le=10**5, description="responses of one prompt at most; null: 4 x rollouts_per_prompt"),
        _BUDGET,
        Bounded(">=", "min_rollouts", when="on", remedy="raise it, or leave it out"),
    ] = None

    @property
    def on(self) -> bool:
        return self.tokens_per_step is not None or self.share is not None


class AbortOptions(BaseModel, frozen=True, extra="forbid"):
    """Responses end soon after their answer, and most that are late without one are given up (DUET, section 3.2)."""

    enabled: Annotated[
        bool,
        Field(description="off: every response ends by itself or at its limit"),
        NotWith(
            "environment",
            said="ends responses behind their answer, and gives late ones up, by lengths of single responses; "
            "environment is set",
            remedy="set it to false",
        ),
    ] = False
    marker: Annotated[
        AnswerMarker | None,
        Field(
            description="what an answer looks like: \\boxed{...}, a closed ``` fence, <answer>...</answer>; null: by "
            "the reward's terms"
        ),
        _ABORT,
    ] = None
    keep: Annotated[
        Literal["auto"] | Annotated[float, Field(gt=0, le=1)],
        Field(
            description="probability with which a late response goes on, counting 1 / keep times; auto: by what late "
            "responses to the prompt teach and cost"
        ),
        _ABORT,
    ] = "auto"
    min_keep: Annotated[
        float,
        Field(gt=0, le=1, description="keep: auto: at least"),
        _ABORT,
        OnlyWith("keep", ("auto",), when="enabled"),
    ] = 0.1
    grace_tokens: Annotated[
        int, Field(ge=0, description="tokens after the answer, before the response ends"), _ABORT
    ] = 16
    poll_quantile: Annotated[
        float,
        Field(ge=0, le=1, description="of natural lengths: no response ends by its answer before it"),
        _ABORT,
        Bounded("<", "abort_quantile", when="enabled"),
    ] = 0.2
    abort_quantile: Annotated[
        float,
        Field(gt=0, le=1, description="of natural lengths: here, plus grace_tokens, a response is late"),
        _ABORT,
    ] = 0.8
    window: Annotated[int, Field(ge=1, description="newest kept responses that the quantiles are taken of"), _ABORT] = (
        1024
    )
    warmup_responses: Annotated[
        int, Field(ge=1, description="nothing is given up before so many have ended"), _ABORT
    ] = 64


class SkipOptions(BaseModel, frozen=True, extra="forbid"):
    """Prompts that teach little lately are mostly passed over: by `after`, those always or never solved (GRESO, arXiv
    2506.02177), or by `target`, those far from a rate of success. Biased."""

    after: Annotated[
        int | None,
        Field(ge=1, description="groups in a row with one and the same reward; null: nothing is passed over"),
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
            description="instead of after: success rate at which a prompt is sampled at every turn; the further its "
            "own is from it, the less",
        ),
    ] = None
    keep: Annotated[
        float,
        Field(gt=0, le=1, description="probability with which such a prompt is sampled at its turn at least"),
    ] = 0.25

    @property
    def on(self) -> bool:
        return self.after is not None or self.target is not None
