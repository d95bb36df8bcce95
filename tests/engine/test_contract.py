"""The contract of an engine, over the native one (plain, drafting, in a child) and the fake that stands in for it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.engine.capabilities import NATIVE
from actors.engine.core import build_core
from actors.engine.process import RolloutEngine, spawn_engine
from actors.engine.wire import Start
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from drafter.eagle.model import init_eagle
from models import weights
from models.checkpoint import hf_state_dict, init_model, save_model
from tests.actors import fake_engine
from tests.actors.fake_engine import FakeCore, FakeEngine, FakeOptions
from tests.engine.contract import EngineContract, InProcess, Subject, Weights
from tests.engine.support import write_config

OPTIONS = EngineOptions(max_running=6, kv_tokens=4096, block_tokens=8, progress_every_tokens=5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(init_model(write_config(directory / "config"), 0), directory / "hf")
    return directory / "hf"


def speculation(strategy: str) -> SpeculationOptions:
    if strategy == "plain":
        return SpeculationOptions(mode="off")
    eagle = EagleOptions(path="random") if strategy.startswith("eagle") else EagleOptions()
    return SpeculationOptions(mode="fixed", strategies=(strategy,), eagle=eagle)


def in_process(model_dir: Path, strategy: str) -> RolloutEngine:
    start = Start(
        model=ModelOptions(path=str(model_dir)),
        options=OPTIONS,
        seed=1,
        weights_version=0,
        niceness=0,
        speculation=speculation(strategy),
    )
    return InProcess(build_core(start))


def in_a_child(model_dir: Path, strategy: str) -> RolloutEngine:
    options = OPTIONS.model_copy(update={"threads": 1})
    return spawn_engine(ModelOptions(path=str(model_dir)), options, speculation=speculation(strategy))


def native(model_dir: Path, start: Callable[[Path, str], RolloutEngine], strategy: str) -> Subject:
    target = init_model(model_dir, 0)

    def target_weights(version: int, seed: int) -> Weights:
        return weights.pack(hf_state_dict(init_model(model_dir, seed)), version)

    def eagle_weights(version: int) -> Weights:
        model = init_eagle(target.config, 3, dtype=torch.float32, device="cpu", batch_invariant=True)
        return weights.pack(model.state_dict(), version)

    longest = target.config.max_position_embeddings - 1
    return Subject(NATIVE, partial(start, model_dir), target_weights, eagle_weights, longest, strategy)


def fake(start: Callable[[FakeOptions], RolloutEngine], logprobs_t1: bool = True) -> Subject:
    return Subject(
        replace(fake_engine.CAPABILITIES, logprobs_t1=logprobs_t1),
        lambda strategy: start(FakeOptions(step_s=0.0005, logprobs_t1=logprobs_t1)),
        lambda version, seed: fake_engine.weights(version),
        fake_engine.weights,
        fake_engine.MAX_PROMPT_TOKENS,
    )


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "native": lambda path: native(path, in_process, "plain"),
    "native that drafts chains": lambda path: native(path, in_process, "ngram:3"),
    "native that drafts trees": lambda path: native(path, in_process, "eagle:3x2/8"),
    "native in a child": lambda path: native(path, in_a_child, "suffix:4"),
    "fake": lambda path: fake(lambda options: InProcess(FakeCore(options))),
    "fake without log-probs at temperature 1": lambda path: fake(lambda options: InProcess(FakeCore(options)), False),
    "fake in a child": lambda path: fake(FakeEngine),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, model_dir: Path) -> Subject:
    return SUBJECTS[request.param](model_dir)


class TestEngines(EngineContract):
    pass
