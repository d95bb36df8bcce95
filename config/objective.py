"""The `objective:` section of the configuration: names, ranges and contradictions. Imports neither torch nor ray.

The learner (policies.objectives) applies `loss`, `clip_*`, `aggregation`, `entropy_coef`, `sampler_correction` and a KL
term in the loss. The driver (policies.advantages) applies `baseline`, `normalize`, `drop_zero_variance`,
`length_penalty`, `overlong`, `mask_truncated`, `dynamic_sampling` and KL in the reward, before it sends sequences to
the learner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, model_validator

from config.import_path import FORM_TEXT, ImportPath
from config.presets import MASKS, WEIGHTS, filled, origin
from config.rules import Bounded, NotWith

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "fixed_mean_token_sum_norm"
]
Baseline = Literal["group", "leave_one_out", "batch", "none"]
Estimator = Literal["none", "k1", "k2", "k3"]
Level = Literal["none", "token", "sequence", "geometric"]
Loss = Literal["clip", "sequence_clip", "sequence_band", "cispo", "policy_gradient"]
LOSS_NAMES = get_args(Loss)
OWN = ImportPath()
LOSS = ImportPath(LOSS_NAMES)
Name = Literal[
    "grpo", "dr_grpo", "dapo", "duet", "gspo", "tbpo", "cispo", "rloo", "reinforce", "reinforce_pp",
    "reinforce_pp_baseline",
]  # fmt: skip
Normalize = Literal["none", "group", "batch", "whiten"]
NORMED = ("seq_mean_token_sum_norm", "fixed_mean_token_sum_norm")  # aggregations that divide by sum_divisor


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two keys of the section that exclude each other. `key` is below `objective`."""

    key: str
    message: str
    remedy: str


class SamplerCorrectionOptions(BaseModel, frozen=True, extra="forbid"):
    """Importance weights between the engine's and the learner's log-probs of the same tokens (TIS, MIS)."""

    weights: Annotated[
        Level,
        Field(description="weight pi_old / pi_sampler of a token, its response, or geometric mean; with vllm: token"),
    ] = "none"
    truncate: Annotated[
        float | None, Field(gt=0, description="largest weight (TIS); default: 2 without a mask, else no limit")
    ] = None
    floor: Annotated[
        float | None,
        Field(gt=0, description="smallest weight; default: 0.5 with geometric weights and no mask, else no limit"),
    ] = None
    mask: Annotated[
        Level,
        Field(description="leave out tokens or responses whose ratio is out of bounds"),
    ] = "none"
    low: Annotated[float | None, Field(gt=0, description="mask: smallest ratio; default: by mask; null: no bound")] = (
        None
    )
    high: Annotated[float | None, Field(gt=0, description="mask: largest ratio; default: by mask; null: no bound")] = (
        None
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        mask, weights = data.get("mask", "none"), data.get("weights", "none")
        defaults = MASKS.get(mask, {}) if isinstance(mask, str) else {}
        if mask == "none" and isinstance(weights, str):
            defaults = WEIGHTS.get(weights, {})
        return {**defaults, **data}

    @property
    def active(self) -> bool:
        return self.weights != "none" or self.mask != "none"


class OverlongOptions(BaseModel, frozen=True, extra="forbid"):
    """Penalty for responses near the length limit (DAPO, eq. 13)."""

    buffer_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            description="tokens before the limit in which reward falls; 0: off; null: a fifth of max_new_tokens",
        ),
        Bounded("<=", "rollout.sampling.max_new_tokens", remedy="lower it"),
    ] = 0
    penalty: Annotated[float, Field(gt=0, description="reward that a response at the limit loses")] = 1.0


class DynamicSamplingOptions(BaseModel, frozen=True, extra="forbid"):
    """Replaces groups with equal rewards by further rollouts (DAPO, section 3.2)."""

    max_rounds: Annotated[
        int,
        Field(
            ge=1,
            le=1000,
            description="rounds of rollouts per RL step at most; 1: off",
        ),
    ] = 1

    @property
    def on(self) -> bool:
        return self.max_rounds > 1


class ObjectiveOptions(BaseModel, frozen=True, extra="forbid"):
    """What the learner minimises: an objective by name, and its switches (docs/concepts/learning.md)."""

    name: Annotated[Name, Field(description="sets the defaults of the keys below")] = "grpo"
    loss: Annotated[
        str,
        AfterValidator(LOSS),
        LOSS,
        Field(description="token loss: PPO's, GSPO's, TBPO's, CISPO's, -A log pi, or your own"),
    ] = "clip"
    loss_arguments: Annotated[dict[str, Any], Field(description="further keyword arguments of your own loss")] = {}
    clip_low: Annotated[
        float | None, Field(gt=0, lt=1, description="the ratio is clipped at 1 - clip_low; null: not clipped")
    ] = 0.2
    clip_high: Annotated[
        float | None, Field(gt=0, description="the ratio is clipped at 1 + clip_high; null: not clipped")
    ] = 0.28
    clip_dual: Annotated[
        float | None,
        Field(gt=1, description="with A < 0 the loss is at most clip_dual * |A|; null: no bound"),
    ] = 3.0
    band_low: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="tbpo: responses with A < 0 and a ratio below 1 - band_low are ignored",
        ),
    ] = None
    band_high: Annotated[
        float | None,
        Field(gt=0, description="tbpo: the same above 1 + band_high; scale it with the learning rate"),
    ] = None
    baseline: Annotated[
        Baseline,
        Field(description="subtracted from a reward: mean of the group, of its other responses, of the batch"),
    ] = "group"
    normalize: Annotated[
        Normalize,
        Field(description="divides by the std of group or batch; whiten: standardises over the batch's tokens"),
    ] = "group"
    advantages: Annotated[
        str | None,
        AfterValidator(OWN),
        OWN,
        Field(description="your own function in place of baseline and normalize"),
    ] = None
    advantages_arguments: Annotated[
        dict[str, Any], Field(description="further keyword arguments of your own advantages")
    ] = {}
    drop_zero_variance: Annotated[
        bool,
        Field(description="leave out groups with equal rewards, unless the loss has a term for them"),
    ] = True
    aggregation: Annotated[
        Aggregation,
        Field(description="how token losses become one (docs/concepts/learning.md)"),
    ] = "token_mean"
    sum_divisor: Annotated[
        float | None,
        Field(gt=0, description="divisor of aggregations in _token_sum_norm; default: rollout.sampling.max_new_tokens"),
    ] = None
    kl: Annotated[Estimator, Field(description="KL estimator against the reference")] = "none"
    kl_coef: Annotated[float, Field(ge=0, description="weight of the KL term")] = 0.0
    kl_in: Annotated[
        Literal["loss", "reward"],
        Field(description="add the KL term to the loss, or subtract it from each token's reward"),
    ] = "loss"
    entropy_coef: Annotated[float, Field(ge=0, description="weight of the entropy bonus, per nat")] = 0.0
    sampler_correction: SamplerCorrectionOptions = SamplerCorrectionOptions()
    length_penalty: Annotated[
        float,
        Field(
            ge=0,
            description="rewards above 0 times exp(-length_penalty * z), z the standardised length (GRPO-LEAD: 0.05)",
        ),
        NotWith(
            "rollout.abort.enabled",
            said="compares lengths of whole responses, which rollout.abort ends at different places",
            remedy="set it to 0, or rollout.abort={}",
        ),
    ] = 0.0
    overlong: OverlongOptions = OverlongOptions()
    mask_truncated: Annotated[
        bool,
        Field(description="leave out responses that were cut at the limit (overlong filtering)"),
        NotWith(
            "rollout.abort.enabled",
            said="leaves out responses by how they end, and rollout.abort ends some that would have been cut off",
            remedy="set it to false, or rollout.abort={}",
        ),
    ] = False
    dynamic_sampling: DynamicSamplingOptions = DynamicSamplingOptions()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return filled(data) if isinstance(data, dict) else data

    @property
    def own_loss(self) -> bool:
        """Whether `loss` is a user's function."""
        return self.loss not in LOSS_NAMES

    def origin(self, key: str) -> str | None:
        """Return the source of the default of a dotted key below `objective`; None: the same for all names."""
        from_limit = {"sum_divisor": self.sum_divisor is not None, "overlong.buffer_tokens": self.name == "dapo"}
        if from_limit.get(key):
            return "rollout.sampling.max_new_tokens"
        names = ("name", "loss", "baseline", "aggregation", "kl", "advantages")
        chosen = {name: getattr(self, name) for name in names}
        return origin(chosen | {"drop_zero_variance": self.drop_zero_variance}, key)

    @property
    def teaches_without_advantage(self) -> bool:
        """Whether a token's loss has a gradient even if its advantage is 0."""
        return (self.needs_reference_in_loss and self.kl_coef > 0) or self.entropy_coef > 0

    @property
    def needs_reference_in_loss(self) -> bool:
        """Whether the loss, or a metric of it, uses the reference model."""
        return self.kl != "none" and self.kl_in == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantages need every token's KL to the reference, which the learner computes first."""
        return self.kl != "none" and self.kl_in == "reward"

    def sized(self, max_new_tokens: int) -> "ObjectiveOptions":
        """Return a copy with the defaults that follow from the longest response."""
        changes: dict[str, Any] = {}
        if self.aggregation in NORMED and self.sum_divisor is None:
            changes["sum_divisor"] = float(max_new_tokens)
        if self.overlong.buffer_tokens is None:
            changes["overlong"] = self.overlong.model_copy(update={"buffer_tokens": max_new_tokens // 5})
        return self.model_copy(update=changes) if changes else self

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield settings that would be ignored or contradict each other."""
        yield from self._own()
        yield from self._clips()
        yield from self._kl()
        if self.sum_divisor is not None and self.aggregation not in NORMED:
            yield Contradiction(
                "sum_divisor",
                f"is set, but objective.aggregation is {self.aggregation}",
                "set objective.aggregation=seq_mean_token_sum_norm, or leave it out",
            )
        if self.dynamic_sampling.max_rounds > 1 and not self.drop_zero_variance:
            yield Contradiction(
                "dynamic_sampling.max_rounds",
                "replaces groups that are dropped, but objective.drop_zero_variance is false",
                "set objective.drop_zero_variance=true, or max_rounds=1",
            )
        if self.overlong.buffer_tokens == 0 and self.overlong.penalty != OverlongOptions().penalty:
            yield Contradiction(
                "overlong.penalty", "is set, but overlong.buffer_tokens is 0", "set objective.overlong.buffer_tokens"
            )
        yield from self._correction()

    def _own(self) -> Iterator[Contradiction]:
        if self.loss_arguments and not self.own_loss:
            message = f"is set, but objective.loss is {self.loss}, which takes none"
            yield Contradiction("loss_arguments", message, f"leave it out, or name your own loss as {FORM_TEXT}")
        if self.advantages is None:
            if self.advantages_arguments:
                remedy = "leave it out, or set objective.advantages"
                yield Contradiction("advantages_arguments", "is set, but objective.advantages is not", remedy)
            return
        for key in ("baseline", "normalize"):
            if getattr(self, key) != "none":
                message = f"is set, but objective.advantages is your own function {self.advantages}"
                yield Contradiction(key, message, "leave it out: the function decides it")

    def _clips(self) -> Iterator[Contradiction]:
        if self.own_loss:
            for key in ("clip_low", "clip_high", "clip_dual", "band_low", "band_high"):
                if getattr(self, key) is not None:
                    message = f"is set, but objective.loss is your own function {self.loss}, which does not get it"
                    yield Contradiction(key, message, "leave it out, or pass it in objective.loss_arguments")
            return
        if self.loss not in ("clip", "sequence_clip") and self.clip_dual is not None:
            yield Contradiction("clip_dual", f"is set, but loss {self.loss} has none", "leave it out")
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        for key, value in bounds.items():
            if self.loss == "policy_gradient" and value is not None:
                yield Contradiction(key, "is set, but loss policy_gradient clips nothing", "leave it out")
            elif (self.loss, key) == ("sequence_band", "clip_low"):
                if value is not None:
                    message = "has no effect in loss sequence_band: where A > 0 its minimum is bounded above only"
                    yield Contradiction(
                        key, message, "leave it out; where A < 0, objective.band_low is the lower bound"
                    )
            elif value is None and self.loss != "policy_gradient" and (self.loss, key) != ("cispo", "clip_low"):
                yield Contradiction(key, f"loss {self.loss} needs it", "leave it out for the default")
        for key, value in {"band_low": self.band_low, "band_high": self.band_high}.items():
            if self.loss == "sequence_band" and value is None:
                yield Contradiction(key, "loss sequence_band needs it", "leave it out for the default")
            elif self.loss != "sequence_band" and value is not None:
                yield Contradiction(key, f"is set, but loss {self.loss} has no band", "set objective.name=tbpo")

    def _kl(self) -> Iterator[Contradiction]:
        if self.kl == "none" and self.kl_coef > 0:
            yield Contradiction("kl_coef", "is set, but objective.kl is none", "set objective.kl=k3, or kl_coef=0")
        if self.kl_in == "reward" and self.kl == "none":
            yield Contradiction("kl_in", "is reward, but objective.kl is none", "set objective.kl=k1, or leave it out")
        elif self.kl_in == "reward" and self.kl_coef == 0:
            yield Contradiction("kl_coef", "is 0, and kl_in: reward would take nothing", "set it, or objective.kl=none")

    def _correction(self) -> Iterator[Contradiction]:
        c, key = self.sampler_correction, "sampler_correction"
        for name, limit in {"truncate": c.truncate, "floor": c.floor}.items():
            if c.weights == "none" and limit is not None:
                yield Contradiction(
                    f"{key}.{name}", "is set, but weights is none", f"set objective.{key}.weights=token"
                )
        if c.floor is not None and c.truncate is not None and c.floor >= c.truncate:
            yield Contradiction(f"{key}.floor", f"{c.floor:g} is not below truncate = {c.truncate:g}", "lower it")
        bounds = {"low": c.low, "high": c.high}
        for name, bound in bounds.items():
            if c.mask == "none" and bound is not None:
                yield Contradiction(f"{key}.{name}", "is set, but mask is none", f"set objective.{key}.mask=token")
        if c.mask != "none" and c.low is None and c.high is None:
            yield Contradiction(f"{key}.mask", f"is {c.mask}, but has no bound", f"set objective.{key}.high")
        if c.mask != "none" and c.low is not None and c.high is not None and c.low >= c.high:
            yield Contradiction(f"{key}.low", f"{c.low:g} is not below high = {c.high:g}", "lower it")
