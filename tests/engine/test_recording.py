"""Recorded states: every row of every sequence is bitwise that of a fresh forward over the sequence, and nothing else
changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.native.hidden import recording as module
from actors.engine.native.hidden.budget import MARGIN, Share, request_draw
from config.strategy import Strategy
from contracts.engine import RecordStates
from contracts.records import SequenceRecord
from contracts.rollout import Event, Recorded, Request, Rollout
from drafter.protocol import BatchView, Drafts
from models import weights
from models.checkpoint import hf_state_dict
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import (
    VOCAB,
    DrafterBase,
    assert_same,
    drain,
    engine,
    make_requests,
    options_of,
    rollouts,
    run,
    tiny_model,
)
from tests.engine.test_trees import RandomTrees

BIG = 1 << 30


class HalfRight(DrafterBase):
    """Chains that follow the answer for a random part of their length."""

    def __init__(self, answers: dict[int, Rollout]) -> None:
        self.answers, self.rng = answers, np.random.default_rng(1)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        tokens = self.rng.integers(0, VOCAB, (len(batch.slots), strategy.depth))
        for r, request_id in enumerate(batch.request_ids):
            done = int(batch.lengths[r] - batch.prompt_lengths[r])
            right = self.answers[int(request_id)].tokens[done : done + int(self.rng.integers(0, strategy.depth + 1))]
            tokens[r, : len(right)] = right
        return Drafts(tokens, self.rng.integers(0, strategy.depth + 1, len(batch.slots)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_model(tmp_path_factory.mktemp("recording"))


@pytest.fixture(autouse=True, params=[1, 5, 64])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_STEPS", request.param)


@torch.no_grad()
def fresh_rows(model: Transformer, tokens: np.ndarray, layers: tuple[int, ...] = ()) -> torch.Tensor:
    """[L, W]: one forward over the sequence alone, layer outputs taken from the blocks themselves."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, out: outputs.__setitem__(layer, out.clone())

    handles = [block.register_forward_hook(keep(layer)) for layer, block in enumerate(model.blocks)]
    context = PackedContext(torch.tensor([0, len(tokens)], dtype=torch.int32))
    hidden = model(torch.from_numpy(tokens.astype(np.int64)), context)
    for handle in handles:
        handle.remove()
    return torch.cat((*(outputs[layer] for layer in layers), hidden), dim=1)


def recorded(events: Sequence[Event]) -> dict[int, SequenceRecord]:
    records = [record for event in events if isinstance(event, Recorded) for record in event.records]
    assert len({record.request_id for record in records}) == len(records), "a request was recorded twice"
    return {record.request_id: record for record in records}


def check(model: Transformer, record: SequenceRecord, version: int = 0, layers: tuple[int, ...] = ()) -> None:
    want = fresh_rows(model, record.tokens, layers)[:-1]
    assert record.first == 0
    assert (record.dtype, record.width, record.target_version) == ("float32", want.shape[1], version)
    assert record.rows == len(record.tokens) - 1
    assert record.states.shape[1] == 4 * want.shape[1]
    assert record.states.tobytes() == want.numpy().tobytes(), record.request_id


def check_all(
    model: Transformer, events: Sequence[Event], requests: Sequence[Request], layers: tuple[int, ...] = ()
) -> None:
    """Every finished request was recorded, whole and right."""
    finished, records = rollouts(events), recorded(events)
    assert records.keys() == finished.keys()
    prompts = {request.request_id: request.prompt_tokens for request in requests}
    for request_id, record in records.items():
        assert record.prompt_length == len(prompts[request_id])
        sequence = np.concatenate((prompts[request_id], finished[request_id].tokens))
        assert record.tokens.tolist() == sequence.tolist()
        check(model, record, layers=layers)


def recording_engine(
    model: Transformer, recording_bytes: int = BIG, drafter: object = None, **options: object
) -> NativeEngine:
    keywords = {name: options.pop(name) for name in ("recorded_layers", "strategy") if name in options}
    strategy = keywords.pop("strategy", None)
    drafters = {} if drafter is None else {"test": drafter}
    policy = None if strategy is None else FixedPolicy(Strategy.parse(str(strategy)))
    return NativeEngine(
        model,
        options_of(**options),
        recording_bytes=recording_bytes,
        drafters=drafters,
        policy=policy,
        **keywords,
    )


@pytest.mark.parametrize("layers", [(), (0,), (0, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_running": 3},  # joins and leaves
        {"prefill_chunk_tokens": 16},  # prompts in pieces
        {"kv_tokens": 160, "max_running": 6},  # preempts
    ],
)
def test_rows_are_those_of_a_fresh_forward(
    model: Transformer, options: dict[str, int], layers: tuple[int, ...]
) -> None:
    requests = make_requests(24, prompts=7, seed=3)
    core = recording_engine(model, recorded_layers=layers, **options)
    core.submit(requests)
    events = drain(core)
    check_all(model, events, requests, layers)
    assert_same(rollouts(events), run(engine(model, **options), requests))


def test_preemption_happens_in_these_tests(model: Transformer) -> None:
    core = recording_engine(model, kv_tokens=160, max_running=6)
    core.submit(make_requests(24, prompts=7, seed=3))
    assert sum(getattr(event, "preempted", 0) for event in drain(core)) > 0


@pytest.mark.parametrize("kind", ["test:3", "test:3x2/6"])
@pytest.mark.parametrize("options", [{}, {"kv_tokens": 200, "max_running": 6, "prefill_chunk_tokens": 16}])
def test_rows_of_rejected_drafts_are_left_out(model: Transformer, kind: str, options: dict[str, int]) -> None:
    requests = make_requests(24, prompts=7, seed=5)
    answers = run(engine(model), requests)
    strategy = Strategy.parse(kind)
    drafter = RandomTrees(answers, 0.6) if strategy.is_tree else HalfRight(answers)
    core = recording_engine(model, drafter=drafter, strategy=kind, recorded_layers=(1,), **options)
    core.submit(requests)
    events = drain(core)
    check_all(model, events, requests, (1,))
    assert_same(rollouts(events), answers)


def test_a_writer_may_speculate_behind_a_prompt_in_pieces(model: Transformer) -> None:
    requests = make_requests(6, prompts=1, seed=11, max_new_tokens=30)
    answers = run(engine(model), requests)
    core = recording_engine(
        model, drafter=HalfRight(answers), strategy="test:3", prefill_chunk_tokens=16, max_running=2
    )
    core.submit(requests)
    check_all(model, drain(core), requests)


def test_aborted_requests_are_not_recorded_and_those_that_waited_for_their_prompt_are(model: Transformer) -> None:
    requests = make_requests(6, prompts=1, seed=12, max_new_tokens=30)
    core = recording_engine(model, prefill_chunk_tokens=16)
    core.submit(requests)
    events = core.step()
    core.abort([requests[0].request_id])
    events += drain(core)
    finished = rollouts(events)
    assert finished.pop(requests[0].request_id).finish_reason == "abort"
    records = recorded(events)
    assert records.keys() == finished.keys()
    for record in records.values():
        check(model, record)


def test_a_drafter_at_rest_costs_no_recording(model: Transformer) -> None:
    """Requests that begin meanwhile are neither recorded nor counted as skipped; those before and behind are."""
    core = recording_engine(model)
    for seed, on in enumerate((True, False, True)):
        requests = make_requests(6, prompts=3, seed=seed)
        core.apply(RecordStates(on), None)
        core.submit(requests)
        events = drain(core)
        if on:
            check_all(model, events, requests)
        else:
            assert not [event for event in events if isinstance(event, Recorded)]


def other_weights(tmp_path: Path) -> Transformer:
    return tiny_model(tmp_path, seed=1)


@pytest.mark.parametrize("steps", [1, 4, 12, 25])
def test_new_weights_cut_what_runs(model: Transformer, tmp_path: Path, steps: int) -> None:
    new = other_weights(tmp_path)
    changing = tiny_model(tmp_path / "changing")
    requests = make_requests(20, prompts=6, seed=4)
    core = recording_engine(changing, prefill_chunk_tokens=32, kv_tokens=240)
    core.submit(requests)
    events: list[Event] = []
    for _ in range(steps):
        events += core.step()
    core.update_weights(*weights.pack(dict(hf_state_dict(new)), 1))
    events += drain(core)
    finished = rollouts(events)
    records = [record for event in events if isinstance(event, Recorded) for record in event.records]
    prompts = {request.request_id: request.prompt_tokens for request in requests}
    for record in records:
        check({0: model, 1: new}[record.target_version], record, record.target_version)
        sequence = np.concatenate((prompts[record.request_id], finished[record.request_id].tokens))
        assert record.tokens.tolist() == sequence[: len(record.tokens)].tolist()
        assert record.target_version == 0 or len(record.tokens) == len(sequence)
    versions = {record.target_version for record in records}
    assert 1 in versions
    assert 0 in versions or steps == 1
    keys = [(record.request_id, record.target_version) for record in records]
    assert len(set(keys)) == len(keys)


def test_old_and_new_part_are_never_one_record(model: Transformer, tmp_path: Path) -> None:
    core = recording_engine(tiny_model(tmp_path / "changing"))
    core.submit(make_requests(4, seed=4, max_new_tokens=30))
    for _ in range(10):
        core.step()
    core.update_weights(*weights.pack(dict(hf_state_dict(other_weights(tmp_path))), 1))
    events = drain(core)
    assert {record.target_version for record in recorded(events).values()} == {0}
    assert all(record.rows < record.prompt_length + 29 for record in recorded(events).values())


def test_budget_holds_and_every_length_has_its_chance(model: Transformer, tmp_path: Path) -> None:
    requests = make_requests(64, prompts=16, seed=7)
    everything = recording_engine(model, max_running=16)
    everything.submit(requests)
    whole = recorded(drain(everything))
    budget = sum(record.bytes for record in whole.values()) // 3
    core = recording_engine(tiny_model(tmp_path / "changing"), budget, max_running=16)
    payload = hf_state_dict(model)
    seen: list[dict[int, SequenceRecord]] = []
    for version in range(1, 4):
        core.submit(requests)
        events = drain(core)
        records = recorded(events)
        assert sum(event.bytes for event in events if isinstance(event, Recorded)) <= budget
        for record in records.values():
            assert record.states.tobytes() == whole[record.request_id].states.tobytes()
        seen.append(records)
        core.update_weights(*weights.pack(dict(payload), version))
    # Now the engine knows what a step takes: most of the budget is used, by a choice that length has no part in.
    assert seen[1].keys() == seen[2].keys()
    assert sum(record.bytes for record in seen[1].values()) > budget // 2
    cut = max(request_draw(request.noise_key) for request in requests if request.request_id in seen[1])
    below = {request.request_id for request in requests if request_draw(request.noise_key) <= cut}
    assert seen[1].keys() == below


def test_nothing_is_sampled_by_order_of_arrival(model: Transformer) -> None:
    requests = make_requests(32, prompts=8, seed=9, max_new_tokens=40, stop_token_ids=tuple(range(6)))
    budget = 80_000
    first, second = recording_engine(model, budget), recording_engine(model, budget)
    first.submit(requests)
    second.submit(requests[::-1])
    one, other = recorded(drain(first)), recorded(drain(second))
    assert 0 < len(one) < len(requests)
    assert one.keys() == other.keys()


def test_draws_are_uniform() -> None:
    draws = np.sort([request_draw(key) for key in range(-5000, 5000)])
    assert np.abs(draws - (np.arange(10_000) + 0.5) / 10_000).max() < 1.63 / 100  # Kolmogorov-Smirnov, 1 %


def test_share_follows_the_demand_of_the_step_before() -> None:
    share = Share(1000)
    share.foresee(500)
    assert share.threshold == 1.0
    share.foresee(1500)
    assert share.threshold == 0.5
    share.spend(400)
    share.ended(1800)
    assert share.room == 600
    share.renew()
    assert share.threshold == pytest.approx(MARGIN / 1.8)
    assert share.room == 1000
    share.foresee(10**9)
    assert share.threshold == pytest.approx(MARGIN / 1.8)
    share.renew()  # a step without requests teaches nothing
    assert share.threshold == pytest.approx(MARGIN / 1.8)


def test_what_it_costs_is_told(model: Transformer) -> None:
    requests = make_requests(24, prompts=6, seed=2)
    core = recording_engine(model, 30_000)
    core.submit(requests)
    reports = [event for event in drain(core) if isinstance(event, Recorded)]
    assert all(0 < report.seconds < 5 for report in reports)
    assert sum(report.skipped + len(report.records) for report in reports) == len(requests)


def test_layers_that_differ_are_an_error(model: Transformer) -> None:
    class Eagle3(DrafterBase):
        hidden_layers = (0, 1)

        def update(self, version: int, tensors: object) -> None:
            pass

    with pytest.raises(ValueError, match=r"drafter\.layers"):
        recording_engine(model, drafter=Eagle3(), recorded_layers=(1,))
    core = recording_engine(model, drafter=Eagle3(), strategy="test:2")
    requests = make_requests(3, seed=1)
    core.submit(requests)
    check_all(model, drain(core), requests, (0, 1))


def test_an_evaluation_is_not_recorded_and_spends_none_of_the_budget(model: Transformer) -> None:
    """Neither its sequences nor the share that later ones get differ from those of an engine that had none."""
    requests = make_requests(24, prompts=6, seed=5, max_new_tokens=30)
    held_out = [replace(request, evaluation=True) for request in make_requests(24, prompts=6, seed=6, temperature=0.0)]
    for budget in (BIG, 40_000):
        events = []
        for rounds in ([requests], [held_out, requests]):
            core = NativeEngine(model, options_of(), recording_bytes=budget)
            events.append([event for some in rounds for event in ask(core, some)])
        undisturbed, after_evaluation = events
        assert recorded(after_evaluation).keys() == recorded(undisturbed).keys()
        counts = [sum(e.skipped for e in found if isinstance(e, Recorded)) for found in events]
        assert counts[0] == counts[1] == len(requests) - len(recorded(undisturbed))
        assert (len(recorded(undisturbed)) < len(requests)) == (budget < BIG)


def ask(core: NativeEngine, requests: Sequence[Request]) -> list[Event]:
    core.submit(requests)
    return drain(core)
