"""The vLLM engine's own half over a backend that draws nothing: requests in and out, without vLLM."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engine.vllm.engine import VllmEngine
from config.strategy import Strategy
from contracts.engine import Abort, Sleep, Submit, UpdateDrafter, Wake
from contracts.rollout import (
    DrafterFailed,
    DrafterLoaded,
    EngineIdle,
    Finished,
    FinishReason,
    Rejected,
    Request,
    Sampled,
    SamplingParams,
    Slept,
)
from drafter.protocol import BatchView, Drafter, Drafts
from models.manifest import WeightsManifest
from policies.speculation.policy import FixedPolicy


class Silent:
    """A backend that holds what it is given and draws nothing."""

    kv_blocks, block_tokens, model_tokens, vocab_size, refusal, preempted = 8, 16, 64, 50, "", 0

    def __init__(self) -> None:
        self.running: list[int] = []
        self.asleep = False

    def attach(self, control: Any) -> None:
        self.control = control

    def submit(self, request: Request, prefix: Sampled | None, limit: int) -> None:
        self.running.append(request.request_id)

    def abort(self, request_ids: list[int]) -> None:
        self.running = [known for known in self.running if known not in request_ids]

    def step(self) -> None:
        """Nothing is drawn."""

    def kv_tokens_used(self) -> int:
        return 0

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False


def engine_of(backend: Any, **options: Any) -> VllmEngine:
    return VllmEngine(backend, max_running=2, progress_every_tokens=8, **options)


def request(request_id: int) -> Request:
    tokens = np.arange(4, dtype=np.int32)
    return Request(
        request_id=request_id, prompt_id=0, prompt_tokens=tokens, noise_key=request_id, sampling=SamplingParams(8)
    )


def test_requests_wait_for_a_slot_and_are_aborted_once() -> None:
    backend = Silent()
    engine = engine_of(backend)
    engine.apply(Submit((request(0), request(1), request(2), request(1))), None)
    engine.step()
    assert backend.running == [0, 1]
    engine.apply(Abort((1, 2, 1, 9)), None)
    assert backend.running == [0]
    events = engine.step()
    ended = [event.rollout for event in events if isinstance(event, Finished)]
    assert [(rollout.request_id, rollout.finish_reason) for rollout in ended] == [
        (1, FinishReason.ABORT),
        (2, FinishReason.ABORT),
    ]


def test_a_request_is_rejected_while_its_id_runs() -> None:
    engine = engine_of(Silent())
    engine.apply(Submit((request(0), request(0))), None)
    assert [event.request_id for event in engine.step() if isinstance(event, Rejected)] == [0]


def test_it_sleeps_only_without_requests() -> None:
    backend = Silent()
    engine = engine_of(backend)
    engine.apply(Submit((request(0),)), None)
    refused = engine.apply(Sleep(), None)
    assert isinstance(refused, Slept)
    assert refused.refusal
    engine.apply(Abort((0,)), None)
    assert any(isinstance(event, EngineIdle) for event in engine.step())
    assert not engine.has_work
    assert engine.apply(Sleep(), None) == Slept()
    assert backend.asleep
    engine.apply(Wake(), None)
    assert not backend.asleep


def test_a_drafter_that_it_does_not_have_is_named() -> None:
    answer = engine_of(Silent()).apply(UpdateDrafter("eagle", WeightsManifest(3, 0, (), 0)), np.zeros(0, np.uint8))
    assert isinstance(answer, DrafterLoaded)
    assert "'eagle'" in answer.reason


class Broken(Drafter):
    """A drafter that fails when a request takes a slot."""

    name = "ngram"

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        raise RuntimeError("it has no room")

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        raise AssertionError("it has no requests")


def test_a_drafter_that_fails_after_the_first_step_is_reported() -> None:
    drafters: dict[str, Drafter] = {"ngram": Broken()}
    engine = engine_of(Silent(), drafters=drafters, policy=FixedPolicy(Strategy.parse("ngram:2")))
    first = engine.step()
    engine.apply(Submit((request(0),)), None)
    events = engine.step() + engine.step()
    assert not any(isinstance(event, DrafterFailed) for event in first)
    assert [event.name for event in events if isinstance(event, DrafterFailed)] == ["ngram"]
