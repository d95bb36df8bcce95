"""Low-bit checkpoints in the `compressed-tensors` format, which stock vLLM loads directly.

Writes config.json's entry and the model directory. `models.low_bit` does the rounding; its names and bytes are those of
this format, so engines receive the same names.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from config.formats import FORMATS, LowBitFormat
from models.directory import write_checkpoint
from models.low_bit import quantised

_LAYOUTS: Mapping[str, str] = {"int8": "int-quantized", "float8_e4m3fn": "float-quantized"}  # by LowBitFormat.stored
EXPORTED = tuple(form.name for form in FORMATS.values() if form.stored in _LAYOUTS)


def quantization_config(form: LowBitFormat) -> dict[str, Any]:
    """Return config.json's `quantization_config`.

    Raises ValueError for grouped formats with zero points: `compressed-tensors` stores those differently, with eight
    values per int32."""
    if form.stored not in _LAYOUTS:
        raise ValueError(f"no checkpoint is written in {form.name}: only {', '.join(EXPORTED)} (compressed-tensors)")
    numbers = {"num_bits": form.bits, "type": "int" if form.stored == "int8" else "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": _LAYOUTS[form.stored],
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
    }


def write_quantised(
    config: Mapping[str, Any],
    named: Iterable[tuple[str, Tensor]],
    form: LowBitFormat,
    out_dir: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    source_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Write a model directory whose layers are in `form`, from a full-precision model's config.json and tensors.

    `dtype`: the tensors are first rounded to it, as by a learner that publishes in it; default: not rounded. Raises
    ValueError (see `quantization_config`), and as `models.directory.write_checkpoint`.
    """
    described = dict(config) | {"quantization_config": quantization_config(form)}
    rounded = ((name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in named)
    whole = str(dtype or torch.float32).removeprefix("torch.")
    write_checkpoint(
        described | {"dtype": config.get("dtype", whole) if dtype is None else whole},
        quantised(rounded, form),
        out_dir,
        tokenizer_dir=tokenizer_dir,
        source_dir=source_dir,
    )
