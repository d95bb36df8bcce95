"""The first things to run on a GPU machine: `pytest -m gpu`. CUDA against the CPU, which the other tests hold to the
oracles; skipped where there is no CUDA device."""

from pathlib import Path

import pytest
import torch

from models.checkpoint import hf_state_dict, load_hf_state_dict
from models.noise import gumbel
from models.packed import PackedContext
from models.transformer import Transformer
from tests.engine.support import FAMILIES, engine, logits_of, make_requests, run, tiny_model

DEVICE = "cuda"
TOLERANCE = 1e-3  # float32 without TF32, torch's default for matrix products
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_device(model: Transformer) -> Transformer:
    copy = Transformer(model.config, device=DEVICE, batch_invariant=False)
    load_hf_state_dict(copy, hf_state_dict(model))
    return copy


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients(family: str, tmp_path: Path) -> None:
    reference = tiny_model(tmp_path, family, invariant=False)
    model = on_device(reference)
    lengths, vocab = [17, 1, 40], reference.config.vocab_size
    tokens = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    expected = reference.logits(reference(tokens, PackedContext.from_lengths(lengths)))
    found = model.logits(model(tokens.to(DEVICE), PackedContext.from_lengths(lengths, DEVICE)))
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    expected.logsumexp(-1).sum().backward()
    found.logsumexp(-1).sum().backward()
    for (name, one), two in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None, name
        assert two.grad is not None, name
        assert (two.grad.cpu() - one.grad).norm() <= TOLERANCE * one.grad.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_draws_from_the_models_distribution(family: str, temperature: float, tmp_path: Path) -> None:
    """Log-probs equal the CPU's, and each token is the argmax of the CPU's logits plus the request's noise, but for
    near ties; more requests than run together, several samples per prompt, prompts in chunks."""
    reference = tiny_model(tmp_path, family, invariant=False)
    requests = make_requests(24, prompts=6, temperature=temperature)
    finished = run(engine(on_device(reference), prefill_chunk_tokens=16), requests)
    assert finished.keys() == {request.request_id for request in requests}
    for request in requests:
        rollout, prompt = finished[request.request_id], request.prompt_tokens.tolist()
        drawn = torch.from_numpy(rollout.tokens).long()
        logits = logits_of(reference, prompt + drawn.tolist())[len(prompt) - 1 : -1]
        at_1 = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs_t1), at_1, atol=TOLERANCE, rtol=0)
        noise = gumbel(torch.full((len(drawn),), request.noise_key), torch.arange(len(drawn)), logits.shape[1])
        scores = logits + (noise if temperature else 0.0)
        behind = scores.max(-1).values - scores.gather(1, drawn[:, None])[:, 0]
        assert behind.max() < TOLERANCE
