"""Early text: whatever it is, tokens and log-probs are those of a run without it; what is right saves steps."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data.stop_strings import compile_marker
from actors.engine.batch.early import AGAIN, MISSES, EarlyTexts
from actors.engine.batch.plan import StepPlan
from actors.engine.batch.step.reference import NumpySteps
from actors.engine.batch.step.types import StepDrafts
from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native import engine as engine_module
from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.draws import Draws
from config.formats import low_bit_format
from config.strategy import Strategy
from contracts.rollout import EarlyUse, EngineWindow, Finished, Marker, Request, Rollout, SamplingParams, StopRule
from models.checkpoint import init_model, load_model, save_model
from models.transformer import Transformer
from policies.calibration.costs import CostModel
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.policy import FixedPolicy, StrategyPolicy
from policies.speculation.toggle import RooflinePolicy
from policies.steps import Load, StepOutcome
from tests.engine.support import (
    FAMILIES,
    VOCAB,
    as_prefix,
    assert_same,
    drain,
    make_requests,
    options_of,
    rollouts,
    run,
    tiny_model,
    write_config,
)
from tests.engine.test_graphs import FakeGraphCapture, assert_same_tokens
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees


class Recorded:
    """An engine, with what its steps did."""

    def __init__(self, model: Transformer, strategy: str = "", drafter: object = None, **options: object) -> None:
        self.records: list[EngineStepRecord] = []
        policy = FixedPolicy(Strategy.parse(strategy)) if strategy else None
        drafters = {"test": drafter} if strategy else {}
        self.core = NativeEngine(model, options_of(**options), drafters=drafters, policy=policy, steps=self.records)

    @property
    def checked(self) -> int:
        return sum(record.checked for record in self.records)


def marker(texts: list[bytes]) -> Marker:
    return compile_marker(texts, [bytes([ord("a") + i]) for i in range(VOCAB)])


def with_early(requests: Sequence[Request], texts: dict[int, np.ndarray]) -> list[Request]:
    return [replace(request, early=texts.get(request.request_id)) for request in requests]


def answers(found: dict[int, Rollout]) -> dict[int, np.ndarray]:
    return {request_id: rollout.tokens for request_id, rollout in found.items()}


def spoilt(found: dict[int, Rollout], seed: int) -> dict[int, np.ndarray]:
    """Right up to somewhere, then anything: wrong, too long, ended early, empty, nothing at all."""
    rng, texts = np.random.default_rng(seed), {}
    for request_id, rollout in found.items():
        text = rollout.tokens.copy()
        match int(rng.integers(7)):
            case 0:
                text[rng.integers(len(text))] = rng.integers(VOCAB)
            case 1:
                text = text[: rng.integers(len(text) + 1)]
            case 2:
                text = np.concatenate([text, rng.integers(0, VOCAB, 300).astype(np.int32)])
            case 3:
                text = rng.integers(0, VOCAB, rng.integers(1, 90)).astype(np.int32)
            case 4:
                text[rng.integers(len(text)) :] = rng.choice([-1, VOCAB, 2**30])
            case 5:
                continue
        texts[request_id] = text
    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.9}], ids=str)
def test_right_text_is_taken_in_a_few_steps(tmp_path: Path, family: str, sampling: dict) -> None:
    model = tiny_model(tmp_path, family)
    requests = make_requests(20, prompts=6, seed=11, stop_token_ids=(2, 9), **sampling)
    plain = Recorded(model, prefill_chunk_tokens=32)
    expected = run(plain.core, requests)
    early = Recorded(model, prefill_chunk_tokens=32)
    assert_same(run(early.core, with_early(requests, answers(expected))), expected)
    assert early.checked > 0
    assert len(early.records) < len(plain.records) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low_bit", ["none", "w8a8", "w4a8"])
@pytest.mark.parametrize("speculation", ["", "chain", "tree"])
def test_no_text_changes_a_token_in_any_format(
    tmp_path: Path, dtype: torch.dtype, low_bit: str, speculation: str
) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "initializer_range": 0.15}
    save_model(init_model(write_config(tmp_path / "config", "qwen3", **wide), 1), tmp_path / "model")
    model = load_model(
        tmp_path / "model", dtype=dtype, low_bit=None if low_bit == "none" else low_bit_format(low_bit, "cpu")
    )
    requests = make_requests(24, prompts=8, seed=5, stop_token_ids=(2, 9), top_p=0.95)
    expected = run(Recorded(model).core, requests)
    drafter = {"": None, "chain": Oracle(expected, spoil=True), "tree": RandomTrees(expected, 0.6)}[speculation]
    strategy = {"": "", "chain": "test:4", "tree": "test:3x2/7"}[speculation]
    for seed in range(3):
        texts = spoilt(expected, seed)
        engine = Recorded(model, strategy, drafter, max_running=6, prefill_chunk_tokens=32)
        assert_same(run(engine.core, with_early(requests, texts)), expected)
        assert engine.checked > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_model(tmp_path_factory.mktemp("early"))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_text_under_any_rule_beside_any_prefix_and_little_memory(model: Transformer, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1000))
    rules = [
        None,
        StopRule(strings=marker([b"d", b"fh"])),
        StopRule(answer=marker([b"e"]), grace_tokens=2, give_up_at_tokens=9, keep=0.5),
    ]
    requests = [
        replace(request, stop=data.draw(st.sampled_from(rules)))
        for request in make_requests(9, prompts=4, seed=seed, stop_token_ids=(2,), temperature=2.0)
    ]
    expected = run(Recorded(model).core, requests)
    texts = spoilt(expected, data.draw(st.integers(0, 1000)))
    early = [
        replace(
            request,
            prefix=as_prefix(expected[request.request_id], data.draw(st.integers(0, 5)))
            if data.draw(st.booleans())
            else None,
        )
        for request in with_early(requests, texts)
    ]
    engine = Recorded(
        model, kv_tokens=data.draw(st.sampled_from([128, 4096])), max_running=data.draw(st.integers(1, 9))
    )
    assert_same(run(engine.core, early), expected)


def test_native_and_numpy_check_alike(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(12, prompts=4, seed=3, stop_token_ids=(2, 9))
    expected = run(Recorded(model).core, requests)
    texts = spoilt(expected, 1)
    native = Recorded(model)
    assert_same(run(native.core, with_early(requests, texts)), expected)
    monkeypatch.setattr(engine_module, "step_arrays", NumpySteps)
    numpy = Recorded(model)
    assert_same(run(numpy.core, with_early(requests, texts)), expected)
    assert [(r.checked, r.emitted) for r in native.records] == [(r.checked, r.emitted) for r in numpy.records]


def test_hostile_text_costs_a_request_a_few_checks(model: Transformer) -> None:
    requests = make_requests(4, seed=1, max_new_tokens=30, temperature=3.0)
    expected = run(Recorded(model).core, requests)
    wrong = {}
    for request_id, tokens in answers(expected).items():
        wrong[request_id] = (tokens + 1) % VOCAB
        wrong[request_id][0] = tokens[0]  # drawn with the prompt: else the text is dropped before any check
    engine = Recorded(model)
    assert_same(run(engine.core, with_early(requests, wrong)), expected)
    assert sum(record.checked > 0 for record in engine.records) == 1 + MISSES
    assert sum(record.checked for record in engine.records) <= sum(map(len, wrong.values())) + 4 * MISSES * AGAIN


@pytest.mark.parametrize("change", ["replaced", "added", "left out"])
def test_text_is_taken_again_behind_a_difference(model: Transformer, change: str) -> None:
    requests = make_requests(4, seed=3, max_new_tokens=60, stop_token_ids=())
    plain, texts = Recorded(model), {}
    expected = run(plain.core, requests)
    for request_id, tokens in answers(expected).items():
        other = np.array([(tokens[20] + 1) % VOCAB, (tokens[20] + 2) % VOCAB], np.int32)
        middle, rest = {"replaced": (other[:1], 21), "added": (other, 20), "left out": (other[:0], 22)}[change]
        texts[request_id] = np.concatenate([tokens[:20], middle, tokens[rest:]])
    early = Recorded(model)
    assert_same(run(early.core, with_early(requests, texts)), expected)
    assert len(early.records) <= 5 + MISSES + 2 < len(plain.records) / 4, "or the 40 tokens behind it were decoded"


def test_new_weights_check_text_anew_and_aborts_keep_what_stood(model: Transformer) -> None:
    requests = make_requests(3, seed=2, max_new_tokens=60)
    expected = run(Recorded(model).core, requests)
    core = Recorded(model, prefill_chunk_tokens=16).core
    core.submit(with_early(requests, answers(expected)))
    events = [event for _ in range(5) for event in core.step()]
    core.abort([request.request_id for request in requests])
    for request_id, rollout in rollouts([*events, *drain(core)]).items():
        assert rollout.tokens.tolist() == expected[request_id].tokens[: len(rollout.tokens)].tolist()


@pytest.mark.parametrize("mode", ["test:3", "test:3x2/7", "adaptive"])
def test_requests_without_text_are_drafted_for_beside_checks(model: Transformer, mode: str) -> None:
    requests = make_requests(8, seed=9, max_new_tokens=60, stop_token_ids=())
    expected = run(Recorded(model).core, requests)
    half = {i: tokens for i, tokens in answers(expected).items() if i % 2}
    records: list[EngineStepRecord] = []
    if mode == "adaptive":
        policy: StrategyPolicy = AdaptivePolicy([Strategy.parse("test:3")], max_running=8, exploration=1.0)
    else:
        policy = FixedPolicy(Strategy.parse(mode))
    drafters = {"test": Oracle(expected)}
    core = NativeEngine(model, options_of(max_running=8), drafters=drafters, policy=policy, steps=records)
    core.submit(with_early(requests, half))
    events = drain(core)
    assert_same(rollouts(events), expected)
    both = [record for record in records if record.checked and record.drafted]
    if mode != "adaptive":
        assert both
        assert {str(record.strategy) for record in both} == {"test:3"}
        assert all(record.accepted == record.drafted for record in both), "the oracle is right, and so is the text"
    uses = [event for event in events if isinstance(event, EngineWindow)]
    assert sum(use.early.stood for use in uses if use.early is not None) == sum(record.checked for record in records)
    counts = [count for use in uses for count in use.strategies if count.drafted]
    told = [prompt for use in uses for prompt in use.prompts]
    for name in ("drafted", "accepted"):
        of_steps = sum(getattr(record, name) for record in records)
        assert sum(getattr(count, name) for count in counts) == of_steps
        assert sum(getattr(prompt, name) for prompt in told) == of_steps, "text is no drafter's"
    assert sum(record.emitted for record in records) == sum(len(rollout.tokens) for rollout in expected.values())


def test_graphs_hold_no_check_and_lose_none(model: Transformer) -> None:
    """Steps that check run eagerly beside captured ones, which go on afterwards."""
    requests = make_requests(12, prompts=4, seed=6, max_new_tokens=30)
    expected = run(Recorded(model).core, requests)
    policy = FixedPolicy(Strategy.parse("test:3"))
    drafters = {"test": Oracle(expected)}
    core = NativeEngine(model, options_of(), drafters=drafters, policy=policy, graph_capture=FakeGraphCapture())
    assert_same_tokens(run(core, with_early(requests, spoilt(expected, 2))), expected)


def test_a_window_says_what_was_checked_and_what_stood(model: Transformer) -> None:
    requests = make_requests(6, seed=4, max_new_tokens=30)
    expected = run(Recorded(model).core, requests)
    core = Recorded(model).core
    core.submit(with_early(requests, answers(expected)))
    uses = [event.early for event in drain(core) if isinstance(event, EngineWindow) and event.early is not None]
    drawn = sum(len(rollout.tokens) for rollout in expected.values())
    assert 0 < sum(use.stood for use in uses) == sum(use.checked for use in uses) <= drawn


@pytest.mark.parametrize("hostile", [False, True])
def test_what_checks_won_is_the_steps_that_they_spared(model: Transformer, hostile: bool) -> None:
    """By a clock on which every engine step takes half a second."""
    requests = make_requests(4, seed=4, max_new_tokens=40, stop_token_ids=())
    ticks = count()
    core = NativeEngine(model, options_of(), timer=lambda: next(ticks) / 2)
    before = core.generate(requests)  # plain decoding, which checks are compared with
    texts = answers(before)
    if hostile:  # right in the token that is drawn with the prompt, wrong behind it
        texts = {i: np.concatenate([text[:1], (text[1:] + 1) % VOCAB]) for i, text in texts.items()}
    late = [replace(request, request_id=request.request_id + 100) for request in requests]
    events = list(core.stream(with_early(late, {i + 100: text for i, text in texts.items()})))
    again = {event.rollout.request_id: event.rollout for event in events if isinstance(event, Finished)}
    windows = [event for event in events if isinstance(event, EngineWindow)]
    assert [again[i + 100].tokens.tolist() for i in texts] == [before[i].tokens.tolist() for i in texts]
    uses = [window.early for window in windows if window.early is not None]
    won_s = sum(use.saved_s for use in uses)
    stood = sum(use.stood for use in uses) / len(requests)
    assert won_s == pytest.approx(stood / 2)
    assert stood < 5 if hostile else stood > 35, "of 40: now and then a wrong text is right by chance"


class Paced:
    """An engine by whose clock a step takes BASE_S, and ROW_S for each row of prompts and checks."""

    BASE_S, ROW_S, CAPTURE_S = 0.5, 0.01, 100.0

    def __init__(self, model: Transformer, policy: StrategyPolicy | None = None, **options: object) -> None:
        self.now_s, self.plans, self.capture_at = 0.0, list[StepPlan](), -1
        self.core = NativeEngine(model, options_of(**options), policy=policy, timer=lambda: self.now_s)
        self._run = self.core._run
        self.core._run = self._timed  # type: ignore[method-assign]

    def _timed(self, plan: StepPlan, load: Load, drafts: StepDrafts | None) -> Draws:
        self.now_s += self.BASE_S + self.ROW_S * (plan.prefill_tokens + (0 if drafts is None else drafts.drafted))
        draws = self._run(plan, load, drafts)
        if drafts is not None:
            self.plans.append(plan)
            if len(self.plans) == self.capture_at:
                self.now_s += self.CAPTURE_S
                return replace(draws, captured=True)
        return draws

    def used(self, requests: Sequence[Request], late: Sequence[Request] = ()) -> EarlyUse:
        """What came of their early text. `late`: come after the first step that checks."""
        self.core.submit(requests)
        total, late = EarlyUse(), list(late)
        while self.core.has_work:
            for event in self.core.step():
                if isinstance(event, EngineWindow) and event.early is not None:
                    total = total.plus(event.early)
            if self.plans and late:
                self.core.submit(late)
                late = []
        return total


class ByRows(FixedPolicy):
    """Knows what `Paced` steps take whose BASE_S is that of REQUESTS requests, and less for fewer."""

    REQUESTS = 8

    def plain_s(self, load: Load) -> float:
        return Paced.BASE_S * load.running / self.REQUESTS

    def expected_s(self, outcome: StepOutcome) -> float:
        return self.plain_s(outcome.load) + Paced.ROW_S * (outcome.drafted + outcome.prompt_tokens)


def test_what_text_and_drafts_beside_it_saved_is_what_the_steps_spared(model: Transformer) -> None:
    """Beside plain decoding of the requests with drafts, and decoding with drafts of those with text."""
    requests = make_requests(8, seed=9, max_new_tokens=121, stop_token_ids=())  # one with the prompt, and 30 fours
    expected = run(Recorded(model).core, requests)
    texts = {i + 100: tokens for i, tokens in answers(expected).items() if i % 2}
    late = [replace(request, request_id=request.request_id + 100) for request in requests]
    policy, records = ByRows(Strategy.parse("test:3")), list[EngineStepRecord]()
    drafters = {"test": Oracle(expected | {i + 100: rollout for i, rollout in expected.items()})}
    now_s = 0.0
    core = NativeEngine(
        model, options_of(max_running=8), drafters=drafters, policy=policy, timer=lambda: now_s, steps=records
    )
    forward = core._run

    def timed(plan: StepPlan, load: Load, drafts: StepDrafts | None) -> Draws:
        nonlocal now_s
        rows = plan.prefill_tokens + (0 if drafts is None else drafts.drafted)
        now_s += (policy.plain_s(load) if load.running else 0.0) + Paced.ROW_S * rows
        return forward(plan, load, drafts)

    core._run = timed  # type: ignore[method-assign]
    core.generate(requests)  # decoding with drafts, which checks are compared with
    usual = [record for record in records if record.running == 8]
    assert {record.emitted for record in usual} == {32}
    token_s = usual[0].elapsed_s / 4
    records.clear()
    core.submit(with_early(late, texts))
    windows = [event for event in drain(core) if isinstance(event, EngineWindow)]
    whole_s, both = 0.0, 0
    for record in (record for record in records if record.running):
        assert not record.prefill_tokens
        plain_s, running = policy.plain_s(Load(record.running, 0, 0)), record.running
        drafted_for = 4 + record.accepted if record.checked else record.emitted
        whole_s += plain_s * drafted_for / running - record.elapsed_s
        whole_s += token_s * (record.emitted - drafted_for) / running
        both += record.checked > 0 and record.drafted == record.accepted == 12
    assert both > 0
    text_s = sum(window.early.saved_s for window in windows if window.early is not None)
    drafts_s = sum(count.saved_s for window in windows for count in window.strategies)
    assert text_s > 0
    assert text_s + drafts_s == pytest.approx(whole_s)


def renamed(requests: Sequence[Request], texts: dict[int, np.ndarray]) -> list[Request]:
    """The same under other ids, with these early texts."""
    return [replace(request, request_id=request.request_id + 100) for request in with_early(requests, texts)]


@pytest.mark.parametrize("chunk", [16, 512])
def test_prompts_beside_checks_take_their_own_seconds(model: Transformer, chunk: int) -> None:
    requests = make_requests(4, seed=4, max_new_tokens=60, stop_token_ids=())
    paced = Paced(model, prefill_chunk_tokens=chunk, max_running=8)
    texts = {i: text[:50] for i, text in answers(paced.core.generate(requests)).items()}
    texts[1000] = np.concatenate([texts[1000][:1], (texts[1000][1:] + 1) % VOCAB])
    prompt = np.arange(150, dtype=np.int32) % VOCAB
    late = [replace(requests[i], request_id=50 + i, prompt_id=50 + i, prompt_tokens=prompt[i:]) for i in range(3)]
    use = paced.used(renamed(requests, texts), late)
    assert any(plan.prefill_tokens for plan in paced.plans), "or nothing is tested here"
    assert use.seconds == pytest.approx(paced.BASE_S * len(paced.plans) + paced.ROW_S * use.checked)
    decoding = {len(plan.decoding) for plan in paced.plans}
    checks_s = paced.ROW_S * use.checked
    most, least = (use.stood * paced.BASE_S / count - checks_s for count in (min(decoding), max(decoding)))
    assert least - 1e-6 <= use.saved_s <= most + 1e-6


def test_the_capture_of_a_graph_is_nothing_that_checks_lost(model: Transformer) -> None:
    requests = make_requests(4, seed=4, max_new_tokens=60, stop_token_ids=())
    used, plain_s, checks_s = [], [], []
    for capture_at in (-1, 2):
        policy = AdaptivePolicy([Strategy.parse("test:3")], max_running=8, exploration=0.0)
        paced = Paced(model, policy)
        texts = answers(paced.core.generate(requests))
        texts = {i: np.concatenate([text[:20], (text[20:] + 1) % VOCAB]) for i, text in texts.items()}
        paced.capture_at = capture_at
        used.append(paced.used(renamed(requests, texts)))
        plain_s.append(policy.costs.step_s(4, 4, 400))
        checks_s.append(policy.costs.step_s(4, 100, 400))
    usual, captured = used
    assert captured.engine_steps == usual.engine_steps
    assert captured.checked == usual.checked
    assert 0 <= usual.seconds - captured.seconds <= Paced.BASE_S + 256 * Paced.ROW_S, "one step says nothing"
    assert abs(usual.saved_s - captured.saved_s) < 5.0
    assert plain_s[0] == pytest.approx(plain_s[1], rel=0.01)
    assert checks_s[0] == pytest.approx(checks_s[1], rel=0.5), "nor does it make rows dear"


def test_requests_whose_text_is_used_up_begin_no_rollout(model: Transformer) -> None:
    """Beside checks the load is that of the others, which grows as texts end. Early text comes with new weights, after
    which only they end a rollout, see RooflinePolicy."""
    requests = make_requests(8, seed=9, max_new_tokens=60, stop_token_ids=())
    expected = run(Recorded(model).core, requests)
    texts = {i: text[: 7 * (i - 1000) + 1] for i, text in answers(expected).items() if i > 1000}
    policy = RooflinePolicy(
        [Strategy.parse("test:3")], margin=-1.0, near_ceiling=0.9, patience=1, max_running=8, costs=CostModel()
    )
    loads, choose = list[int](), policy.choose

    def chosen(load: Load) -> Strategy:
        loads.append(load.running)
        return choose(load)

    policy.choose = chosen  # type: ignore[method-assign]
    core = NativeEngine(
        model, options_of(max_running=8), drafters={"test": Oracle(expected, spoil=True)}, policy=policy
    )
    ended, end = list[int](), policy._end_rollout
    policy._end_rollout = lambda: (ended.append(len(loads)), end())[1]  # type: ignore[method-assign, func-returns-value]
    assert_same(run(core, with_early(requests, texts)), expected)
    assert any(after > before for before, after in pairwise(loads)), "or nothing is tested here"
    assert any(after < before for before, after in pairwise(loads))
    assert ended == []


def test_rejection_sampling_ignores_early_text(model: Transformer) -> None:
    requests = make_requests(6, seed=4, max_new_tokens=30)
    core = NativeEngine(model, options_of(), verification="rejection")
    expected = run(core, requests)
    again = NativeEngine(model, options_of(), verification="rejection")
    assert_same(run(again, with_early(requests, answers(expected))), expected)


@pytest.mark.parametrize(("count", "served", "each"), [(4, 4, 16), (40, 16, 4)])
def test_rows_are_shared_by_the_requests_that_have_text(model: Transformer, count: int, served: int, each: int) -> None:
    request = Request(
        request_id=0,
        prompt_id=0,
        prompt_tokens=np.array([1], np.int32),
        noise_key=1,
        sampling=SamplingParams(100),
        early=np.ones(100, np.int32),
    )
    core = NativeEngine(model, options_of(max_running=count))
    core.submit([replace(request, request_id=i) for i in range(count)])
    plan = core._scheduler.schedule(0, 0.0)
    early = EarlyTexts(core._table, core._steps, VOCAB, rows=64)
    for slot in range(count):
        early.begin(slot, None)
    assert plan is not None
    drafts = early.draft(plan, core._scheduler.reserve_drafts)
    assert drafts is not None
    assert sorted(drafts.counts.tolist()) == [0] * (count - served) + [each] * served
