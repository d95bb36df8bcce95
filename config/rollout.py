"""The `rollout:` section of the configuration. Names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_serializer, model_validator

from config.formats import Quantization
from config.rounds import RoundsOptions
from config.rules import CUDA, Bounded, NotWith, OnlyWith
from config.speculation import SpeculationOptions
from config.token_budget import AbortOptions, BudgetOptions, SkipOptions


class SamplingOptions(BaseModel, frozen=True, extra="forbid"):
    """How tokens are sampled."""

    temperature: Annotated[float, Field(ge=0, le=10, description="0: greedy")] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0: off")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="1: off")] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=10**8, description="tokens of a response at most")] = 1024
    stop_token_ids: Annotated[
        tuple[int, ...] | None,
        Field(
            min_length=1,
            description="tokens that end a response; default: from the model's files (docs/howto/data.md)",
        ),
    ] = None
    stop_strings: Annotated[tuple[str, ...], Field(description="texts that end a response")] = ()


class EngineOptions(BaseModel, frozen=True, extra="forbid"):
    """One rollout engine (one process)."""

    backend: Annotated[
        Literal["native", "vllm"],
        Field(description="rollout engine: Paceline's own or stock vLLM (docs/howto/vllm.md)"),
    ] = "native"
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="device of the engine"), CUDA] = "auto"
    threads: Annotated[int | None, Field(ge=1, le=4096, description="CPU threads; default: cores / workers")] = None
    tensor_parallel: Annotated[
        int | None,
        Field(
            ge=1,
            le=64,
            description="ranks (GPUs, or processes on CPU) that one engine's model is spread over, on one node; "
            "default: the GPUs of a worker (docs/howto/tensor_parallel.md)",
        ),
    ] = None
    max_running: Annotated[int, Field(ge=1, le=100_000, description="requests that are decoded together at most")] = 64
    kv_tokens: Annotated[int, Field(ge=64, le=10**10, description="size of the KV cache, tokens")] = 65_536
    block_tokens: Annotated[
        int,
        Field(ge=1, le=256, description="size of a KV block, tokens"),
        OnlyWith(
            "backend",
            ("native",),
            said="vLLM chooses the size of its KV blocks by what its kernels take",
            remedy="leave it out; rollout.engine.vllm_arguments={block_size: {value}} insists",
        ),
    ] = 16
    prefill_chunk_tokens: Annotated[int, Field(ge=16, description="prompt tokens per engine step at most")] = 1024
    max_model_tokens: Annotated[
        int | None, Field(ge=2, description="tokens of prompt and response at most; default: the model's limit")
    ] = None
    cuda_graphs: Annotated[
        bool, Field(description="CUDA: capture decoding and verification as graphs (`paceline plan-graphs`)")
    ] = True
    seeded_requests: Annotated[
        bool,
        Field(description="vllm: one random generator per request, slower (docs/howto/vllm.md)"),
        OnlyWith("backend", ("vllm",)),
    ] = False
    vllm_arguments: Annotated[
        dict[str, Any],
        Field(description="vllm: further EngineArgs, e.g. {quantization: fp8}"),
        OnlyWith("backend", ("vllm",)),
    ] = {}
    progress_every_tokens: Annotated[
        int, Field(ge=1, description="tokens between two reports of a response's progress")
    ] = 64


MOST_WORKERS = 10_000


class WorkerCount(BaseModel, frozen=True, extra="forbid"):
    """Number of rollout workers, one engine each. {min, max}: workers join and leave during the run."""

    in_short: ClassVar[str] = f"an integer, >= 1, <= {MOST_WORKERS}"  # the short form of the section

    min: Annotated[int, Field(ge=1, le=MOST_WORKERS, description="workers that a run starts with")] = 1
    max: Annotated[
        int,
        Field(ge=1, le=MOST_WORKERS, description="workers at most"),
        Bounded(">=", "min", remedy="raise it, or lower min"),
    ]

    @classmethod
    def fixed(cls, count: int) -> Self:
        return cls(min=count, max=count)

    @property
    def elastic(self) -> bool:
        return self.min < self.max

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if not 1 <= value <= MOST_WORKERS:
                raise ValueError(cls.in_short)
            return {"min": value, "max": value}
        return value

    @model_serializer
    def _short(self) -> int | dict[str, int]:
        return {"min": self.min, "max": self.max} if self.elastic else self.max


def _not_partial(section: str, on: str) -> NotWith:
    return NotWith(
        on,
        said=f"has groups end in later steps, but {section} decides by how those of this one have ended",
        remedy=f"leave one of rollout.partial.tokens_per_step and {section} out",
    )


class PartialOptions(BaseModel, frozen=True, extra="forbid"):
    """Long responses continue in the next RL step (docs/concepts/staleness.md)."""

    tokens_per_step: Annotated[
        int | None,
        Field(
            ge=1,
            description="tokens of one response in one RL step; null: no limit",
        ),
        Bounded(
            "<",
            "rollout.sampling.max_new_tokens",
            said="{value} is no less than rollout.sampling.max_new_tokens = {other}, so no response would go on",
            remedy="lower it, or leave it out",
        ),
        NotWith(
            "environment",
            said="{value}: what goes on in the next step is kept as a single response, and environment is set",
        ),
        _not_partial("rollout.budget", "rollout.budget.on"),
        _not_partial("rollout.abort", "rollout.abort.enabled"),
        _not_partial("objective.dynamic_sampling", "objective.dynamic_sampling.on"),
    ] = None
    max_steps: Annotated[
        int,
        Field(ge=2, le=1000, description="RL steps of one response at most"),
        OnlyWith("tokens_per_step"),
    ] = 4


class RolloutOptions(BaseModel, frozen=True, extra="forbid"):
    """Rollout workers and what they sample."""

    workers: WorkerCount = WorkerCount.fixed(1)
    prompts_per_step: Annotated[int, Field(ge=1, le=10**6, description="prompts per RL step")] = 16
    rollouts_per_prompt: Annotated[int, Field(ge=1, le=10**5, description="responses per prompt (group size)")] = 8
    staleness: Annotated[
        int,
        Field(
            ge=0,
            le=1,
            description="1: sample the next step while this one is learned (docs/concepts/staleness.md)",
        ),
        NotWith(
            "cluster.layout",
            ("colocated",),
            said="{value} has engines sample while the learner works, but with cluster.layout=colocated they take "
            "turns on the same GPUs",
            remedy="set cluster.layout=disaggregated, or rollout.staleness=0",
        ),
        NotWith(
            "environment",
            said="{value}: what is sampled ahead is kept as single responses, and environment is set",
            remedy="set it to 0",
        ),
    ] = 0
    lookahead: Annotated[
        Literal["auto", "always", "off"],
        Field(
            description="idle workers sample the next step early; auto: with devices of their own, while it pays; "
            "no token changes (docs/concepts/lookahead.md)"
        ),
    ] = "auto"
    probe_first: Annotated[
        bool,
        Field(
            description="one response of each prompt starts before the others, which are then expected to be as long; "
            "no token changes (docs/concepts/rounds.md)"
        ),
        NotWith("environment", said="is set, but a turn's length says nothing of an episode's"),
    ] = False
    partial: PartialOptions = PartialOptions()
    rounds: RoundsOptions = RoundsOptions()
    quantization: Annotated[
        Quantization,
        Field(description="format of layer weights and activations in rollouts; none: model.dtype"),
    ] = "none"
    budget: BudgetOptions = BudgetOptions()
    abort: AbortOptions = AbortOptions()
    skip: SkipOptions = SkipOptions()
    sampling: SamplingOptions = SamplingOptions()
    engine: EngineOptions = EngineOptions()
    speculation: SpeculationOptions = SpeculationOptions()
    max_retries: Annotated[int, Field(ge=0, description="how often one request is re-issued after lost workers")] = 3
    max_worker_restarts: Annotated[int, Field(ge=0, description="engine restarts per worker and run")] = 10
    stall_timeout_s: Annotated[float, Field(gt=0, description="a busy worker silent for longer is lost")] = 120.0
    weight_sync_timeout_s: Annotated[
        float, Field(gt=0, description="a worker that takes longer to load weights is lost")
    ] = 300.0
    max_logprob_gap: Annotated[
        float | None,
        Field(
            gt=0,
            description="mean log-prob gap of engine and learner that stops the run; default: by precision",
        ),
    ] = None
