from pathlib import Path

import pytest
import torch

from models.checkpoint import hf_state_dict, hf_targets, init_model, load_model, save_model
from models.config import ModelConfig, ModelConfigError, ranks_fault
from models.packed import PackedContext
from models.tensor_parallel import (
    PartScatter,
    RankGroup,
    RankTransformer,
    load_rank,
    part_config,
    part_of,
    sum_in_order,
)
from models.transformer import Transformer
from models.weights import pack
from tests.engine.support import FAMILIES, write_config
from tests.models.ranks import on_ranks, summed_in_parts

LENGTHS = (9, 1, 17)


def saved(directory: Path, family: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    config = write_config(
        directory / "config", family, **{"num_attention_heads": 8, "num_key_value_heads": 4} | changes
    )
    model = init_model(config, 3)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases too
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    save_model(model.to(dtype), directory / "model")
    return directory / "model"


def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def forward(model: Transformer) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = model(tokens(), PackedContext.from_lengths(LENGTHS))
    return hidden, model.logits(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_bitwise_the_reference_with_the_same_sums(
    tmp_path: Path, family: str, dtype: torch.dtype, ranks: int
) -> None:
    path = saved(tmp_path, family, dtype, attention_bias=True)

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        return forward(load_rank(path, group, dtype=dtype))

    whole = load_model(path, dtype=dtype)
    with torch.inference_mode():
        one_rank = forward(whole)[1]
        hidden, logits = forward(summed_in_parts(whole, ranks))
    for found_hidden, found_logits in on_ranks(ranks, work):
        assert torch.equal(found_hidden, hidden)
        assert torch.equal(found_logits, logits)
    assert torch.allclose(logits.float(), one_rank.float(), atol=1e-4 if dtype is torch.float32 else 0.3)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_beyond_the_heads_of_keys_hold_the_same_ones(tmp_path: Path, ranks: int) -> None:
    path = saved(tmp_path, "qwen2", num_key_value_heads=1)
    with torch.inference_mode():
        expected = forward(summed_in_parts(load_model(path), ranks))[1]
    found = on_ranks(ranks, lambda group: forward(load_rank(path, group))[1])
    assert all(torch.equal(logits, expected) for logits in found)


def test_another_number_of_ranks_is_another_rounding(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")

    def work(group: RankGroup) -> torch.Tensor:
        return forward(load_rank(path, group))[1]

    two, four = on_ranks(2, work)[0], on_ranks(4, work)[0]
    assert not torch.equal(two, four)
    assert torch.allclose(two, four, atol=1e-4)


def test_a_row_depends_on_its_own_segment_only(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen3")

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        model = load_rank(path, group)
        alone = model(tokens()[: LENGTHS[0]], PackedContext.from_lengths(LENGTHS[:1]))
        return model.logits(alone), forward(model)[1][: LENGTHS[0]]

    for alone, among in on_ranks(4, work):
        assert torch.equal(alone, among)


def test_a_vocabulary_that_ranks_do_not_divide(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama", vocab_size=61)  # the last of 4 ranks has 13 of 16 rows
    with torch.inference_mode():
        expected = forward(summed_in_parts(load_model(path), 4))[1]

    def work(group: RankGroup) -> tuple[int, torch.Tensor]:
        model = load_rank(path, group)
        return len(model.head_part), forward(model)[1]

    found = on_ranks(4, work)
    assert [rows for rows, _ in found] == [16, 16, 16, 13]
    assert all(torch.equal(logits, expected) for _, logits in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_together_are_the_whole(tmp_path: Path, family: str) -> None:
    model = load_model(saved(tmp_path, family))
    for name, whole in hf_state_dict(model).items():
        parts = [part_of(name, whole, model.config, rank, 4) for rank in range(4)]
        if torch.equal(parts[0], whole):
            assert all(torch.equal(part, whole) for part in parts)
            continue
        along = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat(parts, dim=along), whole)


def test_a_rank_holds_its_part_alone(tmp_path: Path) -> None:
    path = saved(tmp_path, "qwen2")
    model = load_model(path)
    whole, config = hf_state_dict(model), model.config

    def work(group: RankGroup) -> bool:
        targets = hf_targets(load_rank(path, group))
        return all(torch.equal(targets[name], part_of(name, whole[name], config, group.rank, 2)) for name in whole)

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("piece_bytes", [64, 1000, 4096, 10**9])
@pytest.mark.parametrize(("family", "ranks"), [("llama", 4), ("qwen2", 2), ("qwen3", 8)])
def test_pieces_of_the_whole_become_a_ranks_parts(tmp_path: Path, family: str, ranks: int, piece_bytes: int) -> None:
    """Wherever pieces begin and end; bitwise, and nothing is left of what was there."""
    path = saved(tmp_path, family, torch.bfloat16)
    whole = load_model(path, dtype=torch.bfloat16)
    tensors = hf_state_dict(whole)
    manifest, buffer = pack(tensors, 1)
    for rank in (0, ranks - 1):
        part = RankTransformer(whole.config, RankGroup(None, rank, ranks), dtype=torch.bfloat16)
        for parameter in part.parameters():
            parameter.data.fill_(torch.nan)
        scatter = PartScatter(manifest.tensors, part)
        for start in range(0, len(buffer), piece_bytes):
            scatter.take(torch.from_numpy(buffer[start : start + piece_bytes]))
        for name, found in hf_targets(part).items():
            assert torch.equal(found, part_of(name, tensors[name], whole.config, rank, ranks)), name


def test_pieces_of_another_model_are_refused(tmp_path: Path) -> None:
    whole = load_model(saved(tmp_path, "llama"))
    manifest, _ = pack(hf_state_dict(whole), 1)
    part = RankTransformer(whole.config, RankGroup(None, 0, 2), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"of a rank here"):
        PartScatter(manifest.tensors, part)
    with pytest.raises(ValueError, match="does not come"):
        PartScatter(manifest.tensors[1:], part)


def test_sums_are_taken_in_order_and_rounded_once() -> None:
    parts = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert sum_in_order(parts).item() == 1.0 + 2.0**-7  # rounding after each sum would leave 1
    wide = torch.tensor([[1e8], [1.0], [-1e8]])
    assert sum_in_order(wide).item() == 0.0  # 1e8 + 1 is 1e8 in float32


def test_ranks_that_do_not_divide_the_model_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        }
    )
    assert ranks_fault(config, 2) == ""
    assert "8 heads, 2 of keys" in ranks_fault(config, 3)
    assert "1, 2, 4, 8 can" in ranks_fault(config, 3)
    with pytest.raises(ModelConfigError, match="3 ranks cannot share"):
        part_config(config, 3)


def test_a_part_is_not_taken_for_a_transformer(tmp_path: Path) -> None:
    """Fused kernels and copies ask for the very class: they would leave out the sums."""
    path = saved(tmp_path, "llama")
    assert on_ranks(2, lambda group: type(load_rank(path, group))) == [RankTransformer] * 2
