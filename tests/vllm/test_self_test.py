"""The self-test at start-up passes on a vLLM that is mended, names what is wrong on one that is not, leaves nothing."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.vllm.patches import expand, mend_worker
from tests.vllm.support import VLLM, RawEngine, expansion_of_the_wheel, tiny_checkpoint, wheel_is_wrong

pytestmark = [*VLLM, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawEngine]:
    directory, _ = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    made = RawEngine(directory, draft_tokens=4)
    made.core.collective_rpc(mend_worker)
    yield made
    made.close()


@pytest.fixture
def expanding_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    from vllm.v1.sample import rejection_sampler

    return lambda function: monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", function)


def self_test(engine: RawEngine) -> str:
    from actors.engine.vllm.self_test import self_test

    return self_test(engine.core)


def test_a_mended_vllm_passes_and_nothing_is_left_behind(engine: RawEngine) -> None:
    steps, step_fn = 0, engine.core.step_fn

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step_fn()

    engine.core.step_fn = counted
    try:
        assert self_test(engine) == ""
    finally:
        engine.core.step_fn = step_fn
    assert steps <= 24, "it is run at every start"
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.control is None
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's own
    assert len(pool.cached_block_hash_to_block) == 0


def of_the_neighbour(x: torch.Tensor, cu: torch.Tensor, num_tokens: int, *replace: int, **named: int) -> torch.Tensor:
    return expand(x, cu, num_tokens, *replace, **named).roll(1)


def through_integers(x: torch.Tensor, cu: torch.Tensor, num_tokens: int, *replace: int, **named: int) -> torch.Tensor:
    return expand(x.long(), cu, num_tokens, *replace, **named).to(x.dtype)


def always(value: float) -> Callable[..., torch.Tensor]:
    return lambda x, cu, num_tokens, *replace, **named: x.new_full((num_tokens,), value)


def wrong_for(dtype: torch.dtype, value: float) -> Callable[..., torch.Tensor]:
    def expansion(x: torch.Tensor, cu: torch.Tensor, num_tokens: int, *args: Any, **named: Any) -> torch.Tensor:
        right = expand(x, cu, num_tokens, *args, **named)
        return torch.full_like(right, value) if x.dtype == dtype else right

    return expansion


@pytest.mark.parametrize(
    "fault",
    [of_the_neighbour, through_integers, always(0.0), always(1.0), always(1e30), always(4.6e-41), always(-1.0)],
    ids=["neighbour", "integers", "zeros", "ones", "huge", "denormal", "negative"],
)
def test_a_wrong_temperature_is_told(
    engine: RawEngine, expanding_by: Callable[[Any], None], fault: Callable[..., torch.Tensor]
) -> None:
    expanding_by(fault)
    assert "temperature" in self_test(engine)
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("value", [2, 61])
def test_a_wrong_top_k_is_told(engine: RawEngine, expanding_by: Callable[[Any], None], value: int) -> None:
    expanding_by(wrong_for(torch.int32, value))
    assert "top_k" in self_test(engine)


def test_a_wrong_top_p_is_told(engine: RawEngine, expanding_by: Callable[[Any], None]) -> None:
    def expansion(x: torch.Tensor, cu: torch.Tensor, num_tokens: int, *args: Any, **named: Any) -> torch.Tensor:
        right = expand(x, cu, num_tokens, *args, **named)
        return torch.ones_like(right) if x.dtype == torch.float32 and not named and not args else right

    expanding_by(expansion)
    assert "top_p" in self_test(engine)


def test_what_vllm_raises_is_the_reason_and_its_requests_are_aborted(
    engine: RawEngine, expanding_by: Callable[[Any], None]
) -> None:
    def expansion(*args: Any, **named: Any) -> torch.Tensor:
        raise IndexError("index 137247040 is out of bounds")

    expanding_by(expansion)
    assert "IndexError: index 137247040" in self_test(engine)
    assert not engine.scheduler.has_unfinished_requests()
    expanding_by(expand)
    assert self_test(engine) == "", "the engine goes on"


def test_rejecting_what_must_be_accepted_is_told(engine: RawEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    right = rejection_sampler.rejection_sample

    def rejecting(draft_token_ids: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return right((draft_token_ids + 1) % 61, *args, **named)

    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejecting)
    assert "rejected" in self_test(engine)


def test_the_wheel_as_it_comes_is_told_apart(engine: RawEngine, expanding_by: Callable[[Any], None]) -> None:
    """The real fault, where this wheel has it: memory that nobody wrote. It may even raise."""
    expanding_by(expansion_of_the_wheel())
    for _ in range(5):
        assert (self_test(engine) != "") == wheel_is_wrong()


@pytest.mark.parametrize("changes", [{"initializer_range": 0.05}, {"initializer_range": 1.5}, {"vocab_size": 2048}])
def test_flat_sharp_and_wide_models_pass(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Depth 1, and no false alarm."""
    directory, _ = tiny_checkpoint(tmp_path, **changes)
    engine = RawEngine(directory, draft_tokens=1)
    try:
        engine.core.collective_rpc(mend_worker)
        assert self_test(engine) == ""
    finally:
        engine.close()
