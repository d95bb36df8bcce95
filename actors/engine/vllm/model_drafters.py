"""Drafters that are networks, for stock vLLM: the directory that it loads at its start, and how new weights get its
names. Owns both forms, EAGLE and a quantised copy of the target; never drafts and holds no engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actors.engine.vllm.worker import Converter, Named
from drafter.eagle.files import eagle_at
from drafter.eagle.model import Kind
from drafter.export import vllm_tensors, write_for_vllm
from models.config import ModelConfig, read_config
from models.directory import SafetensorsDirectory, write_checkpoint
from models.low_bit import quantised

W8A8: Mapping[str, Any] = {  # config.json's quantization_config for models.low_bit.quantised
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafter:
    """A network that vLLM drafts with, in its directory."""

    method: Literal["eagle", "eagle3", "draft_model"]
    directory: Path
    convert: Converter  # of what `shapes` describes
    shapes: Mapping[str, torch.Size]  # of the tensors that an update brings; empty: it is made of the target's
    copies_target: bool = False  # layer by layer, so that its K/V approximates the target's

    def speculative_config(self, drafts: int, tensor_parallel: int = 1) -> dict[str, Any]:
        """Of EngineArgs. `drafts`: the deepest strategy of any drafter. Drafts are the likeliest tokens: with the
        probabilities of sampled ones, vLLM could not verify drafts that the scheduler puts in their place."""
        return {
            "method": self.method,
            "model": str(self.directory),
            "num_speculative_tokens": drafts,
            "draft_tensor_parallel_size": tensor_parallel,
            "draft_sample_method": "greedy",
        }


@dataclass(frozen=True, slots=True)
class EagleNames:
    """vLLM's names for the tensors of our EAGLE networks."""

    kind: Kind
    config: ModelConfig  # of the target

    def __call__(self, named: Named) -> Iterator[tuple[str, Tensor]]:
        return vllm_tensors(self.kind, self.config, dict(named))


def eagle_drafter(path: str, target: Path, out: Path, *, dtype: torch.dtype, seed: int = 0) -> ModelDrafter:
    """Write `out` for what rollout.speculation.eagle.path says. Its embedding and its head are the target's own.

    Raises EagleWeightsError (not a drafter of this target), ExportError (none that vLLM computes), ModelConfigError.
    """
    config = ModelConfig.from_hf(read_config(target))
    model = eagle_at(path, config, seed, dtype=dtype, device="cpu", batch_invariant=False)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    written = write_for_vllm(model, out)
    return ModelDrafter(
        method=written.method, directory=written.directory, convert=EagleNames(model.kind, config), shapes=shapes
    )


def self_drafter(target: Path, out: Path) -> ModelDrafter:
    """Write `out`: the model in `target` with eight-bit weights. New weights of the target make new ones of it. For an
    engine that is made in this process afterwards (`mend_int8`).

    Raises UnsupportedModelError for a family whose layers are not known to be quantised in this way.
    """
    source = read_config(target)
    ModelConfig.from_hf(source)
    with SafetensorsDirectory(target) as tensors:
        write_checkpoint(source | {"quantization_config": dict(W8A8)}, quantised(tensors.items()), out)
    mend_int8()
    return ModelDrafter(method="draft_model", directory=out, convert=quantised, shapes={}, copies_target=True)


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
