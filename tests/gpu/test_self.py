"""Drafting by a copy of the target in few bits on a GPU: the drafts are the CPU's, and no token changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.formats import FORMATS
from config.strategy import Strategy
from drafter.self import SelfDrafter
from models.checkpoint import hf_state_dict, init_model
from models.transformer import Transformer
from models.weights import pack
from policies.speculation.policy import FixedPolicy
from tests.engine.support import engine, make_requests, options_of, run, write_config
from tests.gpu.test_cuda import DTYPES, TIE, Counting, assert_tokens_of, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def reference_of(directory: Path, dtype: torch.dtype) -> Transformer:
    """On the CPU: weights that are numbers of `dtype`; groups of 128 divide its matrices."""
    model = init_model(write_config(directory / "qwen3", "qwen3", **WIDE), 0, batch_invariant=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def drafting(
    model: Transformer, name: str, strategy: str = "self:4"
) -> tuple[NativeEngine, list[EngineStepRecord], Any]:
    records: list[EngineStepRecord] = []
    capture = Counting()
    core = NativeEngine(
        model,
        options_of(max_running=4),
        drafters={"self": SelfDrafter(model, FORMATS[name])},
        policy=FixedPolicy(Strategy.parse(strategy)),
        steps=records,
        graph_capture=capture,
    )
    return core, records, capture


def accepted(records: list[EngineStepRecord]) -> float:
    return sum(record.accepted for record in records) / max(1, sum(record.drafted for record in records))


@DTYPES
@pytest.mark.pretended
@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_gives_the_tokens_of_plain_decoding(
    name: str, temperature: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Captured at the start; then with new weights, of which the copy is made again where the old one lay."""
    reference = reference_of(tmp_path, dtype)
    model = on_device(reference, dtype)
    requests = make_requests(6, prompts=4, temperature=temperature, max_new_tokens=16)
    expected = run(engine(model, cuda_graphs=False), requests)
    core, records, capture = drafting(model, name)
    captured = capture.captures
    assert_tokens_of(reference, requests, expected, run(core, requests), TIE[dtype])
    assert sum(record.drafted for record in records) > 50
    assert accepted(records) > (0.8 if name == "w8a8" else 0.4)
    with torch.no_grad():
        reference.norm.weight.mul_(0.5)
    core.update_weights(*pack({name: tensor.to(dtype) for name, tensor in hf_state_dict(reference).items()}, 1))
    records.clear()
    anew = run(engine(model, cuda_graphs=False), requests)
    assert_tokens_of(reference, requests, anew, run(core, requests), TIE[dtype])
    assert accepted(records) > (0.8 if name == "w8a8" else 0.4)
    assert capture.captures == captured, "all weights are read in place"


@DTYPES
@pytest.mark.pretended
def test_it_drafts_under_top_p_with_graphs_of_its_own(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = reference_of(tmp_path, dtype)
    model = on_device(reference, dtype)
    requests = make_requests(4, prompts=3, max_new_tokens=12, top_p=0.7)
    core, records, capture = drafting(model, "w8a8", "self:3")
    captured = capture.captures
    found = run(core, requests)
    if dtype is torch.float32:  # else a token near the cutoff may be in or out
        assert_tokens_of(reference, requests, run(engine(model, cuda_graphs=False), requests), found, TIE[dtype])
    assert capture.captures > captured
    assert accepted(records) > 0.6


def test_a_few_drafts_with_the_kernels_themselves(tmp_path: Path) -> None:
    """Short, so that it also runs interpreted (tests/pretended/test_kernels.py)."""
    reference = reference_of(tmp_path, torch.float32)
    model = on_device(reference, torch.float32)
    requests = make_requests(2, max_new_tokens=6)
    core, records, _ = drafting(model, "w4a16", "self:2")
    expected = run(engine(reference), requests)
    assert_tokens_of(reference, requests, expected, run(core, requests), TIE[torch.float32])
    assert sum(record.drafted for record in records) >= 6
