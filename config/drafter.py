"""The `drafter:` section of the configuration. Owns names and ranges only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Algorithm = Literal["eagle", "hass", "eagle3", "osd"]
Collectives = Literal["auto", "gloo"]


class RecordingOptions(BaseModel, frozen=True, extra="forbid"):
    """Where the hidden states come from that the drafter learns from."""

    source: Annotated[
        Literal["engine", "learner"],
        Field(
            description="engine: while decoding; learner: from its forward pass (one version late), the default and "
            "the only one with backend vllm"
        ),
    ] = "engine"
    max_bytes_per_step: Annotated[
        int, Field(ge=1 << 16, description="per rollout worker (or learner rank) and RL step; the rest is not recorded")
    ] = 256 << 20


class BufferOptions(BaseModel, frozen=True, extra="forbid"):
    """The online data buffer (TLT 4.2): one per node, in host memory, kept across RL steps."""

    max_bytes: Annotated[int, Field(ge=1 << 20, description="host memory per node")] = 1 << 30
    max_age_steps: Annotated[int, Field(ge=1, description="older sequences, in RL steps, leave")] = 4
    long_share: Annotated[
        float, Field(ge=0, le=1, description="one-step offset: share of tokens from long sequences of the step before")
    ] = 0.5
    long_quantile: Annotated[
        float, Field(ge=0, lt=1, description="a sequence above this quantile of its step's lengths is long")
    ] = 0.5


class CanaryOptions(BaseModel, frozen=True, extra="forbid"):
    """New drafter weights whose acceptance collapses are rolled back."""

    floor: Annotated[float, Field(ge=0, le=1, description="of the acceptance before the swap; below: roll back")] = 0.5
    min_drafted: Annotated[int, Field(ge=1, description="drafted tokens before it judges")] = 256


class OfflineOptions(BaseModel, frozen=True, extra="forbid"):
    """The drafter's start before the first RL step: a fit to the initial target's own rollouts of data.train."""

    samples: Annotated[int, Field(ge=1, description="rollouts per prompt to learn from")] = 4
    limit: Annotated[int | None, Field(ge=1, description="prompts; default: all")] = None
    max_steps: Annotated[int, Field(ge=1, description="micro-steps, if no plateau is reached before")] = 20_000


class DrafterOptions(BaseModel, frozen=True, extra="forbid"):
    """Training of the EAGLE drafter on rollout workers that have run out of work (TLT 4)."""

    train: Annotated[bool, Field(description="spot training on idle rollout workers")] = False
    algorithm: Annotated[Algorithm, Field(description="loss, inputs and training-time test (TLT Figure 7)")] = "eagle"
    layers: Annotated[
        tuple[int, int, int] | None,
        Field(description="eagle3: target layers whose outputs are fused; default: low, middle and top"),
    ] = None
    learning_rate: Annotated[
        float, Field(gt=0, description="of a fit, and of fresh weights; what was fitted is followed at a tenth of it")
    ] = 1e-3
    warmup_steps: Annotated[int, Field(ge=0, description="micro-steps of linear warm-up of the learning rate")] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    micro_step_tokens: Annotated[int, Field(ge=64, description="tokens packed into one micro-step")] = 2048
    every_steps: Annotated[int, Field(ge=1, description="train at most once in so many RL steps")] = 1
    drift: Annotated[
        float, Field(ge=0, le=1, description="train when acceptance fell by this share of its best; 0: always")
    ] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1, description="micro-steps between checkpoints")] = 50
    checkpoint_keep: Annotated[int, Field(ge=1, description="how many are kept")] = 2
    collectives: Annotated[
        Collectives,
        Field(description="how trainers sum gradients; auto: NCCL between GPUs; gloo: always over the hosts, slower"),
    ] = "auto"
    stop_timeout_s: Annotated[float, Field(gt=0, description="a trainer that has not stopped by then is killed")] = 2.0
    seed: Annotated[int, Field(description="of fresh weights and of what buffers choose")] = 0
    offline: Annotated[
        OfflineOptions | None, Field(description="fit before the first RL step, kept for later runs; default: none")
    ] = None
    recording: RecordingOptions = RecordingOptions()
    buffer: BufferOptions = BufferOptions()
    canary: CanaryOptions = CanaryOptions()
