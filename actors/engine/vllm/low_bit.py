"""A low-bit target for stock vLLM: its model directory, made from the full-precision one, and fixes for vLLM's CPU
build. `models.low_bit` has the rounding, `models.compressed_tensors` the file format.

New weights have the same format and the names of this directory: vLLM's parameters have one precision, so a low-bit
engine never computes in full precision, nor vice versa.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.engine.capabilities import VLLM
from config.formats import FORMATS, Quantization
from config.model import ModelOptions
from models.compressed_tensors import write_quantised
from models.config import ModelConfig, read_config
from models.directory import SafetensorsDirectory


def low_bit_target(model: ModelOptions, quantization: Quantization, out: Path) -> ModelOptions:
    """Write `out`: the weights of `model`, rounded to its dtype and quantised, as its learner publishes them.

    For an engine that is made in this process afterwards (`mend_int8`). quantization "none": return `model` unchanged.
    Raises ValueError for an unsupported format, UnsupportedModelError or ModelConfigError for a family whose layers are
    not known to be quantised in this way.
    """
    if quantization == "none":
        return model
    if quantization not in VLLM.formats:
        raise ValueError(
            f"rollout.quantization={quantization}: vLLM takes {' or '.join(sorted(VLLM.formats))} from us; use one of "
            "them, or rollout.engine.backend=native"
        )
    source = read_config(model.path)
    ModelConfig.from_hf(source)
    with SafetensorsDirectory(Path(model.path)) as tensors:
        write_quantised(
            source,
            tensors.items(),
            FORMATS[quantization],
            out,
            dtype=getattr(torch, model.dtype),
            tokenizer_dir=model.path,
            source_dir=model.path,
        )
    mend_int8()
    return model.model_copy(update={"path": str(out)})


def mend_int8() -> None:
    """Fix two bugs of eight-bit layers in vLLM's CPU build (0.32), in this process and before an engine is made.

    It picks its AMX kernel by the type of the weights alone, but that kernel refuses float32 activations. The oneDNN
    kernel, which accepts them, must be picked. (While layers are packed, the default dtype is the model's.) And a
    oneDNN layer keeps a bare pointer to its scales, which vLLM frees when weights are reloaded.
    """
    try:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu
    except ImportError:  # not a CPU build
        return
    suits, create = cpu.check_cpu_sgl_kernel, cpu.ops.create_onednn_scaled_mm
    if suits.__module__ == __name__:
        return

    def suits_activations(n: int, k: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() != torch.float32 and bool(suits(n, k, dtype))

    def create_holding(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        handler = create(weight, scales, *args)
        handler.scales = scales
        return handler

    cpu.check_cpu_sgl_kernel, cpu.ops.create_onednn_scaled_mm = suits_activations, create_holding
