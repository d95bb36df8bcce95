"""Weights in pieces into a live native engine: the tokens of the new weights or of the old ones, never of a mixture."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from actors.engine.native.engine import NativeEngine
from actors.handoff import receive, send
from contracts.handoff import HandOffError, Way
from contracts.rollout import WeightsLoaded
from models import weights
from models.checkpoint import hf_state_dict
from models.checksum import BLOCK_BYTES
from models.manifest import WeightsManifest
from models.pieces import Scatter
from models.transformer import Transformer
from tests.engine.support import assert_same, engine, make_requests, run, tiny_model
from tests.handoff.tools import Meeting


@pytest.fixture(autouse=True)
def small_pieces_and_little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    for module in (send, receive):
        monkeypatch.setattr(module, "PATIENCE_S", 2.0)


def offered(core: NativeEngine, model: Transformer, way: Way, version: int = 3) -> tuple[WeightsLoaded, int]:
    """What the engine answers when the weights of `model` are offered, and their checksum."""
    meeting, named = Meeting(), hf_state_dict(model)
    manifest, _ = weights.pack(named, version)
    terms = meeting.terms(1, way, version)
    given: Iterator[tuple[str, Tensor]] = iter(named.items())
    sending = threading.Thread(
        target=meeting.senders[0].send, args=(terms, (manifest.tensors, manifest.total_bytes), given)
    )
    sending.start()
    answer = core.receive_weights(meeting.offer(terms, 0, manifest))
    sending.join(60)
    assert not sending.is_alive()
    return answer, manifest.checksum


def whole(model: Transformer, version: int) -> tuple[WeightsManifest, weights.Buffer]:
    return weights.pack(hf_state_dict(model), version)


@pytest.mark.parametrize("way", ["ipc", "broadcast"])
def test_the_next_tokens_are_the_new_models(way: Way, tmp_path: Path) -> None:
    old, new = tiny_model(tmp_path / "a", seed=1), tiny_model(tmp_path / "b", seed=2)
    requests = make_requests(6, prompts=2, seed=7, max_new_tokens=12)
    want = run(engine(new), requests)
    core = engine(old)
    run(core, requests)
    answer, checksum = offered(core, new, way)
    assert (answer.version, answer.checksum, answer.way, answer.failure) == (3, checksum, way, "")
    results = run(core, requests)
    assert_same(results, want)
    assert {rollout.weights_version for rollout in results.values()} == {3}


def test_an_engine_that_got_nothing_goes_on_with_what_it_has(tmp_path: Path) -> None:
    old, other = tiny_model(tmp_path / "a", seed=1), tiny_model(tmp_path / "b", "qwen2")
    requests = make_requests(4, seed=9)
    want, core = run(engine(old), requests), engine(old)
    answer, _ = offered(core, other, "ipc")
    assert answer.failure
    assert answer.version == 0
    results = run(core, requests)
    assert_same(results, want)
    assert {rollout.weights_version for rollout in results.values()} == {0}


def test_a_half_loaded_engine_decodes_nothing_until_whole_weights_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tiny_model(tmp_path / "a", seed=1), tiny_model(tmp_path / "b", seed=2)
    requests = make_requests(6, prompts=2, seed=7, max_new_tokens=12)
    want, core = run(engine(new), requests), engine(old)
    run(core, requests)
    take = Scatter.take

    def breaks(self: Scatter, piece: Tensor) -> None:
        if self._at:
            raise HandOffError("the cable")
        take(self, piece)

    with monkeypatch.context() as patched:
        patched.setattr(Scatter, "take", breaks)
        answer, _ = offered(core, new, "ipc")
    assert "the cable" in answer.failure
    core.submit(requests)
    works = [core.has_work]
    core.update_weights(*whole(new, 3))
    works.append(core.has_work)
    assert works == [False, True]
    core.abort([request.request_id for request in requests])
    core.step()
    assert_same(run(core, requests), want)
