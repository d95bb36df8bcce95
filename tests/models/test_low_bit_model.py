"""A model whose blocks store their matrices in few bits, and the master model that mirrors it, compute the same."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.training.network import computing_in
from config.formats import FORMATS, LowBitFormat
from models.checkpoint import (
    WeightsMismatchError,
    hf_state_dict,
    hf_targets,
    load_hf_state_dict,
    load_model,
    load_packed,
)
from models.config import ModelConfig, ModelConfigError
from models.layout import hf_layout
from models.low_bit import LowBitWeight, dequantise, quantise, quantised
from models.manifest import WeightsManifest
from models.packed import PackedContext
from models.pieces import Scatter, in_pieces
from models.transformer import Block, LowBitProjection, Projection, Transformer
from models.weights import WeightsCorruptError, pack
from tests.models.families import CONFIGS, saved, tokens

W8A8, W4A8 = FORMATS["w8a8"], FORMATS["w4a8"]
GROUPS_OF_16 = replace(W4A8, group=16)  # the families' matrices have 48 and 80 inputs
LENGTHS = [5, 12, 3, 20]
FORMS = (W8A8, GROUPS_OF_16)


def hidden(model: Transformer) -> torch.Tensor:
    return model(tokens(sum(LENGTHS)), PackedContext.from_lengths(LENGTHS))


def published(model: Transformer, form: LowBitFormat, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As a learner publishes: in the engine's dtype, then quantised, tensor by tensor."""
    return dict(quantised(((n, t.detach().to(dtype)) for n, t in hf_state_dict(model).items()), form))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_checkpoint_quantised_while_it_loads_is_what_the_learner_publishes(
    tmp_path: Path, family: str, form: LowBitFormat
) -> None:
    saved(family, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        engine = load_model(tmp_path, dtype=dtype, low_bit=form)
        expected = published(load_model(tmp_path), form, dtype)
        found = hf_targets(engine)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@torch.no_grad()
def test_every_slice_of_a_fused_matrix_is_at_its_rows(tmp_path: Path, family: str, form: LowBitFormat) -> None:
    """Of weights, scales and zero points alike: the fused matrix in float32 has the slices' numbers at their rows."""
    saved(family, tmp_path)
    master, engine = load_model(tmp_path), load_model(tmp_path, low_bit=form)
    for piece in hf_layout(master.config):
        block, _, name = piece.parameter.rpartition("blocks.")[2].partition(".")
        module = engine.get_submodule(piece.parameter.rpartition(".")[0])
        if isinstance(module, LowBitProjection) and name.endswith(".weight"):
            parts = hf_targets(engine)
            zero = parts.get(piece.hf_name + "_zero")
            weight = LowBitWeight(form, parts[piece.hf_name], parts[piece.hf_name + "_scale"], zero)
            assert torch.equal(dequantise(module.stored)[piece.start : piece.stop], dequantise(weight)), block
        else:
            assert torch.equal(
                engine.get_parameter(piece.parameter)[piece.start : piece.stop],
                master.get_parameter(piece.parameter)[piece.start : piece.stop],
            )


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@torch.no_grad()
def test_the_mirror_of_the_masters_computes_bitwise_what_the_engines_tensors_do(
    tmp_path: Path, family: str, form: LowBitFormat
) -> None:
    saved(family, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        engine, masters = load_model(tmp_path, dtype=dtype, low_bit=form), load_model(tmp_path)
        plain = hidden(masters)
        masters.mirror(form, dtype)
        with computing_in(masters, dtype if dtype is torch.bfloat16 else None):
            found = hidden(masters)
        assert torch.equal(found, hidden(engine))
        masters.mirror(None, dtype)
        assert torch.equal(hidden(masters), plain)
        assert not torch.equal(found.float(), plain)


@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(-30, 30),
    st.integers(0, 2**32 - 1),
)
def test_fused_rows_and_groups_of_inputs_are_quantised_as_by_themselves(
    form: LowBitFormat, parts: list[int], groups: int, exponent: int, seed: int
) -> None:
    """So a learner may quantise q, k and v, or the fused matrix, or rows of it that one rank has."""
    form = replace(form, group=None if form.group is None else 8)
    weight = torch.randn(sum(parts), 8 * groups, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[0] = 0
    fused = quantise(weight, form)
    split = [quantise(part, form) for part in weight.split(parts)]
    for name in ("values", "scales", "zeros"):
        whole, pieces = getattr(fused, name), [getattr(part, name) for part in split]
        assert (whole is None) == (pieces[0] is None)
        if whole is not None:
            assert torch.equal(whole.view(torch.uint8), torch.cat([piece.view(torch.uint8) for piece in pieces]))
    if form.group is not None:
        last = quantise(weight[:, -form.group :].contiguous(), form)
        assert torch.equal(fused.values[:, -form.group // 2 :], last.values)
        assert torch.equal(fused.scales[:, -1:], last.scales)
    assert torch.isfinite(dequantise(fused)).all()


def test_gradients_go_straight_through_to_the_masters(tmp_path: Path) -> None:
    """Through copies in bfloat16 as well; every parameter gets one."""
    saved("qwen3-tied-biases", tmp_path)
    model = load_model(tmp_path)
    for dtype in (None, torch.bfloat16):
        model.mirror(W8A8, dtype or torch.float32)
        with computing_in(model, dtype):
            model.logits(hidden(model)).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
            parameter.grad = None


def test_a_mirror_follows_its_masters_when_they_change_in_place(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    for cached in (True, False):
        model = load_model(tmp_path)
        model.mirror(W8A8, torch.float32, cached=cached)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = hidden(model)
        before.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            changed = hidden(model)
            fresh = deepcopy(model)
            fresh.mirror(W8A8, torch.float32)
            assert torch.equal(changed, hidden(fresh))
            assert not torch.equal(changed, before)


@torch.no_grad()
def test_a_mirrored_model_can_be_copied_and_its_copy_forgets_what_was_cached(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = load_model(tmp_path)
    model.mirror(W8A8, torch.float32)
    before = hidden(model)
    copy = deepcopy(model)
    assert torch.equal(hidden(copy), before)
    for parameter in copy.parameters():
        parameter.mul_(2)
    assert not torch.equal(hidden(copy), before)
    assert torch.equal(hidden(model), before)
    assert copy.state_dict().keys() == load_model(tmp_path).state_dict().keys()  # nothing cached is part of it


def test_a_matrix_is_quantised_once_per_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once per use where versions do not count, as with parameters that FSDP2 gathers."""
    saved("llama", tmp_path)
    model, counted = load_model(tmp_path), [0]

    def counting(*given: Any) -> LowBitWeight:
        counted[0] += 1
        return quantise(*given)

    monkeypatch.setattr("models.transformer.quantise", counting)
    matrices = 4 * model.config.num_layers
    model.mirror(W8A8, torch.float32)
    for _ in range(3):
        with computing_in(model, torch.bfloat16):  # copies of their own every time
            hidden(model)
    assert counted[0] == matrices
    model.mirror(W8A8, torch.float32, cached=False)
    hidden(model)
    hidden(model)
    assert counted[0] == 3 * matrices


def test_packed_weights_of_both_precisions_reach_a_model_that_stores_them(tmp_path: Path) -> None:
    saved("qwen3-tied-biases", tmp_path)
    masters, engine = load_model(tmp_path), load_model(tmp_path, low_bit=W8A8)
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.mul_(1.5)
    low, full = published(masters, W8A8, torch.float32), hf_state_dict(masters)
    load_packed(engine, *pack(low, 1))
    masters.mirror(W8A8, torch.float32)
    with torch.no_grad():
        assert torch.equal(hidden(engine), hidden(masters))
    with engine.storing(None):
        load_packed(engine, *pack(full, 2))
    masters.mirror(None, torch.float32)
    with torch.no_grad():
        assert torch.equal(hidden(engine), hidden(masters))
    assert engine.low_bit is None
    with engine.storing(W8A8):
        load_packed(engine, *pack(low, 3))
    assert engine.low_bit == W8A8


def test_what_does_not_fit_leaves_a_model_as_it_was(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    masters, engine = load_model(tmp_path), load_model(tmp_path, low_bit=W8A8)
    before, modules = hidden(engine), list(engine.modules())
    low = published(masters, W8A8, torch.float32)
    scale = "model.layers.1.mlp.down_proj.weight_scale"
    for fault in (
        {name: tensor for name, tensor in low.items() if name != scale},
        low | {scale: low[scale][:-1]},
        low | {scale: low[scale].bfloat16()},
        low | {"model.layers.0.self_attn.k_proj.weight": masters.blocks[0].get_parameter("qkv_proj.weight")[24:40]},
        hf_state_dict(masters),
        published(masters, GROUPS_OF_16, torch.float32),
    ):
        with pytest.raises(WeightsMismatchError):
            load_packed(engine, *pack(fault, 1))
        assert torch.equal(hidden(engine), before)
    manifest, buffer = pack(low, 1)
    buffer[100] ^= 1
    with pytest.raises(WeightsCorruptError), engine.storing(None):
        load_packed(engine, manifest, buffer)
    assert torch.equal(hidden(engine), before)
    assert engine.low_bit == W8A8
    assert list(engine.modules()) == modules


def test_pieces_of_low_bit_weights_are_scattered_into_the_models_memory(tmp_path: Path) -> None:
    saved("llama3-rope-biases", tmp_path)
    masters = load_model(tmp_path)
    low = published(masters, GROUPS_OF_16, torch.bfloat16)
    manifest, buffer = pack(low, 1)
    engine = Transformer(masters.config, dtype=torch.bfloat16, low_bit=GROUPS_OF_16)
    scatter = Scatter(manifest.tensors, hf_targets(engine))
    for piece in in_pieces(manifest.tensors, manifest.total_bytes, low.items(), torch.device("cpu"), piece_bytes=4096):
        scatter.take(piece)
    assert all(torch.equal(tensor, low[name]) for name, tensor in hf_targets(engine).items())
    assert buffer.nbytes < manifest_of(masters).total_bytes / 2


def manifest_of(model: Transformer) -> WeightsManifest:
    return pack(hf_state_dict(model), 0)[0]


def test_a_dtype_is_never_converted_in_silence(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model, name = load_model(tmp_path), "model.layers.0.mlp.up_proj.weight"
    state = {key: tensor.clone() for key, tensor in hf_state_dict(model).items()}
    for dtype in (torch.bfloat16, torch.float16):  # of a checkpoint
        load_hf_state_dict(model, {key: tensor.to(dtype) for key, tensor in state.items()})
    for dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64):
        with pytest.raises(WeightsMismatchError, match=f"{name} is {str(dtype)[6:]}, the model's is float32"):
            load_hf_state_dict(model, state | {name: state[name].to(dtype)})
    with pytest.raises(TypeError, match=f"{name}: weights travel as .*int8.*, not as torch.int16"):
        pack(state | {name: state[name].to(torch.int16)}, 1)
    folder = tmp_path / "model.safetensors"
    save_file(load_file(folder) | {name: state[name].to(torch.int8)}, folder)
    for low_bit in (None, W8A8):
        with pytest.raises(WeightsMismatchError, match=f"{name} is int8, the model's is float32"):
            load_model(tmp_path, low_bit=low_bit)


def test_groups_that_do_not_divide_a_matrix_are_refused_with_its_name_and_the_remedy() -> None:
    config = ModelConfig.from_hf(CONFIGS["qwen3"].to_dict())
    for wrong, named in (
        (config, r"48 inputs of model\.layers\.\*\.self_attn\.q_proj\.weight \(hidden_size\)"),
        (replace(config, hidden_size=128), r"80 inputs of model\.layers\.\*\.mlp\.down_proj\.weight \(interm"),
        (replace(config, hidden_size=128, head_dim=40), r"160 inputs of .*o_proj\.weight \(num_attention_heads x head"),
    ):
        expected = rf"w4a8 has groups of 128 or 64 .*divide the {named}.*use w8a8"
        with pytest.raises(ModelConfigError, match=expected) as raised:
            Transformer(wrong, device="meta", low_bit=W4A8)
        with pytest.raises(ModelConfigError, match="groups of 128 or 64") as mirrored:
            Transformer(wrong, device="meta").mirror(W4A8, torch.float32)
        assert str(raised.value) == str(mirrored.value)


def test_an_engines_model_has_no_masters_to_mirror() -> None:
    config = ModelConfig.from_hf(CONFIGS["qwen3"].to_dict())
    model = Transformer(config, device="meta", low_bit=W8A8)
    assert all(
        isinstance(getattr(block, name), LowBitProjection) for block in model.blocks for name in Block.PROJECTIONS
    )
    assert isinstance(model.lm_head, Projection)
    with pytest.raises(TypeError, match="no masters"):
        model.mirror(W8A8, torch.float32)
