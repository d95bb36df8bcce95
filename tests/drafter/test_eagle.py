"""The batched, incremental EAGLE drafter against drafts computed from scratch, through everything an engine does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions
from config.strategy import PLAIN, Strategy
from drafter.eagle import EagleDrafter, EagleModel, EagleWeightsError, init_eagle, load_eagle, save_eagle
from drafter.eagle.drafter import MAX_FED_ROWS
from drafter.protocol import BatchView, Drafts
from models.checkpoint import hf_state_dict
from models.transformer import Transformer
from models.weights import pack
from policies.speculation.policy import FixedPolicy, Reason
from policies.steps import Load, StepKind, StepOutcome
from tests.drafter.eagle_oracle import Oracle
from tests.engine.support import FAMILIES, DrafterBase, assert_same, make_requests, options_of, run, tiny_model
from tests.native import needs_native
from tests.policies.loads import load

BLOCKS, BLOCK_TOKENS = 512, 8


class Checked(EagleDrafter):
    """Compares what it proposes with the oracle, request by request."""

    checked = 0
    skipped = 0

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        drafts = super().propose(batch, strategy)
        oracle = Oracle(self._target, self.model)
        for i, slot in enumerate(batch.slots):
            length = int(batch.lengths[i])
            sequence = batch.history[slot, :length].tolist()
            start = int(self._cache.start[slot])
            if not drafts.counts[i]:
                self.skipped += 1
                continue
            self.checked += 1
            settings = (float(batch.temperatures[i]), int(batch.noise_keys[i]), length - int(batch.prompt_lengths[i]))
            count, room = int(drafts.counts[i]), int(batch.room[i])
            with torch.no_grad():
                if drafts.parents is None:
                    expected = oracle.chain(sequence, start, min(strategy.depth, room), *settings)
                    assert drafts.tokens[i, :count].tolist() == expected
                else:
                    paths: list[tuple[int, ...]] = []
                    for token, parent in zip(drafts.tokens[i, :count], drafts.parents[i, :count], strict=True):
                        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
                    shape = (strategy.depth, strategy.top_k, min(strategy.tokens_to_verify, room))
                    assert set(paths) == oracle.tree(sequence, start, *shape, *settings)
        return drafts


class Recorder(EagleDrafter):
    """Keeps what it proposes."""

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        drafts = super().propose(batch, strategy)
        self.__dict__.setdefault("proposed", []).append(drafts)
        return drafts

    proposed: list[Drafts]


class Perfect(DrafterBase):
    """Knows the answers, so that steps accept several tokens between two proposals of the drafter under test."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        tokens = np.zeros((len(batch.slots), strategy.depth), np.int64)
        counts = np.zeros(len(batch.slots), np.int64)
        for i, request in enumerate(batch.request_ids):
            done = int(batch.lengths[i] - batch.prompt_lengths[i])
            rest = self.answers[int(request)][done : done + 1 + done % strategy.depth]
            tokens[i, : len(rest)], counts[i] = rest, len(rest)
        return Drafts(tokens, counts)


class Turns:
    """Strategies in turn, some steps each."""

    max_nodes = 16
    reason = Reason.FIXED

    def __init__(self, *strategies: str) -> None:
        self.strategies, self.step = [Strategy.parse(text) for text in strategies], 0

    def choose(self, load: Load) -> Strategy:
        self.step += 1
        return self.strategies[self.step // 3 % len(self.strategies)]

    def record(self, outcome: StepOutcome) -> None: ...
    def unavailable(self, drafter: str) -> None:
        raise AssertionError(f"{drafter} failed")

    def new_target(self) -> None: ...

    def plain_s(self, load: Load) -> float | None:
        return None

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return None


def drafter_of(
    model: Transformer,
    kind: type[EagleDrafter] = EagleDrafter,
    slots: int = 8,
    min_probability: float = 0.0,
    **keywords: object,
) -> Any:  # a `kind`
    """Drafts in full length, unless options say otherwise."""
    options = EagleOptions(path="random", min_probability=min_probability)
    return kind(model, options, slots, BLOCKS, BLOCK_TOKENS, **keywords)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", ["eagle:3", "eagle:3x2/5", "eagle:3x3/9"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_equal_those_from_scratch(tmp_path: Path, family: str, strategy: str, temperature: float) -> None:
    """Among plain steps, steps of another drafter that accept several tokens, joins and leaves, a tight cache."""
    model = tiny_model(tmp_path, family)
    requests = make_requests(8, prompts=4, seed=3, temperature=temperature, max_new_tokens=44)
    plain = run(NativeEngine(model, options_of()), requests)
    eagle = drafter_of(model, Checked)
    perfect = Perfect({request: rollout.tokens.tolist() for request, rollout in plain.items()})
    drafters = {"eagle": eagle, "perfect": perfect}
    policy = Turns(strategy, "perfect:4", strategy, "plain")
    core = NativeEngine(model, options_of(max_running=4), drafters=drafters, policy=policy, hidden_tokens=16)
    assert_same(run(core, requests), plain)
    assert eagle.checked > 40


def test_a_step_that_catches_up_is_not_a_measurement(tmp_path: Path) -> None:
    """Switched on for some steps among many plain ones: the first works through what it has missed."""

    class Noting(Turns):
        def __init__(self) -> None:
            super().__init__("plain", "plain", "plain", "eagle:2")
            self.kinds: list[str] = []

        def record(self, outcome: StepOutcome) -> None:
            if outcome.kind is StepKind.CAUGHT_UP:
                assert outcome.strategy.depth
                self.kinds.append("late")
            elif outcome.kind is StepKind.USUAL and outcome.strategy.depth:
                self.kinds.append("usual")

    model = tiny_model(tmp_path)
    policy = Noting()
    core = NativeEngine(
        model, options_of(max_running=4), drafters={"eagle": drafter_of(model)}, policy=policy, hidden_tokens=16
    )
    run(core, make_requests(4, prompts=4, seed=3, max_new_tokens=60))
    first_to_last = policy.kinds[3:]  # turns of three steps, without the first: its requests were in their prompts
    assert len(first_to_last) >= 6
    assert {tuple(first_to_last[i : i + 3]) for i in range(0, len(first_to_last) - 2, 3)} == {
        ("late", "usual", "usual")
    }


@pytest.mark.parametrize("strategy", ["eagle:90", "eagle:70x2/80"])
def test_drafts_deeper_than_its_cache_end_there(tmp_path: Path, strategy: str) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(2, seed=3, max_new_tokens=120)
    plain, records = run(NativeEngine(model, options_of()), requests), list[Any]()
    policy = FixedPolicy(Strategy.parse(strategy))
    core = NativeEngine(model, options_of(), drafters={"eagle": drafter_of(model)}, policy=policy, steps=records)
    assert_same(run(core, requests), plain)
    assert policy.choose(load(1)) == Strategy.parse(strategy), "the drafter failed"
    assert max(record.drafted for record in records) >= MAX_FED_ROWS


def test_starts_from_the_states_that_are_kept(tmp_path: Path) -> None:
    """Speculation switches on late: the context begins where the engine's memory does, never with a prefill."""
    model = tiny_model(tmp_path)
    eagle = drafter_of(model, Checked)
    core = NativeEngine(model, options_of(), drafters={"eagle": eagle}, policy=FixedPolicy(PLAIN), hidden_tokens=16)
    core.submit(make_requests(3, seed=1, max_new_tokens=60))
    for _ in range(40):
        core.step()
    assert eagle.checked == 0
    core.use(FixedPolicy(Strategy.parse("eagle:4")))
    core.step()
    assert eagle.checked == 3
    starts = eagle._cache.start[eagle._cache.start >= 0]
    assert (starts > 20).all()


def test_follows_the_target_and_forgets_its_old_states(tmp_path: Path) -> None:
    model, other = tiny_model(tmp_path / "a"), tiny_model(tmp_path / "b", seed=5)
    eagle = drafter_of(model, Checked)
    core = NativeEngine(model, options_of(), drafters={"eagle": eagle}, policy=FixedPolicy(Strategy.parse("eagle:3")))
    core.submit(make_requests(4, seed=2, max_new_tokens=50))
    for _ in range(10):
        core.step()
    core.update_weights(*pack(hf_state_dict(other), 1))
    before = eagle.checked
    # The running requests keep K/V of the old weights: only requests from now on equal a fresh forward.
    eagle.checked, eagle.propose = 0, lambda batch, strategy: EagleDrafter.propose(eagle, batch, strategy)
    while core.has_work:
        core.step()
    del eagle.propose
    run(core, make_requests(4, seed=8, max_new_tokens=30))
    assert before > 0
    assert eagle.checked > 20


def test_a_drafter_that_thinks_like_the_target_is_always_accepted(tmp_path: Path) -> None:
    """Coupling: with the target's own logits behind it, the same noise gives the same tokens."""
    model = tiny_model(tmp_path)

    class Twin(EagleDrafter):
        def _forward(self, tokens: np.ndarray, hidden: torch.Tensor, context: object) -> torch.Tensor:
            return self._answers(tokens, context)

        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            self._batch_view = batch
            self._drafted: list[list[int]] = [[] for _ in batch.slots]
            return super().propose(batch, strategy)

        def _answers(self, tokens: np.ndarray, context: object) -> torch.Tensor:
            """The target's true state behind each request's text and drafts, for every row of the request."""
            batch, states = self._batch_view, []
            rows = context.query_offsets.diff().tolist()  # type: ignore[attr-defined]
            ready = [i for i, slot in enumerate(batch.slots) if self._cache.start[slot] >= 0]
            end = 0
            for i, count in zip(ready, rows, strict=True):
                end += count
                sequence = batch.history[batch.slots[i], : batch.lengths[i]].tolist()
                fed = [int(t) for t in tokens[end - count : end]]
                if self._drafted[i] or fed[-1] != sequence[-1] or self._fed[i]:
                    self._drafted[i].append(fed[-1])
                self._fed[i] = True
                from models.packed import PackedContext

                whole = [*sequence, *self._drafted[i]]
                state = model(torch.tensor(whole), PackedContext.from_lengths([len(whole)]))[-1]
                states += [state] * count
            return torch.stack(states)

        @property
        def _fed(self) -> dict[int, bool]:
            return self.__dict__.setdefault("_fed_now", {})

    class Fresh(Twin):
        _fused = None  # it would not ask `_forward`

        def __setattr__(self, name: str, value: object) -> None:
            if name != "_fused":
                super().__setattr__(name, value)

        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            self.__dict__["_fed_now"] = dict.fromkeys(range(len(batch.slots)), False)
            return super().propose(batch, strategy)

    records: list[Any] = []
    core = NativeEngine(
        model,
        options_of(),
        drafters={"eagle": drafter_of(model, Fresh)},
        policy=FixedPolicy(Strategy.parse("eagle:3")),
        steps=records,
    )
    run(core, make_requests(6, seed=4, max_new_tokens=40, temperature=0.9))
    drafted, accepted = (sum(getattr(record, name) for record in records) for name in ("drafted", "accepted"))
    ended = 6 * 3  # drafts behind a request's last token
    assert drafted > 100
    assert accepted >= drafted - ended


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["eagle:1", "eagle:5", "eagle:3x2/6"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_passes_draft_bitwise_what_the_separate_operations_do(
    tmp_path: Path, family: str, strategy: str, dtype: torch.dtype
) -> None:
    """Drafts, and the features that they come from: the whole cache of the drafter is the same in every bit."""
    model = tiny_model(tmp_path, family).to(dtype)
    found = []
    for fused in (True, False):
        drafter = drafter_of(model, Recorder)
        assert drafter._fused is not None
        if not fused:
            drafter._fused = None
        policy = FixedPolicy(Strategy.parse(strategy))
        core = NativeEngine(model, options_of(), drafters={"eagle": drafter}, policy=policy)
        run(core, make_requests(9, prompts=4, seed=5, max_new_tokens=24))
        found.append((drafter.proposed, drafter._cache.keys.clone(), drafter._cache.values.clone()))
    (drafts, keys, values), (expected, expected_keys, expected_values) = found
    assert len(drafts) == len(expected) > 20
    for mine, theirs in zip(drafts, expected, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.counts, theirs.counts)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_ends_where_its_path_is_unlikely(tmp_path: Path, fused: bool, temperature: float) -> None:
    """Tokens stay those of plain decoding; a chain keeps the leading tokens whose path is likely, at least one."""
    model = tiny_model(tmp_path)
    requests = make_requests(6, prompts=3, seed=8, temperature=temperature, max_new_tokens=24)
    found = []
    for least in (0.0, 0.3):
        drafter = drafter_of(model, Recorder, min_probability=least)
        if not fused:
            drafter._fused = None
        policy = FixedPolicy(Strategy.parse("eagle:6"))
        found.append(run(NativeEngine(model, options_of(), drafters={"eagle": drafter}, policy=policy), requests))
        cut = drafter.proposed
    assert_same(*found)
    counts = np.concatenate([drafts.counts for drafts in cut])
    assert set(counts[counts > 0]) > {1}
    assert counts.max() <= 6
    sure = drafter._sure(np.log(np.array([[0.9, 0.5, 0.6], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9]], np.float32)))
    assert sure.tolist() == [2, 1, 3]


def test_weights_round_trip_and_refuse_another_target(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    eagle = init_eagle(model.config, 7, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_eagle(eagle, tmp_path / "drafter")
    settings = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}
    loaded = load_eagle(tmp_path / "drafter", model.config, **settings)
    for name, tensor in eagle.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    normed = EagleModel(model.config, qk_norm=True, **settings)
    save_eagle(normed, tmp_path / "normed")
    assert load_eagle(tmp_path / "normed", model.config, **settings).block.q_norm is not None
    wider = replace(model.config, intermediate_size=2 * model.config.intermediate_size)
    with pytest.raises(EagleWeightsError, match="intermediate_size"):
        load_eagle(tmp_path / "drafter", wider, **settings)
    with pytest.raises(EagleWeightsError, match=r"rollout\.speculation\.eagle\.path"):
        load_eagle(tmp_path / "nothing", model.config, **settings)


def test_swapped_weights_draft_differently_and_start_over(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    eagle = drafter_of(model, Checked)
    core = NativeEngine(model, options_of(), drafters={"eagle": eagle}, policy=FixedPolicy(Strategy.parse("eagle:3")))
    core.submit(make_requests(3, seed=6, max_new_tokens=60))
    for _ in range(8):
        core.step()
    before = eagle.checked
    other = init_eagle(model.config, 99, dtype=torch.float32, device="cpu", batch_invariant=True)
    eagle.update(3, other.state_dict())
    assert eagle.version == 3
    for _ in range(8):
        core.step()
    assert eagle.checked > before
