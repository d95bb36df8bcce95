"""A drafter that writes into the target's KV cache finds there what it must, and what it leaves there harms nobody."""

from pathlib import Path

import numpy as np
import pytest

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafts, TargetPasses
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import DrafterBase, assert_same, engine, make_requests, options_of, run
from tests.speculation.support import model_of

TIGHT = {"kv_tokens": 160, "max_model_tokens": 90}  # of ten requests some are preempted


class Copyist(DrafterBase):
    """Drafts with the model that it is given, from what the target's cache holds."""

    name = "copyist"
    shares_kv = True

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.rooms: list[int] = []

    def attach(self, target: TargetPasses) -> None:
        self.target = target

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        self.rooms += batch.room.tolist()
        tokens, _ = self.target.chain(self.model, batch, strategy.depth)
        return Drafts(tokens, np.minimum(batch.room, strategy.depth))


def serve(
    model: Transformer, drafter: Copyist, requests: list, **options: int
) -> tuple[dict, list[EngineStepRecord], NativeEngine]:
    records: list[EngineStepRecord] = []
    core = NativeEngine(
        model,
        options_of(**options),
        drafters={"copyist": drafter},
        policy=FixedPolicy(Strategy.parse("copyist:5")),
        steps=records,
    )
    return run(core, requests), records, core


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8}], ids=str
)
@pytest.mark.parametrize("options", [{}, TIGHT, {"prefill_chunk_tokens": 16}], ids=["roomy", "tight", "chunked"])
def test_the_target_itself_as_its_drafter_is_always_right(tmp_path: Path, sampling: dict, options: dict) -> None:
    """Forks of shared prompts, preempted requests, prompts in chunks: a draft that read K/V that were not there, or
    were another's, or wrote them over another's, would be wrong somewhere."""
    model = model_of(tmp_path, "qwen3")
    requests = make_requests(12, prompts=3, seed=5, max_new_tokens=40, **sampling)
    expected = run(engine(model), requests)
    drafter = Copyist(model)
    found, records, core = serve(model, drafter, requests, **options)
    assert_same(found, expected)
    drafted, accepted = (sum(getattr(record, name) for record in records) for name in ("drafted", "accepted"))
    assert drafted > 300
    assert accepted == drafted
    assert (core._scheduler.preempted > 0) == (options == TIGHT)


@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_rubbish_in_the_cache_changes_no_token(tmp_path: Path, options: dict) -> None:
    model, other = model_of(tmp_path, "llama"), model_of(tmp_path / "other", "llama")
    for parameter in other.parameters():
        parameter.data.mul_(-3)
    requests = make_requests(16, prompts=2, seed=6, max_new_tokens=40)
    found, records, _ = serve(model, Copyist(other), requests, **options)
    assert_same(found, run(engine(model), requests))
    assert sum(record.drafted for record in records) > 5 * sum(record.accepted for record in records)


def test_where_blocks_are_short_drafts_are_shorter_and_nobody_loses_its_place(tmp_path: Path) -> None:
    """Eight requests that just fit: what is drafted takes no block that another would need in the step."""
    model = model_of(tmp_path, "qwen3")
    requests = make_requests(8, prompts=8, seed=7, max_new_tokens=24)
    drafter = Copyist(model)
    found, _, _ = serve(model, drafter, requests, kv_tokens=136, max_model_tokens=64)
    assert_same(found, run(engine(model), requests))
    assert set(drafter.rooms) == {0, 1, 2, 3, 4, 5}
