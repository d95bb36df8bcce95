"""Load and save Hugging Face checkpoints of a model: names, fusing and initialisation.

Optimizer and run state are in actors/training, the files themselves in models/directory.py."""

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from config.formats import SCALE_SUFFIX, LowBitFormat
from models import ops
from models.auto import AutoTransformer
from models.config import ModelConfig, UnsupportedModelError, read_config
from models.directory import SafetensorsDirectory, WeightsMismatchError, write_checkpoint
from models.layout import Slice, hf_layout
from models.low_bit import is_quantised, named_parts, quantise
from models.manifest import WeightsManifest
from models.pieces import Scatter, from_host
from models.transformer import Adapter, Transformer
from models.weights import Buffer, unpack

__all__ = [
    "WeightsMismatchError",
    "hf_shapes",
    "hf_state_dict",
    "hf_targets",
    "hf_tensors",
    "init_model",
    "load_causal_model",
    "load_hf_state_dict",
    "load_model",
    "load_packed",
    "parameter_count",
    "read_config",
    "save_model",
    "write_checkpoint",
]

CausalModel = Transformer | AutoTransformer
_STORED_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of checkpoints that can be trained from


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_invariant: bool = True,
    low_bit: LowBitFormat | None = None,
) -> Transformer:
    """Load the model in a Hugging Face directory, converted to `dtype`.

    With `low_bit`, the blocks' matrices are then quantised one by one, so that at most one is held in `dtype`. Raises
    UnsupportedModelError (another architecture), ModelConfigError (also if `low_bit` does not fit),
    WeightsMismatchError.
    """
    config = ModelConfig.from_hf(read_config(path))
    model = Transformer(config, dtype=dtype, device=device, batch_invariant=batch_invariant, low_bit=low_bit)
    with SafetensorsDirectory(Path(path)) as tensors:
        if low_bit is None:
            load_hf_state_dict(model, tensors)
        else:
            _load_quantised(model, tensors, low_bit, dtype)
    return model


@torch.no_grad()
def _load_quantised(model: Transformer, mapping: Mapping[str, Tensor], form: LowBitFormat, dtype: torch.dtype) -> None:
    masters = Transformer(model.config, dtype=dtype, device="meta")
    _check(masters, mapping)
    targets = hf_targets(model)
    for piece in hf_layout(model.config):
        name, tensor = piece.hf_name, mapping[piece.hf_name]
        if not is_quantised(name, tensor.dim()):
            targets[name].copy_(tensor)
            continue
        here = tensor.to(model.embed_tokens.weight.device, dtype)
        for part, values in named_parts(name, quantise(here, form)):
            targets[part].copy_(values)


def load_causal_model(
    path: str | os.PathLike[str],
    *,
    implementation: Literal["auto", "native", "transformers"] = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_invariant: bool = True,
) -> CausalModel:
    """Load the learner's network (`model.implementation`); auto: native if the architecture is supported, else
    transformers."""
    if implementation != "transformers":
        try:
            return load_model(path, dtype=dtype, device=device, batch_invariant=batch_invariant)
        except UnsupportedModelError:
            if implementation == "native":
                raise
    return AutoTransformer.load(path, dtype=dtype, device=device)


def init_model(
    path: str | os.PathLike[str],
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_invariant: bool = True,
) -> Transformer:
    """Fresh weights for the config.json at `path`: N(0, initializer_range) matrices, zero biases, unit norms.

    The same seed gives the same float32 numbers on every device; other dtypes are rounded from them.
    """
    config = ModelConfig.from_hf(read_config(path))
    model = Transformer(config, dtype=dtype, device=device, batch_invariant=batch_invariant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                values = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(values.normal_(0.0, config.initializer_range, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    return model


def hf_state_dict(model: CausalModel) -> dict[str, Tensor]:
    """Return Hugging Face names and unfused tensors, in a fixed order: detached views of the live parameters.

    Adapters are returned merged. For a sharded (FSDP2) model: full tensors, gathered all at once; every rank must call
    it.
    """
    return dict(hf_tensors(model))


def hf_tensors(model: CausalModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `hf_state_dict` one parameter at a time, in `dtype` (default: unchanged).

    The previous parameter is released before the next is gathered, so the caller needs memory for the largest only.
    With a sharded model, all ranks must iterate to the end, in step.
    """
    parameters = _tensors(model)
    for names in _groups(model):
        gathered = _gathered(model, parameters, names, dtype)
        while gathered:
            name = next(iter(gathered))
            yield name, gathered.pop(name)


def hf_shapes(model: CausalModel) -> dict[str, torch.Size]:
    """Return names and shapes of `hf_tensors`, in its order. Nothing is gathered or copied."""
    parameters = _tensors(model)
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in parameters.items()}
    return {
        name: tensor.shape for names in _groups(model) for name, tensor in _gathered(model, empty, names, None).items()
    }


def _groups(model: CausalModel) -> Iterator[list[Slice]]:
    """Yield the layout in parts that can be converted separately: slices of one parameter, or of one layer if
    transformers merges or splits tensors."""
    split = isinstance(model, AutoTransformer) and model.converts
    part_of = _layer_of if split else (lambda piece: piece.parameter)
    return (list(group) for _, group in groupby(model.layout(), key=part_of))


def _layer_of(piece: Slice) -> str:
    """Return the name up to its first number, the layer's; the whole name if there is none."""
    parts = piece.hf_name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _gathered(
    model: CausalModel, parameters: Mapping[str, Tensor], pieces: list[Slice], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    full: dict[str, Tensor] = {}
    for name in dict.fromkeys(piece.parameter for piece in pieces):
        tensor: Any = parameters[name].detach()
        if dtype is not None:
            tensor = tensor.to(dtype)  # before gathering: the same numbers, half the bytes
        full[name] = gathered(tensor)
    tensors = {piece.hf_name: full[piece.parameter][piece.start : piece.stop] for piece in pieces}
    for piece in pieces:
        tensors[piece.hf_name] = _merged(model, parameters, piece, tensors[piece.hf_name])
    return model.as_stored(tensors) if isinstance(model, AutoTransformer) else tensors


def _merged(model: CausalModel, parameters: Mapping[str, Tensor], piece: Slice, tensor: Tensor) -> Tensor:
    """Return the tensor merged with the model's adapters for it, if any."""
    module = piece.hf_name.rpartition(".")[0].rpartition(".")[2]
    place = f"{piece.parameter.removesuffix('.weight')}.adapters.{module}"
    if f"{place}.a" not in parameters:
        return tensor
    adapter = model.get_submodule(place)
    assert isinstance(adapter, Adapter)
    return ops.merge(tensor, gathered(parameters[f"{place}.a"]), gathered(parameters[f"{place}.b"]), adapter.scale)


def gathered(tensor: Any) -> Tensor:
    """Return a sharded parameter in full, detached; every rank must call it. Others are returned unchanged."""
    tensor = tensor.detach()
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def hf_targets(model: Transformer) -> dict[str, Tensor]:
    """Return the live memory of each unfused tensor by Hugging Face name: rows of our parameters. Not for sharded
    models."""
    parameters = _tensors(model)
    return {piece.hf_name: parameters[piece.parameter].detach()[piece.start : piece.stop] for piece in model.layout()}


@torch.no_grad()
def load_hf_state_dict(model: CausalModel, mapping: Mapping[str, Tensor]) -> None:
    """Copy unfused tensors into the model, in place; nothing is changed if names, shapes or dtypes differ.

    Float tensors are converted into a float32 or bfloat16 model; any other change of dtype is an error. A tied model
    accepts a redundant lm_head.weight. For a sharded (FSDP2) model, every rank passes the full tensors. Raises
    WeightsMismatchError.
    """
    layout = model.layout()
    parameters = _tensors(model)
    _check(model, mapping)
    fused: list[Tensor] = []
    for index, piece in enumerate(layout):
        target = parameters[piece.parameter]
        if not is_sharded(target):
            target[piece.start : piece.stop].copy_(mapping[piece.hf_name])
            continue
        fused.append(mapping[piece.hf_name].to(target.device, target.dtype))
        if index + 1 == len(layout) or layout[index + 1].parameter != piece.parameter:
            copy_full(target, torch.cat(fused))
            fused = []


def load_packed(model: Transformer, manifest: WeightsManifest, buffer: Buffer) -> None:
    """Copy the weights of a flat buffer into the model, in place; nothing changes if checksum, names or shapes differ.

    Onto CUDA in pieces through pinned memory if the dtypes match, without a pageable copy. Raises WeightsCorruptError,
    WeightsMismatchError.
    """
    named = dict(unpack(manifest, buffer))
    targets = hf_targets(model)
    device = next(iter(targets.values())).device
    fits = {name: (t.shape, t.dtype) for name, t in named.items()} == {
        name: (t.shape, t.dtype) for name, t in targets.items()
    }
    if device.type == "cuda" and fits:
        from_host(buffer, Scatter(manifest.tensors, targets), device)
    else:
        load_hf_state_dict(model, named)


def _check(model: CausalModel, given: Mapping[str, Tensor]) -> None:
    """Raise WeightsMismatchError unless `given` has the model's names, shapes and dtypes, or convertible float
    dtypes."""
    parameters = _tensors(model)
    expected = {piece.hf_name: parameters[piece.parameter][piece.start : piece.stop].shape for piece in model.layout()}
    check_tensors(expected, given, tied=isinstance(model, Transformer) and model.tied)
    for piece in model.layout():
        name, dtype = piece.hf_name, parameters[piece.parameter].dtype
        found = given.dtype_of(name) if isinstance(given, SafetensorsDirectory) else given[name].dtype
        convertible = found in _STORED_FLOATS and dtype in (torch.float32, torch.bfloat16)
        if found != dtype and (not convertible or name.endswith(SCALE_SUFFIX)):
            raise WeightsMismatchError(
                f"{name} is {_plain(found)}, the model's is {_plain(dtype)}, and one is not converted into the other: "
                "weights in few bits are loaded only where a model stores that format"
            )


def _plain(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, without importing that class: the import would cost every engine, and every
    learner of one rank, a good part of a second at its start."""
    return hasattr(tensor, "device_mesh")


def copy_full(target: Any, full: Tensor) -> None:
    """Copy this rank's part of a full tensor, which every rank holds, into a sharded parameter."""
    from torch.distributed.tensor import distribute_tensor

    target.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None))


def check_tensors(expected: Mapping[str, torch.Size], given: Mapping[str, Tensor], *, tied: bool) -> None:
    """Raise WeightsMismatchError unless `given` has the expected names and shapes.

    `tied`: the head shares the embedding, so lm_head.weight is not expected, but allowed if it is equal."""
    check_names(expected, given, also_allowed={"lm_head.weight"} if tied else set())
    check_shapes(expected, given)
    if (
        tied
        and "lm_head.weight" in given.keys() - expected.keys()
        and not torch.equal(given["lm_head.weight"], given["model.embed_tokens.weight"])
    ):
        raise WeightsMismatchError("lm_head.weight is not the embedding, but config.json says tie_word_embeddings")


def check_names(expected: Mapping[str, Any], given: Mapping[str, Any], *, also_allowed: set[str]) -> None:
    """Raise WeightsMismatchError unless `given` has the expected names (inv_freq buffers of old checkpoints are
    ignored)."""
    if missing := [name for name in expected if name not in given]:
        raise WeightsMismatchError(f"missing tensor {missing[0]} (and {len(missing) - 1} more) for this model's config")
    ignored = also_allowed | expected.keys()
    if extra := sorted(name for name in given if name not in ignored and not name.endswith("rotary_emb.inv_freq")):
        raise WeightsMismatchError(f"unexpected tensor {extra[0]} (and {len(extra) - 1} more) for this model's config")


def check_shapes(expected: Mapping[str, torch.Size], given: Mapping[str, Tensor]) -> None:
    shape_of = given.shape_of if isinstance(given, SafetensorsDirectory) else lambda name: given[name].shape
    for name, shape in expected.items():
        if (found := tuple(shape_of(name))) != tuple(shape):
            raise WeightsMismatchError(f"{name} has shape {list(found)}, the model's config says {list(shape)}")


def save_model(
    model: CausalModel,
    out_dir: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Write a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads; see write_checkpoint."""
    write_checkpoint(model.hf_config(), hf_tensors(model), out_dir, tokenizer_dir=tokenizer_dir, source_dir=source_dir)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and stored buffers; tied ones once, under their first name."""
    stored = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def parameter_count(model: nn.Module) -> int:
    """Number of weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
