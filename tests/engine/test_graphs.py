"""An engine whose graphs are recorded by a fake, on CPU.

The fake's replay is the recorded computation over the tensors it was recorded with: a graph that would read anything
else than what stays in place on CUDA gives other tokens here too.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward import device_steps
from actors.engine.native.forward.decoder import DecoderForward
from actors.engine.native.forward.graphs import StepGraphs
from actors.engine.native.forward.kv_memory import AllocatedMemory
from config.strategy import PLAIN, Strategy
from models import staging, weights
from models.checkpoint import hf_state_dict, init_model
from models.ops.triton import operators
from models.ops.triton.work import SPLIT_TOKENS, WorkList
from models.transformer import Transformer
from policies.speculation.graph_plan import batch_buckets, bucketed_plan
from policies.speculation.policy import FixedPolicy
from policies.steps import StepKind, StepOutcome
from tests.engine.support import (
    FAMILIES,
    drain,
    engine,
    make_requests,
    options_of,
    rollouts,
    run,
    tiny_model,
    write_config,
)
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees

SIZE, BLOCKS = 8, 40
TRASH = BLOCKS * SIZE
CPU = torch.device("cpu")


class FakeGraphCapture:
    """Records nothing: computes again, on the same tensors."""

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.records = self.replays = self.resets = 0
        self._fail_at = fail_at
        self._error = error or RuntimeError("CUDA out of memory, said the fake")

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.records += 1
        if self.records == self._fail_at:
            raise self._error
        compute()

        def replay() -> None:
            self.replays += 1
            compute()

        return replay

    def reset(self) -> None:
        self.resets += 1


# Where a step's arrays lie.


def graphed(
    model: Transformer, graph_capture: FakeGraphCapture, strategy: str = "plain", **keywords: Any
) -> NativeEngine:
    options = {k: keywords.pop(k) for k in ("prefill_chunk_tokens", "max_running") if k in keywords}
    policy = None if strategy == "plain" else policy_of(strategy)
    return NativeEngine(model, options_of(**options), policy=policy, graph_capture=graph_capture, **keywords)


def policy_of(strategy: str) -> FixedPolicy:
    return FixedPolicy(Strategy.parse(strategy))


def assert_same_tokens(actual: dict[int, Any], expected: dict[int, Any], atol: float = 1e-3) -> None:
    """atol: of log-probs; 0.05 where tokens are rounded to eight bits, since another order of sums may round one
    otherwise."""
    assert actual.keys() == expected.keys()
    for request_id, rollout in expected.items():
        assert actual[request_id].tokens.tolist() == rollout.tokens.tolist(), request_id
        np.testing.assert_allclose(actual[request_id].logprobs, rollout.logprobs, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 9, "top_p": 0.9}])
def test_tokens_are_those_of_eager_steps(tmp_path: Path, family: str, sampling: dict[str, Any]) -> None:
    """Plain decoding, ragged chains and trees; requests come and go, with prompts in chunks beside the others."""
    model = tiny_model(tmp_path, family)
    requests = make_requests(14, prompts=5, seed=71, stop_token_ids=(3,), **sampling)
    expected = run(engine(model), requests)
    drafters: dict[str, dict[str, Any]] = {"plain": {}, "test:5": {"test": Oracle(expected, spoil=True)}}
    drafters["test:4x3/12"] = {"test": RandomTrees(expected, 0.7)}
    for strategy, drafter in drafters.items():
        graph_capture = FakeGraphCapture()
        cut = bool(sampling.get("top_k"))
        core = graphed(model, graph_capture, strategy, drafters=drafter, prefill_chunk_tokens=16, truncated=cut)
        captured = graph_capture.records
        plan = bucketed_plan(policy_of(strategy).arms_at, batch_buckets(8), chunk_tokens=16)
        assert captured == len(plan.of("target"))
        assert_same_tokens(run(core, requests), expected)
        assert graph_capture.replays > 0
        assert graph_capture.records == captured, "all captured at the start, none while requests run"


def test_graphs_for_top_k_and_top_p_hold_requests_without_them(tmp_path: Path) -> None:
    """B2: with top_p in rollout.sampling no graph of the start was of use, and each was captured again in a step."""
    model = tiny_model(tmp_path)
    cut, whole = make_requests(8, seed=72, top_p=0.8), make_requests(8, seed=73)
    mixed = [
        replace(one, request_id=i) for i, one in enumerate(of for pair in zip(cut, whole, strict=True) for of in pair)
    ]
    expected = [run(engine(model), requests) for requests in (whole, mixed)]
    for announced in (True, False):
        graph_capture = FakeGraphCapture()
        core = graphed(model, graph_capture, truncated=announced)
        captured = graph_capture.records
        assert_same_tokens(run(core, whole), expected[0])
        assert_same_tokens(run(core, mixed), expected[1])
        assert (graph_capture.records == captured) is announced


def test_a_graph_reads_the_work_list_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured on rows of nobody, for whom there is no work."""
    model = init_model(write_config(tmp_path / "long", max_position_embeddings=1024), 0)
    requests = make_requests(6, prompts=3, seed=81, max_new_tokens=12)
    expected = run(engine(model), requests)
    attend, listed = operators.paged_attention, [0, 0]

    def checked(*given: Any) -> torch.Tensor:
        offsets, contexts, work = (given[place].numpy() for place in (4, 5, 11))
        config = model.config
        mine = WorkList.of(config.num_heads, config.num_kv_heads, given[0].dtype)
        begins, items = work[: mine.programs + 1], work[mine.programs + 1 :].reshape(-1, 4)
        own = items[: begins[-1]]
        real = np.flatnonzero(np.diff(offsets))
        splits = sum(-(-int(contexts[b]) // SPLIT_TOKENS) for b in real)
        assert own[:, 3].sum() == splits or len(own) > splits, "a prompt's tiles see less than its last"
        assert sorted(set(own[:, 0].tolist())) == real.tolist()
        listed[0] += 1
        listed[1] += len(own)
        found: torch.Tensor = attend(*given)
        return found

    monkeypatch.setattr(operators, "paged_attention", checked)
    core = graphed(model, FakeGraphCapture(), prefill_chunk_tokens=16)
    assert listed[0] > 0
    assert listed[1] == 0
    assert_same_tokens(run(core, requests), expected)
    assert listed[1] > 0


class StayingMemory(AllocatedMemory):
    """Keeps its address through sleep, and loses its contents, as the driver's virtual memory does."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        super().__init__(size_bytes, device, keep_bytes=size_bytes)

    def sleep(self) -> None:
        self.tensor.fill_(0xFF)  # NaN in any dtype


@pytest.mark.parametrize("memory", [StayingMemory, AllocatedMemory])
def test_only_a_cache_that_moved_needs_new_graphs(tmp_path: Path, memory: type[AllocatedMemory]) -> None:
    """B6: every sleep cost all graphs, which were captured again one by one while requests ran."""
    model = tiny_model(tmp_path)
    requests = make_requests(6, seed=73, max_new_tokens=12)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture()
    core = graphed(model, graph_capture, make_memory=memory)
    assert_same_tokens(run(core, requests), expected)
    first = graph_capture.records
    core.sleep()
    core.sleep()
    core.wake()
    woken = graph_capture.records
    assert woken == (first if memory is StayingMemory else 2 * first), "captured when it wakes, not in a step"
    assert_same_tokens(run(core, requests), expected)
    assert graph_capture.records == woken


def test_new_weights_need_no_new_graphs_and_policies_those_that_they_lack(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(6, seed=73, max_new_tokens=12)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture()
    core = graphed(model, graph_capture, drafters={"test": Oracle(expected)})
    first = graph_capture.records
    core.update_weights(*weights.pack(hf_state_dict(tiny_model(tmp_path, seed=5)), version=1))
    changed = run(engine(model), requests)
    assert_same_tokens(run(core, requests), changed)
    assert graph_capture.records == first
    core.use(FixedPolicy(Strategy.parse("test:5")))  # larger steps: buffers move
    chunk_tokens = options_of().prefill_chunk_tokens
    plan = bucketed_plan(policy_of("test:5").arms_at, batch_buckets(8), chunk_tokens=chunk_tokens).of("target")
    assert graph_capture.records == first + len(plan)
    assert_same_tokens(run(core, requests), changed)
    for policy in (None, FixedPolicy(PLAIN), FixedPolicy(Strategy.parse("test:5"))):
        core.use(policy)
        assert_same_tokens(run(core, requests), changed)
    assert graph_capture.records == first + len(plan)


def test_captures_end_in_time_and_go_on_when_a_shape_comes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture_all = StepGraphs.capture_all
    monkeypatch.setattr(StepGraphs, "capture_all", lambda graphs, upload: capture_all(graphs, upload, limit_s=-1.0))
    model = tiny_model(tmp_path)
    requests = make_requests(6, seed=77)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture()
    with caplog.at_level(logging.INFO):
        core = graphed(model, graph_capture)
    assert graph_capture.records == 0
    assert "captured 0 of 14 CUDA graphs" in caplog.text, "four of decoding, ten of mixed steps"
    assert_same_tokens(run(core, requests), expected)
    assert 0 < graph_capture.records <= 14
    assert graph_capture.replays > graph_capture.records


def test_a_step_is_one_upload_and_one_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it uploads is the size of the step, not of the largest one (C9)."""
    sent: list[int] = []
    fetched: list[int] = []

    class Counted(staging.Upload):
        def send(self, used_bytes: int) -> None:
            sent.append(used_bytes)
            super().send(used_bytes)

    class CountedBack(staging.Download):
        def fetch(self, words: torch.Tensor) -> Any:
            fetched.append(len(words))
            return super().fetch(words)

    monkeypatch.setattr(device_steps, "Upload", Counted)
    monkeypatch.setattr(device_steps, "Download", CountedBack)
    steps: list[Any] = []
    core = graphed(tiny_model(tmp_path), FakeGraphCapture(), steps=steps, max_running=64)
    sent.clear()
    run(core, make_requests(1, seed=78, max_new_tokens=20))
    assert len(sent) == len(steps)
    assert len(fetched) == sum(step.emitted > 0 for step in steps)
    decoding = sent[2:]
    assert max(decoding) < 1024
    assert max(fetched[1:]) == 4, "token, and two log-probabilities"


@pytest.mark.parametrize("error", ["torch", "triton"])
def test_a_failed_capture_costs_the_graphs_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    """Triton's errors are no RuntimeErrors."""
    model = tiny_model(tmp_path)
    requests = make_requests(8, seed=74)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture(
        2, OutOfResources(300_000, 232_448, "shared memory") if error == "triton" else None
    )
    core = graphed(model, graph_capture)
    assert_same_tokens(run(core, requests), expected)
    assert graph_capture.records == 2
    assert graph_capture.resets >= 1
    assert "decoding goes on without graphs" in caplog.text


def test_without_kernels_the_models_own_forward_runs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA machine without Triton, or a changed model: slower and without graphs, the same tokens."""
    monkeypatch.setattr(DecoderForward, "supports", staticmethod(lambda model: False))
    model = tiny_model(tmp_path)
    requests = make_requests(10, prompts=4, seed=79)
    expected = run(engine(model), requests)
    graph_capture = FakeGraphCapture()
    core = graphed(
        model, graph_capture, "test:4x3/12", drafters={"test": RandomTrees(expected, 0.7)}, prefill_chunk_tokens=16
    )
    assert_same_tokens(run(core, requests), expected)
    assert graph_capture.records == 0
    assert caplog.text.count("torch's operations") == 1


def test_hidden_states_kept_from_replays_are_their_own(tmp_path: Path) -> None:
    """A drafter that reads hidden states sees those of eager steps: no replay writes into what an earlier one gave."""
    from config.speculation import EagleOptions
    from drafter.eagle import EagleDrafter

    model = tiny_model(tmp_path)
    requests = make_requests(6, seed=75, max_new_tokens=20)
    records: list[list[tuple[int, int]]] = []
    for graph_capture in (None, FakeGraphCapture()):
        drafter = EagleDrafter(model, EagleOptions(), 8, 512, 8)
        seen: list[EngineStepRecord] = []
        core = NativeEngine(
            model,
            options_of(),
            drafters={"eagle": drafter},
            policy=FixedPolicy(Strategy.parse("eagle:3")),
            graph_capture=graph_capture,
            steps=seen,
        )
        core.submit(requests)
        rollouts(drain(core))
        records.append([(record.drafted, record.accepted) for record in seen])
    assert records[0] == records[1]
    assert sum(accepted for _, accepted in records[0]) > 0


def test_steps_that_capture_say_nothing_about_a_strategy(tmp_path: Path) -> None:
    """What comes up late is captured then, which takes many times a step: no cost of the strategy."""

    class Listening(FixedPolicy):
        recorded = skipped = 0

        def record(self, outcome: StepOutcome) -> None:
            usual = outcome.kind is StepKind.USUAL
            self.recorded, self.skipped = self.recorded + usual, self.skipped + (not usual)

    requests = make_requests(6, seed=76, max_new_tokens=20, top_p=0.9)  # truncated: not captured at the start
    seen = []
    for graph_capture in (None, FakeGraphCapture()):
        policy = Listening(Strategy.parse("test:3"))
        core = NativeEngine(
            tiny_model(tmp_path),
            options_of(),
            drafters={"test": Oracle({}, spoil=False)},
            policy=policy,
            graph_capture=graph_capture,
        )
        core._speculator.draft = lambda *_: None  # type: ignore[method-assign]
        before = 0 if graph_capture is None else graph_capture.records
        run(core, requests)
        seen.append((policy.recorded, policy.skipped, 0 if graph_capture is None else graph_capture.records - before))
    (eager, skipped, _), (timed, more, captures) = seen
    assert captures > 0
    prompts = 1  # the step of the prompts captures, too, and is no usual one anyway
    assert (timed, more) == (eager - captures + prompts, skipped + captures - prompts)
