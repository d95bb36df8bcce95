"""Small models and the dumb oracle that the engine tests compare against."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.rollout import EngineOptions
from config.strategy import Strategy
from contracts.rollout import Event, Finished, FinishReason, Request, Rollout, Sampled, SamplingParams
from drafter.protocol import BatchView, Drafter, Drafts
from models.checkpoint import init_model
from models.noise import gumbel, noise_key
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy

VOCAB = 61
FAMILIES = ("llama", "qwen2", "qwen3")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_config(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family == "qwen3",
        "initializer_range": 0.4,  # Sharp enough that different tokens give clearly different logits.
        **changes,
    }


def write_config(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(family, **changes)))
    return directory


def tiny_model(directory: Path, family: str = "qwen3", *, seed: int = 0, invariant: bool = True) -> Transformer:
    return init_model(write_config(directory / family, family), seed, batch_invariant=invariant)


def make_requests(
    count: int,
    *,
    prompts: int | None = None,
    seed: int = 0,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    **sampling: Any,
) -> list[Request]:
    """`count` requests over `prompts` (default: one each) prompts of 1 to 40 tokens, of mixed response limits."""
    rng = np.random.default_rng(seed)
    prompts = prompts or count
    texts = [rng.integers(0, VOCAB, rng.integers(1, 41)).astype(np.int32) for _ in range(prompts)]
    return [
        Request(
            request_id=1000 + i,
            prompt_id=i % prompts,
            prompt_tokens=texts[i % prompts],
            noise_key=noise_key(seed, 0, i % prompts, i // prompts),
            sampling=SamplingParams(max_new_tokens or int(rng.integers(1, 40)), temperature, **sampling),
            expected_tokens=float(rng.integers(1, 40)),
        )
        for i in range(count)
    ]


def options_of(**changes: Any) -> EngineOptions:
    return EngineOptions(**{"max_running": 8, "kv_tokens": 4096, "block_tokens": 8} | changes)


def engine(model: Transformer, **options: Any) -> NativeEngine:
    return NativeEngine(model, options_of(**options))


class DrafterBase(Drafter):
    """A drafter that is told everything, remembers nothing and proposes nothing."""

    name = "test"

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        return Drafts(np.zeros((len(batch.slots), 0), np.int64), np.zeros(len(batch.slots), np.int64))


class Counted:
    """An engine with one drafter, and what its steps drafted and accepted."""

    def __init__(self, model: Transformer, drafter: Drafter, strategy: str, **options: Any) -> None:
        self.records: list[EngineStepRecord] = []
        keywords = {k: options.pop(k) for k in ("verification", "graph_capture") if k in options}
        self.core = NativeEngine(
            model,
            options_of(**options),
            drafters={"test": drafter},
            policy=FixedPolicy(Strategy.parse(strategy)),
            steps=self.records,
            **keywords,
        )

    def run(self, requests: Sequence[Request]) -> dict[int, Rollout]:
        return run(self.core, requests)

    @property
    def drafted(self) -> int:
        return sum(record.drafted for record in self.records)

    @property
    def accepted(self) -> int:
        return sum(record.accepted for record in self.records)


def drain(core: NativeEngine, max_steps: int = 20_000) -> list[Event]:
    events: list[Event] = []
    for _ in range(max_steps):
        if not core.has_work:
            return events
        events += core.step()
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def rollouts(events: Sequence[Event]) -> dict[int, Rollout]:
    finished = [event.rollout for event in events if isinstance(event, Finished)]
    assert len({rollout.request_id for rollout in finished}) == len(finished), "a request finished twice"
    return {rollout.request_id: rollout for rollout in finished}


def run(core: NativeEngine, requests: Sequence[Request]) -> dict[int, Rollout]:
    core.submit(requests)
    return rollouts(drain(core))


def t1_bytes(rollout: Rollout) -> bytes:
    assert rollout.logprobs_t1 is not None
    return rollout.logprobs_t1.tobytes()


def assert_same(actual: dict[int, Rollout], expected: dict[int, Rollout]) -> None:
    """Equal tokens, reasons and, bitwise, log-probs."""
    assert actual.keys() == expected.keys()
    for request_id, rollout in expected.items():
        assert actual[request_id].tokens.tolist() == rollout.tokens.tolist(), request_id
        assert actual[request_id].finish_reason == rollout.finish_reason
        assert actual[request_id].logprobs.tobytes() == rollout.logprobs.tobytes(), request_id
        assert t1_bytes(actual[request_id]) == t1_bytes(rollout), request_id


def as_prefix(rollout: Rollout, tokens: int) -> Sampled:
    return rollout.sampled.first(tokens)


@torch.no_grad()
def logits_of(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    """[T, V] by one packed forward over the whole sequence: the learner's path."""
    hidden = model(torch.tensor(tokens), PackedContext(torch.tensor([0, len(tokens)], dtype=torch.int32)))
    return model.logits(hidden).float()


def oracle(model: Transformer, request: Request, model_tokens: int = 256) -> Rollout:
    """One request, one token at a time, everything recomputed for each: no cache, no batch, no kernels of the engine.

    Restricts the distribution token by token in plain Python, and draws with the reference noise.
    """
    sampling, prompt = request.sampling, request.prompt_tokens.tolist()
    tokens: list[int] = []
    logprobs: list[float] = []
    logprobs_t1: list[float] = []
    reason = FinishReason.LENGTH
    while len(tokens) < sampling.max_new_tokens and len(prompt) + len(tokens) < model_tokens:
        logits = logits_of(model, prompt + tokens)[-1].double()
        scaled = logits / (sampling.temperature or 1.0)
        kept = _kept(scaled, sampling)
        noise = gumbel(torch.tensor([request.noise_key]), torch.tensor([len(tokens)]), len(logits))[0].double()
        scores = torch.full_like(scaled, -torch.inf)
        scores[kept] = scaled[kept] + (noise[kept] if sampling.temperature else 0.0)
        token = int(scores.argmax())
        tokens.append(token)
        logprobs.append(float(scaled[token] - scaled[kept].logsumexp(0)) if sampling.temperature else 0.0)
        logprobs_t1.append(float(logits[token] - logits.logsumexp(0)))
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
            break
    arrays = np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(logprobs_t1, np.float32)
    return Rollout(
        request_id=request.request_id,
        sampled=Sampled(*arrays),
        finish_reason=reason,
        weights_version=0,
        started_s=0.0,
        finished_s=0.0,
    )


def _kept(scaled: torch.Tensor, sampling: SamplingParams) -> list[int]:
    order = scaled.argsort(descending=True).tolist()
    if sampling.top_k:
        order = order[: sampling.top_k]
    probability = scaled[order].softmax(0).tolist()
    mass, kept = 0.0, list[int]()
    for token, p in zip(order, probability, strict=True):
        if kept and mass >= sampling.top_p:
            break
        kept.append(token)
        mass += p
    return kept


def assert_close(actual: Rollout, expected: Rollout, tolerance: float = 1e-4) -> None:
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert actual.finish_reason == expected.finish_reason
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, atol=tolerance)
    np.testing.assert_allclose(actual.logprobs_t1, expected.logprobs_t1, atol=tolerance)
