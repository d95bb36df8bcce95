"""Model Runner V2 with our drafts: the native engine's greedy tokens, right drafts accepted, new weights in place."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.vllm.runner_v2 import write_drafts
from actors.engine.vllm.versions import V2_SWITCH
from config.rollout import EngineOptions
from models.transformer import Transformer
from tests.engine.support import make_requests
from tests.vllm.runner_v2 import RUNNING
from tests.vllm.support import VLLM, tiny_checkpoint

TRITON = Path(sys.prefix) / "triton"  # apart from vLLM's packages, whose choices depend on it


def greedy(model: Transformer) -> dict[str, list[int]]:
    """By request id, as JSON has it."""
    engine = NativeEngine(model, EngineOptions(max_running=RUNNING, kv_tokens=4096))
    requests = make_requests(RUNNING, prompts=2, seed=1)
    found = engine.generate([replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests])
    return {str(name): rollout.tokens.tolist() for name, rollout in found.items()}


@VLLM[0]
@VLLM[1]
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRITON.is_dir(), reason="there is no Triton in this environment: run `make test-vllm`")
def test_our_drafts_are_verified_by_model_runner_v2(tmp_path: Path) -> None:
    (path, model), (following, other) = (tiny_checkpoint(tmp_path / str(seed), seed=seed) for seed in range(2))
    path.rename(tmp_path / "model")
    following.rename(tmp_path / "next")
    given = {"PYTHONPATH": os.pathsep.join([str(TRITON), str(Path.cwd())]), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.runner_v2", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | given | {V2_SWITCH: "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert found["refusal"] == ""  # drafts are verified at their requests' temperature, top-k and top-p
    first, second, renewed = found["epochs"]
    assert first["tokens"] == second["tokens"] == greedy(model)
    assert 0 < first["accepted"] < first["drafted"]
    assert 0.9 * second["drafted"] < second["accepted"]  # the same texts again
    assert renewed["tokens"] == greedy(other) != first["tokens"]
    print([(epoch["drafted"], epoch["accepted"]) for epoch in found["epochs"]])


def test_drafts_are_written_in_their_requests_rows() -> None:
    states = SimpleNamespace(req_id_to_index={"a": 2, "b": 0, "c": 1}, draft_tokens=torch.full((3, 4), 9))
    write_drafts(states, {"a": [5, 6, 7], "b": [], "c": [-1, -1]})
    assert states.draft_tokens.tolist() == [[9, 9, 9, 9], [9, 9, 9, 9], [5, 6, 7, 9]]
    write_drafts(states, {"b": [1]})
    assert states.draft_tokens.tolist() == [[1, 9, 9, 9], [9, 9, 9, 9], [5, 6, 7, 9]]
