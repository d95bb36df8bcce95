"""What vLLM is told at its start. Needs no vLLM."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.vllm import arguments as module
from actors.engine.vllm.arguments import OURS, engine_arguments, prepare_environment, require_runner
from actors.engine.vllm.versions import V2_SWITCH, InstalledVllm, UnsupportedVllmError, check_runner_v2
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


def test_on_a_cpu_half_of_what_a_container_has_left_is_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 2 << 20)
    assert arguments(tmp_path, "cpu")["kv_cache_memory_bytes"] == 1 << 20


def test_what_paceline_sets_cannot_be_set_beside_it(tmp_path: Path) -> None:
    assert arguments(tmp_path, vllm_arguments={"quantization": "fp8"})["quantization"] == "fp8"
    for name in OURS:
        with pytest.raises(ValueError, match=rf"rollout\.engine\.vllm_arguments: {name} cannot be set"):
            arguments(tmp_path, vllm_arguments={name: 1})


def test_the_runner_is_the_one_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    v1, v2 = SimpleNamespace(use_v2_model_runner=False), SimpleNamespace(use_v2_model_runner=True)
    for switch, right, wrong, said in (
        ("0", v1, v2, f"Model Runner V2 because of vllm_arguments.*set {V2_SWITCH}=1"),
        ("1", v2, v1, f"{V2_SWITCH} asks for Model Runner V2, and vLLM chose V1"),
    ):
        monkeypatch.setenv(V2_SWITCH, switch)
        require_runner(right)
        with pytest.raises(UnsupportedVllmError, match=said):
            require_runner(wrong)


def test_a_release_whose_runner_v2_was_not_looked_at_is_refused() -> None:
    check_runner_v2(InstalledVllm("vllm", "0.33.0"))
    with pytest.raises(UnsupportedVllmError, match=r"vllm 0\.31\.0: Model Runner V2 is supported in 0\.32, 0\.33"):
        check_runner_v2(InstalledVllm("vllm", "0.31.0"))


def test_v1_is_asked_for_unless_somebody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((None, "0"), ("1", "1")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {} if before is None else {V2_SWITCH: before})
            prepare_environment()
            assert os.environ[V2_SWITCH] == after
