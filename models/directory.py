"""A Hugging Face model directory on disk: config.json, safetensors (one file or sharded), tokenizer files.

Reads lazily and replaces atomically; independent of networks and parameter names.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.durable import sync

MAX_SHARD_BYTES = 5 * 2**30
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_SIDE_FILES = (  # copied beside the weights if the source directory has them
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
    """The checkpoint's tensors do not match the model; the message names the first that differs."""


class SafetensorsDirectory(Mapping[str, Tensor]):
    """The tensors of a model directory, one file or sharded, read on access."""

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
        """Return the shape without reading the tensor."""
        shape: list[int] = self._files[name].get_slice(name).get_shape()
        return shape

    def dtype_of(self, name: str) -> torch.dtype | str:
        """Return the dtype without reading the tensor; an unknown one as its name in the file."""
        code: str = self._files[name].get_slice(name).get_dtype()
        return _DTYPES.get(code, code)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> "SafetensorsDirectory":
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()


def write_checkpoint(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, safetensors and the tokenizer's files; out_dir appears, or is replaced, only when complete.

    `tensors` by name, one at a time: each is on the host before the next is requested.

    `tokenizer_dir` and `source_dir` (the model this one came from: generation_config.json) are copied from if given. An
    existing out_dir is replaced if it holds a model; anything else raises FileExistsError. After an error, such as a
    full disk, the old directory is intact and no temporary file remains. (A kill between the two renames of a
    replacement leaves the old model beside it, as .NAME.old.*/model.)
    """
    out = Path(out_dir)
    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not a model directory: not overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for source in (source_dir, tokenizer_dir):
            _copy_side_files(source, temporary)
        dtypes = _write_weights(tensors, temporary, max_shard_bytes)
        _write_json(temporary / "config.json", dict(config) | ({"dtype": dtypes.pop()} if len(dtypes) == 1 else {}))
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors writes 0600, and engines may run as another user
            sync(file)
        temporary.chmod(0o755)
        _replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_side_files(source: str | os.PathLike[str] | None, target: Path) -> None:
    for name in _SIDE_FILES if source is not None else ():
        if source is not None and (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def _write_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path, max_shard_bytes: int) -> set[str]:
    """Write the shards and return the tensors' dtypes."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size, total, dtypes = 0, 0, set[str]()

    def write() -> None:
        save_file(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > max_shard_bytes:
            write()
            size = 0
        # clone: safetensors refuses views that share a storage, which the slices of fused parameters do.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        size, total = size + tensor_bytes, total + tensor_bytes
        del tensor  # freed before the next one is made
    write()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):  # only now is their number known
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number - 1}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtypes


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _replace(new: Path, out: Path) -> None:
    """Replace a directory: rename(2) cannot replace a non-empty one, so move the old one aside, and back if the swap
    fails."""
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
