"""What a drafted token may cost on a GPU, over the real EAGLE drafter inside the engine: kernels, waits of the host. A
draft is one upload at its beginning and one download at its end, however deep it is."""

from pathlib import Path
from typing import Any

import pytest

from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions
from config.strategy import Strategy
from drafter.eagle import EagleDrafter
from drafter.protocol import BatchView, Drafts
from tests.engine.support import options_of
from tests.pretended.counting import counting
from tests.pretended.device import Seen
from tests.pretended.support import steps_of, target

KERNELS_PER_TOKEN = 20
WEIGHTS = pytest.mark.parametrize(
    "weights", ["random", pytest.param("random:eagle3:0,0,1", marks=pytest.mark.pretended)]
)
GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


def drafts_of(tmp_path: Path, strategy: str, weights: str, graphs: bool, requests: int = 2) -> list[Seen]:
    """Drafts of requests that the drafter has caught up with: at most `depth + 1` positions to feed first."""
    model, options = target(tmp_path, "qwen2"), options_of(max_running=2)
    drafter = EagleDrafter(
        model, EagleOptions(path=weights), options.max_running, options.kv_tokens // options.block_tokens, 8
    )
    found: list[Seen] = []
    propose = drafter.propose

    def counted(batch: BatchView, chosen: Strategy) -> Drafts:
        with counting() as seen:
            drafts = propose(batch, chosen)
        found.append(seen)
        return drafts

    drafter.propose = counted  # type: ignore[assignment, method-assign]

    def still_there(engine: NativeEngine) -> None:
        assert drafter.name in engine._speculator._drafters, "the drafter failed, and the engine went on without it"

    more: dict[str, Any] = {"recorded_layers": drafter.hidden_layers} if drafter.hidden_layers else {}
    steps_of(
        model,
        drafter=drafter,
        strategy=strategy,
        requests=requests,
        warm=6,
        watch=still_there,
        engine_keywords=more,
        cuda_graphs=graphs,
    )
    assert len(found) > 5
    return found[-3:]


@WEIGHTS
@GRAPHS
@pytest.mark.parametrize(
    ("shallow", "deep"),
    [
        pytest.param("eagle:2", "eagle:5", id="chain"),
        pytest.param("eagle:2x3/6", "eagle:4x3/12", id="tree"),
    ],
)
def test_a_drafted_token_or_level_is_few_kernels_and_no_wait(
    shallow: str, deep: str, weights: str, graphs: bool, tmp_path: Path
) -> None:
    two, more = (drafts_of(tmp_path / text[6], text, weights, graphs)[-1] for text in (shallow, deep))
    levels = Strategy.parse(deep).depth - Strategy.parse(shallow).depth
    each = (more.kernels.total() - two.kernels.total()) / levels
    assert 0 < each <= KERNELS_PER_TOKEN, (each, more.kernels - two.kernels)
    assert more.waits.total() == two.waits.total() <= 1, more.waits


@WEIGHTS
@GRAPHS
@pytest.mark.parametrize("strategy", ["eagle:4", "eagle:4x3/12"])
def test_a_draft_is_one_upload_and_one_download(strategy: str, weights: str, graphs: bool, tmp_path: Path) -> None:
    for seen in drafts_of(tmp_path, strategy, weights, graphs):
        assert not seen.pageable, seen.pageable
        assert (seen.uploads.total(), seen.downloads.total(), seen.waits.total()) == (1, 1, 1), seen


@WEIGHTS
@pytest.mark.parametrize("strategy", ["eagle:4", "eagle:4x3/12"])
def test_a_draft_is_replays_of_graphs(strategy: str, weights: str, tmp_path: Path) -> None:
    for seen in drafts_of(tmp_path, strategy, weights, True):
        assert seen.replays.total() >= 1
        assert seen.launches.total() < KERNELS_PER_TOKEN, seen.launches
