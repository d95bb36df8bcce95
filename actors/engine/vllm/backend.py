"""vLLM's own engine core, in this process, behind the interface of `actors.engine.vllm.engine`. Contains every call
into it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request as VllmRequest

from actors.engine.vllm.arguments import require_runner
from actors.engine.vllm.lean_steps import lean_worker
from actors.engine.vllm.model_drafters import ModelDrafter
from actors.engine.vllm.patches import mend_worker
from actors.engine.vllm.scheduler import StepControl
from actors.engine.vllm.seeds import seed_of
from actors.engine.vllm.self_test import self_test
from actors.engine.vllm.weights import WeightsLoader
from actors.engine.vllm.worker import PacelineWorker
from contracts.rollout import Request, Sampled
from models.manifest import WeightsManifest

_log = logging.getLogger(__name__)


class VllmBackend:
    """`arguments`: of EngineArgs. `kv_tokens`: KV cache of all requests together. `seeded`: every request has its own
    generator. `drafter`: the network that vLLM drafts with, by these arguments.
    """

    def __init__(
        self, arguments: Mapping[str, Any], *, kv_tokens: int, seeded: bool, drafter: ModelDrafter | None = None
    ) -> None:
        config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        require_runner(config)
        cache = config.cache_config
        cache.num_gpu_blocks_override = -(-kv_tokens // cache.block_size) + 1  # vLLM reserves one block for itself
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._drafter = drafter
        if config.use_v2_model_runner:
            if config.speculative_config is not None:
                self.core.collective_rpc("paceline_take_drafts")  # of worker_v2, which only vLLM imports
        else:
            self._prepare_v1(drafter)
        self._seeded = seeded
        self._asleep: list[str] = []  # vLLM's tags of sleeping memory
        self.refusal = self_test(self.core) if config.speculative_config is not None else ""
        follower = drafter.convert if drafter is not None and not drafter.shapes else None
        self._weights = WeightsLoader(self.core, arguments["model"], follower=follower)
        self.kv_blocks = int(cache.num_gpu_blocks) - 1
        self.block_tokens = int(cache.block_size)
        self.model_tokens = int(config.model_config.max_model_len)
        self.vocab_size = int(config.model_config.get_vocab_size())

    def _prepare_v1(self, drafter: ModelDrafter | None) -> None:
        """Fix and trim Model Runner V1, and let the scheduler decide when its network drafts."""
        for mended in {name for rank in self.core.collective_rpc(mend_worker) for name in rank}:
            _log.warning("mended in this vLLM: %s (docs/howto/vllm.md)", mended)
        if drafter is not None:
            how = (drafter.copies_target, drafter.block)
            self.core.collective_rpc(PacelineWorker.paceline_hold_drafter.__name__, args=how)
        self.core.collective_rpc(lean_worker, args=(drafter is not None,))

    @property
    def preempted(self) -> int:
        preemptions: int = self.core.scheduler.preemptions
        return preemptions

    def kv_tokens_used(self) -> int:
        used: float = self.core.scheduler.kv_cache_manager.usage
        return round(used * self.kv_blocks) * self.block_tokens

    def attach(self, control: StepControl | None) -> None:
        self.core.scheduler.control = control

    def submit(self, request: Request, prefix: Sampled | None, limit: int) -> None:
        """Submit a request. vLLM gets only the length limit: the control handles stop tokens and rules."""
        known = request.prompt_tokens if prefix is None else np.concatenate([request.prompt_tokens, prefix.tokens])
        sampling, drawn = request.sampling, 0 if prefix is None else len(prefix)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed_of(request.noise_key, request.earlier_tokens + drawn) if self._seeded else None,
            max_tokens=limit - len(known),
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        self.core.add_request(
            VllmRequest(
                request_id=str(request.request_id),
                prompt_token_ids=known.tolist(),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.core.request_block_hasher,
            )
        )

    def abort(self, request_ids: Sequence[int]) -> None:
        if request_ids:
            self.core.abort_requests([str(request_id) for request_id in request_ids])

    def step(self) -> None:
        _, executed = self.core.step_fn()
        if self._drafter is not None:
            self.core.post_step(executed)

    def draft_s(self, drafts: int) -> float | None:
        found: list[float | None] = self.core.collective_rpc(PacelineWorker.paceline_draft_s.__name__, args=(drafts,))
        return found[0]

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> list[int]:
        self._wake_weights()
        return [int(name) for name in self._weights.load_target(manifest, buffer)]

    def update_drafter(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        drafter = self._drafter
        if drafter is None or not drafter.shapes or drafter.convert is None:
            raise ValueError("this engine's drafter takes no weights: it is made of the target's, or never trained")
        self._wake_weights()
        self._weights.load_drafter(manifest, buffer, drafter.convert, drafter.shapes)

    def sleep(self) -> None:
        """Move weights to the host and drop the K/V, on GPUs; on CPUs vLLM does nothing."""
        self.core.sleep(level=1)
        self._asleep = ["weights", "kv_cache"]

    def wake(self) -> None:
        if self._asleep:
            self.core.wake_up(self._asleep)
            self._asleep = []

    def _wake_weights(self) -> None:
        """Wake the weights' memory, so that new ones can be written. The K/V stays asleep."""
        if "weights" in self._asleep:
            self.core.wake_up(["weights"])
            self._asleep.remove("weights")

    def close(self) -> None:
        self.core.shutdown()
