"""vLLM's own engine core, in this process, as `actors.engine.vllm.engine` drives it. Owns every call into it."""

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

from actors.engine.types import Request, Sampled
from actors.engine.vllm.scheduler import StepControl
from actors.engine.vllm.seeds import seed_of
from models.manifest import WeightsManifest

_log = logging.getLogger(__name__)


class VllmBackend:
    """`arguments`: of EngineArgs. `seeded`: every request draws from a generator of its own."""

    def __init__(self, arguments: Mapping[str, Any], *, seeded: bool) -> None:
        config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._seeded = seeded
        self._drafts_itself = config.speculative_config is not None and config.speculative_config.method not in (
            "custom_class",
            "ngram",
        )
        self.kv_blocks = int(config.cache_config.num_gpu_blocks)
        self.block_tokens = int(config.cache_config.block_size)
        self.model_tokens = int(config.model_config.max_model_len)
        self.vocab_size = int(config.model_config.get_vocab_size())

    @property
    def preempted(self) -> int:
        preemptions: int = self.core.scheduler.preemptions
        return preemptions

    def kv_tokens_used(self) -> int:
        used: float = self.core.scheduler.get_kv_cache_usage()
        return round(used * self.kv_blocks) * self.block_tokens

    def attach(self, control: StepControl | None) -> None:
        self.core.scheduler.control = control

    def submit(self, request: Request, prefix: Sampled | None, limit: int) -> None:
        """Ends and stop tokens are the control's: vLLM is told the cap alone."""
        known = request.prompt_tokens if prefix is None else np.concatenate([request.prompt_tokens, prefix.tokens])
        sampling, drawn = request.sampling, 0 if prefix is None else len(prefix)
        params = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed_of(request.noise_key, drawn) if self._seeded else None,
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
        if self._drafts_itself:
            self.core.post_step(executed)

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> set[int]:
        raise NotImplementedError

    def sleep(self) -> None:
        self.core.sleep(level=1)

    def wake(self) -> None:
        self.core.wake_up()

    def close(self) -> None:
        self.core.shutdown()
