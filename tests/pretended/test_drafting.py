"""Budgets of drafting on a GPU: kernels, waits and copies of a draft, counted on the pretended device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter.protocol import Drafts
from tests.engine.support import make_requests
from tests.gpu.test_cuda import on_device, reference_of
from tests.gpu.test_eagle import drafting
from tests.pretended.counting import counting
from tests.pretended.device import Seen

PER_TOKEN = 20  # kernels of a drafted token, with its share of catching up


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("eagle:4", "random"),
        ("eagle:4x3/12", "random:eagle3"),
        pytest.param("eagle:4", "random:eagle3", marks=pytest.mark.pretended),
        pytest.param("eagle:4x3/12", "random", marks=pytest.mark.pretended),
    ],
)
def test_a_draft_uploads_once_downloads_once_and_waits_once(strategy: str, kind: str, tmp_path: Path) -> None:
    """Of usual steps, where the last one was of the same strategy; two replays, and a gather that no graph can hold."""
    reference = reference_of(tmp_path, "qwen2", torch.bfloat16)
    core, drafter, _ = drafting(on_device(reference, torch.bfloat16), reference, kind, strategy)
    drafts: list[tuple[Seen, Drafts]] = []

    def around(propose: Callable[[], Drafts]) -> Drafts:
        with counting() as seen:
            proposed = propose()
        drafts.append((seen, proposed))
        return proposed

    drafter.around = around
    core.submit(make_requests(3, prompts=3, max_new_tokens=24))
    for _ in range(6):
        core.step()
    usual = [(seen, proposed) for seen, proposed in drafts if not proposed.caught_up]
    assert len(usual) >= 3
    for seen, proposed in usual:
        assert (seen.waits.total(), seen.uploads.total(), seen.downloads.total()) == (1, 1, 1), seen
        assert not seen.pageable, seen.pageable
        assert not seen.captures, seen.captures
        assert (seen.replays.total(), seen.launches.total()) == (2, 3), seen.launches
        assert seen.kernels.total() <= PER_TOKEN * proposed.tokens.shape[1], seen.kernels
