"""The helpers themselves: vLLM loads the tiny model of each family and computes what our own network computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.support import FAMILIES, logits_of
from tests.vllm.support import VLLM, RawEngine, tiny_checkpoint

pytestmark = [*VLLM, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_decodes_a_tiny_model_as_our_network_does(family: str, tmp_path: Path) -> None:
    """Greedy, and the log-probs of T = 1, from one engine."""
    directory, model = tiny_checkpoint(tmp_path, family)
    engine = RawEngine(directory)
    try:
        prompts = [np.random.default_rng(i).integers(0, 61, 3 + i) for i in range(4)]
        for i, prompt in enumerate(prompts):
            engine.add(f"greedy-{i}", prompt, 8, temperature=0.0)
            engine.add(f"drawn-{i}", prompt, 8, temperature=1.0)
        drawn = engine.run()
    finally:
        engine.close()
    for name, one in drawn.items():
        assert one.finished
        assert len(one.tokens) == 8
        prompt = prompts[int(name[-1])].tolist()
        logits = logits_of(model, prompt + one.tokens)[len(prompt) - 1 : -1]
        if name.startswith("greedy"):
            assert logits.argmax(-1).tolist() == one.tokens
        else:
            expected = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
