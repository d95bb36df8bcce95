"""The `objective:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Normalize = Literal["none", "group", "batch", "whiten"]


class ObjectiveOptions(BaseModel, frozen=True, extra="forbid"):
    """What the learner minimises (GRPO and its switches)."""

    normalize_std: Annotated[bool, Field(description="divide group-relative advantages by the group's std")] = True
    drop_zero_variance: Annotated[
        bool, Field(description="leave out groups whose rewards are all equal, unless a KL term still teaches them")
    ] = True
    clip_low: Annotated[float, Field(gt=0, lt=1, description="ratio is clipped below at 1 - clip_low")] = 0.2
    clip_high: Annotated[float, Field(gt=0, description="ratio is clipped above at 1 + clip_high")] = 0.28
    clip_dual: Annotated[
        float | None,
        Field(gt=1, description="with a negative advantage A the loss is at most clip_dual * |A|; null: no bound"),
    ] = 3.0
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum"],
        Field(description="mean over response tokens of the mini-batch, or over sequences of their means or sums"),
    ] = "token_mean"
    sum_divisor: Annotated[
        float | None, Field(gt=0, description="divides sequence_sum (Dr. GRPO: rollout.sampling.max_new_tokens)")
    ] = None
    kl: Annotated[Literal["none", "k1", "k2", "k3"], Field(description="KL estimator against the reference")] = "none"
    kl_coef: Annotated[float, Field(ge=0, description="weight of the KL term in the loss")] = 0.0

    @property
    def pulls_to_reference(self) -> bool:
        """Whether the loss of a token has a gradient even where its advantage is 0."""
        return self.kl != "none" and self.kl_coef > 0
