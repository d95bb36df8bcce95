"""The written-out heads (`actors.training.head`) against autograd's (`chunk_logprobs`), on the CPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from actors.training.head import (
    LOGITS_CHUNK_BYTES,
    chunk_bytes_on,
    chunk_rows_of,
    frozen_head_logprobs,
    head_logprobs,
)
from actors.training.network import chunk_logprobs
from models import ops
from tests.native import needs_native


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


def frozen_case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """States, a frozen weight, rows of which some have several targets and one is nearly certain, targets, slopes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 16, generator=generator).to(dtype)
    states = torch.randn(9, 16, generator=generator).to(dtype)
    states[4] = weight[3] * 1.2
    rows = torch.tensor([7, 2, 2, 4, 2, 0, 7, 4, 8])
    targets = torch.tensor([5, 6, 1, 3, 6, 36, 5, 20, 0])
    return states, weight, rows, targets, torch.randn(9, generator=generator)


@needs_native
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 2, 100])
def test_the_frozen_head_is_bitwise_the_other_and_its_gradient_that_of_float64(
    chunk_rows: int, temperature: float
) -> None:
    states, weight, rows, targets, slopes = frozen_case(torch.float32)
    ours = states.clone().requires_grad_()
    out = frozen_head_logprobs(ours, weight, rows, targets, temperature, chunk_rows=chunk_rows, invariant=True)
    theirs = chunk_logprobs(lambda h: ops.linear(h, weight, None, invariant=True), states[rows], targets, temperature)
    assert torch.equal(out[0], theirs[0])
    assert torch.equal(out[1], theirs[1])
    torch.testing.assert_close(out[2], theirs[2], rtol=1e-5, atol=1e-6)
    assert not out[2].requires_grad
    (out[0] * slopes).sum().backward()
    exact = states.double().requires_grad_()
    logprobs = F.log_softmax(exact[rows] @ weight.double().T / temperature, -1)
    (logprobs.gather(1, targets[:, None])[:, 0] * slopes.double()).sum().backward()
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=2e-5, atol=2e-6)


@needs_native
def test_a_nearly_certain_token_keeps_its_gradient() -> None:
    """W_t - p W would lose it: both are near W_t."""
    states, weight, _, targets, _ = frozen_case(torch.float32)
    ours = states[4:5].clone().requires_grad_()
    only, at = torch.zeros(1, dtype=torch.int64), targets[3:4]
    logprob = frozen_head_logprobs(ours, weight, only, at, 0.9, chunk_rows=8, invariant=True)[0]
    assert -1e-3 < float(logprob.detach()) < 0
    logprob.sum().backward()
    exact = states[4:5].double().requires_grad_()
    F.log_softmax(exact @ weight.double().T / 0.9, -1)[0, int(at)].backward()
    assert ours.grad is not None
    assert exact.grad is not None
    assert float((ours.grad - exact.grad).norm() / exact.grad.norm()) < 1e-5


@needs_native
def test_the_frozen_head_in_bfloat16_is_as_near_as_rounding_allows() -> None:
    states, weight, rows, targets, slopes = frozen_case(torch.bfloat16)
    found = []
    for ours in (True, False):
        x = states.clone().requires_grad_()
        if ours:
            out = frozen_head_logprobs(x, weight, rows, targets, 0.7, chunk_rows=2, invariant=True)
        else:
            out = chunk_logprobs(lambda h: ops.linear(h, weight, None, invariant=True), x[rows], targets, 0.7)
        found.append((out[0].detach(), torch.autograd.grad((out[0] * slopes).sum(), x)[0].float()))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).abs().max() <= 0.04 * found[1][1].abs().max()


@needs_native
def test_softmax_terms_of_a_real_vocabulary_are_those_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 49_153, generator=generator).mul(4)
    targets = torch.tensor([0, 49_152, 777])
    terms = logits.clone()
    facts = ops.softmax_terms(terms, targets, 0.7)
    wide = logits.double() / 0.7
    probs = wide.softmax(-1)
    torch.testing.assert_close(facts.entropy.double(), -(probs * wide.log_softmax(-1)).sum(-1), rtol=1e-6, atol=0)
    own = F.one_hot(targets, 49_153)
    torch.testing.assert_close(terms.double() / facts.total[:, None], probs - own, rtol=1e-5, atol=1e-9)
    at_one = (logits - facts.top[:, None]) - facts.log_total_t1[:, None]
    assert torch.equal(at_one, ops.log_softmax(logits))
