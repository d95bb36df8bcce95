"""Fast mode (not batch-invariant): the first token that differs is always at a tie below the measured logit noise.

The native kernels do not depend on the batch in this mode either, so nothing differs with them; torch's do. In bfloat16
they differ enough for tokens to change, and then every first difference must be explained by the noise: the largest
deviation of a logit, or of a log-prob that the engine reported, between two computations of one context.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from config.strategy import Strategy
from contracts.rollout import Request, Rollout
from models.noise import gumbel
from models.ops import native
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import FAMILIES, VOCAB, engine, make_requests, run
from tests.params import long
from tests.speculation.support import SAMPLINGS, Mixed, Served, Trees, model_of

STRATEGIES = ("right:6", "often:5", "often:4x3/12")


@dataclass(frozen=True)
class Difference:
    """The first place where two rollouts of one request differ."""

    request: Request
    context: list[int]  # prompt and the tokens that agree
    tokens: tuple[int, int]  # without and with speculation

    def scores(self, model: Transformer) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, logits with the noise of the draw) [V] float64, of the context computed alone."""
        logits = logits_in(model, [self.context])[0]
        place = len(self.context) - len(self.request.prompt_tokens)
        gumbels = gumbel(torch.tensor([self.request.noise_key]), torch.tensor([place]), len(logits))[0].double()
        return logits, logits + self.request.sampling.temperature * gumbels

    def drawable(self, model: Transformer, noise: float) -> set[int]:
        """The tokens that would be drawn here under some deviation of each logit by at most `noise`."""
        sampling = self.request.sampling
        temperature = sampling.temperature or 1.0
        logits, scores = self.scores(model)
        others = ~torch.eye(len(logits), dtype=torch.bool)
        above = (logits > logits[:, None] + 2 * noise) & others  # [V, V], surely before a token
        around = (logits > logits[:, None] - 2 * noise) & others  # perhaps before it
        top_k = sampling.top_k or len(logits)
        possible, sure = above.sum(1) < top_k, around.sum(1) < top_k
        if sampling.top_p < 1:
            kept = logits.masked_fill(logits < logits.sort(descending=True).values[top_k - 1], -torch.inf)
            mass = (kept / temperature).softmax(0)
            slack = noise / temperature  # The mass of a set changes by at most half of it.
            possible &= (above * mass).sum(1) - slack < sampling.top_p
            sure &= (around * mass).sum(1) + slack < sampling.top_p
        least = scores[sure].max() - 2 * noise if sure.any() else -torch.inf
        return set((possible & (scores >= least)).nonzero()[:, 0].tolist())

    def gap(self, model: Transformer) -> float:
        """Between the perturbed logits of the two tokens."""
        return abs(float(self.scores(model)[1][list(self.tokens)].diff()))


@torch.no_grad()
def logits_in(model: Transformer, contexts: list[list[int]]) -> torch.Tensor:
    """Last logits [N, V] of each context, all in one packed forward."""
    ends = torch.tensor([0, *(len(c) for c in contexts)]).cumsum(0)
    hidden = model(torch.tensor([t for c in contexts for t in c]), PackedContext(ends.to(torch.int32)))
    return model.logits(hidden[ends[1:] - 1]).double()


def compare(requests: list[Request], plain: dict[int, Rollout], served: Served) -> tuple[list[Difference], float]:
    """First differences, and the largest deviation of a reported log-prob before them."""
    differences, deviation = [], 0.0
    for request in requests:
        mine = (served.rollouts | served.aborted)[request.request_id]
        wanted = plain[request.request_id]
        count = min(len(mine.tokens), len(wanted.tokens))
        unequal = (mine.tokens[:count] != wanted.tokens[:count]).nonzero()[0]
        same = int(unequal[0]) if len(unequal) else count
        if same:
            assert mine.logprobs_t1 is not None
            assert wanted.logprobs_t1 is not None
            deviation = max(deviation, float(abs(mine.logprobs_t1[:same] - wanted.logprobs_t1[:same]).max()))
        if len(unequal):
            context = request.prompt_tokens.tolist() + wanted.tokens[:same].tolist()
            differences.append(Difference(request, context, (int(wanted.tokens[same]), int(mine.tokens[same]))))
        else:
            assert request.request_id in served.aborted or len(mine.tokens) == len(wanted.tokens)
    return differences, deviation


def logit_noise(model: Transformer, contexts: list[list[int]]) -> float:
    """Largest deviation of a logit between computing each context alone and beside others."""
    alone = torch.cat([logits_in(model, [context]) for context in contexts])
    return max(
        float((logits_in(model, contexts[i : i + size]) - alone[i : i + size]).abs().max())
        for size in (2, 5, 16)
        for i in range(0, len(contexts), size)
    )


def decode_all(model: Transformer, seed: int) -> tuple[list[Difference], float, int, list[list[int]]]:
    differences: list[Difference] = []
    deviation, tokens = 0.0, 0
    contexts: list[list[int]] = []
    for number, sampling in enumerate(SAMPLINGS):
        requests = make_requests(28, prompts=9, seed=seed + number, stop_token_ids=(2,), **sampling)
        plain = run(engine(model), requests)
        contexts += [r.prompt_tokens.tolist() + plain[r.request_id].tokens[:-1].tolist() for r in requests[::4]]
        drafters = {"right": Trees(plain, 1.0), "often": Trees(plain, 0.7, seed)}
        for strategy in (*STRATEGIES, "mixed"):
            policy = (
                Mixed(("plain", *STRATEGIES), seed) if strategy == "mixed" else FixedPolicy(Strategy.parse(strategy))
            )
            served = Served(model, requests, policy, drafters, seed=seed)
            found, moved = compare(requests, plain, served)
            differences += found
            deviation = max(deviation, moved)
            tokens += served.tokens
    return differences, deviation, tokens, contexts


@pytest.mark.slow
@pytest.mark.parametrize("family", [FAMILIES[0], *long(*FAMILIES[1:])])
def test_with_torch_kernels_first_differences_are_ties_below_the_logit_noise(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(native, "kernels", None)
    model = model_of(tmp_path, family, dtype=torch.bfloat16, invariant=False)
    differences, deviation, tokens, contexts = decode_all(model, 60)
    noise = max(deviation, logit_noise(model, contexts + [d.context for d in differences]))
    print(
        f"{family}, torch kernels, bfloat16: {len(differences)} first differences in {tokens} tokens; noise {noise:.4f}"
    )
    assert tokens > 10_000
    assert 0 < noise < 0.5
    assert differences, "these kernels no longer depend on the batch: nothing was put to the test"
    for difference in differences:
        drawable, gap = difference.drawable(model, noise), difference.gap(model)
        edge = "" if gap <= 2 * noise else ", at the edge of what may be drawn"
        print(f"  T={difference.request.sampling.temperature}: {difference.tokens}, gap {gap:.5f}{edge}; {drawable=}")
        assert set(difference.tokens) <= drawable
        assert len(drawable) < VOCAB / 5, "a tie of so many explains anything"


@pytest.mark.skipif(native.kernels is None, reason="paceline_native is not installed: pip install -e .")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_native_kernels_nothing_differs_in_fast_mode_either(tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of(tmp_path, "qwen3", dtype=dtype, invariant=False)
    differences, deviation, tokens, _ = decode_all(model, 70)
    assert tokens > 5_000
    assert not differences
    assert deviation == 0.0
