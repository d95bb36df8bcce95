"""An engine that stores its matrices in few bits on a GPU: what its steps launch, that graphs outlive new weights, and
that what the device has no products for is refused at the start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.native import core
from actors.engine.native.engine import NativeEngine
from actors.engine.wire import Start
from config.formats import FORMATS
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from models.checkpoint import hf_state_dict, init_model, load_model, save_model
from models.low_bit import quantise, quantised
from models.ops import low_bit, low_bit_reference
from models.transformer import Transformer
from models.weights import pack
from tests.engine.support import assert_same, make_requests, options_of, run, write_config
from tests.pretended.counting import counting
from tests.pretended.device import Seen
from tests.pretended.support import steps_of

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


def checkpoint(directory: Path, layers: int = 2, seed: int = 0) -> Path:
    config = write_config(directory / "config", "qwen3", num_hidden_layers=layers, **WIDE)
    save_model(init_model(config, seed, batch_invariant=False), directory / "model")
    return directory / "model"


def target(directory: Path, name: str, layers: int = 2) -> Transformer:
    path = checkpoint(directory / f"{name}-{layers}", layers)
    model = load_model(path, dtype=torch.bfloat16, device="cuda", batch_invariant=False, low_bit=FORMATS.get(name))
    return model.requires_grad_(False)


def last_step(directory: Path, name: str, graphs: bool, layers: int = 2) -> Seen:
    return steps_of(target(directory, name, layers), cuda_graphs=graphs)[-1]


@GRAPHS
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_has_a_launch_more_where_tokens_are_rounded(name: str, graphs: bool, tmp_path: Path) -> None:
    """For attention's, and once a step for the first norm's; norms and SwiGLU round theirs."""
    two, three, exact = (last_step(tmp_path, *of) for of in ((name, graphs), (name, graphs, 3), ("none", graphs)))
    more = int(FORMATS[name].activations != "none")
    assert two.kernels.total() == exact.kernels.total() + 2 * more + more
    layer = three.kernels.total() - two.kernels.total()
    assert 0 < layer <= 12 + more
    fused = {"add_norm_quantise", "swiglu_quantise"} & {what.split(".")[1] for what in two.kernels.whats()}
    assert len(fused) == 2 * more
    assert two.waits.total() == 1, two.waits
    assert not two.pageable, two.pageable
    products = {what for what in two.kernels.whats() if "mm" in what or "linear" in what}
    assert products == {"paceline.low_bit_linear.default"}, "no library multiplies but for the head"


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_graphs_outlive_weights_that_arrive_in_few_bits(name: str, tmp_path: Path) -> None:
    """They are written where the old ones lay: nothing is captured again, and tokens are those of a fresh engine."""
    model = target(tmp_path / "old", name)
    later = init_model(write_config(tmp_path / "later", "qwen3", **WIDE), 3, batch_invariant=False).to(torch.bfloat16)
    manifest, buffer = pack(dict(quantised(hf_state_dict(later).items(), FORMATS[name])), 1)
    new_weights = np.asarray(buffer)
    engine = NativeEngine(model, options_of(max_running=2))
    requests = make_requests(2, max_new_tokens=8)
    before = run(engine, requests)
    assert engine.update_weights(manifest, new_weights).quantization == name
    with counting() as seen:
        found = run(engine, requests)
    assert seen.replays.total() > 0
    assert not seen.captures, seen.captures
    fresh = target(tmp_path / "new", name)
    other = NativeEngine(fresh, options_of(max_running=2))
    other.update_weights(manifest, new_weights)
    expected = run(other, requests)
    assert_same(found, expected)
    assert any(found[key].tokens.tolist() != before[key].tokens.tolist() for key in found), "weights did not change"


@pytest.mark.parametrize("name", FORMATS)
def test_a_mirrored_product_and_its_gradients_are_the_cpus(name: str) -> None:
    """The learner's forward takes the engine's operators for as many rows as it has, and waits for nothing."""
    generator = torch.Generator().manual_seed(0)
    x, master, grad = (torch.randn(*shape, generator=generator) for shape in ((70, 128), (96, 128), (70, 96)))
    found = []
    for device in ("cpu", "cuda"):
        mine, weight = (t.detach().to(device).requires_grad_() for t in (x, master))
        given = grad.to(device)
        with counting() as seen:
            y = low_bit.mirrored_linear(mine, weight, quantise(weight, FORMATS[name]))
            y.backward(given)
        found.append([t.detach().cpu() for t in (y, mine.grad, weight.grad) if t is not None])
    assert seen.waits.total() == 0, seen.waits
    launched = seen.kernels.whats()
    assert "paceline.low_bit_linear.default" in launched
    expected = low_bit_reference.reference(x, quantise(master, FORMATS[name]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    if FORMATS[name].activations == "int8":
        assert torch.equal(found[1][0], expected)


def started(path: Path, quantization: Any) -> Start:
    return Start(
        model=ModelOptions(path=str(path), dtype="bfloat16"),
        options=EngineOptions(device="cuda", kv_tokens=512),
        seed=0,
        weights_version=0,
        niceness=0,
        speculation=SpeculationOptions(mode="off"),
        quantization=quantization,
    )


def test_fp8_is_refused_at_the_start_where_the_gpu_has_no_products_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path)
    core.build(started(path, "fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    with pytest.raises(ValueError, match=r"rollout.quantization=fp8: .* capability 8.6, .* take w8a8"):
        core.build(started(path, "fp8"))
    core.build(started(path, "w8a8"))
