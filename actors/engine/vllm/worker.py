"""Code in every process that executes the model, called by `EngineCore.collective_rpc`: vLLM's `worker_extension_cls`.
Reads new weights into vLLM's models in place; weights.py has checked them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.vllm.drafter_passes import DrafterPasses, verify_by_step
from models.manifest import WeightsManifest
from models.weights import Buffer, unpack

EXTENSION = f"{__name__}.PacelineWorker"  # EngineArgs.worker_extension_cls
EXTENSION_V2 = f"{__name__}_v2.PacelineWorkerV2"  # with Model Runner V2

Named = Iterable[tuple[str, Tensor]]
Converter = Callable[[Named], Named]  # gives tensors the names, and the form, of a drafter in vLLM; picklable


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Verified weights, in this process's memory or in a file that every rank maps."""

    manifest: WeightsManifest
    memory: Buffer | str

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield views. Their memory must exist until they have been read."""
        memory = self.memory
        if isinstance(memory, str):
            memory = np.memmap(memory, np.uint8, mode="r", shape=(self.manifest.total_bytes,))
        return unpack(self.manifest, memory, verify=False)


class PacelineWorker:
    """Methods that vLLM adds to its worker class. The names must be unique: vLLM refuses an existing one."""

    vllm_config: Any
    model_runner: Any

    def paceline_load_target(self, source: WeightsSource) -> None:
        """Load the target's weights. Raises RuntimeError if vLLM left a parameter without new values."""
        with _as_at_start(self.vllm_config, self.vllm_config.model_config):
            _reload(self.model_runner.get_model(), source.tensors(), self.vllm_config.model_config)

    def paceline_load_drafter(self, source: WeightsSource, convert: Converter) -> None:
        """Load a drafter's weights. `convert` gives the tensors vLLM's names. Modules that it omits stay: those shared
        with the target are the target's."""
        model_config = self.vllm_config.speculative_config.draft_model_config
        with _as_at_start(self.vllm_config, model_config):
            _reload(self.model_runner.get_draft_model(), convert(source.tensors()), model_config)

    def paceline_hold_drafter(self, copies_target: bool, block: int = 0) -> None:
        """Let the scheduler decide when the drafter runs; see DrafterPasses."""
        runner = self.model_runner
        runner.drafter.propose = DrafterPasses(runner, copies_target, block).propose
        if runner.speculative_config.draft_sample_method == "probabilistic":
            verify_by_step(runner)

    def paceline_draft_s(self, drafts: int) -> float | None:
        """Return recent drafting seconds; see DrafterPasses.seconds."""
        passes: DrafterPasses = self.model_runner.drafter.propose.__self__
        return passes.seconds(drafts)


@contextmanager
def _as_at_start(vllm_config: Any, model_config: Any) -> Iterator[None]:
    """Restore vLLM's context of loading a model. Its own reloading omits the dtype, by which kernels are packed."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config), set_default_torch_dtype(model_config.dtype), torch.no_grad():
        yield


def _reload(model: Any, named: Named, model_config: Any) -> None:
    """Reload layer by layer, each as at the start. Copying into parameters would fail, since kernels have packed or
    freed them."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    names = {name for name, _ in model.named_parameters()}
    _pack_experts_again(model)
    initialize_layerwise_reload(model)
    loaded = model.load_weights(named)
    finalize_layerwise_reload(model, model_config)
    _pack_tied_heads(model)
    if loaded is not None and model_config.quantization is None and (left := sorted(names - loaded)):
        raise RuntimeError(f"vLLM took no new values for {left[0]} (and {len(left) - 1} more) of its model")


def _pack_experts_again(model: Any) -> None:
    """Make vLLM pack experts for its CPU kernel again.

    It packs them where it makes the kernel, which it keeps: an update would put unpacked weights where the kernel reads
    packed ones. So the kernel is made anew (elsewhere nothing is packed there)."""
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_heads(model: Any) -> None:
    """Pack tied heads again. A head that shares its embedding's parameter loads nothing itself, so vLLM would keep its
    kernel's packed copy of the old one (on CPUs: elsewhere there is no such copy)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    shared = {id(module.weight) for module in embeddings if not isinstance(module, ParallelLMHead)}
    for head in embeddings:
        if isinstance(head, ParallelLMHead) and id(head.weight) in shared:
            head.quant_method.process_weights_after_loading(head)
