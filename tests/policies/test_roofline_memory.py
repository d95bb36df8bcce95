"""Bytes of weights and of what autograd keeps: the plan's sums are those of the network itself, on meta tensors."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from config.formats import FORMATS
from config.network import Network
from models.checkpoint import parameter_count
from models.config import ModelConfig
from models.low_bit_copy import copy_bytes, low_bit_copy
from models.tensor_parallel import part_config
from models.transformer import Transformer
from policies.roofline.devices import DEVICES, device_named
from policies.roofline.memory import (
    GIB,
    EngineShape,
    LearnerShape,
    plan_colocated,
    plan_learner,
    plan_rollout,
    saved_bytes,
)
from tests.policies.networks import NETWORKS

H100 = DEVICES["H100"]
SEVEN = NETWORKS["7b"]
ENGINE = EngineShape(max_running=128, kv_tokens=262_144, prefill_tokens=8192, most_rows=544, drafter=True)
LEARNER = LearnerShape(ranks=8, micro_batch_tokens=16_384, checkpointing=True, master_bytes=4, compute_bytes=2)
TRAINER = 2048  # tokens of a micro-step


class _Attention(torch.autograd.Function):
    """Keeps what a flash kernel keeps, but for one number per row and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


class _Context:
    def __init__(self, tokens: int) -> None:
        self.positions = torch.empty(tokens, dtype=torch.int64, device="meta")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Attention.apply(q, k, v)
        return out


def meta_model(net: Network, layers: int, quantization: str = "none") -> Transformer:
    config = ModelConfig(
        family="qwen2",
        **{field.name: getattr(net, field.name) for field in fields(Network)} | {"num_layers": layers},
        max_position_embeddings=32_768,
    )
    form = FORMATS.get(quantization)
    return Transformer(config, dtype=torch.bfloat16, device="meta", batch_invariant=False, low_bit=form)


def kept_bytes(
    net: Network, layers: int, tokens: int, *, checkpointing: bool = False, mirrored: str | None = None
) -> int:
    """Of tensors that autograd keeps for the backward pass, parameters left out."""
    model = meta_model(net, layers)
    if mirrored is not None:
        model.mirror(FORMATS[mirrored], torch.bfloat16, cached=True)
    model.set_activation_checkpointing(checkpointing)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.empty(tokens, dtype=torch.int64, device="meta"), _Context(tokens))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_are_those_of_the_network(name: str) -> None:
    net = NETWORKS[name]
    model = meta_model(net, 3)
    assert sum(p.numel() for p in model.parameters()) == replace(net, num_layers=3).parameters
    assert max(p.numel() for p in model.parameters()) == net.largest_parameter


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_layer_keeps_is_what_autograd_keeps(name: str) -> None:
    net, tokens = NETWORKS[name], 512
    found = (kept_bytes(net, 2, tokens) - kept_bytes(net, 1, tokens)) / tokens
    assert saved_bytes(net) == pytest.approx(found, rel=0.01)
    first, second = (kept_bytes(net, layers, tokens, checkpointing=True) for layers in (1, 2))
    assert second - first == tokens * 2 * net.hidden_size


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_in_few_bits_are_as_large_as_the_engines(name: str, quantization: str) -> None:
    net = replace(NETWORKS[name], num_layers=3, low_bits=FORMATS[quantization])
    stored = [*meta_model(net, 3, quantization).state_dict(keep_vars=True).values()]
    assert sum(t.numel() * t.element_size() for t in {id(t): t for t in stored}.values()) == net.weight_bytes
    assert net.weight_bytes < replace(net, low_bits=None).weight_bytes


@pytest.mark.parametrize("quantization", ["w8a8", "w4a16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_mirrored_layer_keeps_is_what_autograd_keeps(name: str, quantization: str) -> None:
    net, tokens = replace(NETWORKS[name], low_bits=FORMATS[quantization]), 512
    two, one = (kept_bytes(net, layers, tokens, mirrored=quantization) for layers in (2, 1))
    assert saved_bytes(net, mirrored=True) == pytest.approx((two - one) / tokens, rel=0.01)


def test_a_mirror_costs_its_copies_and_room_to_round_a_matrix() -> None:
    net = replace(SEVEN, low_bits=FORMATS["w8a8"])
    exact, mirrored = (plan_learner(net, replace(LEARNER, mirrored=on), H100.memory_bytes) for on in (False, True))
    copies = {name for phase in mirrored.phases for name in phase.items} - {n for p in exact.phases for n in p.items}
    assert copies == {"quantised matrices", "a matrix quantised"}
    alone = plan_learner(net, replace(LEARNER, mirrored=True, ranks=1), 10 * H100.memory_bytes)
    kept = alone.phases[0].items["quantised matrices"]
    assert kept == net.num_layers * net.matrices_bytes > mirrored.phases[0].items["quantised matrices"]


def test_sleep_and_offload_only_take_away() -> None:
    """And take away what they name: the KV cache from learning, the moments from rollout."""
    awake, asleep = (
        plan_colocated(SEVEN, ENGINE, LEARNER, TRAINER, H100.memory_bytes, engines_sleep=on, optimizer_away=on)
        for on in (False, True)
    )
    phases = {phase.name: phase for phase in asleep.phases}
    for phase in awake.phases:
        assert phases[phase.name].total_bytes <= phase.total_bytes
    kv = 262_144 * SEVEN.kv_token_bytes * 29 // 28  # the drafter's layer as well
    before = next(phase for phase in awake.phases if phase.name == "learning")
    assert before.total_bytes - phases["learning"].total_bytes == kv
    assert "optimizer" in awake.phases[0].items
    assert "optimizer" not in asleep.phases[0].items


def test_the_colocated_7b_fits_where_a_full_copy_of_the_weights_did_not() -> None:
    """Defect B1: 28.4 GiB of gathered float32 and 14.2 GiB of bfloat16 on top did not fit; pieces do."""
    plan = plan_colocated(SEVEN, ENGINE, LEARNER, TRAINER, H100.memory_bytes, engines_sleep=False, optimizer_away=False)
    handing_over = next(phase for phase in plan.phases if phase.name == "hand-over")
    copies = SEVEN.parameters * (4 + 2)
    assert plan.fits(H100.memory_bytes)
    assert handing_over.total_bytes + copies > H100.memory_bytes
    assert handing_over.items["hand-over's pieces"] < 4 * GIB


def test_checkpointing_and_ranks_shrink_the_learner() -> None:
    whole = plan_learner(SEVEN, replace(LEARNER, checkpointing=False), H100.memory_bytes)
    kept = plan_learner(SEVEN, LEARNER, H100.memory_bytes)
    alone = plan_learner(SEVEN, replace(LEARNER, ranks=1), H100.memory_bytes)
    assert not whole.fits(H100.memory_bytes)
    assert kept.fits(H100.memory_bytes)
    assert not alone.fits(H100.memory_bytes)
    assert "GiB = activations" in whole.worst.text()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("A100-40G", "A100-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("h100", "H100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_devices_are_found_by_what_cuda_and_ray_call_them(text: str, name: str | None) -> None:
    found = device_named(text)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8", "w4a16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_self_drafters_copy_is_as_large_as_the_engines(name: str, quantization: str) -> None:
    """With its head in eight bits where that is large beside the layers."""
    net = replace(NETWORKS[name], num_layers=3)
    copy = low_bit_copy(meta_model(net, 3), FORMATS[quantization])
    assert copy_bytes(copy) == net.copied(FORMATS[quantization]).copy_bytes
    engine = replace(ENGINE, self_copy=FORMATS[quantization])
    with_copy, without = (plan_rollout(net, shape, None).phases[0] for shape in (engine, ENGINE))
    assert with_copy.items["self-drafter's copy"] == copy_bytes(copy)
    assert with_copy.total_bytes >= without.total_bytes + copy_bytes(copy)
    apart = plan_rollout(net, replace(engine, copy_apart=True), None).phases[0]
    assert apart.items["KV cache"] > 1.5 * with_copy.items["KV cache"], "vLLM's copy has K/V of its own"


def test_a_rank_of_our_engine_holds_its_part_and_the_tables_whole() -> None:
    """Bytes of the weights: those of the very tensors that a rank has (models.tensor_parallel)."""
    net = SEVEN
    config = meta_model(net, net.num_layers).config
    part = Transformer(part_config(config, 4), dtype=torch.bfloat16, device="meta")
    engine = replace(ENGINE, gpus=4, own_ranks=True)
    items = plan_rollout(net, engine, None).phases[0].items
    assert items["engine weights"] == 2 * parameter_count(part)
    tables = 2 * net.embedding_parameters * net.item_bytes
    assert items["engine weights"] > net.weight_bytes // 4 + tables // 2
    eight = plan_rollout(net, replace(engine, gpus=8), None).phases[0].items
    assert net.num_kv_heads == 4
    assert eight["KV cache"] == items["KV cache"], "beyond four ranks, heads of keys are held twice"
