"""Drafts that a network draws, through the whole child process: responses have the model's probabilities, and more
drafts are accepted than of the most probable tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.process import spawn_engine
from actors.engine.vllm.patches import mend_worker
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from contracts.rollout import DrafterFailed, EngineWindow, Event, Request, SamplingParams
from models.noise import noise_key
from tests.drafter.test_export_vllm import fitted
from tests.engine.contract import Talk, finished
from tests.vllm.support import VLLM, RawEngine, tiny_checkpoint
from tests.vllm.test_distribution import LEAST_P, PROMPT, VOCAB, Law, law_of, p_values, truncated

pytestmark = [*VLLM, pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES, TOKENS, DEPTH = 20_000, 6, 2  # six, so that requests begin while others decode, and are drafted for at once
EXTENSION = "actors.engine.vllm.worker.PacelineWorker"
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "head_dim": 64,
    "initializer_range": 0.15,
    "vocab_size": VOCAB,
}


class World:
    """A tiny model, a head fitted to it, and what the model draws its first three tokens from."""

    def __init__(self, folder: Path) -> None:
        self.directory, model = tiny_checkpoint(folder, "llama", **SHAPE)
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, VOCAB, 40).astype(np.int32) for _ in range(24)]
        fitted(model, texts, "eagle3", folder / "head")
        self.head = folder / "head"
        with torch.no_grad():
            self.plain: Law = law_of(model, lambda logits: logits.softmax(-1))
            self.truncated: Law = law_of(model, truncated)

    def engine(self, *strategies: str) -> Talk:
        options = EngineOptions(
            backend="vllm",
            max_running=256,
            kv_tokens=256 * 128,
            threads=1,
            max_model_tokens=64,
            vllm_arguments={"enforce_eager": True},
        )
        eagle = EagleOptions(path=str(self.head))
        speculation = SpeculationOptions(mode="fixed", strategies=strategies, max_running=256, eagle=eagle)
        model = ModelOptions(path=str(self.directory))
        return Talk(spawn_engine(model, options, speculation=speculation, start_timeout_s=300.0))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def requests(count: int, tokens: int, **sampling: Any) -> list[Request]:
    prompt = np.array(PROMPT, np.int32)
    params = SamplingParams(tokens, **sampling)
    return [
        Request(request_id=i, prompt_id=0, prompt_tokens=prompt, noise_key=noise_key(1, 0, 0, i), sampling=params)
        for i in range(count)
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "truncated"])
def test_responses_have_the_models_probabilities(world: World, kind: str) -> None:
    """The first three tokens, at T = 1, and with T, top-k and top-p at once, of which drafts only know T."""
    law = world.plain if kind == "plain" else world.truncated
    sampling = {"temperature": 1.0} if kind == "plain" else {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    talk = world.engine(f"eagle:{DEPTH}")
    try:
        talk.submit(requests(SAMPLES, TOKENS, **sampling))
        events = talk.idle(SAMPLES)
    finally:
        talk.engine.close()
    assert [event.reason for event in events if isinstance(event, DrafterFailed)] == []
    found = finished(events)
    tokens = np.array([found[i].tokens[:3] for i in range(SAMPLES)])
    drafted, accepted = shares(events)
    values = p_values(law, tokens)
    print(f"{kind}: {accepted} of {drafted} drafts accepted; p {values}")
    assert drafted > 2 * SAMPLES
    assert min(values.values()) > LEAST_P, values


def shares(events: Sequence[Event]) -> tuple[int, int]:
    uses = [use for event in events if isinstance(event, EngineWindow) for use in event.strategies]
    return sum(use.drafted for use in uses), sum(use.accepted for use in uses)


@pytest.mark.parametrize("instead", [False, True])
def test_more_drafts_are_accepted_than_of_the_most_probable_tokens(world: World, instead: bool) -> None:
    """The same head and prompts at T = 1. `instead`: others are verified in every second step, as certain ones."""
    from actors.engine.vllm.model_drafters import eagle_drafter

    found = {}
    for drawn in (True, False):
        made = eagle_drafter(str(world.head), world.directory, world.head / f"{drawn}", dtype=torch.float32)
        engine = RawEngine(
            world.directory,
            block_size=32,
            worker_extension_cls=EXTENSION,
            speculative_config=made.speculative_config(4, drawn=drawn),
        )
        engine.core.collective_rpc(mend_worker)
        engine.core.collective_rpc("paceline_hold_drafter", args=(False,))
        control = engine.scheduler.control = Mixed(instead)
        for i in range(200):
            engine.add(str(i), PROMPT, 40, temperature=1.0, seed=i)
        engine.run()
        engine.close()
        found[drawn] = np.array(control.accepted) / np.maximum(control.drafted, 1)
    print(f"share accepted, drawn {found[True]}, most probable {found[False]}")
    assert found[True][0] > 1.05 * found[False][0]
    if instead:
        assert found[True][1] == pytest.approx(found[False][1], abs=0.03)


class Mixed:
    """A StepControl: the network's drafts, or in every second step a token of no great probability."""

    def __init__(self, instead: bool) -> None:
        self._instead, self._step = instead, 0
        self.drafted, self.accepted = [0, 0], [0, 0]  # of the network, of others

    @property
    def _others(self) -> bool:
        return self._instead and self._step % 2 == 1

    def before_schedule(self, running: list[Any]) -> None:
        self._step += 1
        for request in running:
            if self._others and request.num_output_tokens:
                request.spec_token_ids = [7]

    def verifies_network(self) -> bool:
        return not self._others

    def drafts_to_make(self) -> int:
        return 4

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.drafted[self._others] += len(drafts)
            self.accepted[self._others] += len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1
        return set()
