"""Limits, rejections, abort, weights, sleep, sharing of prompts, telemetry."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.native.engine import NativeEngine
from config.rollout import EngineOptions
from contracts.rollout import (
    EngineIdle,
    EngineWindow,
    Finished,
    FinishReason,
    Progress,
    Rejected,
    Request,
    SamplingParams,
)
from models import weights
from models.checkpoint import WeightsMismatchError, hf_state_dict
from models.checksum import checksum
from tests.engine.support import (
    VOCAB,
    as_prefix,
    assert_same,
    drain,
    engine,
    make_requests,
    rollouts,
    run,
    tiny_model,
)


def request(prompt: int, max_new_tokens: int, request_id: int = 1, **sampling: object) -> Request:
    tokens = np.arange(prompt, dtype=np.int32) % VOCAB
    return Request(
        request_id=request_id,
        prompt_id=request_id,
        prompt_tokens=tokens,
        noise_key=77 + request_id,
        sampling=SamplingParams(max_new_tokens, **sampling),
    )


def test_max_tokens_stop_tokens_and_the_models_limit(tmp_path: Path) -> None:
    core = engine(tiny_model(tmp_path), max_model_tokens=40)
    free = run(core, [request(10, 1), request(10, 12, 2), request(30, 100, 3), request(39, 5, 4)])
    assert [len(free[i].tokens) for i in (1, 2, 3, 4)] == [1, 12, 10, 1]
    assert {rollout.finish_reason for rollout in free.values()} == {FinishReason.LENGTH}
    stop = int(free[2].tokens[5])
    first = free[2].tokens.tolist().index(stop)
    stopped = run(core, [request(10, 12, 2, stop_token_ids=(60, stop))])[2]
    assert stopped.tokens.tolist() == free[2].tokens[: first + 1].tolist()
    assert stopped.finish_reason == FinishReason.STOP
    # A stop token that is also the last allowed one counts as a stop.
    both = run(core, [request(10, first + 1, 2, stop_token_ids=(stop,))])[2]
    assert both.finish_reason == FinishReason.STOP


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(256, 1), "max_model_tokens"),
        (request(20, 200), "rollout.engine.kv_tokens"),
        (replace(request(3, 5), prompt_tokens=np.array([1, VOCAB], np.int32)), "vocabulary"),
        (replace(request(3, 5), prompt_tokens=np.zeros(0, np.int32)), "empty"),
        (request(3, 0), "max_new_tokens"),
        (request(3, 5, temperature=-1.0), "sampling"),
        (request(3, 5, top_p=0.0), "sampling"),
    ],
)
def test_what_can_never_run_is_rejected_with_the_remedy(tmp_path: Path, bad: Request, words: str) -> None:
    core = engine(tiny_model(tmp_path), kv_tokens=128)
    good = request(5, 5, 2)
    core.submit([bad, good])
    events = drain(core)
    rejected = [event for event in events if isinstance(event, Rejected)]
    assert [event.request_id for event in rejected] == [1]
    assert words in rejected[0].reason
    assert set(rollouts(events)) == {2}


def test_generate_gives_every_rollout_tells_every_event_and_raises_what_cannot_run(tmp_path: Path) -> None:
    core, model = engine(tiny_model(tmp_path), kv_tokens=128), tiny_model(tmp_path)
    wanted, heard = [request(5, 5), request(9, 7, 2)], list[Any]()
    assert_same(core.generate(wanted), run(engine(model), wanted))
    heard += core.stream(wanted)
    assert_same(rollouts(heard), run(engine(model), wanted))
    assert isinstance(heard[-1], EngineIdle)
    with pytest.raises(ValueError, match=r"request 1: .*rollout\.engine\.kv_tokens"):
        core.generate([request(20, 200)])


def test_the_largest_request_that_fits_ends(tmp_path: Path) -> None:
    core = engine(tiny_model(tmp_path), kv_tokens=128)
    assert len(run(core, [request(20, 109), request(20, 109, 2)])[1].tokens) == 109


def test_a_running_request_id_is_not_taken_twice(tmp_path: Path) -> None:
    core = engine(tiny_model(tmp_path))
    core.submit([request(5, 5), request(5, 9)])
    events = drain(core)
    assert [event.request_id for event in events if isinstance(event, Rejected)] == [1]
    assert len(rollouts(events)[1].tokens) == 5


def test_one_prefill_per_prompt(tmp_path: Path) -> None:
    for prompt in (1, 2, 8, 9, 33):  # Below, at and above block borders (8 tokens).
        core = engine(tiny_model(tmp_path), max_running=16)
        same = [replace(request(prompt, 6), request_id=i, noise_key=i) for i in range(16)]
        core.submit(same)
        windows = [event for event in drain(core) if isinstance(event, EngineWindow)]
        prefilled = sum(window.prefill_tokens for window in windows)
        assert prefilled == (prompt if prompt > 1 else 0)  # A single prompt token is one row, like a decoded one.
        assert sum(window.decode_tokens for window in windows) == 16 * 6


def test_equal_prompt_ids_with_different_tokens_do_not_share(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    first, second = make_requests(2, seed=3, max_new_tokens=8)
    expected = run(engine(model), [first, second])
    assert_same(run(engine(model), [first, replace(second, prompt_id=first.prompt_id)]), expected)


def test_abort_of_waiting_prefilling_and_decoding_requests(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(12, prompts=3, seed=4, max_new_tokens=30)
    expected = run(engine(model), requests)
    rng = np.random.default_rng(0)
    for when in range(12):
        core = engine(model, max_running=4, prefill_chunk_tokens=16)
        core.submit(requests)
        events = [event for _ in range(when * 2) for event in core.step()]
        over = set(rollouts(events))
        gone = [int(i) for i in rng.choice([r.request_id for r in requests], 5, replace=False)]
        core.abort([*gone, 999_999])
        results = rollouts(events + drain(core))
        assert results.keys() == expected.keys()
        for request_id, rollout in results.items():
            if request_id in gone and request_id not in over:
                assert rollout.finish_reason == FinishReason.ABORT
            count = len(rollout.tokens)
            assert rollout.tokens.tolist() == expected[request_id].tokens[:count].tolist()
        assert core._scheduler._pool.free + _cached_blocks(core) == core._scheduler._pool.total


def _cached_blocks(core: object) -> int:
    entries = core._scheduler._prompts._entries.values()  # type: ignore[attr-defined]
    return sum(len(entry.blocks) for entry in entries)


def test_no_block_is_lost_over_random_traffic(tmp_path: Path) -> None:
    model, rng = tiny_model(tmp_path), np.random.default_rng(5)
    core = engine(model, kv_tokens=160, max_running=6)
    requests = make_requests(60, prompts=9, seed=6)
    waiting = list(requests)
    while waiting or core.has_work:
        if waiting and rng.random() < 0.3:
            core.submit([waiting.pop()])
        if rng.random() < 0.05:
            core.abort([int(rng.choice(requests).request_id)])
        core.step()
    core.sleep()
    assert core._scheduler._pool.free == core._scheduler._pool.total == 20
    assert len(core._scheduler._free_slots) == 6


def test_new_weights_are_used_and_old_prompts_are_not(tmp_path: Path) -> None:
    old, new = tiny_model(tmp_path / "a", seed=1), tiny_model(tmp_path / "b", seed=2)
    requests = make_requests(6, prompts=2, seed=7, max_new_tokens=12)
    want_old, want_new = run(engine(old), requests), run(engine(new), requests)
    manifest, buffer = weights.pack(hf_state_dict(new), version=3)
    core = engine(old)
    assert_same(run(core, requests), want_old)
    loaded = core.update_weights(manifest, buffer)
    assert (loaded.version, loaded.checksum) == (3, checksum(buffer))
    results = run(core, requests)
    assert_same(results, want_new)
    assert {rollout.weights_version for rollout in results.values()} == {3}


def test_running_requests_go_on_with_new_weights(tmp_path: Path) -> None:
    """Tokens before the update are the old model's; requests without a token yet are wholly the new model's."""
    old, new = tiny_model(tmp_path / "a", seed=1), tiny_model(tmp_path / "b", seed=2)
    requests = make_requests(8, prompts=2, seed=8, max_new_tokens=20)
    want_old, want_new = run(engine(old), requests), run(engine(new), requests)
    manifest, buffer = weights.pack(hf_state_dict(new), version=1)
    for steps in (1, 2, 6):
        core = engine(tiny_model(tmp_path / "a", seed=1), max_running=5, prefill_chunk_tokens=16)
        core.submit(requests)
        events = [event for _ in range(steps) for event in core.step()]
        had = {int(r): int(n) for r, n in _response_lengths(core).items()}
        core.update_weights(manifest, buffer)
        for request_id, rollout in rollouts(events + drain(core)).items():
            before = had.get(request_id, 0)
            assert rollout.weights_version == (0 if before else 1)
            assert rollout.tokens[:before].tolist() == want_old[request_id].tokens[:before].tolist()
            if not before:
                assert rollout.tokens.tolist() == want_new[request_id].tokens.tolist()


def _response_lengths(core: object) -> dict[int, int]:
    table, running = core._table, core._scheduler._running  # type: ignore[attr-defined]
    return {table.request_id[slot]: table.length[slot] - table.prompt_length[slot] for slot in running}


def test_corrupt_or_foreign_weights_change_nothing(tmp_path: Path) -> None:
    model, other = tiny_model(tmp_path), tiny_model(tmp_path, "qwen2")
    requests = make_requests(3, seed=9)
    expected = run(engine(model), requests)
    core = engine(model)
    manifest, buffer = weights.pack(hf_state_dict(tiny_model(tmp_path, seed=9)), version=1)
    buffer[100] ^= 1
    with pytest.raises(weights.WeightsCorruptError, match="version 1"):
        core.update_weights(manifest, buffer)
    with pytest.raises(WeightsMismatchError):
        core.update_weights(*weights.pack(hf_state_dict(other), version=2))
    results = run(core, requests)
    assert_same(results, expected)
    assert results[requests[0].request_id].weights_version == 0


def test_sleep_is_refused_while_there_is_work_and_wake_gives_the_same_tokens(tmp_path: Path) -> None:
    core = engine(tiny_model(tmp_path))
    requests = make_requests(5, prompts=2, seed=10)
    core.submit(requests)
    with pytest.raises(ValueError, match="abort them before sleep"):
        core.sleep()
    expected = rollouts(drain(core))
    core.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        run(core, requests[:1])
    core.abort([requests[0].request_id])
    drain(core)
    core.wake()
    assert_same(run(core, requests), expected)


def test_progress_and_windows_add_up(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    options = EngineOptions(max_running=3, progress_every_tokens=4)
    core = NativeEngine(tiny_model(tmp_path), options, clock=clock)
    requests = make_requests(7, seed=11, max_new_tokens=21)
    core.submit(requests)
    events = drain(core)
    results = rollouts(events)
    for r in requests:
        deltas = [e.delta for e in events if isinstance(e, Progress) and e.request_id == r.request_id]
        whole = results[r.request_id]
        assert [len(delta.tokens) for delta in deltas] == [4] * 5
        joined = np.concatenate([delta.tokens for delta in deltas])
        assert joined.tolist() == as_prefix(whole, 20).tokens.tolist()
    windows = [event for event in events if isinstance(event, EngineWindow)]
    assert sum(window.decode_tokens for window in windows) == 7 * 21
    assert len(windows) > 3
    assert all(a.end_s <= b.start_s for a, b in pairwise(windows))
    assert windows[-1].running == windows[-1].waiting == 0
    assert [type(event) for event in events[-2:]] == [EngineWindow, EngineIdle]
    assert sum(isinstance(event, EngineIdle) for event in events) == 1
    core.submit([])
    assert not core.has_work
    starts = {i: rollout.started_s for i, rollout in results.items()}
    assert all(0 < starts[i] < results[i].finished_s for i in starts)


def test_the_longest_expected_start_first(tmp_path: Path) -> None:
    core = engine(tiny_model(tmp_path), max_running=1)
    lengths = [3.0, 30.0, 9.0, 20.0]
    core.submit([replace(request(4, 3, i), expected_tokens=length) for i, length in enumerate(lengths)])
    order = [event.rollout.request_id for event in drain(core) if isinstance(event, Finished)]
    assert order == [1, 3, 2, 0]


def test_a_request_whose_logits_are_no_numbers_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    """A row of NaN comes from one request's own past; here from the embedding of a token that one prompt has."""
    model = tiny_model(tmp_path, "llama")
    odd = replace(request(12, 9, 2), prompt_tokens=np.full(12, VOCAB - 1, np.int32))
    wanted = [request(10, 12, 1), request(14, 12, 3)]
    free = run(engine(model), wanted)
    assert not any((rollout.tokens == VOCAB - 1).any() for rollout in free.values())
    with torch.no_grad():
        model.embed_tokens.weight[VOCAB - 1] = torch.nan
    core = engine(model)
    core.submit([wanted[0], odd, wanted[1]])
    events = drain(core)
    [refused] = [event for event in events if isinstance(event, Rejected)]
    assert refused.request_id == 2
    assert "logits are NaN at its token 1" in refused.reason
    assert not any(isinstance(event, Progress) and event.request_id == 2 for event in events)
    assert_same(rollouts(events), free)
    assert not core.has_work
