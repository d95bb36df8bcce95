"""Stock vLLM drafts with an exported drafter as our engine does: equal tokens, and equal acceptance at T = 0.

vLLM runs in an interpreter of its own: the one that PACELINE_VLLM_PYTHON names, or this one, if it has vLLM, or that of
.venv-vllm, if it is there.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from actors.engine.native.engine import NativeEngine
from config.drafter import DrafterOptions
from config.speculation import EagleOptions
from config.strategy import Strategy
from contracts.rollout import EngineWindow, Request, SamplingParams
from drafter.eagle import EagleDrafter, save_eagle
from drafter.export import export_drafter
from drafter.training.collect import collect_records
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from models.checkpoint import init_model, save_model
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import VOCAB, drain, options_of, rollouts, write_config

DEPTH, TOKENS, PROMPTS = 4, 64, 24
FIT_STEPS = 120


def vllm_python() -> str | None:
    if named := os.environ.get("PACELINE_VLLM_PYTHON"):
        return named
    if importlib.util.find_spec("vllm"):
        return sys.executable
    built = Path(__file__).resolve().parents[2] / ".venv-vllm"
    return str(built / "bin/python") if (built / ".installed").exists() else None


needs_vllm = pytest.mark.skipif(
    vllm_python() is None, reason="no vLLM: make test-vllm, or set PACELINE_VLLM_PYTHON to an interpreter that has it"
)
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600), needs_vllm]


def greedy(prompts: list[np.ndarray]) -> list[Request]:
    sampling = SamplingParams(TOKENS, temperature=0.0)
    return [
        Request(request_id=i, prompt_id=i, prompt_tokens=prompt, noise_key=i, sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]


def fitted(
    target: Transformer, prompts: list[np.ndarray], method: Literal["eagle", "eagle3"], out: Path
) -> dict[int, Any]:
    """Write a drafter that knows the target's own responses; returns them."""
    core = NativeEngine(target, options_of())
    core.submit(greedy(prompts))
    responses = rollouts(drain(core))
    trainer = DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(algorithm=method, learning_rate=3e-3), seed=0)
    tokens = [responses[i].tokens for i in range(len(prompts))]
    records = list(collect_records(target, prompts, tokens, layers=trainer.model.layers))
    for step in range(FIT_STEPS):
        trainer.rate_scale = 1 - 0.9 * step / FIT_STEPS
        trainer.micro_step(records[step % 3 :: 3])
    save_eagle(trainer.model, out)
    return responses


def ours(target: Transformer, prompts: list[np.ndarray], drafter: Path) -> tuple[dict[int, Any], list[float]]:
    """Responses, and the share of drafts that were accepted to each position."""
    options = options_of()
    blocks = options.kv_tokens // options.block_tokens
    whole = EagleOptions(path=str(drafter), context_tokens=256, min_probability=0)  # as vLLM: no draft is cut short
    eagle = EagleDrafter(target, whole, options.max_running, blocks, options.block_tokens)
    core = NativeEngine(
        target, options, drafters={"eagle": eagle}, policy=FixedPolicy(Strategy.parse(f"eagle:{DEPTH}"))
    )
    core.submit(greedy(prompts))
    events = drain(core)
    uses = [u for e in events if isinstance(e, EngineWindow) for u in e.strategies if u.drafted]
    offered, taken = (np.sum([getattr(u, name) for u in uses], 0)[:DEPTH] for name in ("offered", "taken"))
    return rollouts(events), list(taken / offered)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_vllm_accepts_what_our_engine_accepts(tmp_path: Path, method: Literal["eagle", "eagle3"]) -> None:
    """Per position within 2 points: vLLM drafts past a response's last token, and our engine does not."""
    shape = {"num_hidden_layers": 6, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = write_config(tmp_path / "source", **shape, head_dim=64, initializer_range=0.15)
    target = init_model(source, 0, batch_invariant=True).requires_grad_(False)
    save_model(target, tmp_path / "target")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 8).astype(np.int32) for _ in range(PROMPTS)]
    plain = fitted(target, prompts, method, tmp_path / "drafter")
    responses, accepted = ours(target, prompts, tmp_path / "drafter")
    assert [responses[i].tokens.tolist() for i in plain] == [plain[i].tokens.tolist() for i in plain]
    assert accepted[0] > 0.5, "the fit failed: nothing would be compared"

    done = export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path / "exported")
    assert done.method == method
    theirs = decode_with_vllm(tmp_path, method, prompts, tmp_path / "exported")
    assert theirs["tokens"] == [plain[i].tokens.tolist() for i in range(PROMPTS)]
    np.testing.assert_allclose(np.array(theirs["accepted"]) / theirs["drafts"], accepted, atol=0.02)
    print(
        f"vLLM {theirs['version']}, {method}: {theirs['accepted']} of {theirs['drafts']}; ours {np.round(accepted, 3)}"
    )


def decode_with_vllm(folder: Path, method: str, prompts: list[np.ndarray], drafter: Path) -> dict[str, Any]:
    job = {
        "target": str(folder / "target"),
        "drafter": str(drafter),
        "method": method,
        "depth": DEPTH,
        "prompts": [prompt.tolist() for prompt in prompts],
        "max_tokens": TOKENS,
    }
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("vllm_run.py")
    command = [str(vllm_python()), str(script), str(folder / "job.json"), str(folder / "out.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return result
