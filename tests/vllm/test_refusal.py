"""An engine whose self-test found something: nothing is drafted at temperatures above 0, and the driver hears why."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.engine.core import EngineCore, build_core
from actors.engine.vllm.engine import VllmEngine
from actors.engine.vllm.worker_drafts import WorkerDrafter
from actors.engine.wire import Start
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from contracts.engine import Submit
from contracts.rollout import DrafterFailed, EngineWindow, Event, Finished, Request, Sampled, SamplingParams
from policies.speculation.policy import FixedPolicy
from tests.vllm.support import VLLM, tiny_checkpoint

REASON = "drafts are verified by dice"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    directory, _ = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    options = EngineOptions(backend="vllm", max_running=8, kv_tokens=4096, vllm_arguments={"enforce_eager": True})
    with pytest.MonkeyPatch.context() as patch:
        import actors.engine.vllm.backend

        patch.setattr(actors.engine.vllm.backend, "self_test", lambda core: REASON)
        core = build_core(
            Start(
                model=ModelOptions(path=str(directory)),
                options=options,
                seed=1,
                weights_version=0,
                niceness=0,
                speculation=SpeculationOptions(mode="fixed", strategies=("ngram:3",)),
            )
        )
    yield core
    core.close()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def run(core: EngineCore, temperatures: list[float], first_id: int) -> list[Event]:
    requests = [
        Request(
            request_id=first_id + i,
            prompt_id=first_id + i,
            prompt_tokens=np.tile(np.arange(4, dtype=np.int32), 3),
            noise_key=i,
            sampling=SamplingParams(40 + 20 * i, temperature),
        )
        for i, temperature in enumerate(temperatures)
    ]
    core.apply(Submit(tuple(requests)), None)
    events = []
    while core.has_work:
        events += core.step()
    assert sum(isinstance(event, Finished) for event in events) == len(temperatures)
    return events


def drafted(events: list[Event]) -> int:
    return sum(use.drafted for event in events if isinstance(event, EngineWindow) for use in event.strategies)


@pytest.mark.slow
class TestVllmItself:
    pytestmark = VLLM

    def test_a_refusal_is_told_and_only_greedy_batches_are_drafted(self, engine: EngineCore) -> None:
        sampled = run(engine, [1.0, 1.0, 1.0], 0)
        assert [event for event in sampled if isinstance(event, DrafterFailed)] == [
            DrafterFailed("ngram", REASON, final=True)
        ]
        assert drafted(sampled) == 0
        greedy = run(engine, [0.0, 0.0], 10)
        assert drafted(greedy) > 0
        assert not [event for event in greedy if isinstance(event, DrafterFailed)]


class NothingDrawn:
    """A Backend whose running requests all decode and have drafts of the step before."""

    kv_blocks, block_tokens, model_tokens, vocab_size, preempted = 64, 16, 256, 61, 0
    refusal = REASON

    def attach(self, control: Any) -> None:
        self.control, self.running = control, list[Any]()

    def submit(self, request: Request, prefix: Sampled | None, limit: int) -> None:
        self.running.append(SimpleNamespace(request_id=str(request.request_id), num_computed_tokens=9, num_tokens=10))

    def step(self) -> None:
        for request in self.running:
            request.spec_token_ids = [1, 2]
        self.control.before_schedule(self.running)

    def kv_tokens_used(self) -> int:
        return 0


@pytest.mark.parametrize(("temperatures", "verified"), [([0.0, 0.0], 2), ([0.0, 1.0], 0), ([1.0], 0)])
def test_what_vllm_drafted_itself_is_refused_too(temperatures: list[float], verified: int) -> None:
    """It drafts a step ahead, before it is known who decodes then."""
    backend: Any = NothingDrawn()
    policy, worker = FixedPolicy(Strategy.parse("eagle:2")), WorkerDrafter("eagle", copies_target=False)
    engine = VllmEngine(backend, max_running=4, progress_every_tokens=8, worker=worker, policy=policy)
    prompt, sampling = np.arange(4, dtype=np.int32), [SamplingParams(20, t) for t in temperatures]
    engine.submit(
        [
            Request(request_id=i, prompt_id=i, prompt_tokens=prompt, noise_key=i, sampling=s)
            for i, s in enumerate(sampling)
        ]
    )
    events = [event for _ in range(3) for event in engine.step()]
    assert [len(request.spec_token_ids) for request in backend.running] == [verified] * len(temperatures)
    assert DrafterFailed("eagle", REASON, final=True) in events
