"""Adapters of low rank: merged as engines and learner share it, their gradient, their names and files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from config.formats import FORMATS
from config.model import LORA_TARGETS, LoraOptions, LoraTarget
from models import ops
from models.checkpoint import hf_state_dict, init_model, load_hf_state_dict
from models.config import ModelConfig, read_config
from models.lora import adapter_parameters, attach
from models.low_bit import quantise
from models.packed import PackedContext
from models.peft import AdapterError, adapter_faults, adapter_shapes, read_adapter, write_adapter
from models.transformer import Transformer
from tests.learner.tiny import write_config
from tests.native import needs_native

ROWS = st.integers(1, 40)


def factors(seed: int, rows: int, inputs: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, A and B."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((rows, inputs), (rank, inputs), (rows, rank))
    weight, a, b = (torch.randn(*shape, generator=g) for shape in shapes)
    return weight, a, b


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), rows=ROWS, inputs=st.sampled_from([8, 24, 40]), rank=st.integers(1, 9), cut=ROWS)
def test_a_merged_row_depends_on_nothing_but_itself(seed: int, rows: int, inputs: int, rank: int, cut: int) -> None:
    weight, a, b = factors(seed, rows, inputs, rank)
    merged = ops.merge(weight, a, b, 0.7)
    torch.testing.assert_close(merged, (weight.double() + 0.7 * b.double() @ a.double()).float())
    part = ops.merge(weight[:cut], a, b[:cut], 0.7)
    assert torch.equal(part, merged[:cut])
    torch.set_num_threads(2)
    assert torch.equal(ops.merge(weight, a, b, 0.7), merged)
    torch.set_num_threads(1)
    assert torch.equal(ops.merge(weight, a, torch.zeros_like(b), 0.7), weight), "fresh adapters change nothing"
    half = ops.merge(weight.bfloat16(), a, b, 0.7)
    assert torch.equal(half, ops.merge(weight.bfloat16().float(), a, b, 0.7).bfloat16()), "rounded once"


@pytest.mark.parametrize("form", [None, "w8a8", "w4a8"])
def test_the_product_is_the_engines_and_its_gradient_that_of_the_sum(form: str | None) -> None:
    weight, a, b = factors(1, 48, 128, 3)
    updates = [ops.LowRank(a, b[:32], 0.5, 0, 32), ops.LowRank(a.flip(0), b[32:], 0.25, 32, 48)]
    merged = torch.cat([ops.merge(weight[u.start : u.stop], u.a, u.b, u.scale) for u in updates])
    x = torch.randn(17, 128, generator=torch.Generator().manual_seed(2))
    low_bit = None if form is None else quantise(merged, FORMATS[form])
    plain = ops.linear(x, merged, None, invariant=True) if low_bit is None else ops.low_bit_linear(x, low_bit)
    leaves = [t.clone().requires_grad_() for t in (x, *(f for u in updates for f in (u.a, u.b)))]
    placed = [u._replace(a=leaves[1 + 2 * i], b=leaves[2 + 2 * i]) for i, u in enumerate(updates)]
    y = ops.adapted_linear(leaves[0], weight, None, placed, invariant=True, low_bit=low_bit)
    assert torch.equal(y.detach(), plain)
    toward = torch.randn(17, 48, generator=torch.Generator().manual_seed(3))
    (y * toward).sum().backward()
    # What reaches the merged matrix in one product, rounded or not; from there to A and B by hand.
    used, seen = merged.clone().requires_grad_(), x.clone().requires_grad_()
    dense = ops.linear(seen, used, None, invariant=True)
    if low_bit is not None:
        dense = ops.mirrored_linear(seen, used, low_bit)
    (dense * toward).sum().backward()
    assert used.grad is not None
    wanted = [seen.grad]
    for u in updates:
        rows = used.grad[u.start : u.stop]
        wanted += [u.scale * u.b.t() @ rows, u.scale * rows @ u.a.t()]
    for leaf, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 150),
    depth=st.integers(1, 90),
    columns=st.integers(1, 150),
    cuts=st.tuples(st.integers(0, 150), st.integers(0, 150), st.integers(0, 150)),
    rank=st.integers(1, 20),
    threads=st.integers(1, 2),
)
def test_merging_where_it_is_used_changes_no_bit(
    dtype: torch.dtype, rows: int, depth: int, columns: int, cuts: tuple[int, int, int], rank: int, threads: int
) -> None:
    """The kernels against single steps of torch, for updates of some rows, in any order."""
    first, middle, last = sorted(min(cut, columns) for cut in cuts)
    g = torch.Generator().manual_seed(rows + depth + columns)
    x, weight = (torch.randn(n, depth, generator=g).to(dtype) for n in (rows, columns))
    bias = torch.randn(columns, generator=g).to(dtype)
    updates, merged = [], weight.clone()
    for scale, start, stop in ((0.7, middle, last), (0.3, first, middle)):
        a, b = torch.randn(rank, depth, generator=g), torch.randn(stop - start, rank, generator=g)
        updates.append(ops.LowRank(a, b, scale, start, stop))
        sums = ops.linear(b, a.t().contiguous(), None, invariant=True)
        merged[start:stop] = (sums * scale + weight[start:stop].float()).to(dtype)
    torch.set_num_threads(threads)
    assert torch.equal(ops.merge_rows(weight, updates), merged)
    for added in (bias, None):
        found = ops.adapted_linear(x, weight, added, updates, invariant=True)
        assert torch.equal(found, ops.linear(x, merged, added, invariant=True))


def test_an_update_that_does_not_fit_its_rows_is_refused() -> None:
    weight, a, b = factors(0, 12, 8, 2)
    for update in (ops.LowRank(a, b, 1.0, 0, 11), ops.LowRank(a[:, :7], b, 1.0, 0, 12), ops.LowRank(a, b, 1.0, 4, 16)):
        with pytest.raises((ValueError, RuntimeError)):
            ops.merge_rows(weight, [update])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"))


def adapted_model(folder: Path, options: LoraOptions, *, scatter: bool = True) -> Transformer:
    model = init_model(folder, 3)
    attach(model, options, 7)
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _, parameter in adapter_parameters(model, options) if scatter else ():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / 4)
    return model


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(model(tokens, PackedContext.from_lengths([len(tokens)])))


def test_fresh_adapters_begin_as_pefts_and_a_seed_gives_them(folder: Path) -> None:
    options = LoraOptions(rank=2)
    one, same, other = (dict(adapter_parameters(m, options)) for m in (_attached(folder, s) for s in (1, 1, 2)))
    for name, parameter in one.items():
        assert torch.equal(parameter, same[name])
        if name.endswith("lora_B.weight"):
            assert not parameter.any()
        else:
            bound = parameter.shape[1] ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound
            assert not torch.equal(parameter, other[name])
    model = _attached(folder, 1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(one)
    assert all(".adapters." in name for name in trained)


def _attached(folder: Path, seed: int) -> Transformer:
    model = init_model(folder, 3)
    attach(model, LoraOptions(rank=2), seed)
    return model


def test_names_and_shapes_are_pefts() -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    shapes = adapter_shapes(config, LoraOptions(rank=4, targets=("down_proj", "k_proj")))
    prefix = "base_model.model.model.layers"
    assert shapes == {  # as peft.get_peft_model_state_dict has them
        f"{prefix}.{layer}.{module}.lora_{side}.weight": shape
        for layer in (0, 1)
        for module, (a, b) in {"self_attn.k_proj": ((4, 16), (8, 4)), "mlp.down_proj": ((4, 40), (16, 4))}.items()
        for side, shape in (("A", a), ("B", b))
    }
    assert len(adapter_shapes(config, LoraOptions())) == 2 * 7 * 2


def test_what_a_model_says_of_itself_is_merged_and_computes_the_same(folder: Path) -> None:
    options = LoraOptions(rank=3, alpha=6, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
    model, whole = adapted_model(folder, options), init_model(folder, 0)
    load_hf_state_dict(whole, hf_state_dict(model))
    tokens = torch.arange(20)
    assert torch.equal(logits(whole, tokens), logits(model, tokens)), "bitwise"
    assert not torch.equal(logits(whole, tokens), logits(init_model(folder, 3), tokens))


def test_files_go_out_and_come_in(folder: Path, tmp_path: Path) -> None:
    options = LoraOptions(rank=2, alpha=5, rslora=True)
    model = adapted_model(folder, options)
    write_adapter(adapter_parameters(model, options), options, "base", tmp_path / "a")
    again = init_model(folder, 3)
    attach(again, options.model_copy(update={"path": str(tmp_path / "a")}), 0)
    assert torch.equal(logits(again, torch.arange(9)), logits(model, torch.arange(9)))
    said = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["use_rslora"]) == (2, 5, True)


@pytest.mark.parametrize(
    ("change", "options", "key", "word"),
    [
        ({"use_dora": True}, {}, "path", "use_dora"),
        ({"peft_type": "IA3"}, {}, "path", "IA3"),
        ({"init_lora_weights": "pissa"}, {}, "path", "pissa"),
        ({"target_modules": ["q_proj"]}, {}, "targets", "q_proj"),
        ({}, {"rank": 3}, "rank", "r = 2"),
        ({}, {"alpha": 1.0}, "alpha", "lora_alpha"),
        ({}, {"rslora": True}, "rslora", "use_rslora"),
    ],
)
def test_an_adapter_that_is_another_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], options: dict[str, Any], key: str, word: str
) -> None:
    own, config = LoraOptions(rank=2), ModelConfig.from_hf(read_config(folder))
    write_adapter(adapter_parameters(adapted_model(folder, own), own), own, "base", tmp_path)
    assert not list(adapter_faults(tmp_path, config, own))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    asked = own.model_copy(update=options)
    (first, *_) = adapter_faults(tmp_path, config, asked)
    assert first[0] == key
    assert word in first[1]
    with pytest.raises(AdapterError, match=f"learner.lora.{key}"):
        read_adapter(tmp_path, config, asked)


PATHS = [f"model.layers.{layer}.{module}_proj" for layer in (0, 1) for module in ("self_attn.q", "mlp.down")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("theirs", "targets"),
    [
        ("all-linear", LORA_TARGETS),
        (r".*\.(q_proj|down_proj)", ("q_proj", "down_proj")),
        (PATHS, ("q_proj", "down_proj")),
        ([*PATHS[:2], "down_proj", "q_proj"], ("q_proj", "down_proj")),
        (["self_attn.q_proj", "mlp.down_proj"], ("q_proj", "down_proj")),
    ],
    ids=["all-linear", "pattern", "paths", "both", "ends of paths"],
)
def test_however_peft_names_the_modules_its_files_are_read(
    folder: Path, tmp_path: Path, theirs: str | list[str], targets: tuple[LoraTarget, ...]
) -> None:
    """Saved by peft itself: 0.21 writes `all-linear` as the full path of every module."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from models.checkpoint import save_model

    save_model(init_model(folder, 3), tmp_path / "base")
    fresh = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(r=2, lora_alpha=4, target_modules=theirs, init_lora_weights=False),
    )
    fresh.save_pretrained(tmp_path / "its")
    config = ModelConfig.from_hf(read_config(folder))
    asked = LoraOptions(rank=2, alpha=4, targets=targets, path=str(tmp_path / "its"))
    assert list(adapter_faults(tmp_path / "its", config, asked)) == []
    ours, tokens = init_model(folder, 3), torch.arange(12)
    attach(ours, asked, 0)
    with torch.no_grad():
        torch.testing.assert_close(fresh(tokens[None]).logits[0], logits(ours, tokens), rtol=1e-4, atol=1e-4)
    ((key, fault, value), *_) = adapter_faults(
        tmp_path / "its", config, asked.model_copy(update={"targets": ("v_proj",)})
    )
    assert (key, value) == ("targets", sorted(targets)), fault


@pytest.mark.parametrize(
    ("targets", "key", "word"),
    [
        (PATHS[:3], "path", "layers.1.mlp.down_proj"),  # only a part of the layers: no keys say so
        (".*", "path", "embed_tokens"),
        ("(", "path", "no pattern"),
        ("experts.w1", "path", "no module of the model"),
        (7, "path", "no list of modules"),
    ],
)
def test_modules_that_keys_cannot_say_are_refused(
    folder: Path, tmp_path: Path, targets: object, key: str, word: str
) -> None:
    own, config = LoraOptions(rank=2, targets=("q_proj", "down_proj")), ModelConfig.from_hf(read_config(folder))
    write_adapter(adapter_parameters(adapted_model(folder, own), own), own, "base", tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": targets}))
    ((found, fault, _), *_) = adapter_faults(tmp_path, config, own)
    assert (found, word in fault) == (key, True), fault


def test_tensors_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    own, config = LoraOptions(rank=2), ModelConfig.from_hf(read_config(folder))
    write_adapter(adapter_parameters(adapted_model(folder, own), own), own, "base", tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    save_file(tensors | {name: torch.zeros(2, 5)}, weights)
    ((key, fault, _),) = adapter_faults(tmp_path, config, own)
    assert key == "path"
    assert name in fault
    weights.write_bytes(b"no header")
    ((key, fault, _),) = adapter_faults(tmp_path, config, own)
    assert "safetensors" in fault


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ("/cache/hub/models--Qwen--Qwen2.5-0.5B/snapshots/" + "a1" * 20, ("Qwen/Qwen2.5-0.5B", "a1" * 20)),
        ("/runs/models/SmolLM2.Q4_1-b179c9523d0e6a0f", ("/runs/models/SmolLM2.Q4_1-b179c9523d0e6a0f", None)),
        ("/cache/models--gpt2/snapshots/main", ("/cache/models--gpt2/snapshots/main", None)),
    ],
)
def test_an_adapter_names_its_base_as_it_can_be_loaded(
    folder: Path, tmp_path: Path, base: str, named: tuple[str, str | None]
) -> None:
    """A model that was fetched from the Hub by its id there, which is the same on every machine."""
    options = LoraOptions(rank=2)
    write_adapter(adapter_parameters(adapted_model(folder, options), options), options, base, tmp_path / "a")
    written = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written.get("revision")) == named


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_peft_itself_reads_ours_and_we_read_its(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from models.checkpoint import save_model

    options, tokens = LoraOptions(rank=3, alpha=6), torch.arange(12)
    save_model(init_model(folder, 3), tmp_path / "base")
    model = adapted_model(folder, options)
    write_adapter(adapter_parameters(model, options), options, str(tmp_path / "base"), tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    found = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours")  # by the name in its file
    for theirs in (peft.PeftModel.from_pretrained(base, tmp_path / "ours"), found):
        with torch.no_grad():
            torch.testing.assert_close(theirs(tokens[None]).logits[0], logits(model, tokens), rtol=1e-4, atol=1e-4)
    fresh = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "down_proj"]),
    )
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    fresh.save_pretrained(tmp_path / "its")
    asked = LoraOptions(rank=2, alpha=3, rslora=True, targets=("q_proj", "down_proj"), path=str(tmp_path / "its"))
    ours = init_model(folder, 3)
    attach(ours, asked, 0)
    with torch.no_grad():
        torch.testing.assert_close(fresh(tokens[None]).logits[0], logits(ours, tokens), rtol=1e-4, atol=1e-4)
