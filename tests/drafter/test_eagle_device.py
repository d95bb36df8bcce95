"""Drafts by passes that feed each other, against those that go through the host for every token: the same, token for
token, eagerly and as replays of a capture that computes again on the same tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions
from config.strategy import PLAIN, Strategy
from drafter.eagle import EagleDrafter
from drafter.protocol import BatchView, Drafts
from models.checkpoint import hf_state_dict
from models.transformer import Transformer
from models.weights import pack
from policies.speculation.policy import FixedPolicy
from policies.steps import StepKind, StepOutcome
from tests.drafter.test_eagle import Turns
from tests.engine.support import FAMILIES, make_requests, options_of, run, tiny_model
from tests.engine.test_graphs import FakeGraphCapture

BLOCKS, BLOCK_TOKENS = 512, 8
TOLERANCE = 1e-5  # attention is summed in another order than by the native kernels


class Compared(EagleDrafter):
    """Drafts on its device, and holds every answer to what a drafter of the same weights drafts through the host."""

    def __init__(self, model: Transformer, options: EagleOptions, **keywords: Any) -> None:
        place = model, options, 8, BLOCKS, BLOCK_TOKENS
        super().__init__(*place, on_device=True, **keywords)
        self.host = EagleDrafter(*place, on_device=False, **keywords)
        self.proposals = self.drafted = self.captures = 0

    def update(self, version: int, tensors: Any) -> None:
        super().update(version, tensors)
        self.host.update(version, tensors)

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        super().begin(slot, prompt_tokens, response_tokens)
        self.host.begin(slot, prompt_tokens, response_tokens)

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        super().end(slot, tokens, prompt_length, finished)
        self.host.end(slot, tokens, prompt_length, finished)

    def new_target(self, version: int) -> None:
        super().new_target(version)
        self.host.new_target(version)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        found, expected = super().propose(batch, strategy), self.host.propose(batch, strategy)
        assert found.counts.tolist() == expected.counts.tolist()
        real = np.arange(found.tokens.shape[1]) < found.counts[:, None]
        assert found.tokens.shape == expected.tokens.shape
        np.testing.assert_array_equal(found.tokens[real], expected.tokens[real])
        assert (found.parents is None) == (expected.parents is None)
        if found.parents is not None and expected.parents is not None:
            np.testing.assert_array_equal(found.parents[real], expected.parents[real])
        assert (found.distributions is None) == (expected.distributions is None)
        if found.distributions is not None and expected.distributions is not None:
            mask = torch.from_numpy(real)
            close = found.distributions[mask], expected.distributions[mask]
            torch.testing.assert_close(*close, atol=TOLERANCE, rtol=0)
        assert found.caught_up == expected.caught_up
        self.proposals += 1
        self.drafted += int(found.counts.sum())
        self.captures += self.captured
        return found


def compared(model: Transformer, path: str = "random", min_probability: float = 0.0, **keywords: Any) -> Compared:
    """With weights of which every part has its say: fresh ones hardly attend."""
    drafter = Compared(model, EagleOptions(path=path, min_probability=min_probability), **keywords)
    drafter.update(0, telling_weights(drafter, seed=1))
    return drafter


def telling_weights(drafter: EagleDrafter, seed: int, scale: float = 0.4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.3 * torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight")
        else scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in drafter.model.state_dict().items()
    }


def planned(drafter: EagleDrafter, *strategies: str, buckets: tuple[int, ...] = (1, 2, 4, 8)) -> FakeGraphCapture:
    graph_capture = FakeGraphCapture()
    drafter.plan_graphs([(n, Strategy.parse(text)) for n in buckets for text in strategies], graph_capture)
    return graph_capture


def engine_with(model: Transformer, drafter: EagleDrafter, policy: Any, **options: Any) -> NativeEngine:
    chosen = {"hidden_tokens": 16} | {key: options.pop(key) for key in ("verification",) if key in options}
    return NativeEngine(model, options_of(**options), drafters={"eagle": drafter}, policy=policy, **chosen)


STRATEGIES = ["eagle:1", "eagle:4", "eagle:4x3/12", "eagle:3x2/5", "eagle:1x4/4"]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", ["random", "random:eagle3"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafts_are_those_that_go_through_the_host(tmp_path: Path, strategy: str, kind: str, graphs: bool) -> None:
    """Among plain steps, with joins and leaves, late starts, limits, and a cache so tight that requests start again."""
    model = tiny_model(tmp_path, FAMILIES[len(strategy) % 3])
    drafter = compared(model, kind)
    graph_capture = planned(drafter, strategy) if graphs else None
    policy = Turns(strategy, strategy, "plain", strategy)
    core = engine_with(model, drafter, policy, max_running=7, kv_tokens=512)
    run(core, make_requests(12, prompts=5, seed=3, max_new_tokens=30))
    assert drafter.proposals > 20
    assert drafter.drafted > 100
    if graph_capture is not None:
        buckets = 4
        assert graph_capture.records == 2 * buckets, "a draft and catching up, at the start"
        assert graph_capture.replays > drafter.proposals
        assert not drafter.captures


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 0.0, "top_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranking", [{}, {"coupled": False}, {"tree_scale": 2.0}, {"sampled": True}], ids=str)
def test_every_way_to_draw_is_the_hosts(tmp_path: Path, settings: dict[str, Any], ranking: dict[str, Any]) -> None:
    """Temperatures, truncation and rankings; what truncation needs is captured when it first comes up."""
    model = tiny_model(tmp_path)
    verification = "rejection" if "sampled" in ranking else "coupled"
    for strategy in ("eagle:4", "eagle:3x2/5"):
        drafter = compared(model, min_probability=0.2, **ranking)
        graph_capture = planned(drafter, strategy)
        policy = FixedPolicy(Strategy.parse(strategy))
        core = engine_with(model, drafter, policy, verification=verification)
        run(core, make_requests(6, prompts=4, seed=5, max_new_tokens=16, **({"temperature": 1.0} | settings)))
        assert drafter.drafted > 20
        special = bool({"top_k", "top_p"} & settings.keys()) or ("sampled" in ranking and settings["temperature"] == 0)
        assert bool(drafter.captures) == special
        assert graph_capture.replays > drafter.proposals


@pytest.mark.parametrize("strategy", ["eagle:90", "eagle:70x2/80"])
def test_drafts_deeper_than_the_cache_end_where_the_hosts_do(tmp_path: Path, strategy: str) -> None:
    drafter = compared(tiny_model(tmp_path))
    drafter.update(0, telling_weights(drafter, seed=1, scale=0.15))  # features must stay finite over so many passes
    planned(drafter, strategy, buckets=(2,))
    core = engine_with(drafter._target, drafter, FixedPolicy(Strategy.parse(strategy)))
    run(core, make_requests(2, seed=3, max_new_tokens=120))
    assert drafter.drafted > 60


def test_new_weights_in_place_need_no_new_graphs(tmp_path: Path) -> None:
    """Of the drafter and of the target, in the middle of a run; a sleep takes none of the drafter's graphs either."""
    model, other = tiny_model(tmp_path / "a"), tiny_model(tmp_path / "b", seed=5)
    drafter = compared(model)
    graph_capture = planned(drafter, "eagle:3", "eagle:3x2/6")
    core = engine_with(model, drafter, Turns("eagle:3", "eagle:3x2/6"))
    core.submit(make_requests(5, seed=6, max_new_tokens=60))
    captured = graph_capture.records
    for _ in range(8):
        core.step()
    drafter.update(3, telling_weights(drafter, seed=2))
    for _ in range(8):
        core.step()
    core.update_weights(*pack(hf_state_dict(other), 1))
    while core.has_work:
        core.step()
    core.sleep()
    core.wake()
    replays = graph_capture.replays
    run(core, make_requests(3, seed=7, max_new_tokens=20))
    assert graph_capture.replays > replays
    assert graph_capture.records == captured


@pytest.mark.parametrize("strategy", ["eagle:4", "eagle:3x2/5"])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.6}], ids=str)
def test_drafts_with_top_k_or_top_p_are_captured_at_the_start_where_they_are_announced(
    tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    model = tiny_model(tmp_path)
    drafter, graph_capture, arm = compared(model), FakeGraphCapture(), Strategy.parse(strategy)
    drafter.plan_graphs([(n, arm) for n in (2, 8)], graph_capture, True)
    captured = graph_capture.records
    run(engine_with(model, drafter, FixedPolicy(arm)), make_requests(6, seed=5, max_new_tokens=16, **settings))
    assert drafter.drafted > 20
    assert graph_capture.replays > 0
    assert graph_capture.records == captured


def test_plans_keep_what_is_captured_and_capture_what_is_new(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    drafter = compared(model)
    graph_capture = planned(drafter, "eagle:4", "eagle:2", buckets=(2, 8))
    captured = graph_capture.records
    fewer = [(2, Strategy.parse("eagle:4")), (8, Strategy.parse("eagle:4"))]
    drafter.plan_graphs(fewer, graph_capture)
    assert graph_capture.records == captured
    drafter.plan_graphs([*fewer, (8, Strategy.parse("eagle:6"))], graph_capture)
    assert graph_capture.records > captured
    core = engine_with(model, drafter, Turns("eagle:4", "eagle:6", "eagle:2", "eagle:2x2/4"))
    run(core, make_requests(8, seed=4, max_new_tokens=40))
    assert drafter.drafted > 100


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_a_failed_capture_is_said_and_drafts_go_on(
    tmp_path: Path, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(tmp_path)
    drafter, graph_capture = compared(model), FakeGraphCapture(fail_at)
    strategy = Strategy.parse("eagle:3")
    drafter.plan_graphs([(1, strategy), (4, strategy), (8, strategy)], graph_capture)
    assert graph_capture.records == fail_at, "nothing is captured after a failure"
    assert sum("no CUDA graph of an EAGLE draft" in record.message for record in caplog.records) == 1
    core = engine_with(model, drafter, FixedPolicy(strategy))
    run(core, make_requests(8, seed=4, max_new_tokens=30))
    assert drafter.drafted > 100
    assert graph_capture.records == fail_at


def test_the_first_rows_of_a_late_start_are_fed_beside_the_graphs(tmp_path: Path) -> None:
    """More rows than a usual step brings: by themselves, then the captured draft follows."""
    model = tiny_model(tmp_path)
    drafter = compared(model)
    graph_capture = planned(drafter, "eagle:4", buckets=(4,))
    core = engine_with(model, drafter, FixedPolicy(PLAIN))
    core.submit(make_requests(3, seed=1, max_new_tokens=60))
    for _ in range(30):
        core.step()
    core.use(FixedPolicy(Strategy.parse("eagle:4")))
    core.step()
    assert drafter.proposals == 1
    assert graph_capture.replays == 1, "the draft alone"
    core.step()
    assert graph_capture.replays == 3


def test_a_step_whose_draft_was_captured_is_not_a_measurement(tmp_path: Path) -> None:
    """Truncation's graph is captured in the first step that needs it, and takes many times a draft."""

    class Noting(Turns):
        def __init__(self) -> None:
            super().__init__("eagle:3")
            self.kinds: list[str] = []

        def record(self, outcome: StepOutcome) -> None:
            if outcome.load.running and outcome.kind is not StepKind.CAUGHT_UP:  # prompts alone are told of, too
                self.kinds.append("measured" if outcome.kind is StepKind.USUAL else "skipped")

    model = tiny_model(tmp_path)
    for sampling, first in (({}, "measured"), ({"top_k": 5}, "skipped")):
        drafter, policy = compared(model), Noting()
        planned(drafter, "eagle:3", buckets=(2,))
        core = engine_with(model, drafter, policy)
        core.submit(make_requests(2, seed=4, max_new_tokens=40, **sampling))
        while len(policy.kinds) < 6:
            core.step()
        assert policy.kinds == [first, *["measured"] * 5]
