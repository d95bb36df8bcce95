"""Contradictions of learner.lora with other keys, the model and an adapter's files. Reads small files."""

from collections.abc import Iterator
from pathlib import Path

from config.tree import Config
from launch.config.issues import Issue
from models.config import ModelConfig, ModelConfigError, read_config
from models.peft import adapter_faults, adapter_shapes

_KEY = "learner.lora"


def lora_issues(c: Config) -> Iterator[Issue]:
    """Yield contradictions between keys; pure."""
    lora = c.learner.lora
    if lora is None:
        return
    if twice := sorted({name for name in lora.targets if lora.targets.count(name) > 1}):
        yield Issue(f"{_KEY}.targets", f"names {twice[0]} twice", remedy="name each once")
    if lora.dropout:
        yield Issue(
            f"{_KEY}.dropout",
            f"{lora.dropout:g}, but rollouts have no dropout, and two passes over a sequence must agree",
            remedy="leave it out",
        )
    if c.learner.autocast_bf16 and c.model.dtype == "float32":
        yield Issue(
            "learner.autocast_bf16",
            f"asks for bfloat16 where engines have float32 (model.dtype); with {_KEY} both compute in model.dtype, and "
            "adapters are float32",
            remedy="set model.dtype=bfloat16, or leave it out",
        )


def lora_fit(c: Config) -> Iterator[Issue]:
    """Yield contradictions with this machine's files."""
    lora = c.learner.lora
    if lora is None:
        return
    try:
        model = ModelConfig.from_hf(read_config(c.model.path))
    except ModelConfigError as error:
        if (Path(c.model.path) / "config.json").is_file():
            yield Issue(_KEY, f"adapts our own architectures only: {error}", remedy="leave it out")
        return
    one = lora.model_copy(update={"rank": 1})
    # A is [rank, inputs] and B is [outputs, rank]. The rank must not exceed the larger side of either.
    smallest, name = min((max(shape), name) for name, shape in adapter_shapes(model, one).items())
    if lora.rank > smallest:
        module = name.split(".")[-3]
        yield Issue(
            f"{_KEY}.rank",
            f"{lora.rank} is more than the {smallest} of {module}'s smaller side: its update would have fewer ranks",
            remedy=f"set it to {smallest} at most, or leave {module} out of {_KEY}.targets",
        )
    elif lora.path is not None:
        for key, fault, value in adapter_faults(lora.path, model, lora):
            remedy = "" if value is None else f"set {_KEY}.{key}={value}"
            yield Issue(f"{_KEY}.{key}", fault, remedy=remedy)
