"""What an engine step may cost on a GPU, over the real engine: kernels per layer and per draw, copies, waits of the
host. Above its budget the build fails: every kernel more is a launch more in a step that takes milliseconds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from config.speculation import EagleOptions
from drafter.eagle import EagleDrafter
from models import ops
from tests.engine.support import engine, make_requests, run
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees
from tests.pretended.counting import counting
from tests.pretended.device import Seen
from tests.pretended.support import DEVICE, steps_of, target

KERNELS_PER_LAYER, KERNELS_PER_DRAW = 12, 3
# Beside layers and draws: embedding, last norm, head, hidden states and results into place.
OTHER_KERNELS = 5
KINDS = pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
FAMILY = "qwen3"  # norms of queries and keys too


def steps(tmp_path: Path, kind: str, graphs: bool, layers: int = 2) -> list[Seen]:
    model = target(tmp_path, FAMILY, layers)
    if kind == "plain":
        return steps_of(model, cuda_graphs=graphs)
    requests = make_requests(2, max_new_tokens=150)
    expected: dict[int, Any] = run(engine(model, cuda_graphs=False, max_running=2), requests)
    if kind == "chain":
        return steps_of(model, drafter=Oracle(expected, spoil=True), strategy="test:5", cuda_graphs=graphs)
    return steps_of(model, drafter=RandomTrees(expected, 0.7), strategy="test:4x3/12", cuda_graphs=graphs)


@KINDS
@GRAPHS
def test_a_layer_is_at_most_twelve_kernels(kind: str, graphs: bool, tmp_path: Path) -> None:
    two, three = (steps(tmp_path, kind, graphs, layers)[-1].kernels for layers in (2, 3))
    layer = three.total() - two.total()
    assert 0 < layer <= KERNELS_PER_LAYER, three - two
    rest = two.total() - 2 * layer
    assert rest <= KERNELS_PER_DRAW + OTHER_KERNELS + (4 if kind == "tree" else 0), two  # accepted nodes move: 4 copies


@pytest.mark.parametrize("truncated", [False, True], ids=["all tokens", "top-k and top-p"])
def test_a_draw_is_at_most_three_kernels(truncated: bool) -> None:
    rows, vocab = 5, 61
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    numbers = torch.arange(rows, device=DEVICE)
    ones = torch.ones(rows, device=DEVICE)
    least, half = torch.full((rows,), -torch.inf, device=DEVICE), ones / 2
    with counting() as seen, torch.inference_mode():
        if truncated:
            least = ops.cutoff(logits, ones, numbers, half)
        ops.sample(logits, least, ones, numbers, numbers)
    assert 0 < seen.kernels.total() <= KERNELS_PER_DRAW, seen.kernels


@KINDS
@GRAPHS
def test_a_step_waits_once_and_copies_nothing_from_pageable_memory(kind: str, graphs: bool, tmp_path: Path) -> None:
    for seen in steps(tmp_path, kind, graphs):
        assert seen.waits.total() == 1, seen.waits
        assert not seen.pageable, seen.pageable


@KINDS
def test_a_step_with_graphs_is_few_calls_of_the_host(kind: str, tmp_path: Path) -> None:
    for seen in steps(tmp_path, kind, True):
        assert seen.replays.total() == 1
        assert seen.launches.total() <= 1 + OTHER_KERNELS + (4 if kind == "tree" else 0), seen.launches


@pytest.mark.parametrize("rows", [16, 64])
def test_prompts_beside_decoding_wait_once_too(rows: int, tmp_path: Path) -> None:
    model = target(tmp_path, FAMILY)
    for seen in steps_of(model, warm=1, requests=6, prefill_chunk_tokens=rows, steps=6):
        if not seen.captures:
            assert seen.waits.total() <= 1, seen.waits
            assert not seen.pageable, seen.pageable


@pytest.mark.parametrize("drafter", [False, True], ids=["plain", "eagle"])
def test_nothing_is_captured_while_requests_with_top_p_run(drafter: bool, tmp_path: Path) -> None:
    """Where the engine was told at its start; of the first step on."""
    model = target(tmp_path, FAMILY)
    own = EagleDrafter(model, EagleOptions(), 2, 512, 8) if drafter else None
    given: dict[str, Any] = {"truncated": True}
    for seen in steps_of(
        model,
        drafter=own,
        strategy="eagle:3" if drafter else "",
        warm=0,
        steps=8,
        sampling={"top_p": 0.9},
        engine_keywords=given,
    ):
        assert not seen.captures


@GRAPHS
def test_rejection_sampling_waits_once_too(graphs: bool, tmp_path: Path) -> None:
    """Nor does it make tensors of the vocabulary's width in chunks that grow with the batch."""
    model = target(tmp_path, FAMILY)
    requests = make_requests(2, max_new_tokens=150)
    expected: dict[int, Any] = run(engine(model, cuda_graphs=False, max_running=2), requests)
    drafter = Oracle(expected, spoil=True)
    rejection: dict[str, Any] = {"verification": "rejection"}
    for seen in steps_of(model, drafter=drafter, strategy="test:5", cuda_graphs=graphs, engine_keywords=rejection):
        assert seen.waits.total() == 1, seen.waits
        assert not seen.pageable, seen.pageable
        assert seen.uploads.total() <= 2, "the step, and what decides about drafts"
