"""EAGLE-3 heads made by speculators and heads made here, both in stock vLLM and in our engine: equal acceptance.

Needs an interpreter with vLLM (see test_export_vllm) and one with speculators (PACELINE_SPECULATORS_PYTHON).
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engine.native.engine import NativeEngine
from config.drafter import DrafterOptions
from drafter.eagle import load_eagle, save_eagle
from drafter.export import export_drafter
from drafter.training.collect import collect_records
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from models.checkpoint import init_model, save_model
from models.transformer import Transformer
from tests.drafter.test_export_vllm import PROMPTS, decode_with_vllm, greedy, needs_vllm, ours
from tests.drafter.test_published import SETTINGS, speculators
from tests.engine.support import VOCAB, drain, options_of, rollouts, write_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs_vllm,
    pytest.mark.skipif(
        "PACELINE_SPECULATORS_PYTHON" not in os.environ,
        reason="set PACELINE_SPECULATORS_PYTHON to an interpreter that has speculators 0.9",
    ),
]

H, PROMPT, IDS = 128, 8, [2, 3, 5]
FIT_STEPS, MORE_STEPS = 240, 12
LAYER = {
    "hidden_size": H,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


class World:
    """A tiny Qwen3, its greedy responses, and what each engine accepts of a head's drafts."""

    def __init__(self, folder: Path) -> None:
        shape = {"num_hidden_layers": 6, "hidden_size": H, "num_attention_heads": 2, "num_key_value_heads": 1}
        source = write_config(folder / "source", **shape, head_dim=64, initializer_range=0.15)
        self.folder = folder
        self.target: Transformer = init_model(source, 0, batch_invariant=True).requires_grad_(False)
        save_model(self.target, folder / "target")
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(0, VOCAB, PROMPT).astype(np.int32) for _ in range(PROMPTS)]
        core = NativeEngine(self.target, options_of())
        core.submit(greedy(self.prompts))
        found = rollouts(drain(core))
        self.responses: list[np.ndarray] = [found[i].tokens for i in range(PROMPTS)]

    def both(self, head: Path) -> tuple[np.ndarray, np.ndarray]:
        """Shares of drafts accepted to each position: our engine's, and stock vLLM's."""
        texts, accepted = ours(self.target, self.prompts, head)
        plain = [response.tolist() for response in self.responses]
        assert [texts[i].tokens.tolist() for i in range(PROMPTS)] == plain
        theirs = decode_with_vllm(self.folder, "eagle3", self.prompts, head)
        assert theirs["tokens"] == plain
        return np.array(accepted), np.array(theirs["accepted"]) / theirs["drafts"]

    def train(self, head: Path, out: Path) -> None:
        """A few updates of the head by our trainer."""
        model = load_eagle(head, self.target.config, **SETTINGS)
        options = DrafterOptions(algorithm="eagle3", learning_rate=1e-3)
        trainer = DrafterTrainer(TargetHead.of(self.target, 0), options, model=model)
        records = list(collect_records(self.target, self.prompts, self.responses, layers=trainer.model.layers))
        for step in range(MORE_STEPS):
            trainer.micro_step(records[step % 3 :: 3])
        save_eagle(trainer.model, out)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(("kind", "rows"), [("qwen3", 0), ("llama", 48)])
def test_heads_of_speculators_and_of_ours_draft_the_same_here_and_in_vllm(world: World, kind: str, rows: int) -> None:
    """Made by speculators; then trained here and written in both forms. Within 2 points at every position."""
    texts = [
        [*prompt.tolist(), *response.tolist()] for prompt, response in zip(world.prompts, world.responses, strict=True)
    ]
    counts = np.bincount(np.concatenate(world.responses), minlength=VOCAB)
    tokens = sorted(np.argsort(-counts, kind="stable")[:rows].tolist()) if rows else None
    job: dict[str, Any] = {
        "name": f"made_{kind}",
        "kind": kind,
        "ids": IDS,
        "texts": texts,
        "prompt": PROMPT,
        "tokens": tokens,
        "layer": LAYER,
        "steps": FIT_STEPS,
    }
    (world.folder / "fit.json").write_text(json.dumps(job))
    speculators("fit", str(world.folder), str(world.folder / "fit.json"), "-")
    made = world.folder / f"made_{kind}"
    found = {"made by speculators": world.both(made)}
    assert found["made by speculators"][0][0] > 0.4, "the fit failed: nothing would be compared"
    trained = world.folder / f"trained_{kind}"
    world.train(made, trained)
    for form in ("speculators", "vllm"):
        out = world.folder / f"written_{kind}_{form}"
        export_drafter(trained, world.folder / "target", out, form=form)
        found[f"trained here, written as {form}"] = world.both(out)
    for name, (here, there) in found.items():
        print(f"{kind}, {tokens and len(tokens)} tokens, {name}: here {np.round(here, 3)}, vLLM {np.round(there, 3)}")
        np.testing.assert_allclose(there, here, atol=0.02, err_msg=name)
    assert not np.array_equal(*(found[name][0] for name in list(found)[:2])), "training changed nothing"
