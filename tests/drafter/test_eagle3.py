"""The EAGLE-3 drafter in an engine: drafts as from scratch from three layers of the target, and no token changes."""

from pathlib import Path

import pytest
import torch

from actors.engine.native.engine import NativeEngine
from config.catalogue import fresh_path
from config.speculation import EagleOptions
from config.strategy import PLAIN, Strategy
from drafter.eagle import EagleDrafter, EagleWeightsError, init_eagle, load_eagle, save_eagle
from drafter.eagle.files import eagle_at
from models.checkpoint import init_model
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.drafter.test_eagle import BLOCK_TOKENS, BLOCKS, Checked
from tests.engine.support import FAMILIES, assert_same, make_requests, options_of, run, write_config

SETTINGS = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}


def deep_model(directory: Path, family: str = "qwen3") -> Transformer:
    return init_model(write_config(directory / family, family, num_hidden_layers=4), 0, batch_invariant=True)


def drafter_of(model: Transformer, path: str = "random:eagle3:0,1,3") -> Checked:
    return Checked(model, EagleOptions(path=path, min_probability=0), 8, BLOCKS, BLOCK_TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["eagle:3", "eagle:3x2/5"])
def test_drafts_equal_those_from_scratch(tmp_path: Path, family: str, strategy: str) -> None:
    """A tight cache, joins and leaves; the recorded layers are not the first three."""
    model = deep_model(tmp_path, family)
    requests = make_requests(8, prompts=4, seed=3, temperature=1.0, max_new_tokens=30)
    plain = run(NativeEngine(model, options_of()), requests)
    eagle = drafter_of(model)
    assert eagle.hidden_layers == (0, 1, 3)
    policy = FixedPolicy(Strategy.parse(strategy))
    core = NativeEngine(model, options_of(max_running=4), drafters={"eagle": eagle}, policy=policy, hidden_tokens=16)
    assert_same(run(core, requests), plain)
    assert eagle.checked > 40


def test_starts_late_and_takes_new_weights(tmp_path: Path) -> None:
    model = deep_model(tmp_path)
    eagle = drafter_of(model)
    core = NativeEngine(model, options_of(), drafters={"eagle": eagle}, policy=FixedPolicy(PLAIN), hidden_tokens=16)
    core.submit(make_requests(3, seed=1, max_new_tokens=60))
    for _ in range(30):
        core.step()
    core.use(FixedPolicy(Strategy.parse("eagle:4")))
    core.step()
    assert eagle.checked == 3
    assert (eagle._cache.start[eagle._cache.start >= 0] > 10).all()
    other = init_eagle(model.config, 99, "eagle3", (0, 1, 3), **SETTINGS)
    eagle.update(7, other.state_dict())
    before = eagle.checked
    for _ in range(6):
        core.step()
    assert eagle.version == 7
    assert eagle.checked > before


def test_files_say_kind_and_layers(tmp_path: Path) -> None:
    model = deep_model(tmp_path)
    network = init_eagle(model.config, 3, "eagle3", (0, 2, 3), **SETTINGS)
    save_eagle(network, tmp_path / "drafter")
    loaded = load_eagle(tmp_path / "drafter", model.config, **SETTINGS)
    assert (loaded.kind, loaded.layers) == ("eagle3", (0, 2, 3))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    drafter = EagleDrafter(model, EagleOptions(path=str(tmp_path / "drafter")), 4, 16, 8)
    assert drafter.hidden_layers == (0, 2, 3)


def test_fresh_weights_by_name(tmp_path: Path) -> None:
    config = deep_model(tmp_path).config

    def fresh(path: str) -> tuple[str, tuple[int, ...]]:
        model = eagle_at(path, config, 5, **SETTINGS)
        return model.kind, model.layers

    assert fresh(fresh_path("eagle")) == ("eagle", ())
    assert fresh(fresh_path("eagle3", (1, 2, 3))) == ("eagle3", (1, 2, 3))
    assert fresh(fresh_path("eagle3")) == ("eagle3", (0, 1, 3))  # shallow: spread
    for wrong in (
        "random:eagle4",
        "random:eagle3:1,2",
        "random:eagle3:1,2,4",
        "random:eagle3:2,1,3",
        "random:eagle3:a",
    ):
        with pytest.raises(EagleWeightsError, match=r"rollout\.speculation\.eagle\.path"):
            fresh(wrong)
