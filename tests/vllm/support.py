"""What the tests of the vLLM engine share: tiny models of three families, and vLLM's own EngineCore a step at a time.

Imports vLLM only when an engine is made, so that test modules collect where it is not installed. Each such module says
`pytestmark = VLLM`.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import init_model, save_model
from models.transformer import Transformer
from tests.engine.support import write_config

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # vLLM's smallest head

VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not in this environment: run `make test-vllm`"
    ),
    # Of vLLM and what it imports, said once while it is imported and while an engine starts.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def tiny_checkpoint(
    directory: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any
) -> tuple[Path, Transformer]:
    """Random weights in a directory that vLLM loads, and the same in our own network.

    `changes` are of config.json, e.g. vocab_size (61) or initializer_range (sharp as it is; 0.1: nearly uniform).
    """
    source = write_config(directory / f"{family}-config", family, **SHAPE | changes)
    model = init_model(source, seed).requires_grad_(False)
    out = directory / family
    save_model(model, out)
    return out, model


@dataclass(slots=True)
class Drawn:
    """What one request has sampled so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the processed distribution, if logprobs were asked for
    finished: bool = False


class Drafting:
    """A StepControl that drafts: `propose` gets a running request of vLLM's that decodes and returns tokens."""

    def __init__(self, propose: Callable[[Any], list[int]]) -> None:
        self._propose = propose

    def before_schedule(self, running: list[Any]) -> None:
        for request in running:
            if request.num_computed_tokens >= request.num_tokens - 1:
                request.spec_token_ids = self._propose(request)

    def verifies_network(self) -> bool:
        return False

    def drafts_to_make(self) -> int:
        return 0

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        return set()


class RawEngine:
    """vLLM's EngineCore in this process, as it comes: nothing of ours but scheduler and proposer.

    `draft_tokens` 0: without speculation; else `scheduler.control` drafts (`Drafting`). `arguments` are vLLM's
    EngineArgs.
    """

    def __init__(self, model: Path, *, draft_tokens: int = 0, **arguments: Any) -> None:
        os.environ.update(ENVIRONMENT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.engine.arg_utils import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.core import EngineCore
            from vllm.v1.executor import Executor

            speculative = {
                "method": "custom_class",
                "model": "actors.engine.vllm.proposer.NoProposer",
                "num_speculative_tokens": draft_tokens,
            }
            engine_args: dict[str, Any] = {
                "model": str(model),
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_seqs": 64,
                "seed": 1,
                "logprobs_mode": "processed_logprobs",
                "scheduler_cls": "actors.engine.vllm.scheduler.PacelineScheduler",
                "disable_log_stats": True,
                "speculative_config": speculative if draft_tokens else None,
            }
            config = EngineArgs(**engine_args | arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            self.core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.drawn: dict[str, Drawn] = {}

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> None:
        """`sampling` is of vLLM's SamplingParams; log-probs of the sampled tokens come with it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            **{"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True, "detokenize": False} | sampling
        )
        self.drawn[request_id] = Drawn()
        self.core.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=[int(token) for token in prompt],
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                block_hasher=self.core.request_block_hasher,
            )
        )

    def step(self) -> None:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for output in (one for of_client in outputs.values() for one in of_client.outputs):
            drawn = self.drawn[output.request_id]
            drawn.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                drawn.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
            drawn.finished = output.finish_reason is not None

    def run(self) -> dict[str, Drawn]:
        """Steps until nothing is left; what every request of this run drew."""
        while self.scheduler.has_requests():
            self.step()
        drawn, self.drawn = self.drawn, {}
        return drawn

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.core.shutdown()
        cleanup_dist_env_and_memory()


def expansion_of_the_wheel() -> Any:
    """vLLM's expand_batch_to_tokens as it was installed, mended in this process or not. After a worker was made."""
    from vllm.v1.sample import rejection_sampler

    spec = importlib.util.spec_from_file_location("rejection_sampler_of_the_wheel", rejection_sampler.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    again._expand = rejection_sampler._expand  # type: ignore[attr-defined]  # with the worker's kernels
    return again.expand_batch_to_tokens


def wheel_is_wrong() -> bool:
    """Of the wheels that this has run on; another one may be right as it comes."""
    import vllm

    return bool(vllm.__version__.startswith(("0.32.0", "0.33.0")))
