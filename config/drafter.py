"""The `drafter:` section of the configuration. Names and ranges only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from config.rules import OnlyWith, Shares

Algorithm = Literal["eagle", "hass", "eagle3", "osd"]
DrafterLoss = Literal["cross_entropy", "tv", "lk"]
Collectives = Literal["auto", "gloo"]


class RecordingOptions(BaseModel, frozen=True, extra="forbid"):
    """Source of the hidden states that the drafter learns from."""

    source: Annotated[
        Literal["engine", "learner"],
        Field(
            description="engine: while decoding; learner: in its forward pass, one version late, the only one with vllm"
        ),
    ] = "engine"
    max_bytes_per_step: Annotated[
        int, Field(ge=1 << 16, description="bytes per worker (or learner rank) and RL step at most")
    ] = 256 << 20


class BufferOptions(BaseModel, frozen=True, extra="forbid"):
    """The online data buffer (TLT 4.2): one per node, in host memory, kept across RL steps."""

    max_bytes: Annotated[int, Field(ge=1 << 20, description="host memory per node")] = 1 << 30
    max_age_steps: Annotated[int, Field(ge=1, description="sequences older than this many RL steps are evicted")] = 4
    long_share: Annotated[
        float, Field(ge=0, le=1, description="share of tokens from long sequences of the previous step")
    ] = 0.5
    long_quantile: Annotated[
        float, Field(ge=0, lt=1, description="a sequence is long above this quantile of its step")
    ] = 0.5


class CanaryOptions(BaseModel, frozen=True, extra="forbid"):
    """Rolls back drafter weights whose acceptance collapses."""

    floor: Annotated[
        float, Field(ge=0, le=1, description="roll back below this share of the acceptance before the swap")
    ] = 0.5
    min_drafted: Annotated[int, Field(ge=1, description="drafted tokens before the check")] = 256


class OfflineOptions(BaseModel, frozen=True, extra="forbid"):
    """The drafter's start before the first RL step: a fit to the initial target's own rollouts of data.train."""

    samples: Annotated[int, Field(ge=1, description="rollouts per prompt")] = 4
    limit: Annotated[int | None, Field(ge=1, description="number of prompts; default: all")] = None
    max_steps: Annotated[int, Field(ge=1, description="micro-steps at most")] = 20_000


class DrafterOptions(BaseModel, frozen=True, extra="forbid"):
    """Training of the EAGLE drafter on idle rollout workers (TLT 4)."""

    train: Annotated[bool, Field(description="train the drafter on idle rollout workers")] = False
    algorithm: Annotated[Algorithm, Field(description="training recipe (TLT Figure 7)")] = "eagle"
    loss: Annotated[
        DrafterLoss,
        Field(description="tv: learns what rejection accepts; lk: cross-entropy first, then tv"),
        OnlyWith("algorithm", ("eagle", "hass", "eagle3"), when="train"),
    ] = "cross_entropy"
    layers: Annotated[
        tuple[int, int, int] | None,
        Field(description="eagle3: target layers whose outputs are fused; default: low, middle, top"),
        OnlyWith("algorithm", ("eagle3",), when="train"),
    ] = None
    learning_rate: Annotated[
        float, Field(gt=0, description="learning rate of a fit; a fitted drafter continues at a tenth of it")
    ] = 1e-3
    warmup_steps: Annotated[int, Field(ge=0, description="linear warm-up, micro-steps")] = 20
    weight_decay: Annotated[float, Field(ge=0, description="AdamW's")] = 0.0
    betas: Annotated[tuple[float, float], Field(description="AdamW's"), Shares(when="train")] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0, description="gradients are clipped to this norm")] = 1.0
    micro_step_tokens: Annotated[int, Field(ge=64, description="tokens packed into one micro-step")] = 2048
    every_steps: Annotated[int, Field(ge=1, description="RL steps between trainings at least")] = 1
    drift: Annotated[
        float, Field(ge=0, le=1, description="train when acceptance fell by this share of its best; 0: always")
    ] = 0.0
    while_it_pays: Annotated[
        bool,
        Field(
            description="begin once a worker was idle for 2 s, stop where it does not pay; not with every_steps, drift"
        ),
    ] = True
    checkpoint_every: Annotated[int, Field(ge=1, description="micro-steps between checkpoints")] = 50
    checkpoint_keep: Annotated[int, Field(ge=1, description="number that is kept")] = 2
    collectives: Annotated[
        Collectives,
        Field(description="auto: NCCL between GPUs; gloo: over the hosts, slower"),
    ] = "auto"
    stop_timeout_s: Annotated[float, Field(gt=0, description="a trainer that takes longer to stop is killed")] = 2.0
    seed: Annotated[int, Field(description="seed of fresh weights and of the buffer's choice")] = 0
    offline: Annotated[
        OfflineOptions | None, Field(description="Fit the drafter before the first RL step. Later runs reuse it.")
    ] = None
    recording: RecordingOptions = RecordingOptions()
    buffer: BufferOptions = BufferOptions()
    canary: CanaryOptions = CanaryOptions()
