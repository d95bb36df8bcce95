"""What a draft by a copy of the target costs on a GPU, inside the engine: kernels, copies, waits of the host.

A draft is one upload at its beginning and one download at its end, however deep, and one replay where it was planned.
"""

from pathlib import Path
from typing import Any

import pytest

from actors.engine.native.engine import NativeEngine
from config.formats import FORMATS
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafts
from drafter.self import SelfDrafter
from models.checkpoint import hf_state_dict, init_model
from models.transformer import Transformer
from models.weights import pack
from policies.speculation.policy import FixedPolicy
from tests.engine.support import engine, make_requests, options_of, run, write_config
from tests.engine.test_device_chains import WIDE
from tests.pretended.counting import counting
from tests.pretended.device import Seen
from tests.pretended.support import steps_of, target

KERNELS_PER_LAYER, OTHER_KERNELS = 10, 6  # of a pass; the rest: embedding, two norms, head and two of the draw
GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


class Counted(SelfDrafter):
    """Every proposal, and what it made the device do."""

    found: list[Seen]

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        with counting() as seen:
            drafts = super().propose(batch, strategy)
        self.found.append(seen)
        return drafts


def drafting(model: Transformer, name: str) -> Counted:
    drafter = Counted(model, FORMATS[name])
    drafter.found = []
    return drafter


def drafts_of(tmp_path: Path, strategy: str, name: str, graphs: bool, layers: int = 2) -> list[Seen]:
    model = target(tmp_path, "qwen3", layers, **WIDE)
    drafter = drafting(model, name)

    def still_there(core: NativeEngine) -> None:
        assert drafter.name in core._speculator._drafters, "the drafter failed, and the engine went on without it"

    for seen in steps_of(model, drafter=drafter, strategy=strategy, warm=6, watch=still_there, cuda_graphs=graphs):
        assert seen.waits.total() == 2, "one for the draft and one for the step"
        assert not seen.pageable, seen.pageable
    return drafter.found[-3:]


@GRAPHS
@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_a_drafted_token_is_a_pass_and_no_wait(name: str, graphs: bool, tmp_path: Path) -> None:
    two, five = (drafts_of(tmp_path / text[5], text, name, graphs)[-1] for text in ("self:2", "self:5"))
    each = (five.kernels.total() - two.kernels.total()) / 3
    rounded = 4 if name == "w8a8" else 0
    assert 0 < each <= 2 * (KERNELS_PER_LAYER + rounded) + OTHER_KERNELS, (each, five.kernels - two.kernels)
    for seen in (two, five):
        assert not seen.pageable, seen.pageable
        assert (seen.uploads.total(), seen.downloads.total(), seen.waits.total()) == (1, 1, 1), seen


def test_a_draft_is_one_replay(tmp_path: Path) -> None:
    for seen in drafts_of(tmp_path, "self:5", "w4a16", True):
        assert seen.replays.total() == 1
        assert seen.launches.total() <= 1, seen.launches
        assert not seen.captures


def test_graphs_outlive_new_weights_of_both(tmp_path: Path) -> None:
    """The target's and the copy's are written where the old ones lay; tokens are those of plain decoding."""
    model = target(tmp_path, "qwen3", **WIDE)
    drafter = drafting(model, "w8a8")
    records: list[Any] = []
    core = NativeEngine(
        model,
        options_of(max_running=2),
        drafters={"self": drafter},
        policy=FixedPolicy(Strategy.parse("self:3")),
        steps=records,
    )
    requests = make_requests(4, max_new_tokens=12)
    before = run(core, requests)
    later = init_model(write_config(tmp_path / "later", "qwen3", **WIDE), 3, batch_invariant=False)
    core.update_weights(*pack(hf_state_dict(later.to(model.norm.weight.dtype)), 1))
    records.clear()
    with counting() as seen:
        found = run(core, requests)
    assert not seen.captures, seen.captures
    expected = run(engine(model, cuda_graphs=False, max_running=2), requests)
    assert found.keys() == expected.keys()
    for key, rollout in expected.items():
        assert found[key].tokens.tolist() == rollout.tokens.tolist(), key
    assert any(found[key].tokens.tolist() != before[key].tokens.tolist() for key in found)
    drafted, accepted = (sum(getattr(record, name) for record in records) for name in ("drafted", "accepted"))
    assert accepted > 0.7 * drafted > 0, "a copy of the old weights would not be accepted"
