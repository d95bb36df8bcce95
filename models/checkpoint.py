"""Hugging Face checkpoints in and out: a directory with config.json and safetensors. Owns names, fusing, sharding of
files and atomic replacement; never the optimizer or the run's state (actors/training)."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from models.config import ConfigError, ModelConfig
from models.layout import hf_layout
from models.transformer import Transformer

MAX_SHARD_BYTES = 5 * 2**30
_INDEX = "model.safetensors.index.json"
_SIDE_FILES = (  # Copied beside the weights when the source directory has them.
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


class WeightsMismatchError(ValueError):
    """The tensors of a checkpoint are not those of the model; the message names the first that differ."""


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a model directory (or the file itself); ConfigError if there is none or it is not JSON."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: model.path must be a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} does not hold a JSON object")
    return config


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_invariant: bool = True,
) -> Transformer:
    """The model in a Hugging Face directory, converted to `dtype`.

    Raises UnsupportedModelError (another architecture), ConfigError, WeightsMismatchError.
    """
    model = _empty(ModelConfig.from_hf(read_config(path)), dtype, device, batch_invariant)
    with SafetensorsDirectory(Path(path)) as tensors:
        load_hf_state_dict(model, tensors)
    return model


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
    model = _empty(config, dtype, device, batch_invariant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                values = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(values.normal_(0.0, config.initializer_range, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
    return model


def _empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, batch_invariant: bool) -> Transformer:
    return Transformer(config, dtype=dtype, device=device, batch_invariant=batch_invariant)


def hf_state_dict(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face names and unfused tensors, in a fixed order. Views of the live parameters, detached.

    Of a sharded (FSDP2) model: full tensors, gathered; every rank must call it.
    """
    full: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        full[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return {piece.hf_name: full[piece.parameter][piece.start : piece.stop] for piece in hf_layout(model.config)}


@torch.no_grad()
def load_hf_state_dict(model: Transformer, mapping: Mapping[str, Tensor]) -> None:
    """Copy unfused tensors into the model, in place, converting dtype; nothing is changed if names or shapes differ.

    A tied model accepts a redundant lm_head.weight. Of a sharded (FSDP2) model: every rank passes the full tensors.
    """
    layout = hf_layout(model.config)
    parameters = dict(model.named_parameters())
    expected = {piece.hf_name: parameters[piece.parameter][piece.start : piece.stop].shape for piece in layout}
    check_names(expected, mapping, also_allowed={"lm_head.weight"} if model.lm_head is None else set())
    check_shapes(expected, mapping)
    fused: list[Tensor] = []
    for index, piece in enumerate(layout):
        target = parameters[piece.parameter]
        if not isinstance(target, DTensor):
            target[piece.start : piece.stop].copy_(mapping[piece.hf_name])
            continue
        fused.append(mapping[piece.hf_name].to(target.device, target.dtype))
        if index + 1 == len(layout) or layout[index + 1].parameter != piece.parameter:
            copy_full(target, torch.cat(fused))
            fused = []


def copy_full(target: DTensor, full: Tensor) -> None:
    """Copy this rank's part of a full tensor, which every rank holds, into a sharded parameter."""
    target.copy_(distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None))


def check_names(expected: Mapping[str, Any], given: Mapping[str, Any], *, also_allowed: set[str]) -> None:
    """WeightsMismatchError unless `given` has the expected names (inv_freq buffers of old checkpoints are ignored)."""
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


class SafetensorsDirectory(Mapping[str, Tensor]):
    """The tensors of a model directory, one file or sharded, read when asked for."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Any] = {}
        index = path / _INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = [file.name for file in [path / "model.safetensors"] if file.is_file()]
        if not names:
            raise WeightsMismatchError(f"{path} has neither model.safetensors nor {_INDEX}")
        for name in names:
            try:
                file: Any = safe_open(path / name, framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own and OS errors alike
                raise WeightsMismatchError(f"{path / name} cannot be read as safetensors: {error}") from error
            keys: list[str] = file.keys()
            self._files |= dict.fromkeys(keys, file)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def shape_of(self, name: str) -> list[int]:
        """Without reading the tensor."""
        shape: list[int] = self._files[name].get_slice(name).get_shape()
        return shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> "SafetensorsDirectory":
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()


def save_model(
    model: Transformer,
    out_dir: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Write a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads; see write_checkpoint."""
    write_checkpoint(
        model.config.to_hf(), hf_state_dict(model), out_dir, tokenizer_dir=tokenizer_dir, source_dir=source_dir
    )


def write_checkpoint(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, safetensors and the tokenizer's files, atomically: out_dir is the old or the new model.

    `tokenizer_dir` and `source_dir` (the model this one came from: generation_config.json) are copied from if given.
    An existing out_dir is replaced if it holds a model; anything else raises FileExistsError. On an error, a full disk
    included, the old directory is intact and nothing is left beside it.
    """
    out = Path(out_dir)
    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not a model directory: not overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for source in (source_dir, tokenizer_dir):
            _copy_side_files(source, temporary)
        _write_weights(tensors, temporary, max_shard_bytes)
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        _write_json(temporary / "config.json", dict(config) | ({"dtype": dtypes.pop()} if len(dtypes) == 1 else {}))
        for file in temporary.iterdir():
            _sync(file)
        temporary.chmod(0o755)
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_side_files(source: str | os.PathLike[str] | None, target: Path) -> None:
    for name in _SIDE_FILES if source is not None else ():
        if source is not None and (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def _write_weights(tensors: Mapping[str, Tensor], directory: Path, max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # clone: safetensors refuses views that share a storage, which the slices of fused parameters do.
        contiguous = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in shard.items()}
        save_file(contiguous, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(new: Path, out: Path) -> None:
    """rename(2) cannot replace a directory that is not empty: move the old one aside, and back if the swap fails."""
    if not out.exists():
        new.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    out.rename(aside / "model")
    try:
        new.rename(out)
    except BaseException:
        (aside / "model").rename(out)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def parameter_count(model: nn.Module) -> int:
    """Number of weights; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
