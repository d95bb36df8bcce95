"""The `rollout.speculation:` section of the configuration. Owns names and ranges only."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator

from config.import_path import ImportPath
from config.rules import OnlyWith
from config.strategy import Strategy

OWN_PATH = ImportPath()


class SuffixOptions(BaseModel, frozen=True, extra="forbid"):
    """The suffix drafter (DAS 4.1): an index per problem over its recent rollouts and the request's own text, and one
    over recent rollouts of all problems."""

    window_bytes: Annotated[
        int, Field(ge=1 << 16, description="a problem's rollouts, 10 bytes per token; the oldest leave")
    ] = 8 << 20
    max_bytes: Annotated[
        int, Field(ge=1 << 20, description="memory limit; the largest windows shrink, then whole problems leave")
    ] = 512 << 20
    pool: Annotated[
        bool,
        Field(
            description="where a problem's own index says next to nothing, draft from all problems'; false: DAS's scope"
        ),
    ] = True
    version_decay: Annotated[float, Field(gt=0, le=1, description="weight of a rollout per weights version of age")] = (
        0.8
    )
    min_probability: Annotated[float, Field(ge=0, lt=1, description="drafts end below this path probability")] = 0.1


class EagleOptions(BaseModel, frozen=True, extra="forbid"):
    """The EAGLE drafter; without `path` there is none."""

    path: Annotated[str | None, Field(description="directory of drafter weights; `random`: fresh weights")] = None
    context_tokens: Annotated[int, Field(ge=1, description="hidden states kept for switching on, tokens")] = 64
    min_probability: Annotated[
        float, Field(ge=0, lt=1, description="chains end before a token whose path is less likely to be the target's")
    ] = 0.2


# What drafts fastest there. On GPUs the products of four bits unpack too slowly to gain from reading less.
_COPIED_IN = {"cpu": "w4a8"}


class SelfOptions(BaseModel, frozen=True, extra="forbid"):
    """The self-drafter: a copy of the target in few bits (EfficientRollout 4.1)."""

    format: Annotated[
        Literal["auto", "none", "w4a8", "w8a8", "w4a16", "fp8"],
        Field(
            description="of the copy's matrices; auto: w4a8 on CPU, w8a8 on GPU, or w4a16 where only that fits; none: "
            "there is no copy"
        ),
    ] = "auto"

    def on(self, device: str) -> str | None:
        """The format on this kind of device; None for no copy."""
        if self.format == "none":
            return None
        return _COPIED_IN.get(device, "w8a8") if self.format == "auto" else self.format


class OwnDrafterOptions(BaseModel, frozen=True, extra="forbid"):
    """A drafter of your own (native engine)."""

    name: Annotated[
        str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="what strategies and metrics call it, as in NAME:4")
    ]
    function: Annotated[
        str, AfterValidator(OWN_PATH), OWN_PATH, Field(description="a class, or a function that makes a drafter")
    ]
    arguments: Annotated[
        dict[str, Any], Field(description="keyword arguments beside slots and max_tokens, the engine's sizes")
    ] = {}


class RooflineOptions(BaseModel, frozen=True, extra="forbid"):
    """mode: roofline (EfficientRollout 4.2, 4.3)."""

    margin: Annotated[float, Field(ge=0, le=1, description="on where the predicted speed-up exceeds 1 + margin")] = 0.05
    near_ceiling: Annotated[
        float, Field(gt=0, le=1, description="longer drafts where a step brings this share of the most it could")
    ] = 0.85
    patience: Annotated[int, Field(ge=1, description="rollouts of one verdict before the draft length changes")] = 2


_PAPER = OnlyWith("mode", ("paper",), when="mode")
ELASTIC, UNLIMITED = 32, 1 << 30  # requests: TLT 5.1, for selectors that know no plain decoding; for those that do


class SpeculationOptions(BaseModel, frozen=True, extra="forbid"):
    """Speculative decoding of rollouts. Never changes a token (verification: coupled) or their distribution."""

    mode: Annotated[
        Literal["off", "adaptive", "roofline", "paper", "fixed"],
        Field(
            description="adaptive: the most tokens per second by what steps cost and what is accepted, plain "
            "decoding among them; roofline: EfficientRollout's toggle and draft-length ladder; paper: TLT Algorithm 1 "
            "as printed"
        ),
    ] = "adaptive"
    verification: Annotated[
        Literal["coupled", "rejection"],
        Field(
            description="coupled: the very tokens of plain decoding; rejection: their distribution only, the default "
            "and the only one with backend vllm"
        ),
    ] = "coupled"
    max_running: Annotated[
        int | None,
        Field(
            ge=1,
            description="the elastic switch: speculate while at most so many requests run; default: 32 in modes paper "
            "and fixed, no limit in adaptive and roofline, which weigh plain decoding anyway",
        ),
    ] = None
    strategies: Annotated[
        tuple[str, ...] | None, Field(description="arms, e.g. suffix:8 or eagle:4x2/12; default: by drafters at hand")
    ] = None
    calibration: Annotated[
        str,
        Field(
            description="what passes and drafts cost: auto begins with what earlier runs and `paceline calibrate` "
            "measured for this model, precision and device, and adds to it; off begins with nothing; a path is taken "
            "or refused"
        ),
    ] = "auto"
    exploration: Annotated[
        float,
        Field(ge=0, le=0.5, description="share of decode time spent on other arms"),
        OnlyWith("mode", ("adaptive",), when="mode"),
    ] = 0.01
    budget: Annotated[
        Literal["length_aware", "none"],
        Field(
            description="length_aware (mode adaptive, backend native): requests that will hold up the batch draft more"
        ),
        OnlyWith("mode", ("adaptive",), when="mode"),
    ] = "none"
    # mode: paper
    window: Annotated[int, Field(ge=1, description="mode paper: steps remembered per strategy")] = 32
    seed: Annotated[int, Field(description="mode paper: of exploration's random stream"), _PAPER] = 0
    epsilon: Annotated[float, Field(ge=0, le=1, description="mode paper: exploration probability"), _PAPER] = 0.1
    batch_thresholds: Annotated[
        tuple[int, ...] | None,
        Field(description="mode paper: first batch size of each bucket, ascending, from 1"),
        _PAPER,
    ] = None
    suffix: SuffixOptions = SuffixOptions()
    eagle: EagleOptions = EagleOptions()
    self: SelfOptions = SelfOptions()
    drafters: Annotated[
        tuple[OwnDrafterOptions, ...],
        Field(description="of your own; they draft beside the others, or alone where strategies name only them"),
    ] = ()
    roofline: Annotated[RooflineOptions, OnlyWith("mode", ("roofline",), when="mode")] = RooflineOptions()

    @property
    def running_limit(self) -> int:
        """The most running requests beside which drafts are considered."""
        if self.max_running is not None:
            return self.max_running
        return ELASTIC if self.mode in ("paper", "fixed") else UNLIMITED

    @field_validator("strategies")
    @classmethod
    def _parses(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in value or ():
            Strategy.parse(text)
        return value
