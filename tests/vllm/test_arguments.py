"""What vLLM is told at its start. Needs no vLLM."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.vllm.arguments import OURS, V1_SWITCH, engine_arguments, prepare_environment, require_v1
from actors.engine.vllm.versions import UnsupportedVllmError
from actors.engine.wire import Start
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions


def arguments(root: Path, device: str = "cuda", ranks: int = 1, **options: Any) -> dict[str, Any]:
    start = Start(
        model=ModelOptions(path=str(root)),
        options=EngineOptions(backend="vllm", **options),
        seed=0,
        weights_version=0,
        niceness=0,
        speculation=SpeculationOptions(mode="off"),
    )
    return engine_arguments(start, device=device, ranks=ranks, max_nodes=0, speculative=None)


@pytest.mark.parametrize(("device", "ranks", "executor"), [("cuda", 1, "uni"), ("cuda", 4, "mp"), ("cpu", 1, "uni")])
def test_an_engine_is_parallel_over_the_gpus_that_it_sees(
    tmp_path: Path, device: str, ranks: int, executor: str
) -> None:
    told = arguments(tmp_path, device, ranks)
    assert (told["tensor_parallel_size"], told["distributed_executor_backend"]) == (ranks, executor)


def test_what_paceline_sets_cannot_be_set_beside_it(tmp_path: Path) -> None:
    assert arguments(tmp_path, vllm_arguments={"quantization": "fp8"})["quantization"] == "fp8"
    for name in OURS:
        with pytest.raises(ValueError, match=rf"rollout\.engine\.vllm_arguments: {name} cannot be set"):
            arguments(tmp_path, vllm_arguments={name: 1})


@pytest.mark.parametrize(("switch", "cause"), [("1", f"{V1_SWITCH}=1"), ("0", "vllm_arguments")])
def test_model_runner_v2_is_refused_with_what_chose_it(
    monkeypatch: pytest.MonkeyPatch, switch: str, cause: str
) -> None:
    monkeypatch.setenv(V1_SWITCH, switch)
    require_v1(SimpleNamespace(use_v2_model_runner=False))
    with pytest.raises(UnsupportedVllmError, match=f"Model Runner V2.*leave {cause} out"):
        require_v1(SimpleNamespace(use_v2_model_runner=True))


def test_v1_is_asked_for_unless_somebody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((None, "0"), ("1", "1")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {} if before is None else {V1_SWITCH: before})
            prepare_environment()
            assert os.environ[V1_SWITCH] == after
