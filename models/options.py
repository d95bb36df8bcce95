"""The `model:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

DType = Literal["float32", "bfloat16"]


class ModelOptions(BaseModel, frozen=True, extra="forbid"):
    """Which network is trained, and in which numerics."""

    path: Annotated[str, Field(description="Hugging Face model directory: config.json, *.safetensors, tokenizer")]
    tokenizer: Annotated[str | None, Field(description="tokenizer directory; default: model.path")] = None
    dtype: Annotated[DType, Field(description="dtype of weights and activations in engine and learner")] = "float32"
    batch_invariant: Annotated[
        bool | Literal["engine"] | None,
        Field(
            description="each row's logits bitwise independent of its batch. true: in engine and learner, on CPU only, "
            "where it is the default; engine: in the native engine on a GPU too, so that its tokens are, while a "
            "learner there agrees up to rounding"
        ),
    ] = None
    implementation: Annotated[
        Literal["auto", "native", "transformers"],
        Field(description="learner network: our own for Llama, Qwen2, Qwen3; transformers' AutoModel for the rest"),
    ] = "auto"


def batch_invariance(model: ModelOptions, device: str, key: str, *, engine: bool = False) -> bool:
    """Whether the network, an engine's or a learner's, is built batch-invariant on this kind of device. ValueError if
    more is asked of a GPU than holds there; `key` is the setting that says where the network runs, should it say auto.
    """
    if device == "cpu":
        return model.batch_invariant is not False
    if model.batch_invariant is True:
        raise ValueError(
            f"model.batch_invariant is true, which holds on CPU only, and this process has a {device} device: set "
            f"{key}=cpu, or model.batch_invariant=engine, or leave it unset"
        )
    return engine and model.batch_invariant == "engine"
