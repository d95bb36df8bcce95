"""What vLLM draws has the model's probabilities, drafts or none: 20,000 responses each against our own network.

Pearson's chi-square over pairs of neighbouring tokens, so that a token is held to its condition, and over pairs of
requests, so that their noise is independent. The expected probabilities of all prefixes come from models.transformer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.vllm.patches import mend_worker
from actors.engine.vllm.seeds import seed_of
from models.noise import noise_key
from models.packed import PackedContext
from models.transformer import Transformer
from tests.vllm.support import VLLM, Drafting, RawEngine, expansion_of_the_wheel, tiny_checkpoint, wheel_is_wrong

pytestmark = [*VLLM, pytest.mark.slow]

VOCAB, PROMPT, DEPTH = 23, [3, 14, 15, 9], 3
SAMPLES, TOKENS = 20_000, 3  # of a response; the second and the third may be drafted
TRUNCATED = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
LEAST_P = 1e-6  # of forty tests


@dataclass(frozen=True, slots=True)
class Law:
    """What the first three tokens of a response are drawn from: [V], [V, V], [V, V, V], each given those before."""

    first: Tensor
    second: Tensor
    third: Tensor

    @property
    def pair(self) -> Tensor:
        return self.first[:, None] * self.second

    @property
    def later_pair(self) -> Tensor:
        return torch.einsum("ab,abc->bc", self.pair, self.third)

    def best(self, known: list[int]) -> list[int]:
        """The most probable tokens behind one known token, or two."""
        second = int(self.second[known[0]].argmax()) if len(known) == 1 else known[1]
        third = int(self.third[known[0], second].argmax())
        return [second, third] if len(known) == 1 else [third]


@dataclass(frozen=True, slots=True)
class World:
    engine: RawEngine
    plain: Law
    truncated: Law

    def draw(self, count: int, *, seeded: bool, sampling: list[dict[str, Any]]) -> list[NDArray[np.int64]]:
        """`count` responses [count, TOKENS] of each way of sampling, all in the same batches."""
        for i in range(count):
            for j, one in enumerate(sampling):
                seed = seed_of(noise_key(1, 0, j, i), 0) if seeded else None
                self.engine.add(f"{j} {i}", PROMPT, TOKENS, seed=seed, logprobs=None, **one)
        drawn = self.engine.run()
        return [np.array([drawn[f"{j} {i}"].tokens for i in range(count)]) for j in range(len(sampling))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory, model = tiny_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, initializer_range=0.15)
    engine = RawEngine(directory, draft_tokens=DEPTH, max_num_seqs=512, max_num_batched_tokens=4096)
    engine.core.collective_rpc(mend_worker)
    yield World(engine, law_of(model, lambda logits: logits.softmax(-1)), law_of(model, truncated))
    engine.close()


def law_of(model: Transformer, constrain: Callable[[Tensor], Tensor]) -> Law:
    """What the model draws a response to PROMPT from; `constrain`: logits to probabilities, on the last dimension."""
    texts = torch.tensor([[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)])
    with torch.no_grad():
        hidden = model(texts.flatten(), PackedContext.from_lengths([texts.shape[1]] * len(texts)))
        logits = model.logits(hidden).double().view(VOCAB, VOCAB, -1, VOCAB)[:, :, len(PROMPT) - 1 :]
    p = constrain(logits)
    return Law(p[0, 0, 0], p[:, 0, 1], p[:, :, 2])


def truncated(logits: Tensor) -> Tensor:
    """TRUNCATED, on the last dimension: the top_k, of them the fewest that hold top_p."""
    p, order = (logits / TRUNCATED["temperature"]).softmax(-1).sort(-1, descending=True)
    p[..., int(TRUNCATED["top_k"]) :] = 0.0
    p /= p.sum(-1, keepdim=True)
    p[p.cumsum(-1) - p >= TRUNCATED["top_p"]] = 0.0
    p /= p.sum(-1, keepdim=True)
    return torch.empty_like(p).scatter_(-1, order, p)


def p_value(expected: Tensor, *tokens: NDArray[np.int64]) -> float:
    """Of Pearson's chi-square: `tokens`, one array [N] per dimension of `expected`. Cells of fewer than five expected
    are one cell; what is impossible must not occur (0 then)."""
    n = len(tokens[0])
    cells = np.ravel_multi_index(tokens, expected.shape)
    found = torch.from_numpy(np.bincount(cells, minlength=expected.numel())).double()
    wanted = expected.flatten().double() * n
    if (found[wanted == 0] > 0).any():
        return 0.0
    rare = wanted < 5
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    kept = wanted > 0
    statistic = ((found - wanted).square() / wanted)[kept].sum()
    return float(torch.special.gammaincc((kept.sum() - 1).double() / 2, statistic / 2))


def p_values(law: Law, tokens: NDArray[np.int64]) -> dict[str, float]:
    first, second, third = tokens[:, 0], tokens[:, 1], tokens[:, 2]
    one, other = law.first, law.pair.sum(0)
    return {
        "first": p_value(law.first, first),
        "second given the first": p_value(law.pair, first, second),
        "third given the second": p_value(law.later_pair, second, third),
        "first of two requests": p_value(one[:, None] * one, first[::2], first[1::2]),
        "second of two requests": p_value(other[:, None] * other, second[::2], second[1::2]),
    }


def random_drafts(world: World) -> Drafting:
    """None to three tokens, mostly improbable: nearly every token behind one is a recovered one."""
    rng = np.random.default_rng(0)
    return Drafting(lambda request: rng.integers(0, VOCAB, rng.integers(0, DEPTH + 1)).tolist())


def good_drafts(world: World) -> Drafting:
    def propose(request: Any) -> list[int]:
        known = list(request.output_token_ids)
        law = world.plain if request.sampling_params.top_k <= 0 else world.truncated
        return law.best(known) if len(known) < 3 else []

    return Drafting(propose)


WAYS: dict[str, Callable[[World], Drafting | None]] = {
    "plain": lambda world: None,
    "random drafts": random_drafts,
    "good drafts": good_drafts,
}


@pytest.mark.parametrize(("way", "seeded"), [*((way, True) for way in WAYS), ("random drafts", False)])
def test_tokens_have_the_models_probabilities(world: World, way: str, seeded: bool) -> None:
    """At T = 1 and under TRUNCATED, which share their batches."""
    world.engine.scheduler.control = WAYS[way](world)
    plain, cut = world.draw(SAMPLES, seeded=seeded, sampling=[{"temperature": 1.0}, TRUNCATED])
    found = {"T = 1": p_values(world.plain, plain), "truncated": p_values(world.truncated, cut)}
    assert min(p for of_one in found.values() for p in of_one.values()) > LEAST_P, found


def test_without_the_mend_this_wheel_does_not_draw_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what drafts precede is wrong. Fewer samples than above are plenty."""
    if not wheel_is_wrong():
        pytest.skip("this wheel expands temperatures rightly")
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expansion_of_the_wheel())
    world.engine.scheduler.control = random_drafts(world)
    (tokens,) = world.draw(SAMPLES // 4, seeded=True, sampling=[{"temperature": 1.0}])
    found = p_values(world.plain, tokens)
    assert found["first"] > LEAST_P
    assert found["second given the first"] < 1e-12
    assert found["third given the second"] < 1e-12
