"""The perturbed top-k against its torch definition, and against the draw that it must begin with."""

import pytest
import torch

from models import ops
from models.ops import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 8, 61, 1029])
@pytest.mark.parametrize("noise", [True, False])
def test_kernel_equals_definition(dtype: torch.dtype, vocab: int, noise: bool) -> None:
    torch.manual_seed(vocab)
    rows, k = 19, min(4, vocab)
    logits = (3 * torch.randn(rows, vocab)).to(dtype)
    logits[::4] = logits[::4].round()  # ties
    temperature = torch.rand(rows) + 0.1
    temperature[::5] = 0
    cutoff = torch.full((rows,), -torch.inf)
    cutoff[::3] = logits[::3].float().median(dim=1).values
    settings = (logits, cutoff, temperature, torch.randint(0, 2**62, (rows,)), torch.arange(rows), k)
    tokens, logprobs = ops.sample_topk(*settings, scale=1.3, noise=noise)
    expected, expected_logprobs = reference.sample_topk(*settings, scale=1.3, noise=noise)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=2e-4)


def test_the_first_is_the_draw() -> None:
    torch.manual_seed(0)
    logits, temperature = torch.randn(500, 97), torch.rand(500)
    keys, positions, cutoff = torch.randint(0, 2**62, (500,)), torch.arange(500), torch.full((500,), -0.5)
    drawn, _, _ = ops.sample(logits, cutoff, temperature, keys, positions)
    assert torch.equal(ops.sample_topk(logits, cutoff, temperature, keys, positions, 3)[0][:, 0], drawn)


@pytest.mark.parametrize("k", [0, 6])
def test_k_must_fit_the_vocabulary(k: int) -> None:
    ones = torch.ones(1)
    with pytest.raises(ValueError, match="vocabulary of 5"):
        ops.sample_topk(torch.zeros(1, 5), ones, ones, ones.long(), ones.long(), k)
