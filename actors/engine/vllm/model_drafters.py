"""Network drafters for stock vLLM: the directory that it loads at its start, and vLLM's names for new weights. Handles
EAGLE, a quantised copy of the target, and speculators of vLLM's own; never drafts and holds no engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actors.engine.vllm.low_bit import mend_int8
from actors.engine.vllm.worker import Converter, Named
from config.formats import FORMATS
from drafter.eagle.files import eagle_at
from drafter.eagle.model import Kind
from drafter.export import vllm_tensors, write_for_vllm
from drafter.foreign import read_speculator
from models.compressed_tensors import write_quantised
from models.config import ModelConfig, read_config
from models.directory import SafetensorsDirectory
from models.low_bit import quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafter:
    """A network that vLLM drafts with, in its directory."""

    method: Literal["eagle", "eagle3", "draft_model", "mtp", "dflash"]
    directory: Path
    convert: Converter | None  # for the tensors of `shapes`; None: its weights never change
    shapes: Mapping[str, torch.Size]  # of an update's tensors; empty: derived from the target's, or never updated
    copies_target: bool = False  # layer by layer, so that its K/V approximate the target's
    parallel: bool = False  # an EAGLE head that drafts all tokens in one pass
    multiple: int = 1  # vLLM accepts only such multiples as the deepest draft
    block: int = 0  # tokens that a parallel drafter drafts in its one pass; 0: as many as the deepest draft

    def speculative_config(self, drafts: int, tensor_parallel: int = 1, *, drawn: bool = False) -> dict[str, Any]:
        """Return the speculative_config of EngineArgs. `drafts`: the deepest strategy of any drafter.

        `drawn`: drafts are drawn at the request's temperature, and verified by their probabilities; otherwise they are
        the most probable tokens."""
        config = {
            "method": self.method,
            "model": str(self.directory),
            "num_speculative_tokens": -(-drafts // self.multiple) * self.multiple,
            "draft_tensor_parallel_size": tensor_parallel,
            "draft_sample_method": "probabilistic" if drawn else "greedy",
        }
        return config | ({"parallel_drafting": True} if self.parallel else {})


@dataclass(frozen=True, slots=True)
class EagleNames:
    """vLLM's names for the tensors of our EAGLE networks."""

    kind: Kind
    config: ModelConfig  # of the drafter's block

    def __call__(self, named: Named) -> Iterator[tuple[str, Tensor]]:
        return vllm_tensors(self.kind, self.config, dict(named))


def eagle_drafter(path: str, target: Path, out: Path, *, dtype: torch.dtype, seed: int = 0) -> ModelDrafter:
    """Write `out` for the drafter at rollout.speculation.eagle.path. Embedding and head are the target's, unless a head
    has its own.

    Raises EagleWeightsError (not a drafter of this target), ExportError (not supported by vLLM), ModelConfigError.
    """
    config = ModelConfig.from_hf(read_config(target))
    model = eagle_at(path, config, seed, dtype=dtype, device="cpu", batch_invariant=False)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    written = write_for_vllm(model, out)
    return ModelDrafter(
        method=written.method,
        directory=written.directory,
        convert=EagleNames(model.kind, model.block.config),
        shapes=shapes,
    )


def self_drafter(target: Path, out: Path) -> ModelDrafter:
    """Write `out`: the model in `target` with eight-bit weights, to be updated from the target's new weights.

    For an engine that is made in this process afterwards (`mend_int8`). Raises UnsupportedModelError for a family whose
    layers are not known to be quantised in this way.
    """
    source = read_config(target)
    ModelConfig.from_hf(source)
    with SafetensorsDirectory(target) as tensors:
        write_quantised(source, tensors.items(), FORMATS["w8a8"], out)
    mend_int8()
    return ModelDrafter(method="draft_model", directory=out, convert=quantised, shapes={}, copies_target=True)


def foreign_drafter(name: str, path: str, target: Path) -> ModelDrafter:
    """Return the speculator at rollout.speculation.NAME.path, which vLLM computes and nothing here trains.

    Raises EagleWeightsError (not such a speculator, or not one of this target), WeightsMismatchError."""
    with SafetensorsDirectory(Path(path)) as tensors:
        found = read_speculator(name, path, target, set(tensors))
    return ModelDrafter(
        method=found.method,
        directory=Path(path),
        convert=None,
        shapes={},
        parallel=found.parallel,
        multiple=found.multiple,
        block=found.block,
    )
