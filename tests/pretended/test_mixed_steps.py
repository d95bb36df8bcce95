"""Steps with a chunk of a prompt beside decoding, replayed as graphs, over the real engine on the pretended device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward import graphs
from actors.engine.native.forward.graphs import CudaGraphCapture
from contracts.rollout import GraphsFailed
from drafter.protocol import Replay
from models.checkpoint import hf_state_dict, load_hf_state_dict
from models.transformer import Transformer
from tests.engine.support import drain, engine, make_requests, options_of, rollouts, run, tiny_model
from tests.engine.test_graphs import assert_same_tokens, policy_of
from tests.engine.test_speculation import Oracle
from tests.pretended.counting import counting

CHUNKS = pytest.mark.parametrize("chunk", [16, 64])
KINDS = pytest.mark.parametrize("kind", ["plain", "chain", "rejection"])


def on_device(directory: Path) -> Transformer:
    """In float32: in bfloat16 the CPU's products round otherwise beside other rows."""
    host = tiny_model(directory, "qwen2", invariant=False)
    model = Transformer(host.config, device="cuda", batch_invariant=False)
    load_hf_state_dict(model, hf_state_dict(host))
    return model


def mixed_engine(model: Any, chunk: int, kind: str, expected: dict[int, Any], **keywords: Any) -> NativeEngine:
    if kind != "plain":
        keywords |= {"drafters": {"test": Oracle(expected, spoil=True)}, "policy": policy_of("test:5")}
    if kind == "rejection":
        keywords["verification"] = "rejection"
    return NativeEngine(model, options_of(prefill_chunk_tokens=chunk), **keywords)


@KINDS
@CHUNKS
def test_every_step_is_one_replay_with_the_eager_engines_tokens(chunk: int, kind: str, tmp_path: Path) -> None:
    """Prompts come in chunks while others decode; all graphs are captured before the first request."""
    model = on_device(tmp_path)
    requests = make_requests(14, prompts=5, seed=71)
    plain = run(engine(model, cuda_graphs=False, prefill_chunk_tokens=chunk), requests)
    expected = plain
    if kind == "rejection":  # draws otherwise than plain decoding
        core = mixed_engine(model, chunk, kind, plain)
        core._runner._device_steps._graphs = None  # type: ignore[union-attr]
        expected = run(core, requests)
    core = mixed_engine(model, chunk, kind, plain)
    core.submit(requests)
    events: list[Any] = []
    while core.has_work:
        with counting() as seen:
            events += core.step()
        assert not seen.captures
        assert seen.replays.total() == 1, "a step of prompts and decoding, too"
        assert seen.waits.total() <= 1
        assert not seen.pageable
    assert_same_tokens(rollouts(events), expected)


class Failing(CudaGraphCapture):
    """The device has no memory for the graph that comes `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.records = at, 0

    def record(self, compute: Callable[[], None]) -> Replay:
        self.records += 1
        if self.records == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().record(compute)


@pytest.mark.parametrize("overlapping", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_capture_that_fails_is_tried_again_with_kernels_that_start_apart(
    error: type[RuntimeError], overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, where they started early, and not if memory was missing. The graph is that of the second capture."""
    turned: list[bool] = []

    def launch_apart() -> bool:
        turned.append(True)
        return overlapping and len(turned) == 1

    monkeypatch.setattr(graphs, "launch_apart", launch_apart)
    x = torch.zeros(3, device="cuda")

    def compute() -> None:
        if not turned:
            raise error("operation not permitted when stream is capturing")
        x.add_(1)

    capture = CudaGraphCapture()
    if overlapping and error is RuntimeError:
        replay = capture.record(compute)
        before = x.clone()
        replay()
        assert torch.equal((x - before).cpu(), torch.ones(3))
    else:
        with pytest.raises(error):
            capture.record(compute)
    assert len(turned) == (error is RuntimeError)


@pytest.mark.parametrize("at", [1, 3])
def test_a_mixed_graph_that_fails_ends_graphs_with_an_event_and_changes_no_token(at: int, tmp_path: Path) -> None:
    model = on_device(tmp_path)
    requests = make_requests(8, seed=74)
    expected = run(engine(model, cuda_graphs=False), requests)
    failing = Failing(at)  # the largest graphs are captured first: those of mixed steps
    core = NativeEngine(model, options_of(), graph_capture=failing)
    core.submit(requests)
    events = drain(core)
    (failed,) = [event for event in events if isinstance(event, GraphsFailed)]
    assert "rows of 8 requests" in failed.graph
    assert failed.reason == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert failing.records == at, "no other is tried"
    assert_same_tokens(rollouts(events), expected)
