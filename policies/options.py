"""The `objective:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class ObjectiveOptions(BaseModel, frozen=True, extra="forbid"):
    """What the learner minimises (GRPO and its switches)."""

    normalize_std: Annotated[bool, Field(description="divide group-relative advantages by the group's std")] = True
    drop_zero_variance: Annotated[bool, Field(description="leave out groups whose rewards are all equal")] = True
    clip_low: Annotated[float, Field(gt=0, lt=1, description="ratio is clipped below at 1 - clip_low")] = 0.2
    clip_high: Annotated[float, Field(gt=0, description="ratio is clipped above at 1 + clip_high")] = 0.28
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean"],
        Field(description="mean over all response tokens of the mini-batch, or over sequences of their means"),
    ] = "token_mean"
    kl: Annotated[Literal["none", "k1", "k2", "k3"], Field(description="KL estimator against the reference")] = "none"
    kl_coef: Annotated[float, Field(ge=0, description="weight of the KL term in the loss")] = 0.0
