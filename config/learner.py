"""The `learner:` and `warmup:` sections of the configuration. Names and ranges only; imports neither torch nor ray."""

import os
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from config.model import LoraOptions
from config.rules import CUDA, Shares


class OptimizerOptions(BaseModel, frozen=True, extra="forbid"):
    """Optimizer and learning-rate schedule."""

    name: Annotated[
        Literal["adamw", "muon"], Field(description="muon: torch.optim.Muon for matrices, AdamW for the rest")
    ] = "adamw"
    lr: Annotated[float, Field(gt=0, le=10, description="peak learning rate")] = 1e-6
    betas: Annotated[tuple[float, float], Field(description="AdamW's"), Shares()] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, description="AdamW's")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="decoupled weight decay")] = 0.0
    warmup_steps: Annotated[int, Field(ge=0, description="linear warm-up, optimizer steps")] = 0
    schedule: Annotated[
        Literal["constant", "linear", "linear_half"],
        Field(description="after warm-up; linear: to 0; linear_half: constant to half time, then to 0"),
    ] = "constant"
    max_grad_norm: Annotated[float, Field(gt=0, description="gradients are clipped to this norm")] = 1.0


class WarmupOptimizerOptions(OptimizerOptions, frozen=True, extra="forbid"):
    """Optimizer and learning-rate schedule of the warm start."""

    lr: Annotated[
        float, Field(gt=0, description="peak learning rate for fresh weights; use about 1e-5 for pretrained ones")
    ] = 3e-3
    warmup_steps: Annotated[int, Field(ge=0, description="linear warm-up, optimizer steps")] = 40
    schedule: Annotated[
        Literal["constant", "linear", "linear_half"],
        Field(description="after warm-up; linear: to 0; linear_half: constant to half time, then to 0"),
    ] = "linear_half"


class LearnerOptions(BaseModel, frozen=True, extra="forbid"):
    """The learner group."""

    ranks: Annotated[int, Field(ge=1, le=10_000, description="FSDP2 ranks, one process each")] = 1
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="device of the learner"), CUDA] = "auto"
    threads: Annotated[int | None, Field(ge=1, le=4096, description="CPU threads; default: cores / ranks")] = None
    micro_batch_tokens: Annotated[
        int, Field(ge=1, description="tokens of a micro-batch per rank; changes memory and speed only")
    ] = 8192
    mini_batches: Annotated[int, Field(ge=1, description="optimizer steps per RL step")] = 1
    packing: Annotated[bool, Field(description="pack sequences; false: pad them (for comparison)")] = True
    activation_checkpointing: Annotated[
        bool,
        Field(description="less memory, one more forward pass"),
    ] = False
    autocast_bf16: Annotated[bool, Field(description="float32 master weights, bfloat16 compute")] = False
    quantization: Annotated[
        Literal["rollout", "none"],
        Field(description="rollout: compute as rollout.quantization does (QaRL); none: full precision, unaligned"),
    ] = "rollout"
    lora: Annotated[
        LoraOptions | None,
        Field(description="Train low-rank adapters only. null: all weights."),
    ] = None
    optimizer: OptimizerOptions = OptimizerOptions()
    timeout_s: Annotated[float, Field(gt=0, description="a rank that takes longer for a call is lost")] = 1800.0
    max_restarts: Annotated[
        int,
        Field(
            ge=0,
            description="restarts of the group after a lost rank; 0: the run ends and can be resumed",
        ),
    ] = 3

    def threads_of(self, ranks_on_node: int) -> int:
        """Return the CPU threads of each rank, for this number of ranks on the machine."""
        return self.threads or max(1, (os.cpu_count() or 1) // ranks_on_node)


class WarmupOptions(BaseModel, frozen=True, extra="forbid"):
    """Supervised warm start from demonstrations, before RL (`paceline warmup`; cached by content)."""

    data: Annotated[str, Field(description="file of demonstrations, with prompt_field and response_field")]
    response_field: Annotated[str, Field(description="record field with the response")] = "response"
    init: Annotated[
        Literal["random", "checkpoint"],
        Field(description="checkpoint: start from model.path; random: fresh weights for its config.json"),
    ] = "checkpoint"
    steps: Annotated[int, Field(ge=1, description="optimizer steps")] = 1000
    batch_size: Annotated[int, Field(ge=1, description="demonstrations per optimizer step")] = 16
    optimizer: WarmupOptimizerOptions = WarmupOptimizerOptions()
