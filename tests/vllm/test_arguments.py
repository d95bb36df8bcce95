"""What vLLM is told at its start. Needs no vLLM."""

from pathlib import Path
from typing import Any

import pytest

from actors.engine.vllm.arguments import OURS, engine_arguments
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
