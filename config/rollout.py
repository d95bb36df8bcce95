"""The `rollout:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_serializer, model_validator

from config.formats import Quantization
from config.rules import CUDA, Bounded, NotWith, OnlyWith
from config.speculation import SpeculationOptions
from config.token_budget import AbortOptions, BudgetOptions, SkipOptions


class SamplingOptions(BaseModel, frozen=True, extra="forbid"):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0, le=10, description="0 is greedy")] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0 is off")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="1 is off")] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=10**8, description="response limit, tokens")] = 1024
    stop_token_ids: Annotated[
        tuple[int, ...] | None,
        Field(
            min_length=1,
            description="tokens that end a response; default: what the model's files say (docs/howto/data.md)",
        ),
    ] = None
    stop_strings: Annotated[
        tuple[str, ...], Field(description="texts that end a response, with the token that completes one of them")
    ] = ()


class EngineOptions(BaseModel, frozen=True, extra="forbid"):
    """One rollout engine (one process)."""

    backend: Annotated[
        Literal["native", "vllm"], Field(description="rollout engine: our own, or stock vLLM (docs/howto/vllm.md)")
    ] = "native"
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="where the engine runs"), CUDA] = "auto"
    threads: Annotated[int | None, Field(ge=1, le=4096, description="CPU threads; default: cores/workers")] = None
    max_running: Annotated[int, Field(ge=1, le=100_000, description="requests decoded together")] = 64
    kv_tokens: Annotated[int, Field(ge=64, le=10**10, description="KV cache budget, tokens")] = 65_536
    block_tokens: Annotated[
        int,
        Field(ge=1, le=256, description="KV block size, tokens"),
        OnlyWith(
            "backend",
            ("native",),
            said="vLLM chooses the size of its KV blocks by what its kernels take",
            remedy="leave it out; rollout.engine.vllm_arguments={block_size: {value}} insists",
        ),
    ] = 16
    prefill_chunk_tokens: Annotated[int, Field(ge=16, description="prompt tokens per engine step at most")] = 1024
    max_model_tokens: Annotated[int | None, Field(ge=2, description="prompt + response limit; default: model's")] = None
    cuda_graphs: Annotated[
        bool, Field(description="on CUDA: decoding and verification as captured graphs (`paceline plan-graphs`)")
    ] = True
    seeded_requests: Annotated[
        bool,
        Field(description="vllm: a generator for each request, at a cost per token (docs/howto/vllm.md)"),
        OnlyWith("backend", ("vllm",)),
    ] = False
    vllm_arguments: Annotated[
        dict[str, Any],
        Field(description="vllm: further arguments of its EngineArgs, e.g. {quantization: fp8}"),
        OnlyWith("backend", ("vllm",)),
    ] = {}
    progress_every_tokens: Annotated[int, Field(ge=1, description="a prefix is reported every N new tokens")] = 64


MOST_WORKERS = 10_000


class WorkerCount(BaseModel, frozen=True, extra="forbid"):
    """Rollout workers, one engine each: a number, or {min, max}: a run starts with min, and more join and leave."""

    in_short: ClassVar[str] = f"an integer, >= 1, <= {MOST_WORKERS}"  # what may stand in the section's place

    min: Annotated[int, Field(ge=1, le=MOST_WORKERS, description="without so many a run does not start")] = 1
    max: Annotated[
        int,
        Field(ge=1, le=MOST_WORKERS, description="as many when there is room and work for them"),
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
    """Responses that take several RL steps, so that none waits for the longest (docs/concepts/staleness.md)."""

    tokens_per_step: Annotated[
        int | None,
        Field(
            ge=1,
            description="a response samples so many tokens in one RL step and goes on in the next, with newer weights; "
            "null: all in one",
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
        Field(ge=2, le=1000, description="RL steps that a response may take; in the last it comes to its end"),
        OnlyWith("tokens_per_step"),
    ] = 4


class RolloutOptions(BaseModel, frozen=True, extra="forbid"):
    """The rollout workers and what they are asked for."""

    workers: WorkerCount = WorkerCount.fixed(1)
    prompts_per_step: Annotated[int, Field(ge=1, le=10**6, description="prompts per RL step")] = 16
    rollouts_per_prompt: Annotated[int, Field(ge=1, le=10**5, description="responses per prompt (group size)")] = 8
    staleness: Annotated[
        int,
        Field(
            ge=0,
            le=1,
            description="updates by which the weights that sample may be older than those that learn; 1: the next step "
            "is sampled while this one is learned (docs/concepts/staleness.md)",
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
    partial: PartialOptions = PartialOptions()
    quantization: Annotated[
        Quantization,
        Field(description="weights and activations of the layers' projections in rollouts; none: in model.dtype"),
    ] = "none"
    budget: BudgetOptions = BudgetOptions()
    abort: AbortOptions = AbortOptions()
    skip: SkipOptions = SkipOptions()
    sampling: SamplingOptions = SamplingOptions()
    engine: EngineOptions = EngineOptions()
    speculation: SpeculationOptions = SpeculationOptions()
    max_retries: Annotated[int, Field(ge=0, description="re-issues of one request after lost workers")] = 3
    max_worker_restarts: Annotated[int, Field(ge=0, description="restarts of one worker's engine per run")] = 10
    stall_timeout_s: Annotated[float, Field(gt=0, description="no event from a busy worker for so long: lost")] = 120.0
    weight_sync_timeout_s: Annotated[float, Field(gt=0, description="a worker slower to take weights is lost")] = 300.0
    max_logprob_gap: Annotated[
        float | None,
        Field(gt=0, description="mean |engine - learner| log-prob above this stops the run; default by precision"),
    ] = None
