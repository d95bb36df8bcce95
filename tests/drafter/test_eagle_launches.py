"""What a draft launches on a GPU, counted from the drafter's own code on meta tensors: budgets that fail the build."""

from collections import Counter

import pytest
import torch

from config.strategy import Strategy
from drafter.eagle.cache import EagleCache
from drafter.eagle.device import DeviceDrafts
from drafter.eagle.drafter import MAX_FED_ROWS
from drafter.eagle.frames import Outputs, Size
from drafter.eagle.model import Kind, empty_eagle
from models.config import ModelConfig
from models.ops.triton.operators import LAUNCHES
from models.transformer import Transformer
from policies.roofline.kernels import draft_kernels
from policies.roofline.kernels import launches as launches_of
from tests.engine.support import hf_config
from tests.policies.networks import NETWORKS
from tests.policies.op_trace import OpTrace

REQUESTS, PER_TOKEN = 4, 20  # kernels per drafted token, catching up and copies to and from the host included


def launches(
    strategy: Strategy, kind: Kind, *, sampled: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Counter[str]:
    """Kernels of one draft by name, the draft's upload, gather and download among them."""
    config = ModelConfig.from_hf(hf_config("qwen2", num_hidden_layers=4))
    device = torch.device("meta")
    target = Transformer(config, dtype=dtype, device=device, batch_invariant=False)
    model = empty_eagle(kind, config, dtype=dtype, device=device, batch_invariant=False).requires_grad_(False)
    target.requires_grad_(False)
    cache = EagleCache(config, 8, 64, 8, MAX_FED_ROWS, dtype, device)
    drafts = DeviceDrafts(
        model, target, cache, cache.columns(256), MAX_FED_ROWS, noise=True, sampled=sampled, scale=1.0
    )
    shape = drafts._shape(strategy, REQUESTS)
    frame = drafts._frames.of(Size(REQUESTS, REQUESTS * (1 + strategy.depth), shape))
    outputs = Outputs({shape}, config.vocab_size if sampled else 0, device)
    rows = drafts._passes.features(REQUESTS * (1 + strategy.depth), max(1, len(model.layers)))
    trace = OpTrace({f"paceline::{name}": count for name, count in LAUNCHES.items()})
    with torch.inference_mode(), trace:
        drafts._passes.catch_up(frame, rows)
        drafts._passes.draft(frame, True, outputs)
    counted = Counter(upload=1, gather=1, download=1)
    for op in trace.ops:
        counted[op.name] += op.launches
    return counted


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("text", ["eagle:2", "eagle:4", "eagle:8", "eagle:4x3/12"])
def test_a_drafted_token_launches_at_most_twenty_kernels(text: str, kind: Kind) -> None:
    strategy = Strategy.parse(text)
    counted = launches(strategy, kind)
    assert counted.total() <= PER_TOKEN * strategy.tokens_to_verify, counted
    assert counted["paceline::paged_attention"] == LAUNCHES["paged_attention"] * strategy.depth, "one pass per level"
    if kind == "eagle":
        by_plan = draft_kernels(NETWORKS["7b"], REQUESTS, strategy, 4096)  # where attention takes two
        assert counted.total() - counted["upload"] - counted["download"] == launches_of(by_plan), by_plan


def test_a_sampled_chain_keeps_its_distributions_within_the_budget() -> None:
    counted = launches(Strategy.parse("eagle:4"), "eagle", sampled=True)
    assert counted.total() <= PER_TOKEN * 4, counted
