"""LoRA adapters in the files of Hugging Face's peft: adapter_model.safetensors and adapter_config.json.

Defines the format and the supported part of it; imports torch only where tensors are read or written.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.model import LORA_TARGETS, LoraOptions
from models.config import ModelConfig
from models.durable import sync
from models.layout import Slice, hf_layout
from models.manifest import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_DIR = "adapter"  # adapters alone, in a model directory that has them merged
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Path of a repository in huggingface_hub's cache.
_CACHED = re.compile(r"/models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")
_PREFIX, _A, _B, _SUFFIX = "base_model.model.", "lora_A.weight", "lora_B.weight", "weight"
# Options that change the result from W + scale * B A, with the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # other values change the base too
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}


def adapted(config: ModelConfig, options: LoraOptions) -> Iterator[Slice]:
    """Yield the matrices that get adapters, in the order of the forward pass."""
    for piece in hf_layout(config):
        module, _, kind = piece.hf_name.rpartition(".")
        if kind == _SUFFIX and module.rpartition(".")[2] in options.targets:
            yield piece


def adapter_names(weight: str) -> tuple[str, str]:
    """Return peft's names of A and B of the matrix with this Hugging Face name."""
    module = f"{_PREFIX}{weight.removesuffix(_SUFFIX)}"
    return f"{module}{_A}", f"{module}{_B}"


def adapter_shapes(config: ModelConfig, options: LoraOptions) -> dict[str, tuple[int, int]]:
    """Return the shapes of all adapters by their names in peft's files: A [rank, inputs], B [outputs, rank]."""
    shapes: dict[str, tuple[int, int]] = {}
    for piece in adapted(config, options):
        assert piece.stop is not None
        inputs = inputs_of(config, piece.hf_name)
        a, b = adapter_names(piece.hf_name)
        shapes |= {a: (options.rank, inputs), b: (piece.stop - piece.start, options.rank)}
    return shapes


def inputs_of(config: ModelConfig, weight: str) -> int:
    """Return K of a projection's matrix [N, K]."""
    match weight.split(".")[-2]:
        case "o_proj":
            return config.query_size
        case "down_proj":
            return config.intermediate_size
        case _:
            return config.hidden_size


def are_adapters(tensors: Sequence[TensorSpec]) -> bool:
    """Return whether the tensors are adapters rather than a model."""
    return bool(tensors) and tensors[0].name.endswith((_A, _B))


class AdapterError(ValueError):
    """The directory's adapter is missing or does not match these settings; the message says why."""


def adapter_faults(
    path: str | os.PathLike[str], config: ModelConfig, options: LoraOptions
) -> Iterator[tuple[str, str, object]]:
    """Yield (key of `options`, fault, expected value or None) for an adapter to continue from. Reads no tensor."""
    file = Path(path) / CONFIG_FILE
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(said, dict)
    except (OSError, ValueError, AssertionError) as error:
        yield "path", f"{file} cannot be read: {error or 'it holds no object'}", None
        return
    if said.get("peft_type") != "LORA":
        yield "path", f"{file}: peft_type is {said.get('peft_type')!r}, not 'LORA'", None
        return
    for key, allowed in _NEUTRAL.items():
        if key in said and said[key] not in allowed:
            yield "path", f"{file}: {key} is {said[key]!r}, which is not supported", None
    yield from _other_targets(file, said.get("target_modules"), config, options)
    for key, theirs in (("rank", "r"), ("alpha", "lora_alpha"), ("rslora", "use_rslora")):
        value = said.get(theirs, False if key == "rslora" else None)
        if value != getattr(options, key):
            yield key, f"{file} has {theirs} = {value}", value
            return  # the shapes differ anyway
    try:
        fault = misfit(config, options, shapes_in(path))
    except AdapterError as error:
        fault = str(error)
    if fault:
        yield "path", fault, None


def _other_targets(
    file: Path, targets: object, config: ModelConfig, options: LoraOptions
) -> Iterator[tuple[str, str, object]]:
    """Yield differences between peft's `target_modules` and `options`."""
    named = _named(targets, config)
    if named is None:
        yield "path", f"{file}: target_modules is {targets!r}, no list of modules and no pattern of them", None
        return
    words = sorted({module.rpartition(".")[2] for module in named})
    if other := [word for word in words if word not in LORA_TARGETS] or ([] if words else ["no module of the model"]):
        yield "path", f"{file} has target_modules for {', '.join(other)}, which is not supported", None
    elif left := _named(words, config) - named:  # type: ignore[operator]
        yield "path", f"{file} has target_modules without {min(left)}: adapters of some layers only", None
    elif set(words) != set(options.targets):
        yield "targets", f"{file} has target_modules for {', '.join(words)}", words


def _named(targets: object, config: ModelConfig) -> set[str] | None:
    """Return the model's modules that peft's `target_modules` names; None if its form is not supported.

    It is `all-linear`, a regular expression of a whole path, or a list of paths and path suffixes (peft's docs,
    LoraConfig)."""
    modules = [piece.hf_name.removesuffix(f".{_SUFFIX}") for piece in hf_layout(config)]
    if targets == "all-linear":
        return {module for module in modules if module.rpartition(".")[2] in LORA_TARGETS}
    if isinstance(targets, str):
        try:
            return {module for module in modules if re.fullmatch(targets, module)}
        except re.error:
            return None
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        return None
    return {module for module in modules if any(f".{module}".endswith(f".{each}") for each in targets)}


def misfit(config: ModelConfig, options: LoraOptions, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return why adapters of these shapes, by name, do not fit the model; empty if they fit."""
    expected, found = adapter_shapes(config, options), {name: tuple(shape) for name, shape in shapes.items()}
    if found == expected:
        return ""
    name = min(expected.items() ^ found.items())[0]
    return f"{name} has shape {found.get(name)}, the model's and learner.lora's has {expected.get(name)}"


def shapes_in(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, without reading tensors. Raises AdapterError."""
    file = Path(path) / WEIGHTS_FILE
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(size, file.stat().st_size)))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{file} cannot be read as safetensors: {error}") from error


def read_adapter(path: str | os.PathLike[str], config: ModelConfig, options: LoraOptions) -> "dict[str, Tensor]":
    """Return the adapter's tensors by name. Raises AdapterError for one that does not match `config` and `options`."""
    from safetensors.torch import load_file

    for key, fault, _ in adapter_faults(path, config, options):
        raise AdapterError(f"learner.lora.{key}: {fault}")
    return load_file(Path(path) / WEIGHTS_FILE)


def write_adapter(
    tensors: "Iterable[tuple[str, Tensor]]", options: LoraOptions, base: str, out_dir: str | os.PathLike[str]
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads onto the model at `base`.

    It appears, or is replaced, only when complete. A `base` in Hugging Face's cache is written as its Hub id and
    revision, which other machines can resolve."""
    from safetensors.torch import save_file

    out = Path(out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        config = json.dumps(_config(options, base), indent=2, sort_keys=True)
        (temporary / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            file.chmod(0o644)
            sync(file)
        temporary.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config(options: LoraOptions, base: str) -> dict[str, Any]:
    from_hub = _CACHED.search(base)
    return {
        "base_model_name_or_path": f"{from_hub['owner']}/{from_hub['name']}" if from_hub else base,
        **({"revision": from_hub["revision"]} if from_hub else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": options.rank,
        "target_modules": list(options.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": options.rslora,
    }
