"""The ledger alone: random interleavings of workers that decode, repeat themselves, die and come back."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.rollout import FinishReason, Request, Rollout, Sampled, StopRule
from launch.dispatch.ledger import Ledger
from tests.actors.fake_engine import RULES, ended, logprob, make_request, part, response
from tests.policies import balance_oracle
from tests.policies.balance_oracle import Open


def give(ledger: Ledger, **slots: int) -> dict[str, list[Request]]:
    """What the ledger assigns when these workers have so many slots."""
    for worker, count in slots.items():
        ledger.offer(worker, count)
    return ledger.assign()


def tokens_of(request: Request, start: int, end: int) -> Sampled:
    return part(request.noise_key, response(request)[0], range(start, end))


def rollout_of(request: Request) -> Rollout:
    tokens, reason = response(request)
    end = ended(request, tokens)
    assert end is not None
    return rollout(request.request_id, tokens_of(request, 0, len(tokens)), reason, end.propensity)


def rollout(request_id: int, sampled: Sampled, reason: FinishReason, propensity: float = 1.0) -> Rollout:
    return Rollout(
        request_id=request_id,
        sampled=sampled,
        finish_reason=reason,
        weights_version=1,
        started_s=0.0,
        finished_s=0.0,
        propensity=propensity,
    )


class Worker:
    """A worker that may die at any moment and whose last words may come late and twice."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[Request, int]] = {}

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            self.running[request.request_id] = (request, 0 if request.prefix is None else len(request.prefix.tokens))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.2]),
)
def test_nothing_is_lost_or_counted_twice_and_grants_are_those_of_the_rule(
    n: int, workers: int, slots: int, retries: int, seed: int, p: float, joins: float, aborts: float
) -> None:
    rng = random.Random(seed)
    asked = {
        i: make_request(
            i, i // 3, max_new_tokens=rng.randrange(1, 20), seed=seed % 1000, stop=RULES[rng.randrange(len(RULES))]
        )
        for i in range(n)
    }
    ledger = Ledger(asked.values(), max_retries=retries)
    fleet = {f"w{i}": Worker() for i in range(workers)}
    open_ = {i: Open(i, r.prompt_id, r.expected_tokens, None) for i, r in asked.items()}
    offered: dict[str, int] = {}
    gone: set[str] = set()
    aborted: set[int] = set()
    done: list[Rollout] = []
    late: list[tuple[str, Rollout]] = []

    def finish(name: str, whole: Rollout) -> None:
        if ledger.finish(name, whole):
            done.append(whole)
            del open_[whole.request_id]

    def sampled(request_id: int, tokens: int, holder: str | None) -> None:
        request = asked[request_id]
        left = max(request.expected_tokens - tokens, 1.0)
        open_[request_id] = Open(request_id, request.prompt_id, left, holder)

    for turn in range(5000):
        if ledger.done:
            break
        for name in fleet:
            if name not in offered or rng.random() < 0.1:
                offered[name] = slots
                ledger.offer(name, slots)
                if rng.random() < 0.1:
                    del offered[name]
                    ledger.withdraw(name)
        wanted: dict[str, list[int]] = {}
        for name, _, ids in balance_oracle.grants(open_.values(), offered):
            wanted.setdefault(name, []).extend(ids)
        given_out = ledger.assign()
        assert {name: [r.request_id for r in requests] for name, requests in given_out.items()} == wanted
        for name, requests in given_out.items():
            fleet[name].submit(requests)
            assert len(fleet[name].running) <= slots
            for request in requests:
                sampled(request.request_id, fleet[name].running[request.request_id][1], name)
        if rng.random() < joins:
            fleet[f"j{turn}"] = Worker()
        if rng.random() < aborts:
            drawn = [rng.randrange(n + 3) for _ in range(rng.randrange(3))]  # some unknown, some ended already
            before = {i: open_[i].holder for i in drawn if i in open_ and i not in aborted}
            waiting, running = ledger.abort(drawn, now_s=0.0, weights_version=1)
            assert {i: name for name, held in running.items() for i in held} == {i: h for i, h in before.items() if h}
            assert sorted(made.request_id for made in waiting) == sorted(i for i, h in before.items() if not h)
            aborted.update(before)
            done += waiting
            for made in waiting:
                del open_[made.request_id]
            for holder, held in running.items():
                for i in held:
                    if rng.random() < 0.5 and i in fleet[holder].running:  # else it finishes, or its worker dies first
                        _, known = fleet[holder].running.pop(i)
                        finish(holder, rollout(i, tokens_of(asked[i], 0, known), FinishReason.ABORT))
        name = rng.choice(sorted(fleet))
        worker = fleet[name]
        for request_id, (request, known) in list(worker.running.items()):
            whole = len(response(asked[request_id])[0])
            assert request.noise_key == asked[request_id].noise_key
            new = min(known + rng.randrange(4), whole)
            assert ledger.progress(name, request_id, tokens_of(asked[request_id], known, new))
            sampled(request_id, new, name)
            worker.running[request_id] = (request, new)
            if new == whole and rng.random() < 0.7:
                del worker.running[request_id]
                finish(name, rollout_of(asked[request_id]))
                if rng.random() < 0.2:
                    late.append((name, rollout_of(asked[request_id])))
        leaves = len(fleet) > 1 and rng.random() < joins
        if leaves or rng.random() < p:
            for i in [i for i in worker.running if rng.random() < 0.5]:  # it was told to end, and gives them back
                known = worker.running[i][1]
                end = rng.randint(known, len(response(asked[i])[0]))
                ledger.hand_back(name, rollout(i, tokens_of(asked[i], 0, end), FinishReason.ABORT))
                if end:
                    worker.running[i] = (asked[i], end)
            late += [(name, rollout_of(asked[i])) for i in worker.running]
            loss = ledger.lose(name, "killed", now_s=0.0, weights_version=1, handed_over=leaves)
            done += loss.finished
            for i in loss.reissued:
                sampled(i, worker.running[i][1], None)
            for i in [r.request_id for r in loss.finished] + [f.request_id for f in loss.failed]:
                del open_[i]
            worker.running.clear()
            if leaves:
                ledger.withdraw(name)
                del fleet[name]
                offered.pop(name, None)
                gone.add(name)
        while late and rng.random() < 0.5:
            sender, last_word = late.pop()
            if sender in gone or last_word.request_id not in fleet[sender].running:
                finish(sender, last_word)
    assert ledger.done
    assert ledger.waiting == 0
    failed = [f.request_id for f in ledger.failed]
    assert sorted([r.request_id for r in done] + failed) == list(range(n))
    assert ledger.finished == len(done)
    for made in done:
        request = asked[made.request_id]
        tokens, reason = response(request)
        if made.finish_reason is FinishReason.ABORT:
            assert made.request_id in aborted
            tokens, reason = tokens[: len(made.tokens)], FinishReason.ABORT
        else:
            assert made.propensity == rollout_of(request).propensity
        assert (made.tokens.tolist(), made.finish_reason) == (tokens, reason)
        assert made.logprobs.tolist() == [logprob(request.noise_key, i) for i in range(len(tokens))]
    if p == 0.0:
        assert failed == [], "who leaves is no reason to suspect a request"
        assert joins or not ledger.reissued


def test_a_lost_request_carries_all_its_deltas_and_longest_remaining_goes_first() -> None:
    short, long = make_request(0, 0, max_new_tokens=30), make_request(1, 1, max_new_tokens=40)
    ledger = Ledger([short, long], max_retries=1)
    assert [r.request_id for r in give(ledger, a=2)["a"]] == [1, 0]
    rng = np.random.default_rng(0)
    draw = lambda k: Sampled(  # noqa: E731
        rng.integers(20, 90, k).astype(np.int32), rng.random(k, np.float32), rng.random(k, np.float32)
    )
    deltas = [draw(5), draw(20)]
    for delta in deltas:
        ledger.progress("a", 1, delta)
    ledger.withdraw("a")
    loss = ledger.lose("a", "gone", now_s=0.0, weights_version=0)
    assert (loss.reissued, loss.failed, loss.prefix_tokens) == ((0, 1), (), 25)
    again = give(ledger, b=2)["b"]
    assert [r.request_id for r in again] == [0, 1]  # 30 tokens to go, against 15
    prefix = again[1].prefix
    assert prefix is not None
    for name in ("tokens", "logprobs", "logprobs_t1"):
        assert np.array_equal(getattr(prefix, name), np.concatenate([getattr(d, name) for d in deltas]))
    assert (again[1].noise_key, again[1].sampling) == (long.noise_key, long.sampling)


def test_a_response_that_was_complete_is_finished_not_sampled_again() -> None:
    request = make_request(0, max_new_tokens=3)
    ledger = Ledger([request], max_retries=0)
    give(ledger, a=1)
    tokens = Sampled(np.array([20, 21, 22], np.int32), np.zeros(3, np.float32), np.zeros(3, np.float32))
    ledger.progress("a", 0, tokens)
    [made] = ledger.lose("a", "gone", now_s=5.0, weights_version=8).finished
    assert (made.tokens.tolist(), made.finish_reason) == ([20, 21, 22], FinishReason.LENGTH)
    assert made.weights_version == 8
    assert ledger.done


def test_the_next_turn_goes_on_where_its_last_one_was_and_counts_once() -> None:
    first, other = make_request(1, 0), make_request(2, 0)
    ledger = Ledger([first, other], max_retries=1)
    assert [r.request_id for r in give(ledger, a=1, b=1)["a"]] == [1]
    with pytest.raises(ValueError, match="request id 1 occurs twice"):
        ledger.add(first, "a")
    assert ledger.finish("a", rollout_of(first))
    ledger.add(replace(first, earlier_tokens=4), "a")
    assert (ledger.total, ledger.finished, ledger.done) == (2, 0, False)
    assert ledger.assign() == {"a": [replace(first, earlier_tokens=4)]}
    assert ledger.assign() == {}
    # Its worker is lost: it waits, with what was reported of this turn alone, for another one.
    ledger.progress("a", 1, tokens_of(first, 0, 2))
    assert ledger.lose("a", "gone", now_s=0.0, weights_version=1).reissued == (1,)
    ledger.withdraw("a")
    assert ledger.finish("b", rollout_of(other))
    ((reissued,),) = ledger.assign().values()
    assert (reissued.earlier_tokens, reissued.prefix is not None and len(reissued.prefix)) == (4, 2)
    # And from a worker that is not there any more it goes to whoever is.
    ledger.add(other, "a")
    assert ledger.assign() == {}
    assert ledger.finish("b", rollout_of(first))
    assert ledger.assign() == {"b": [other]}
    assert ledger.finish("b", rollout_of(other))
    assert (ledger.total, ledger.finished, ledger.done) == (2, 2, True)


def test_turns_that_were_not_handed_out_wait_again() -> None:
    request = make_request(1, 0)
    ledger = Ledger([request], max_retries=1)
    give(ledger, a=1)
    ledger.finish("a", rollout_of(request))
    ledger.add(request, "a")
    assert list(ledger.running("a")) == [1]
    ledger.hold_back()
    assert (list(ledger.running("a")), ledger.waiting) == ([], 1)
    assert ledger.assign() == {"a": [request]}


def test_equal_request_ids_are_an_error() -> None:
    with pytest.raises(ValueError, match="request id 3 occurs twice"):
        Ledger([make_request(3), make_request(3)], max_retries=0)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule is not None])
def test_a_response_that_its_rule_had_ended_is_finished_by_the_ledger_as_the_engine_would(rule: StopRule) -> None:
    asked = [make_request(0, seed=i, stop=rule) for i in range(50)]
    request = next(r for r in asked if response(r)[1] is not response(replace(r, stop=None))[1])
    whole = rollout_of(request)
    ledger = Ledger([request], max_retries=0)
    give(ledger, a=1)
    ledger.progress("a", 0, whole.sampled)
    [made] = ledger.lose("a", "gone", now_s=5.0, weights_version=1).finished
    assert (made.tokens.tolist(), made.finish_reason) == (whole.tokens.tolist(), whole.finish_reason)
    assert made.propensity == whole.propensity


def test_a_probe_of_each_prompt_goes_first_and_says_how_long_the_others_will_be() -> None:
    """Three prompts of three, two places: all probes before any other, then the group of the longest probe."""
    asked = {i: replace(make_request(i, i // 3), expected_tokens=10.0) for i in range(9)}
    ledger = Ledger(asked.values(), max_retries=0, probes=True)
    lengths = {0: 5, 3: 50, 6: 20}
    assert ledger.waiting == 9
    assert ledger.waiting_tokens == 90.0
    order = list[int]()
    running = [request for requests in give(ledger, w=2).values() for request in requests]
    while running:
        order += [request.request_id for request in running]
        for request in running:
            count = lengths.get(request.request_id, 10)
            whole = Sampled(np.zeros(count, np.int32), np.zeros(count, np.float32), np.zeros(count, np.float32))
            assert ledger.finish("w", rollout(request.request_id, whole, FinishReason.STOP))
        running = [request for requests in ledger.assign().values() for request in requests]
    assert set(order[:3]) == set(lengths)
    assert order[4:] == [4, 5, 7, 8, 1, 2][-len(order[4:]) :]
    assert ledger.done


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_with_probes_each_request_still_ends_once(data: st.DataObject) -> None:
    """Ends, losses and aborts in any order; the books of who waits stay right."""
    asked = [replace(make_request(i, i // 4), expected_tokens=float(1 + i % 5)) for i in range(12)]
    ledger = Ledger(asked, max_retries=100, probes=True)
    held: dict[str, set[int]] = {"a": set(), "b": set()}
    ended = set[int]()
    for _ in range(400):
        for name, requests in give(ledger, a=2, b=3).items():
            held[name] |= {request.request_id for request in requests}
        assert ledger.waiting == 12 - len(ended) - sum(map(len, held.values()))
        assert ledger.waiting_tokens >= ledger.waiting
        if ledger.done:
            break
        name = data.draw(st.sampled_from(sorted(name for name in held if held[name])))
        match data.draw(st.sampled_from(["end", "end", "lose", "abort"])):
            case "end":
                request_id = data.draw(st.sampled_from(sorted(held[name])))
                held[name].discard(request_id)
                ended.add(request_id)
                tokens = tokens_of(asked[request_id], 0, 1)
                assert ledger.finish(name, rollout(request_id, tokens, FinishReason.STOP))
            case "lose":
                loss = ledger.lose(name, "gone", now_s=0.0, weights_version=1)
                ended |= {one.request_id for one in loss.finished}
                held[name].clear()
            case _:
                gone, _ = ledger.abort([data.draw(st.integers(0, 11))], now_s=0.0, weights_version=1)
                ended |= {one.request_id for one in gone}
    assert ledger.done
