"""The engine over the fused stack and over the modules: the same tokens and, bitwise, the same log-probs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.native.forward.fused import FusedForward
from contracts.rollout import Rollout
from models import weights
from models.checkpoint import hf_state_dict, init_model
from models.transformer import Transformer
from tests.engine.support import FAMILIES, assert_same, engine, make_requests, run, write_config

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=DTYPES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Transformer:
    model = init_model(write_config(tmp_path), 0, dtype=request.param)
    if not FusedForward.supports(model):
        pytest.skip("paceline_native is not installed: pip install -e .")
    return model


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every step that went through the stack."""
    rows: list[int] = []
    forward = FusedForward.__call__

    def counted(self: FusedForward, tokens: torch.Tensor, context: Any) -> torch.Tensor:
        rows.append(len(tokens))
        return forward(self, tokens, context)

    monkeypatch.setattr(FusedForward, "__call__", counted)
    return rows


def through_modules(monkeypatch: pytest.MonkeyPatch, model: Transformer, *args: Any, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(FusedForward, "supports", staticmethod(lambda model: False))
        return run(engine(model, **options), *args)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int], family: str, dtype: torch.dtype, threads: int
) -> None:
    model = init_model(write_config(tmp_path, family), 0, dtype=dtype)
    if not FusedForward.supports(model):
        pytest.skip("paceline_native is not installed: pip install -e .")
    requests = make_requests(24, prompts=7, seed=1, stop_token_ids=(2,), top_p=0.95)
    options = {"prefill_chunk_tokens": 16, "max_running": 5, "kv_tokens": 512}
    expected = through_modules(monkeypatch, model, requests, **options)
    assert not steps, "the modules were to run"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(run(engine(model, **options), requests), expected)
    finally:
        torch.set_num_threads(before)
    assert min(steps) <= options["max_running"], "decoding goes through the stack"
    assert max(steps) > options["max_running"], "and so do prompt chunks"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_mode_goes_through_the_stack(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    model = init_model(write_config(tmp_path), 0, dtype=dtype, batch_invariant=False)
    if not FusedForward.supports(model):
        pytest.skip("paceline_native is not installed: pip install -e .")
    requests = make_requests(6, seed=3)
    assert_same(run(engine(model), requests), through_modules(monkeypatch, model, requests))
    assert steps


def test_new_weights_reach_the_stack(tmp_path: Path, model: Transformer, steps: list[int]) -> None:
    new = init_model(tmp_path, 7, dtype=model.embed_tokens.weight.dtype)
    core, requests = engine(model), make_requests(6, seed=2)
    before = run(core, requests)
    core.update_weights(*weights.pack(hf_state_dict(new), version=1))
    after, wanted = run(core, requests), run(engine(new), requests)
    assert _tokens(after) == _tokens(wanted) != _tokens(before)
    assert all(after[i].logprobs.tobytes() == wanted[i].logprobs.tobytes() for i in wanted)
    assert steps


def test_a_new_cache_reaches_the_stack(model: Transformer, steps: list[int]) -> None:
    """After sleep and wake the cache has other memory."""
    core, requests = engine(model), make_requests(6, seed=2)
    expected = run(core, requests)
    core.sleep()
    core.wake()
    assert_same(run(core, requests), expected)
    assert steps


def test_a_model_that_was_changed_goes_through_its_own_code(model: Transformer, steps: list[int]) -> None:
    class Changed(Transformer):
        pass

    model.__class__ = Changed
    assert run(engine(model), make_requests(2))
    assert not steps


def test_a_shape_without_a_kernel_goes_through_the_modules(tmp_path: Path, steps: list[int]) -> None:
    model = init_model(write_config(tmp_path, head_dim=12), 0)
    assert run(engine(model), make_requests(2))
    assert not steps


def _tokens(results: dict[int, Rollout]) -> dict[int, list[int]]:
    return {request_id: rollout.tokens.tolist() for request_id, rollout in results.items()}
