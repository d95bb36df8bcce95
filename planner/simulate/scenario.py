"""The scenario of a simulated run: its inputs, in one YAML or JSON file. Owns names, ranges and contradictions.

The author is responsible for every number: measured, taken from a table, or assumed. Only a device's data sheet and a
public model's shape are looked up, both by name.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from config.catalogue import CATALOGUE, TRAINED
from config.coordinator import CoordinatorOptions
from config.rounds import RoundsOptions
from config.strategy import Strategy
from config.token_budget import AbortOptions, BudgetOptions
from launch.config.issues import ConfigError, Issue
from planner.simulate.shapes import SHAPES

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
FORMATS = ("w4a16", "w8a8", "fp8", "w4a8")


class ModelShape(BaseModel, frozen=True, extra="forbid"):
    """The counts of a decoder-only transformer."""

    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    item_bytes: Literal[2, 4] = 2


class FleetShape(BaseModel, frozen=True, extra="forbid"):
    """Machines. Workers are rollout instances of `gpus_per_worker` GPUs, never across nodes."""

    nodes: Annotated[int, Field(ge=1, le=65536, description="that roll out; with colocated, that learn as well")] = 8
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] = 8
    gpus_per_worker: Annotated[int, Field(ge=1, le=64, description="tensor parallel")] = 1
    layout: Annotated[
        Literal["colocated", "disaggregated"], Field(description="the learner on the same GPUs, or on nodes of its own")
    ] = "disaggregated"
    learner_nodes: Annotated[int, Field(ge=1, description="disaggregated: nodes of the learner")] = 1
    min_workers: Annotated[
        int | None, Field(ge=1, description="workers come and go, so many stay (disaggregated); null: all stay")
    ] = None
    idle_timeout_s: Annotated[_Seconds, Field(description="a node without workers is paid for so long")] = 300.0
    device: Annotated[str | None, Field(description="a GPU by name, for rooflines and memory; null: a CPU machine")] = (
        "H100"
    )

    @property
    def workers_per_node(self) -> int:
        return self.gpus_per_node // self.gpus_per_worker

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node


class Lengths(BaseModel, frozen=True, extra="forbid"):
    """Response lengths in tokens: lognormal with a share that reaches the limit, or given ones by prompt."""

    median: Annotated[_Positive, Field(description="lognormal")] = 1000.0
    sigma: Annotated[float, Field(ge=0, le=4, description="standard deviation of the logarithm")] = 1.0
    between: Annotated[_Share, Field(description="share of its variance that prompts differ by")] = 0.5
    runaway: Annotated[float, Field(ge=0, lt=1, description="share of responses that never end by themselves")] = 0.0
    max_tokens: Annotated[int, Field(ge=1, description="limit of a response")] = 8192
    given: Annotated[
        tuple[tuple[int, ...], ...] | None, Field(description="lengths of a prompt's responses, by prompt")
    ] = None
    file: Annotated[
        str | None, Field(description="a run's folder (its lengths.jsonl), or JSON lines with the keys below")
    ] = None


class WorkloadOptions(BaseModel, frozen=True, extra="forbid"):
    """The requests of an RL step."""

    steps: Annotated[int, Field(ge=1, le=100_000, description="RL steps, unless hours end the run")] = 4
    hours: Annotated[_Positive | None, Field(description="of virtual time; null: as many as steps take")] = None
    prompts_per_step: Annotated[int, Field(ge=1)] = 128
    rollouts_per_prompt: Annotated[int, Field(ge=1)] = 8
    pool: Annotated[int, Field(ge=1, description="different prompts")] = 8192
    known: Annotated[bool, Field(description="every prompt has been seen once: lengths, spread")] = True
    prompt_tokens: Annotated[int, Field(ge=1)] = 256
    solved: Annotated[_Share, Field(description="mean reward; prompts differ (Beta with this mean, spread 2)")] = 0.5
    grade_s: Annotated[_Seconds, Field(description="of the last response, after the rollout")] = 0.1
    probe_first: Annotated[bool, Field(description="rollout.probe_first")] = False


class EngineScenario(BaseModel, frozen=True, extra="forbid"):
    """A rollout engine."""

    max_running: Annotated[int, Field(ge=1, description="requests that decode at once")] = 128
    kv_tokens: Annotated[int | None, Field(ge=1, description="of its KV cache; null: what memory leaves")] = None
    progress_every_tokens: Annotated[int, Field(ge=1, description="prefixes reach the driver so often")] = 128
    prefill_tokens_s: Annotated[_Positive | None, Field(description="null: by the costs below")] = None


class PassPrices(BaseModel, frozen=True, extra="forbid"):
    """The cost of engine steps and drafts."""

    source: Literal["roofline", "calibration", "sweep", "table"] = "roofline"
    file: Annotated[str | None, Field(description="calibration (JSON) or sweep (CSV)")] = None
    model: Annotated[str | None, Field(description="of a sweep with several models")] = None
    fixed_s: Annotated[_Positive, Field(description="table: of a pass")] = 0.01
    row_s: Annotated[_Seconds, Field(description="table: per row")] = 1e-5
    context_s: Annotated[_Seconds, Field(description="table: per token of context")] = 0.0
    draft_s: Annotated[_Seconds, Field(description="table: per level of a draft")] = 0.0
    factor: Annotated[_Positive, Field(description="what this machine takes longer than all of that")] = 1.0
    step_s: Annotated[_Seconds, Field(description="added to every engine step")] = 0.0
    drafting_s: Annotated[_Seconds, Field(description="added to every engine step that drafts")] = 0.0
    shared: Annotated[
        tuple[_Positive, ...],
        Field(description="times longer all takes while 1, 2, ... engines of a node compute: they share its cores"),
    ] = ()


class Acceptance(BaseModel, frozen=True, extra="forbid"):
    """Acceptance of one freshly trained drafter: P that a drafted token is accepted if all before it were."""

    per_token: Annotated[float, Field(ge=0, lt=1)] = 0.7
    by_depth: Annotated[tuple[_Share, ...], Field(description="the same level by level; the last goes on")] = ()
    speaks: Annotated[_Share, Field(description="share of steps in which it has something to say")] = 1.0


class SpotTraining(BaseModel, frozen=True, extra="forbid"):
    """Drafter training on idle workers, and its effect."""

    enabled: bool = False
    micro_step_s: _Positive = 0.5
    start_s: Annotated[_Seconds, Field(description="from the command to the first micro-step")] = 2.0
    drift: Annotated[_Share, Field(description="share of the acceptance above the floor that an RL step costs")] = 0.05
    floor: Annotated[_Share, Field(description="share of acceptance that stays without training")] = 0.7
    recovery_micro_steps: Annotated[_Positive, Field(description="after which 63 % of a loss is made good")] = 200.0
    stale: Annotated[_Share, Field(description="of that loss, before the first step: 0 fresh, 1 at the floor")] = 0.0


def _known(drafter: str) -> None:
    """Raise ValueError for a drafter that is not in the catalogue."""
    if drafter not in CATALOGUE:
        close = difflib.get_close_matches(drafter, CATALOGUE, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(CATALOGUE)}"
        raise ValueError(f"no drafter is called {drafter!r}; {meant}")


class Speculation(BaseModel, frozen=True, extra="forbid"):
    """How engines draft."""

    mode: Annotated[
        Literal["off", "static", "adaptive", "roofline"],
        Field(description="static: the first strategy always; adaptive: the best by costs and acceptance"),
    ] = "off"
    strategies: Annotated[tuple[str, ...], Field(description="arms")] = CATALOGUE[TRAINED].arms
    max_running: Annotated[int, Field(ge=1, description="speculate while at most so many requests run")] = 32
    margin: Annotated[float, Field(ge=0, le=1, description="mode roofline")] = 0.05
    acceptance: Annotated[dict[str, Acceptance], Field(description="by drafter")] = {}
    copy_format: Annotated[Literal["w4a16", "w8a8", "fp8", "w4a8"], Field(description="of drafter self")] = "w8a8"
    training: SpotTraining = SpotTraining()

    @field_validator("mode", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false

    @field_validator("strategies")
    @classmethod
    def _parses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            arm = Strategy.parse(text)
            if arm.depth:
                _known(arm.drafter)
        return value

    @field_validator("acceptance")
    @classmethod
    def _of_drafters(cls, value: dict[str, Acceptance]) -> dict[str, Acceptance]:
        for drafter in value:
            _known(drafter)
        return value

    @property
    def arms(self) -> tuple[Strategy, ...]:
        return tuple(Strategy.parse(text) for text in self.strategies)


class EarlyScenario(BaseModel, frozen=True, extra="forbid"):
    """Idle workers sample the next RL step early (rollout.lookahead)."""

    enabled: bool = False
    differs: Annotated[_Positive, Field(description="early tokens to the first that new weights draw otherwise")] = (
        900.0  # experiments/lookahead, SmolLM2 at a learning rate of 1e-6
    )


class Learning(BaseModel, frozen=True, extra="forbid"):
    """The other phases of a step."""

    tokens_s: Annotated[_Positive | None, Field(description="prompt and response; null: by the roofline")] = None
    ranks: Annotated[int | None, Field(ge=1, description="null: all GPUs of the learner's nodes")] = None
    mfu: Annotated[float, Field(gt=0, le=1, description="of the roofline")] = 0.4
    checkpointing: bool = True
    log_probs: Annotated[bool, Field(description="a forward pass before the first update: a third more")] = True
    overhead_s: Annotated[_Seconds, Field(description="of a step: optimizer, data")] = 1.0
    weights_s: Annotated[_Seconds | None, Field(description="to all engines; null: by the roofline")] = None
    checkpoint_every: Annotated[int, Field(ge=0, description="RL steps; 0: never")] = 10
    checkpoint_s: _Seconds = 20.0
    failures_per_day: Annotated[_Seconds, Field(description="lost ranks, Poisson")] = 0.0
    detect_s: Annotated[_Seconds, Field(description="until a lost rank is noticed")] = 10.0
    restart_s: Annotated[_Seconds, Field(description="until the group is up again")] = 120.0
    load_s: Annotated[_Seconds, Field(description="of a checkpoint")] = 30.0


class Spot(BaseModel, frozen=True, extra="forbid"):
    """Rollout nodes that are lost and replaced."""

    interruptions_per_hour: Annotated[_Seconds, Field(description="of the whole cluster, Poisson")] = 0.0
    node_life_h: Annotated[_Positive | None, Field(description="mean life of a node, Poisson, beside it")] = None
    every_s: Annotated[_Positive | None, Field(description="regularly, instead")] = None
    trace_s: Annotated[tuple[_Seconds, ...], Field(description="times of interruptions, instead")] = ()
    takes: Annotated[Literal["node", "worker"], Field(description="what one interruption takes")] = "node"
    notice_s: Annotated[_Seconds, Field(description="from the notice to the end; 0: none comes")] = 120.0
    react_s: Annotated[_Seconds, Field(description="from the notice to drained workers")] = 2.0
    detect_s: Annotated[_Seconds, Field(description="without a notice: until the loss is noticed")] = 10.0
    capacity_s: Annotated[_Seconds, Field(description="until another machine is granted; it is not paid for")] = 30.0
    boot_s: Annotated[_Seconds, Field(description="until Ray runs there")] = 180.0
    start_s: Annotated[_Seconds, Field(description="of a worker: process, CUDA, graphs")] = 60.0
    load_s: Annotated[_Seconds, Field(description="of the present weights")] = 20.0


class Prices(BaseModel, frozen=True, extra="forbid"):
    """Price of a GPU-hour, in any currency."""

    on_demand: Annotated[_Positive, Field(description="of the learner's nodes")] = 4.0
    spot: Annotated[
        _Positive, Field(description="of disaggregated rollout nodes, interrupted or not; elsewhere on_demand")
    ] = 1.6


class Scenario(BaseModel, frozen=True, extra="forbid"):
    """The whole scenario."""

    name: str = "scenario"
    seed: Annotated[int, Field(ge=0)] = 0
    model: Annotated[str | ModelShape, Field(description="a public model by name, a shape, or a config.json")] = (
        "Qwen2.5-7B"
    )
    quantization: Annotated[
        Literal["none", "w4a16", "w8a8", "fp8", "w4a8"], Field(description="of the engines' matrices")
    ] = "none"
    fleet: FleetShape = FleetShape()
    workload: WorkloadOptions = WorkloadOptions()
    lengths: Lengths = Lengths()
    engine: EngineScenario = EngineScenario()
    costs: PassPrices = PassPrices()
    speculation: Speculation = Speculation()
    budget: BudgetOptions = BudgetOptions()
    abort: AbortOptions = AbortOptions()
    rounds: RoundsOptions = RoundsOptions()
    lookahead: EarlyScenario = EarlyScenario()
    hopeless: Annotated[_Share, Field(description="share of late responses that no answer would come from")] = 0.7
    learning: Learning = Learning()
    spot: Spot = Spot()
    prices: Prices = Prices()
    coordinator: CoordinatorOptions = CoordinatorOptions()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for issue in self._contradictions():
            raise ValueError(issue)
        return self

    def _contradictions(self) -> Iterator[str]:
        fleet = self.fleet
        if fleet.gpus_per_node % fleet.gpus_per_worker:
            yield (
                f"fleet.gpus_per_worker={fleet.gpus_per_worker} does not divide fleet.gpus_per_node="
                f"{fleet.gpus_per_node}: a worker does not cross nodes"
            )
        if isinstance(self.model, str) and self.model not in SHAPES and not self.model.endswith(".json"):
            yield f"model={self.model!r} is none of {', '.join(SHAPES)}, nor the path of a config.json, nor a shape"
        if self.costs.source in ("calibration", "sweep") and self.costs.file is None:
            yield f"costs.source={self.costs.source} needs costs.file"
        if fleet.device is None and self.costs.source == "roofline":
            yield "fleet.device=null and costs.source=roofline: a CPU's passes come of a calibration (or table)"
        if fleet.device is None and self.learning.tokens_s is None:
            yield "fleet.device=null: give learning.tokens_s, as measured"
        if fleet.device is not None and self.learner_ranks > self.learner_gpus:
            yield f"learning.ranks={self.learner_ranks}, but the learner's nodes have {self.learner_gpus} GPUs"
        if fleet.min_workers is not None and fleet.min_workers > fleet.workers:
            yield f"fleet.min_workers={fleet.min_workers} of {fleet.workers} workers"
        if fleet.min_workers is not None and fleet.layout == "colocated":
            yield "fleet.min_workers: workers on the learner's own GPUs cannot be given back (layout: colocated)"
        if self.speculation.mode != "off" and not self.speculation.strategies:
            yield "speculation.strategies is empty"
        if self.speculation.training.enabled and fleet.workers < 2:
            yield "speculation.training.enabled needs two workers: drafters learn on idle ones while others decode"
        if self.lengths.given is not None and not all(self.lengths.given):
            yield "lengths.given: a prompt without any length"
        if self.rounds.factor is not None and (self.budget.on or self.abort.enabled):
            yield "rounds.factor: leave budget and abort out, which decide by lengths too"
        if self.rounds.factor is not None and self.lookahead.enabled:
            yield "rounds.factor: leave lookahead out, which cannot know the prompts of the next round"
        if self.budget.on and self.workload.rollouts_per_prompt < 2:
            yield "budget needs workload.rollouts_per_prompt of 2 or more"

    @property
    def learner_gpus(self) -> int:
        """The GPUs of the nodes that learn."""
        fleet = self.fleet
        return fleet.gpus_per_node * (fleet.nodes if fleet.layout == "colocated" else fleet.learner_nodes)

    @property
    def learner_ranks(self) -> int:
        return self.learner_gpus if self.learning.ranks is None else self.learning.ranks

    @property
    def disturbed(self) -> bool:
        """Whether anything is lost during the run."""
        spot = self.spot
        lost = spot.interruptions_per_hour or spot.node_life_h or spot.every_s or spot.trace_s
        return bool(lost or self.learning.failures_per_day)

    def undisturbed(self, steps: int) -> "Scenario":
        """Return the scenario with nothing lost, for `steps` RL steps."""
        calm: dict[str, Any] = {"spot.interruptions_per_hour": 0.0, "spot.every_s": None, "spot.trace_s": []}
        calm |= {
            "spot.node_life_h": None,
            "learning.failures_per_day": 0.0,
            "workload.hours": None,
            "workload.steps": steps,
        }
        return with_values(self, calm)

    def but(self, **changes: Any) -> "Scenario":
        """Return the scenario with other values by dotted key, validated; `__` stands for a dot."""
        return with_values(self, {key.replace("__", "."): value for key, value in changes.items()})


def with_values(scenario: Scenario, values: dict[str, Any]) -> Scenario:
    """Set values by dotted key. Raises ConfigError."""
    tree = scenario.model_dump(mode="json")
    for key, value in values.items():
        _put(tree, key, value)
    return _validated(tree)


def load_scenario(path: Path, overrides: list[str] | None = None) -> Scenario:
    """Load a scenario from YAML or JSON (which is YAML), with `key=value` over it. Raises ConfigError, which names the
    key; OSError."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Issue("", f"{path} is no YAML: {error}")]) from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError([Issue("", f"{path} holds {type(tree).__name__}, not a mapping of keys")])
    tree.setdefault("name", path.stem)
    for section in ("lengths", "costs"):  # files are relative to the scenario
        given = tree.get(section)
        if isinstance(given, dict) and isinstance(given.get("file"), str) and not Path(given["file"]).exists():
            given["file"] = str(path.parent / given["file"])
    return scenario_of(tree, overrides or [])


def scenario_of(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """Make a scenario from nested keys, with `key=value` over them. Raises ConfigError, which names the key."""
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError([Issue("", f"{text!r} is not an override", remedy="write key=value")])
        try:
            _put(tree, key.strip(), yaml.safe_load(raw))
        except yaml.YAMLError:
            raise ConfigError([Issue(key.strip(), f"{raw!r} is no YAML value")]) from None
    return _validated(tree)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        child = tree.get(section)
        if not isinstance(child, dict):
            child = tree[section] = {}
        tree = child
    tree[last] = value


def _validated(tree: dict[str, Any]) -> Scenario:
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        issues = []
        for one in error.errors(include_url=False):
            key = ".".join(map(str, one["loc"]))
            message = one["msg"].removeprefix("Value error, ")
            remedy = "planner/simulate/scenario.py has every key" if one["type"] == "extra_forbidden" else ""
            issues.append(Issue(key, "no such key" if one["type"] == "extra_forbidden" else message, remedy=remedy))
        raise ConfigError(issues) from None
