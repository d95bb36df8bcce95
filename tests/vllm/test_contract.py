"""The vLLM engine keeps what every rollout engine keeps (tests.engine.contract), plain and drafting. Always in a child:
vLLM has globals, so that one process holds one engine."""

from pathlib import Path

import pytest
import torch

from actors.engine.capabilities import VLLM as CAPABILITIES
from actors.engine.process import RolloutEngine, spawn_engine
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from drafter.eagle.model import init_eagle
from models import weights
from models.checkpoint import hf_state_dict, init_model
from tests.engine.contract import EngineContract, Subject, Weights
from tests.vllm.support import VLLM, tiny_checkpoint

pytestmark = VLLM

OPTIONS = EngineOptions(
    backend="vllm",
    max_running=6,
    kv_tokens=4096,
    progress_every_tokens=5,
    threads=1,
    vllm_arguments={"enforce_eager": True},
)
STRATEGIES = ("plain", "suffix:4")


def in_a_child(model_dir: Path, strategy: str) -> RolloutEngine:
    return spawn_engine(
        ModelOptions(path=str(model_dir)), OPTIONS, speculation=speculation(strategy), start_timeout_s=300.0
    )


def speculation(strategy: str) -> SpeculationOptions:
    if strategy == "plain":
        return SpeculationOptions(mode="off")
    eagle = EagleOptions(path="random") if strategy.startswith("eagle") else EagleOptions()
    return SpeculationOptions(mode="fixed", strategies=(strategy,), eagle=eagle)


@pytest.fixture(scope="module", params=STRATEGIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    model_dir, model = tiny_checkpoint(tmp_path_factory.mktemp("model"))

    def target_weights(version: int, seed: int) -> Weights:
        return weights.pack(hf_state_dict(init_model(model_dir, seed)), version)

    def eagle_weights(version: int) -> Weights:
        eagle = init_eagle(model.config, 3, dtype=torch.float32, device="cpu", batch_invariant=True)
        return weights.pack(eagle.state_dict(), version)

    return Subject(
        CAPABILITIES,
        lambda strategy: in_a_child(model_dir, strategy),
        target_weights,
        eagle_weights,
        model.config.max_position_embeddings - 1,
        request.param,
    )


class TestVllm(EngineContract):
    pass
