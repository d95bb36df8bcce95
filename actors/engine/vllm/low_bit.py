"""A target in few bits for stock vLLM: the model directory that its engine starts from, made of the full-precision one,
and what its build for CPUs needs mended. Owns neither rounding nor file format (`models.low_bit`,
`models.compressed_tensors`).

New weights come in the same format, under the names of this directory: vLLM makes its parameters for one precision, so
that an engine started in few bits never computes in full precision, nor the other way round.
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
    """Write `out`: the weights of `model`, rounded to its dtype and quantised, as its learner publishes them. For an
    engine that is made in this process afterwards (`mend_int8`). quantization "none": `model` as it is.

    Raises ValueError for a format that vLLM does not take from us, UnsupportedModelError or ModelConfigError for a
    family whose layers are not known to be quantised in this way.
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
    """In this process, before an engine is made: two mends of eight-bit layers in vLLM's build for CPUs (0.32).

    It picks its AMX kernel by the type of the weights alone, and that kernel refuses float32 activations: its oneDNN
    kernel, which takes them, must be picked. (While layers are packed, the default dtype is the model's.) And a oneDNN
    layer keeps a bare pointer to the scales that it was packed with, which vLLM frees when weights are reloaded.
    """
    try:
        from vllm.model_executor.kernels.linear.scaled_mm import cpu
    except ImportError:  # not a build for CPUs
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
