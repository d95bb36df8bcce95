"""The learner's product: the engine's bits forward, the gradients of an explicit straight-through graph backward."""

import pytest
import torch
from torch import Tensor

from config.formats import FORMATS
from models import ops
from models.low_bit import dequantise, quantise
from models.ops.low_bit import quantise_tokens

INTEGER = ["w8a8", "w4a8", "w3a8", "w2a8"]


def _leaves(dtype: torch.dtype, depth: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, master, bias = (torch.randn(*shape, generator=generator) for shape in ((9, depth), (40, depth), (40,)))
    x, master, bias = (leaf.to(dtype).requires_grad_() for leaf in (x, master, bias))
    return x, master, bias


@pytest.mark.parametrize(("name", "depth"), [*((name, 256) for name in INTEGER), ("w8a8", 101)])
def test_gradients_are_those_of_an_explicit_straight_through_graph(name: str, depth: int) -> None:
    x, master, bias = _leaves(torch.float32, depth)
    weight = quantise(master, FORMATS[name])
    mirrored = ops.mirrored_linear(x, master, weight, bias)
    values, scales = quantise_tokens(x.detach())
    x_rounded = x + (values.float() * scales - x).detach()
    master_rounded = master + (dequantise(weight) - master).detach()
    explicit = x_rounded @ master_rounded.t() + bias
    torch.testing.assert_close(mirrored, explicit, rtol=1e-4, atol=1e-4)
    grad = torch.randn(mirrored.shape, generator=torch.Generator().manual_seed(4))
    found = torch.autograd.grad(mirrored, (x, master, bias), grad)
    expected = torch.autograd.grad(explicit, (x, master, bias), grad)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    exact = torch.autograd.grad(x @ master.t() + bias, (x, master), grad)
    assert not torch.allclose(found[0], exact[0], rtol=1e-4, atol=1e-4)  # so the roundings are seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INTEGER)
def test_the_forward_has_the_engines_bits(name: str, dtype: torch.dtype) -> None:
    x, master, bias = _leaves(dtype)
    weight = quantise(master, FORMATS[name])
    stored = quantise(master, FORMATS[name])  # what an engine was handed
    with torch.inference_mode():
        engine = torch.cat([ops.low_bit_linear(row, stored, bias) for row in x.detach().split(2)])
    mirrored = ops.mirrored_linear(x, master, weight, bias)
    assert torch.equal(mirrored, engine)
    mirrored.float().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype is dtype for leaf in (x, master, bias))


def test_a_frozen_master_gets_no_gradient() -> None:
    x, master, _ = _leaves(torch.float32)
    result = ops.mirrored_linear(x, master.detach(), quantise(master, FORMATS["w8a8"]))
    result.sum().backward()
    assert master.grad is None
    assert x.grad is not None
