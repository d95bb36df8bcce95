"""Later turns of an episode: the tokens of one long response, with or without the K/V of the turns before."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.engine.native.engine import NativeEngine
from config.speculation import SuffixOptions
from contracts.rollout import Request, Rollout, Sampled
from drafter.suffix.drafter import SuffixDrafter
from models.ops.native import kernels
from models.transformer import Transformer
from tests.engine.support import Counted, as_prefix, engine, make_requests, run, tiny_model


def turn(request: Request, behind: Sequence[NDArray[np.int32]], tokens: int, *, continues: bool = True) -> Request:
    """The next one, of so many tokens, behind its prompt and what else there is."""
    return replace(
        request,
        prompt_tokens=np.concatenate([request.prompt_tokens, *behind]),
        sampling=replace(request.sampling, max_new_tokens=tokens),
        earlier_tokens=sum(map(len, behind)),
        continues=continues,
    )


def in_turns(core: NativeEngine, requests: Sequence[Request], *, every: int) -> dict[int, list[Rollout]]:
    """Each request as an episode without observations: `every` tokens a turn."""
    made: dict[int, list[Rollout]] = {request.request_id: [] for request in requests}
    for begun in range(0, max(request.sampling.max_new_tokens for request in requests), every):
        left = [request for request in requests if request.sampling.max_new_tokens > begun]
        asked = [
            turn(r, [o.tokens for o in made[r.request_id]], min(every, r.sampling.max_new_tokens - begun)) for r in left
        ]
        for request_id, rollout in run(core, asked).items():
            made[request_id].append(rollout)
    return made


def joined(parts: Sequence[Rollout]) -> Sampled:
    return Sampled.join([part.sampled for part in parts])


def model_of(tmp_path: Path) -> Transformer:
    return tiny_model(tmp_path)


@pytest.mark.parametrize("kv_tokens", [4096, 256], ids=["room", "evicted"])
def test_turns_have_the_tokens_of_one_response_bit_by_bit(tmp_path: Path, kv_tokens: int) -> None:
    """Noise counts on over turns; K/V that were kept, computed again after eviction, or shared are the same."""
    model, requests = model_of(tmp_path), make_requests(9, prompts=3, max_new_tokens=20)
    whole = run(engine(model), requests)
    for request_id, parts in in_turns(engine(model, kv_tokens=kv_tokens), requests, every=7).items():
        sampled = joined(parts)
        assert sampled.tokens.tolist() == whole[request_id].tokens.tolist()
        assert sampled.logprobs.tobytes() == whole[request_id].logprobs.tobytes()


def test_only_what_is_new_is_computed(tmp_path: Path) -> None:
    model, request = model_of(tmp_path), make_requests(1, max_new_tokens=6)[0]
    core = engine(model)
    first = run(core, [turn(request, [], 6)])[request.request_id]
    observed = np.arange(11, dtype=np.int32)
    behind = [first.tokens, observed]
    second = run(core, [turn(request, behind, 6)])[request.request_id]
    # The last token that was drawn has no K/V yet.
    assert second.reused_tokens == len(request.prompt_tokens) + len(first.tokens) - 1
    fresh = run(engine(model), [turn(request, behind, 6)])[request.request_id]
    assert fresh.reused_tokens == 0
    assert fresh.tokens.tolist() == second.tokens.tolist()
    assert fresh.logprobs.tobytes() == second.logprobs.tobytes()
    other = [first.tokens, observed[::-1].copy()]
    third = run(core, [turn(request, [*other], 6)])[request.request_id]
    assert third.reused_tokens == 0, "what was kept stands behind other tokens"


def test_other_weights_keep_nothing(tmp_path: Path) -> None:
    model, request = model_of(tmp_path), make_requests(1, max_new_tokens=6)[0]
    core = engine(model)
    first = run(core, [turn(request, [], 6)])[request.request_id]
    core.sleep()
    core.wake()
    assert run(core, [turn(request, [first.tokens], 6)])[request.request_id].reused_tokens == 0


def test_a_turn_is_taken_up_elsewhere_with_its_prefix(tmp_path: Path) -> None:
    model, request = model_of(tmp_path), make_requests(1, max_new_tokens=24)[0]
    first = run(engine(model), [turn(request, [], 8)])[request.request_id]
    asked = turn(request, [first.tokens, np.arange(5, dtype=np.int32)], 16)
    whole = run(engine(model), [asked])[request.request_id]
    again = run(engine(model), [replace(asked, prefix=as_prefix(whole, 5))])[request.request_id]
    assert again.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.skipif(kernels is None, reason="needs the native extension")
def test_drafts_change_nothing_and_observations_are_never_learned(tmp_path: Path) -> None:
    """Greedy turns repeat: the index drafts what the model said before, under the first prompt, and nothing else."""
    model = model_of(tmp_path)
    requests = make_requests(4, prompts=1, max_new_tokens=24, temperature=0.0)
    drafter = SuffixDrafter(SuffixOptions(), 8, 256)
    published: list[tuple[list[int], list[int]]] = []
    publish = drafter._index.publish

    class Index:
        def __getattr__(self, name: str) -> object:
            return getattr(index, name)

        def publish(self, prompt: np.ndarray, response: np.ndarray, version: int) -> None:
            published.append((prompt.tolist(), response.tolist()))
            publish(prompt, response, version)

    index, drafter._index = drafter._index, Index()
    counted = Counted(model, drafter, "suffix:4".replace("suffix", "test"))
    observed = np.full(9, 3, np.int32)
    plain, spoken = engine(model), list[Rollout]()
    for request in requests:
        first = run(counted.core, [turn(request, [], 12)])[request.request_id]
        second = run(counted.core, [turn(request, [first.tokens, observed], 12)])[request.request_id]
        fresh = run(plain, [turn(request, [first.tokens, observed], 12)])[request.request_id]
        assert second.tokens.tolist() == fresh.tokens.tolist()
        spoken += [first, second]
    assert counted.accepted > 0
    assert published == [(requests[0].prompt_tokens.tolist(), rollout.tokens.tolist()) for rollout in spoken]
