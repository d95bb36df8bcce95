"""The device's head (`actors.training.head`) against autograd's (`chunk_logprobs`), on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from actors.training.head import LOGITS_CHUNK_BYTES, chunk_bytes_on, chunk_rows_of, head_logprobs
from actors.training.network import chunk_logprobs


def computed(dtype: torch.dtype, chunk_rows: int | None, temperature: float, with_entropy: bool, rows: int = 23) -> Any:
    """Outputs and gradients; `chunk_rows` None: by autograd, in one piece."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).mul(0.5).to(dtype).requires_grad_() for n in (rows, 37))
    targets = torch.randint(0, 37, (rows,), generator=generator)
    slopes = torch.randn(2, rows, generator=generator)
    if chunk_rows is None:
        out = chunk_logprobs(lambda h: F.linear(h, weight), hidden, targets, temperature, with_entropy)
    else:
        out = head_logprobs(hidden, weight, targets, temperature, chunk_rows=chunk_rows, entropy_gradient=with_entropy)
    assert not out[1].requires_grad
    assert out[2].requires_grad == with_entropy
    loss = (out[0] * slopes[0]).sum() + ((out[2] * slopes[1]).sum() if with_entropy else 0.0)
    return [x.detach().float() for x in (*out, *torch.autograd.grad(loss, (hidden, weight)))]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_rows", [4, 23, 100])
def test_values_and_gradients_are_autograds(chunk_rows: int, with_entropy: bool, temperature: float) -> None:
    found = computed(torch.float32, chunk_rows, temperature, with_entropy)
    for ours, theirs in zip(found, computed(torch.float32, None, temperature, with_entropy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [4, 100])
def test_in_bfloat16_it_is_as_near_as_rounding_allows(chunk_rows: int) -> None:
    found = computed(torch.bfloat16, chunk_rows, 0.7, True)
    for ours, theirs in zip(found, computed(torch.bfloat16, None, 0.7, True), strict=True):
        assert (ours - theirs).abs().max() <= 0.04 * theirs.abs().max()


def test_no_rows_have_no_gradient() -> None:
    *_, for_hidden, for_weight = computed(torch.float32, 4, 1.0, False, rows=0)
    assert for_hidden.shape == (0, 16)
    assert not for_weight.any()


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    out, _, _ = head_logprobs(hidden, torch.randn(7, 8), torch.zeros(5, dtype=torch.int64), 1.0, chunk_rows=2)
    out.sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("chunks", [2, 40])
def test_chunks_share_one_gradient_of_the_weight(chunks: int) -> None:
    """A tensor of the weight's size per chunk would be gigabytes, each written and read again."""
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape == (97, 8) and "mm" in str(func) and "_" not in str(func):
                made.append(str(func))
            return out

    hidden, weight = torch.randn(chunks * 3, 8, requires_grad=True), torch.randn(97, 8, requires_grad=True)
    targets = torch.zeros(chunks * 3, dtype=torch.int64)
    out, _, _ = head_logprobs(hidden, weight, targets, 1.0, chunk_rows=3)
    with Watch():
        out.sum().backward()
    assert len(made) == 1


def test_chunks_are_cut_by_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert chunk_rows_of(151_936, chunk_bytes_on(torch.device("cpu"))) == LOGITS_CHUNK_BYTES // (4 * 151_936) == 110
    assert chunk_rows_of(151_936, chunk_bytes_on(torch.device("cuda", 0))) == 2176
    Properties.total_memory = 2**30
    assert chunk_rows_of(151_936, chunk_bytes_on(torch.device("cuda", 0))) == 110
