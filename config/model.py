"""The `model:` and `learner.lora:` sections of the configuration. Names and ranges only; imports neither torch nor
ray."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from config.rules import NotWith

DType = Literal["float32", "bfloat16"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ModelOptions(BaseModel, frozen=True, extra="forbid"):
    """The network that is trained, and its numerics."""

    path: Annotated[
        str,
        Field(description="folder, Hub id, GGUF file, or package:NAME (docs/howto/data.md)"),
    ]
    tokenizer: Annotated[str | None, Field(description="tokenizer directory; default: model.path")] = None
    dtype: Annotated[DType, Field(description="dtype of weights and activations in engine and learner")] = "float32"
    batch_invariant: Annotated[
        bool | Literal["engine"] | None,
        Field(
            description="a row's logits do not depend on its batch; true: engine and learner, CPU only, default there; "
            "engine: the native engine, GPU too"
        ),
    ] = None
    implementation: Annotated[
        Literal["auto", "native", "transformers"],
        Field(description="learner's network; auto: native where possible"),
        NotWith(
            "rollout.quantization",
            own="transformers",
            said="transformers, whose layers the learner cannot round as rollout.quantization={other} does",
            remedy="leave it out (our own Llama, Mistral, Qwen2, Qwen3), or set rollout.quantization=none",
        ),
        NotWith(
            "learner.lora",
            own="transformers",
            said="transformers, whose projections learner.lora does not adapt",
            remedy="leave it out (our own Llama, Mistral, Qwen2, Qwen3), or leave learner.lora out",
        ),
    ] = "auto"


class LoraOptions(BaseModel, frozen=True, extra="forbid"):
    """Adapters of low rank, trained in the place of the weights (Hu et al. 2021, arXiv 2106.09685)."""

    rank: Annotated[int, Field(ge=1, description="rank of each update B A")] = 16
    alpha: Annotated[float, Field(gt=0, description="scale of the update is alpha / rank")] = 32.0
    targets: Annotated[
        tuple[LoraTarget, ...],
        Field(min_length=1, description="projections that get adapters; default: all of a layer"),
    ] = LORA_TARGETS
    rslora: Annotated[bool, Field(description="scale by alpha / sqrt(rank), like peft's use_rslora")] = False
    dropout: Annotated[
        float, Field(ge=0, lt=1, description="only 0 is possible: two passes over a sequence must agree")
    ] = 0.0
    bf16_gradients: Annotated[
        bool,
        Field(description="multiply gradients in bfloat16 on CPUs with AVX-512 BF16; log-probs keep their bits"),
    ] = False
    path: Annotated[
        str | None, Field(description="directory of a peft adapter to continue; default: fresh ones, B = 0")
    ] = None

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def batch_invariance(model: ModelOptions, device: str, key: str, *, engine: bool = False) -> bool:
    """Return whether an engine's or a learner's network is built batch-invariant on this kind of device.

    `key` is the setting that names the network's device, for the message. Raises ValueError if the configuration
    requires an invariance that a GPU does not have.
    """
    if device == "cpu":
        return model.batch_invariant is not False
    if model.batch_invariant is True:
        raise ValueError(
            f"model.batch_invariant is true, which holds on CPU only, and this process has a {device} device: set "
            f"{key}=cpu, or model.batch_invariant=engine, or leave it unset"
        )
    return engine and model.batch_invariant == "engine"
