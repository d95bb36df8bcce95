"""The `rollout.speculation:` section of the configuration. Names and ranges only."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator

from config.import_path import ImportPath
from config.rules import OnlyWith
from config.strategy import Strategy

OWN_PATH = ImportPath()


class SuffixOptions(BaseModel, frozen=True, extra="forbid"):
    """The suffix drafter (DAS 4.1): an index per problem (recent rollouts, the request's text) and one over all."""

    window_bytes: Annotated[
        int,
        Field(ge=1 << 16, description="memory of one problem's rollouts, 10 bytes per token; the oldest are evicted"),
    ] = 8 << 20
    max_bytes: Annotated[
        int,
        Field(
            ge=1 << 20, description="memory of all; the largest windows shrink first, then whole problems are evicted"
        ),
    ] = 512 << 20
    pool: Annotated[
        bool,
        Field(description="draft from all problems where a problem's own index has little; false: as in DAS"),
    ] = True
    siblings: Annotated[
        bool,
        Field(description="draft from a prompt's other responses while they are sampled, here and on other workers"),
    ] = True
    version_decay: Annotated[float, Field(gt=0, le=1, description="weight of a rollout per version of age")] = 0.8
    min_probability: Annotated[float, Field(ge=0, lt=1, description="a draft ends below this path probability")] = 0.1


class EagleOptions(BaseModel, frozen=True, extra="forbid"):
    """The EAGLE drafter; without `path` there is none."""

    path: Annotated[
        str | None, Field(description="directory of a drafter or published EAGLE-3 head; `random`: fresh weights")
    ] = None
    context_tokens: Annotated[int, Field(ge=1, description="hidden states kept for a later switch-on, tokens")] = 64
    min_probability: Annotated[float, Field(ge=0, lt=1, description="a chain ends below this path probability")] = 0.2


class SpeculatorOptions(BaseModel, frozen=True, extra="forbid"):
    """A speculator that vLLM computes."""

    path: Annotated[str | None, Field(description="its directory; none: not used")] = None


# The fastest formats for drafting. On GPUs, unpacking four bits costs more time than the smaller reads save.
_COPIED_IN = {"cpu": "w4a8"}


class SelfOptions(BaseModel, frozen=True, extra="forbid"):
    """The self-drafter: a copy of the target in few bits (EfficientRollout 4.1)."""

    format: Annotated[
        Literal["auto", "none", "w4a8", "w8a8", "w4a16", "fp8"],
        Field(description="format of the copy; auto: w4a8 on CPU, w8a8 on GPU, w4a16 if only that fits; none: no copy"),
    ] = "auto"

    def on(self, device: str) -> str | None:
        """Return the format on this kind of device; None: no copy."""
        if self.format == "none":
            return None
        return _COPIED_IN.get(device, "w8a8") if self.format == "auto" else self.format


class OwnDrafterOptions(BaseModel, frozen=True, extra="forbid"):
    """A drafter of your own (native engine)."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="name in strategies (NAME:4) and metrics")]
    function: Annotated[
        str, AfterValidator(OWN_PATH), OWN_PATH, Field(description="class or function that makes the drafter")
    ]
    arguments: Annotated[dict[str, Any], Field(description="keyword arguments beside slots and max_tokens")] = {}


class RooflineOptions(BaseModel, frozen=True, extra="forbid"):
    """mode: roofline (EfficientRollout 4.2, 4.3)."""

    margin: Annotated[
        float, Field(ge=0, le=1, description="speculate where the predicted speed-up exceeds 1 + margin")
    ] = 0.05
    near_ceiling: Annotated[
        float, Field(gt=0, le=1, description="drafts get longer where a step reaches this share of its ceiling")
    ] = 0.85
    patience: Annotated[
        int, Field(ge=1, description="rollouts with the same verdict before the draft length changes")
    ] = 2


_PAPER = OnlyWith("mode", ("paper",), when="mode")
ELASTIC, UNLIMITED = 32, 1 << 30  # requests: TLT 5.1, for modes that cannot choose plain decoding; for the others


class SpeculationOptions(BaseModel, frozen=True, extra="forbid"):
    """Speculative decoding of rollouts. Sampled tokens (coupled) or their distribution (rejection) do not change."""

    mode: Annotated[
        Literal["off", "adaptive", "roofline", "paper", "fixed"],
        Field(
            description="adaptive: highest expected tokens/s; roofline: EfficientRollout's toggle and ladder; "
            "paper: TLT Algorithm 1; fixed: the one strategy given"
        ),
    ] = "adaptive"
    verification: Annotated[
        Literal["coupled", "rejection"],
        Field(
            description="coupled: the tokens of plain decoding; rejection: their distribution, the only one with vllm"
        ),
    ] = "coupled"
    max_running: Annotated[
        int | None,
        Field(
            ge=1,
            description="speculate while at most so many requests run; default: 32 in modes paper and fixed, else no "
            "limit",
        ),
    ] = None
    strategies: Annotated[
        tuple[str, ...] | None,
        Field(description="strategies to choose from, e.g. suffix:8 or eagle:4x2/12; default: by the drafters at hand"),
    ] = None
    calibration: Annotated[
        str,
        Field(description="measured costs; auto: of this model, precision and device; off: none; else a path"),
    ] = "auto"
    exploration: Annotated[
        float,
        Field(ge=0, le=0.5, description="share of decode time for trials of other strategies"),
        OnlyWith("mode", ("adaptive",), when="mode"),
    ] = 0.01
    budget: Annotated[
        Literal["length_aware", "none"],
        Field(description="length_aware (adaptive, native): requests that will end last get longer drafts"),
        OnlyWith("mode", ("adaptive",), when="mode"),
    ] = "none"
    # mode: paper
    window: Annotated[int, Field(ge=1, description="mode paper: steps that a strategy's estimate covers")] = 32
    seed: Annotated[int, Field(description="mode paper: seed of exploration"), _PAPER] = 0
    epsilon: Annotated[float, Field(ge=0, le=1, description="mode paper: exploration probability"), _PAPER] = 0.1
    batch_thresholds: Annotated[
        tuple[int, ...] | None,
        Field(description="mode paper: first batch size of each bucket, ascending, from 1"),
        _PAPER,
    ] = None
    suffix: SuffixOptions = SuffixOptions()
    eagle: EagleOptions = EagleOptions()
    self: SelfOptions = SelfOptions()
    mtp: SpeculatorOptions = SpeculatorOptions()
    dflash: SpeculatorOptions = SpeculatorOptions()
    peagle: SpeculatorOptions = SpeculatorOptions()
    drafters: Annotated[
        tuple[OwnDrafterOptions, ...],
        Field(description="Drafters of your own, beside the others."),
    ] = ()
    roofline: Annotated[RooflineOptions, OnlyWith("mode", ("roofline",), when="mode")] = RooflineOptions()

    @property
    def running_limit(self) -> int:
        """Drafts are considered up to this number of running requests."""
        if self.max_running is not None:
            return self.max_running
        return ELASTIC if self.mode in ("paper", "fixed") else UNLIMITED

    @field_validator("strategies")
    @classmethod
    def _parses(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in value or ():
            Strategy.parse(text)
        return value
