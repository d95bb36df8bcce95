"""A drafter is known everywhere once it stands in the catalogue: nothing else has a list of names."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from actors.engine.capabilities import BACKENDS, NATIVE
from config.catalogue import CATALOGUE, DrafterEntry, at_hand
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from contracts.rollout import StrategyUse
from drafter.build import build_drafters
from launch.config.check import check_values
from launch.config.load import load_config
from launch.observe import SpeculationMeter
from policies.speculation.build import build_policy
from policies.speculation.graph_plan import drafter_rows
from tests.engine.support import DrafterBase, tiny_model
from tests.windows import engine_window

ENGINE = EngineOptions(max_running=3, kv_tokens=512)
OWN = SpeculationOptions(strategies=("parrot:3",))


class Parrot(DrafterBase):
    name = "parrot"


@pytest.fixture(autouse=True)
def parrot(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = DrafterEntry(name="parrot", arms=("parrot:5", "parrot:2"), is_network=True)
    monkeypatch.setitem(CATALOGUE, "parrot", entry)
    native = replace(NATIVE, drafters={*NATIVE.drafters, "parrot"})  # which is made of the catalogue when imported
    monkeypatch.setitem(BACKENDS, "native", native)
    module = ModuleType("drafter.parrot")
    module.build = lambda options, model, engine: Parrot()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "drafter.parrot", module)


def test_an_engine_is_built_with_it(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    assert isinstance(build_drafters(SpeculationOptions(), model, ENGINE)["parrot"], Parrot)
    assert list(build_drafters(OWN, model, ENGINE)) == ["parrot"]


def test_it_has_arms_graphs_and_a_place_in_the_plan() -> None:
    assert "parrot" in at_hand(SpeculationOptions())
    policy = build_policy(SpeculationOptions(), at_hand(SpeculationOptions()))
    assert policy is not None
    assert {Strategy.parse("parrot:5"), Strategy.parse("parrot:2")} <= set(policy.arms_at(1))
    assert drafter_rows(Strategy.parse("parrot:4x3/12")) == 3


def faults(strategy: str) -> list[str]:
    config = load_config(Path("examples/guess_and_check/config.yaml"), ["drafter.train=false"]).config
    speculation = config.rollout.speculation.model_copy(update={"strategies": (strategy,)})
    rollout = config.rollout.model_copy(update={"speculation": speculation})
    return [issue.message for issue in check_values(config.model_copy(update={"rollout": rollout}))]


def test_the_configuration_knows_it_and_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults("parrot:4") == []
    assert faults("parot:4") == ["unknown drafter 'parot'"]
    needy = DrafterEntry(name="parrot", arms=(), needs_weights=True)
    monkeypatch.setitem(CATALOGUE, "parrot", needy)
    assert faults("parrot:4") == ["is not set, but rollout.speculation.strategies names the drafter parrot"]
    with pytest.raises(ValueError, match=r"'parrot', which has no weights: set rollout\.speculation\.parrot\.path"):
        build_drafters(OWN, tiny_model(tmp_path), ENGINE)


def test_what_it_does_is_observed_under_its_name() -> None:
    counts: dict[str, Any] = {"engine_steps": 1, "request_steps": 4, "drafted": 12, "accepted": 6}
    use = StrategyUse(strategy="parrot:3", **counts, seconds=1.0, draft_s=0.1, saved_s=0.5)
    meter = SpeculationMeter()
    meter.window("rollout-0", engine_window(strategies=(use,)))
    assert meter.take().metrics()["speculation/parrot/acceptance"] == 0.5


def test_the_copy_of_the_target_is_at_hand_where_an_engine_lends_its_cache(tmp_path: Path) -> None:
    assert faults("self:4") == []
    assert "self" not in at_hand(SpeculationOptions())  # of vLLM, only where it is named
    assert "self" in at_hand(SpeculationOptions(), cache_lent=True)
    assert {"ngram", "self", "suffix"} <= set(build_drafters(SpeculationOptions(), tiny_model(tmp_path), ENGINE))
    assert {"self"} < BACKENDS["vllm"].drafters
