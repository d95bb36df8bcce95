"""Self-test: does this vLLM verify drafts at the requested temperature, top-k and top-p? Takes about a hundred tokens.

The engine runs it before it reports ready, and with a fault decodes plainly at T > 0. It is also a warm-up, since
vLLM's first steps compile. It leaves no request and no cached prefix behind.

All compared values come from vLLM itself, on its present weights. The drafted responses are read once more as prompts,
because prompt log-probs depend neither on drafts nor on temperature or the rejection sampler. With l the logits before
a token,
    at a draft position of temperature T:   log p(a) - log p(b)  =  (l_a - l_b) / T    for the tokens a and b it lists,
    under top_k = 1, or top_p next to 0:    the token is the argmax of l, its log-prob 0; only that draft is accepted.
The result does not depend on chance: draws select the checked positions, but the equations must hold at all of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.request import Request

PROMPT_TOKENS = 6
RESPONSE_TOKENS = 5  # one after the prompt, the others by verification
LISTED = 8  # log-probs per position: the farther apart two tokens, the more precise the temperature
# All different, and neighbours have different draft counts, so that values in a wrong row are detected.
TEMPERATURES = (0.4, 1.0, 0.6, 0.0, 1.7, 0.8, 1.3)
TOLERANCE = 0.2  # of a temperature; neighbours in TEMPERATURES are farther apart
WRONG_SHARE = 0.1  # of the positions: half precision may exceed the tolerance at some, a bug does at all
MIN_POSITIONS = 8
TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_p": 1e-6},
    {"temperature": 0.6, "top_k": 1, "top_p": 0.9},
)

Row = dict[int, float]  # token -> log-prob


@dataclass(slots=True)
class _Position:
    token: int
    listed: Row  # it and the most probable ones, as drawn
    drafted: int | None  # the draft for it, if verified
    stood: bool  # whether the draft was accepted
    raw: Row = field(default_factory=dict)  # the model's own log-probs


@dataclass(slots=True, eq=False)
class _Response:
    prompt: list[int]
    sampling: dict[str, Any]
    drafts: Callable[[int], list[int]] = lambda known: []  # by number of known tokens
    positions: list[_Position] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [position.token for position in self.positions]

    @property
    def verified(self) -> list[_Position]:
        return [position for position in self.positions if position.drafted is not None]


class _Control:
    """Drafts as the responses define."""

    def __init__(self, responses: Mapping[str, _Response]) -> None:
        self._responses = responses
        self.drafted: dict[str, list[int]] = {}  # in the last step

    def before_schedule(self, running: list[Any]) -> None:
        self.drafted.clear()
        for request in running:
            response = self._responses[request.request_id]
            known = len(response.positions)
            drafts = response.drafts(known)[: RESPONSE_TOKENS - known - 1] if known else []
            self.drafted[request.request_id] = request.spec_token_ids = drafts

    def verifies_network(self) -> bool:
        return False

    def drafts_to_make(self) -> int:
        return 0

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        return set()


def self_test(core: Any) -> str:
    """Return why this started EngineCore must not speculate at T > 0; "" if it may.

    Its scheduler is PacelineScheduler, whose control is replaced meanwhile; speculation is on, log-probs are
    "processed_logprobs". An exception of vLLM becomes the reason; the requests are then aborted.
    """
    kept = core.scheduler.control
    try:
        return _temperatures(core) or _truncation(core)
    except Exception as error:
        return f"vLLM raised while it verified drafts: {type(error).__name__}: {error}"
    finally:
        core.scheduler.control = kept
        core.reset_prefix_cache()


def _temperatures(core: Any) -> str:
    """Test random drafts, with a different temperature for every request."""
    vocab, depth = _sizes(core)
    rng = np.random.default_rng(0)
    responses = [
        _Response(
            rng.integers(0, vocab, PROMPT_TOKENS).tolist(),
            {"temperature": temperature, "seed": i},
            _random(rng, vocab, 1 + i % min(depth, 3)),
        )
        for i, temperature in enumerate(TEMPERATURES)
    ]
    _decode(core, responses)
    _read_again(core, responses)
    ratios = []  # measured over requested temperature
    for response in responses:
        asked = response.sampling["temperature"] or 1.0  # log-probs of greedy requests are those of T = 1
        for position in response.verified:
            shared = [(position.raw[token], p) for token, p in position.listed.items() if token in position.raw]
            (high, drawn_high), (low, drawn_low) = max(shared), min(shared)
            if high - low >= 10 * _noise(core):
                apart = drawn_high - drawn_low
                ratios.append((high - low) / apart / asked if apart else math.inf)
    if len(ratios) < MIN_POSITIONS:
        return f"the temperature shows at {len(ratios)} draft positions only, {MIN_POSITIONS} are needed"
    wrong = sum(not abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    if wrong > WRONG_SHARE * len(ratios):
        return f"{wrong} of {len(ratios)} draft positions were sampled at another temperature than the one asked for"
    return ""


def _truncation(core: Any) -> str:
    """Test settings that leave only the argmax: without drafts, with right and with wrong drafts; and a request with
    top_k = 2 among them."""
    vocab, depth = _sizes(core)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab, PROMPT_TOKENS).tolist() for _ in TRUNCATIONS]
    plain = [_Response(prompt, sampling) for prompt, sampling in zip(prompts, TRUNCATIONS, strict=True)]
    _decode(core, plain)
    right, wrong = [], []
    for i, response in enumerate(plain):
        count, tokens = 1 + i % min(depth, 3), response.tokens
        other = [(token + 1) % vocab for token in tokens]
        right.append(_Response(response.prompt, response.sampling, _following(tokens, count)))
        wrong.append(_Response(response.prompt, response.sampling, _following(other, count)))
    two = _Response(prompts[0], {"temperature": 1.0, "top_k": 2}, _random(rng, vocab, 1))
    responses = [r for pair in zip(right, wrong, strict=True) for r in pair] + [two]
    _decode(core, responses)
    _read_again(core, responses)
    misses = 0
    for response in responses:
        rank = response.sampling.get("top_k", 1)
        for position in response.verified:
            least = sorted(position.raw.values())[-rank] - 2 * _noise(core)
            alone = rank > 1 or position.listed[position.token] > -1e-3
            misses += not (position.raw.get(position.token, -math.inf) >= least and alone)
    verified = sum(len(response.verified) for response in responses)
    if misses > WRONG_SHARE * verified:
        return f"{misses} of {verified} tokens at draft positions were not what top_k or top_p leaves"
    stood = [position.stood for response in right for position in response.verified]
    if sum(stood) < (1 - WRONG_SHARE) * len(stood):
        return f"{len(stood) - sum(stood)} of {len(stood)} drafts were rejected that are all that top_k or top_p leaves"
    return ""


def _random(rng: np.random.Generator, vocab: int, count: int) -> Callable[[int], list[int]]:
    return lambda known: rng.integers(0, vocab, count).tolist()


def _following(tokens: list[int], count: int) -> Callable[[int], list[int]]:
    return lambda known: tokens[known : known + count]


def _sizes(core: Any) -> tuple[int, int]:
    """Return the size of the vocabulary, and the deepest draft."""
    config = core.vllm_config
    return config.model_config.get_vocab_size(), config.speculative_config.num_speculative_tokens


def _noise(core: Any) -> float:
    """Return how much a logit may differ between two batches."""
    return 1e-4 if core.vllm_config.model_config.dtype.itemsize >= 4 else 0.1


def _decode(core: Any, responses: list[_Response]) -> None:
    """Decode each response's tokens, with its drafts."""
    named = {f"self-test-{i}": response for i, response in enumerate(responses)}
    core.scheduler.control = control = _Control(named)
    for output in _outputs(core, named, {"max_tokens": RESPONSE_TOKENS, "logprobs": LISTED}):
        response, drafts = named[output.request_id], control.drafted.get(output.request_id, [])
        new = output.new_token_ids
        for i, (token, listed) in enumerate(zip(new, _rows(*output.new_logprobs[:2]), strict=True)):
            draft = drafts[i] if i < len(drafts) else None
            response.positions.append(_Position(token, listed, draft, stood=i < len(new) - 1))


def _read_again(core: Any, responses: list[_Response]) -> None:
    """Fill in `raw`."""
    core.scheduler.control = None
    named = {
        f"self-test-{i}": _Response(response.prompt + response.tokens, {"temperature": 0.0})
        for i, response in enumerate(responses)
    }
    for output in _outputs(core, named, {"max_tokens": 1, "prompt_logprobs": LISTED}):
        positions = responses[int(output.request_id.rpartition("-")[2])].positions
        rows = _rows(*output.new_prompt_logprobs_tensors[:2])[PROMPT_TOKENS - 1 :]
        for position, raw in zip(positions, rows, strict=True):
            position.raw = raw


def _rows(ids: Any, logprobs: Any) -> list[Row]:
    """Return [T, 1 + LISTED] each, the token itself first."""
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _outputs(core: Any, named: dict[str, _Response], sampling: dict[str, Any]) -> Iterator[Any]:
    """Run the requests to their ends; yield vLLM's EngineCoreOutput objects."""
    try:
        for name, response in named.items():
            params = SamplingParams(**{"ignore_eos": True, "detokenize": False} | sampling | response.sampling)
            core.add_request(
                Request(
                    request_id=name,
                    prompt_token_ids=response.prompt,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=0.0,
                    block_hasher=core.request_block_hasher,
                )
            )
        while core.scheduler.has_requests():
            outputs, executed = core.step_fn()
            core.post_step(executed)
            for of_client in (outputs or {}).values():
                yield from of_client.outputs
    finally:
        core.abort_requests(list(named))  # those left after an exception
