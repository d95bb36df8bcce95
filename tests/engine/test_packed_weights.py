"""Packed weights compute what the parameters say, also after an update."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from actors.engine.native.forward.packed_weights import pack_weights
from models import weights
from models.checkpoint import hf_state_dict, init_model
from models.transformer import Projection
from tests.engine.support import FAMILIES, engine, make_requests, run, write_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "fast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_projections_are_those_of_torch(tmp_path: Path, family: str, invariant: bool, dtype: torch.dtype) -> None:
    model = init_model(write_config(tmp_path, family), 0, dtype=dtype, batch_invariant=invariant)
    names = [name for name, _ in model.named_parameters()]
    pack_weights(model)
    pack_weights(model)
    assert [name for name, _ in model.named_parameters()] == names
    projections = [m for m in model.modules() if isinstance(m, Projection)]
    assert len(projections) >= 8
    with torch.inference_mode():
        for projection in projections:
            for rows in (1, 5, 40):
                x = torch.randn(rows, projection.weight.shape[1]).to(dtype)
                wanted = F.linear(x.double(), projection.weight.double(), _double(projection.bias))
                tolerance = 1e-5 if dtype == torch.float32 else 3e-2
                torch.testing.assert_close(projection(x).double(), wanted, rtol=tolerance, atol=tolerance)


def _double(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_reaches_the_packed_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Greedy log-probs after an update are those of an engine that started with the new weights."""
    old, new, fresh = (
        init_model(write_config(tmp_path), seed, dtype=dtype, batch_invariant=False) for seed in (1, 2, 2)
    )
    requests = make_requests(6, seed=1, max_new_tokens=4, temperature=0.0)
    core = engine(old)
    before = run(core, requests)
    core.update_weights(*weights.pack(hf_state_dict(new), version=1))
    after, wanted = run(core, requests), run(engine(fresh), requests)
    for request_id, rollout in wanted.items():
        assert rollout.tokens.tolist() == after[request_id].tokens.tolist()
        np.testing.assert_allclose(rollout.logprobs_t1, after[request_id].logprobs_t1, atol=1e-3)
    assert any(before[i].tokens.tolist() != after[i].tokens.tolist() for i in wanted)
