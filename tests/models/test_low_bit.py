"""Eight-bit weights are the nearest ones, row by row, and only matrices of layers become them."""

import numpy as np
import torch

from config.formats import FORMATS
from models.low_bit import dequantise, quantise, quantise_rows, quantised
from models.ops.low_bit import quantise_tokens


def test_each_weight_is_the_nearest_multiple_of_its_rows_scale() -> None:
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 7)[:, None]
    values, scales = quantise_rows(weight)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (torch.int8, (7, 33), torch.float32, (7, 1))
    torch.testing.assert_close(scales[:, 0], weight.abs().amax(1) / 127)
    assert (values.abs().amax(1) == 127).all()
    assert ((dequantise(quantise(weight, FORMATS["w8a8"])) - weight).abs() <= scales * 0.50001).all()


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = quantise(torch.zeros(2, 5), FORMATS["w8a8"])
    assert not dequantise(zeros).any()
    assert zeros.scales.isfinite().all()


def test_bfloat16_weights_are_quantised_in_float32() -> None:
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert all(torch.equal(a, b) for a, b in zip(quantise_rows(weight), quantise_rows(weight.float()), strict=True))


def test_embedding_head_norms_and_biases_stay() -> None:
    named = {
        "model.embed_tokens.weight": torch.randn(8, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(4),
        "model.norm.weight": torch.randn(4),
        "lm_head.weight": torch.randn(8, 4),
    }
    found = dict(quantised(named.items()))
    changed = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight_scale"}
    assert found.keys() == named.keys() | changed
    assert all(found[name] is named[name] for name in named.keys() - changed)


def test_scales_and_factors_are_divided_once() -> None:
    """numpy divides; torch multiplies a number that is divided by a tensor with the tensor's reciprocal."""
    x = torch.randn(4096, 3, generator=torch.Generator().manual_seed(2))
    largest = x.abs().amax(1).numpy()
    assert np.array_equal(quantise_rows(x)[1][:, 0].numpy(), largest / np.float32(127))
    values, scales = quantise_tokens(x)
    assert np.array_equal(scales[:, 0].numpy(), largest / np.float32(127))
    factors = np.float32(127) / largest
    assert np.array_equal(values.numpy(), np.rint(x.numpy() * factors[:, None]).astype(np.int8))
    assert (torch.reciprocal(torch.from_numpy(largest)) * 127 != torch.from_numpy(factors)).any(), "or it shows nothing"
