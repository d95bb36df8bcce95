"""What every rollout engine keeps, whatever samples inside: tests to be inherited, over RolloutEngine alone.

    class TestMine(EngineContract): ...   # and a fixture `subject`, of module scope

What an engine cannot do is read from its `Capabilities`, and the test then expects the refusal, or less.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.engine.capabilities import Capabilities
from actors.engine.core import EngineCore
from actors.engine.process import RolloutEngine
from actors.engine.shared_rollouts import pack
from contracts.engine import (
    Abort,
    Answered,
    Command,
    LoadDrafters,
    Remember,
    SaveDrafters,
    Sleep,
    Submit,
    UpdateDrafter,
    UpdateWeights,
    Wake,
)
from contracts.rollout import (
    EngineAnswer,
    EngineDiedError,
    EngineFailed,
    EngineIdle,
    EngineWindow,
    Event,
    Finished,
    FinishReason,
    Progress,
    Rejected,
    Request,
    Rollout,
    Sampled,
    Slept,
)
from models.checksum import checksum
from models.manifest import WeightsManifest
from tests.engine.support import make_requests

A = TypeVar("A", bound=EngineAnswer)
Bytes = NDArray[np.uint8]
Weights = tuple[WeightsManifest, Bytes]
POLLS = 60_000  # of a millisecond at least where nothing comes: a minute


@dataclass(frozen=True)
class Subject:
    """How to make engines of one kind."""

    capabilities: Capabilities
    start: Callable[[str], RolloutEngine]  # that draft by this strategy; by none where the engine cannot: "plain"
    weights: Callable[[int, int], Weights]  # of the target, from version and seed
    drafter_weights: Callable[[int], Weights]  # of eagle, from a version
    longest_prompt: int
    strategy: str = "plain"  # of the engine that most tests share


class InProcess(RolloutEngine):
    """A RolloutEngine around a core in this process: no socket, no thread, and what ends a child ends it too."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._events: list[Event] = []
        self._died = ""

    def send(self, command: Command, memory: Bytes | None = None) -> None:
        if self._died:
            raise EngineDiedError(self._died)
        with self._alive():
            answer = self._core.apply(command, None if memory is None else memory.copy())
            if answer is not None:
                self._events.append(answer)

    def poll(self, timeout_s: float) -> list[Event]:
        if self._died and not self._events:
            raise EngineDiedError(self._died)
        if not self._events and self._core.has_work:
            with self._alive():
                self._events += self._core.step()
        events, self._events = self._events, []
        return events

    def close(self, timeout_s: float = 5.0) -> None:
        self._core.close()

    def _alive(self) -> "_Child":
        return _Child(self._failed)

    def _failed(self, error: BaseException) -> None:
        self._died = str(error)
        self._events.append(EngineFailed(f"{type(error).__name__}: {error}"))


@dataclass
class _Child:
    failed: Callable[[BaseException], None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self.failed(error)
            return True
        return False


class Talk:
    """With one engine, to the end of what was asked."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.versions = 0

    def until(self, done: Callable[[list[Event]], bool]) -> list[Event]:
        events: list[Event] = []
        for _ in range(POLLS):
            if done(events):
                return events
            events += self.engine.poll(0.5)
        raise AssertionError(f"nothing more came after {Counter(type(event).__name__ for event in events)}")

    def ask(self, command: Answered[A], memory: Bytes | None = None) -> A:
        self.engine.send(command, memory)
        events = self.until(lambda events: any(isinstance(event, EngineAnswer) for event in events))
        (answer,) = [event for event in events if isinstance(event, EngineAnswer)]
        return answer  # type: ignore[return-value]

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.send(Submit(tuple(requests)))

    def idle(self, answers: int) -> list[Event]:
        """Until so many requests have ended and the engine has said that it is idle."""

        def done(events: list[Event]) -> bool:
            ends = [i for i, event in enumerate(events) if isinstance(event, Finished | Rejected)]
            return len(ends) >= answers and any(isinstance(e, EngineIdle) for e in events[ends[-1] if ends else 0 :])

        return self.until(done)

    def run(self, requests: Sequence[Request]) -> dict[int, Rollout]:
        self.submit(requests)
        return finished(self.idle(len(requests)))

    def update(self, make: Callable[[int, int], Weights], seed: int) -> Weights:
        """New target weights, taken; their version is one that was never there."""
        self.versions += 1
        manifest, buffer = make(self.versions, seed)
        loaded = self.ask(UpdateWeights(manifest), buffer)
        assert (loaded.version, loaded.checksum) == (manifest.version, manifest.checksum)
        return manifest, buffer


def finished(events: Sequence[Event]) -> dict[int, Rollout]:
    """By request; none twice."""
    rollouts = [event.rollout for event in events if isinstance(event, Finished)]
    assert max(Counter(rollout.request_id for rollout in rollouts).values(), default=1) == 1
    return {rollout.request_id: rollout for rollout in rollouts}


def equal(one: Sampled, other: Sampled) -> bool:
    """Bit for bit."""
    mine, yours = ((s.tokens, s.logprobs, s.logprobs_t1) for s in (one, other))
    return [None if a is None else a.tobytes() for a in mine] == [None if a is None else a.tobytes() for a in yours]


def same(one: dict[int, Rollout], other: dict[int, Rollout]) -> bool:
    return one.keys() == other.keys() and all(
        equal(one[i].sampled, other[i].sampled) and one[i].finish_reason == other[i].finish_reason for i in one
    )


def changed(request: Request, **sampling: object) -> Request:
    return replace(request, sampling=replace(request.sampling, **sampling))


class EngineContract:
    @pytest.fixture(scope="module")
    @classmethod
    def talk(cls, subject: Subject) -> Iterator[Talk]:
        """An engine for all tests that leave it as they found it, idle."""
        engine = subject.start(subject.strategy)
        yield Talk(engine)
        engine.close()

    @pytest.fixture
    def invariant(self, subject: Subject) -> bool:
        return subject.capabilities.batch_invariant

    def test_each_request_is_answered_exactly_once(self, subject: Subject, talk: Talk) -> None:
        requests = make_requests(9, prompts=3, seed=1)
        too_long = replace(requests[0], request_id=7, prompt_tokens=np.zeros(subject.longest_prompt + 1, np.int32))
        talk.submit([*requests[:5], too_long, requests[0]])  # one twice
        talk.submit(requests[5:])
        events = talk.idle(11)
        rejected = {event.request_id: event.reason for event in events if isinstance(event, Rejected)}
        assert rejected.keys() == {7, requests[0].request_id}
        assert all(rejected.values())
        assert finished(events).keys() == {request.request_id for request in requests}
        assert not [event for event in talk.engine.poll(0.0) if isinstance(event, Finished | Rejected)]

    def test_caps_are_exact_to_the_token(self, talk: Talk, invariant: bool) -> None:
        requests = make_requests(6, seed=2, max_new_tokens=20)
        whole = talk.run(requests)
        for cap in (1, 2, 7, 19):
            for request_id, rollout in talk.run([changed(request, max_new_tokens=cap) for request in requests]).items():
                assert (len(rollout.tokens), rollout.finish_reason) == (cap, FinishReason.LENGTH)
                assert not invariant or equal(rollout.sampled, whole[request_id].sampled.first(cap))

    def test_stop_tokens_are_exact_to_the_token(self, talk: Talk, invariant: bool) -> None:
        requests = make_requests(6, seed=3, max_new_tokens=20)
        whole = talk.run(requests)
        for position in (0, 3, 11, 19):
            stops = {request.request_id: int(whole[request.request_id].tokens[position]) for request in requests}
            stopping = [changed(request, stop_token_ids=(stops[request.request_id],)) for request in requests]
            for request_id, rollout in talk.run(stopping).items():
                stop, tokens = stops[request_id], rollout.tokens.tolist()
                assert stop not in tokens[:-1]
                assert (rollout.finish_reason is FinishReason.STOP) == (tokens[-1] == stop)
                if invariant:  # also where the cap is reached with it
                    first = whole[request_id].tokens.tolist().index(stop) + 1
                    assert rollout.finish_reason is FinishReason.STOP
                    assert equal(rollout.sampled, whole[request_id].sampled.first(first))

    def test_an_aborted_request_ends_once_with_the_tokens_it_has(self, talk: Talk, invariant: bool) -> None:
        requests = make_requests(8, prompts=4, seed=4, max_new_tokens=120)
        whole = talk.run(requests)
        talk.submit(requests)
        begun = talk.until(lambda events: any(isinstance(event, Progress) for event in events))
        gone = tuple(request.request_id for request in requests[::2])
        talk.engine.send(Abort((*gone, 999_999)))
        over = len(finished(begun))
        events = [*begun, *talk.idle(len(requests) - over)]
        rollouts = finished(events)
        assert rollouts.keys() == whole.keys()
        assert FinishReason.ABORT in {rollouts[request_id].finish_reason for request_id in gone}
        for request_id, rollout in rollouts.items():
            if rollout.finish_reason is FinishReason.ABORT:
                assert request_id in gone
                assert len(rollout.tokens) < 120
            if invariant:
                assert equal(rollout.sampled, whole[request_id].sampled.first(len(rollout.tokens)))

    def test_a_reissued_request_goes_on_exactly_where_it_was(self, talk: Talk, invariant: bool) -> None:
        requests = make_requests(6, seed=5, max_new_tokens=24)
        stops = {request_id: int(rollout.tokens[15]) for request_id, rollout in talk.run(requests).items()}
        requests = [changed(request, stop_token_ids=(stops[request.request_id],)) for request in requests]
        whole = talk.run(requests)
        for cut in (1, 9, 24):  # 24: nothing is left to do
            prefixes = {request_id: rollout.sampled.first(cut) for request_id, rollout in whole.items()}
            again = talk.run([replace(request, prefix=prefixes[request.request_id]) for request in requests])
            assert again.keys() == whole.keys()
            for request_id, rollout in again.items():
                known = len(prefixes[request_id])
                assert equal(rollout.sampled.first(known), prefixes[request_id])
                if known == len(whole[request_id].tokens):
                    assert len(rollout.tokens) == known
                    assert rollout.finish_reason == whole[request_id].finish_reason
            assert not invariant or same(again, whole)

    def test_early_text_is_never_trusted(self, subject: Subject, talk: Talk, invariant: bool) -> None:
        """An engine that checks it takes no token of it that it would not have drawn; others pass over it."""
        requests = make_requests(6, prompts=3, seed=15, max_new_tokens=24)
        plain = talk.run(requests)
        for shift in (0, 1):  # right, and wrong from the first token on
            early = [replace(r, early=(plain[r.request_id].tokens + shift) % 50) for r in requests]
            found = talk.run(early)
            assert same(found, plain) or not (invariant or subject.capabilities.early_text)

    def test_progress_joins_to_the_rollout(self, talk: Talk) -> None:
        requests = make_requests(6, seed=6, max_new_tokens=40)
        talk.submit(requests)
        events = talk.idle(6)
        rollouts = finished(events)
        assert any(isinstance(event, Progress) for event in events)
        for request in requests:
            deltas = [e.delta for e in events if isinstance(e, Progress) and e.request_id == request.request_id]
            assert all(len(delta) for delta in deltas)
            if deltas:
                joined = Sampled.join(deltas)
                assert equal(joined, rollouts[request.request_id].sampled.first(len(joined)))
        prefix = rollouts[requests[0].request_id].sampled.first(10)
        talk.submit([replace(requests[0], prefix=prefix)])
        events = talk.idle(1)
        (rollout,) = finished(events).values()
        deltas = [event.delta for event in events if isinstance(event, Progress)]
        assert deltas, "nothing was told of thirty tokens"
        joined = Sampled.join([prefix, *deltas])  # what was handed over is not told again
        assert equal(joined, rollout.sampled.first(len(joined)))

    def test_log_probs_are_those_of_the_distributions(self, subject: Subject, talk: Talk) -> None:
        for temperature in (1.0, 0.5, 0.0):
            rollouts = talk.run(make_requests(4, seed=7, max_new_tokens=12, temperature=temperature))
            for rollout in rollouts.values():
                assert len(rollout.logprobs) == len(rollout.tokens)
                assert np.isfinite(rollout.logprobs).all()
                assert (rollout.logprobs <= 1e-6).all()
                assert (rollout.logprobs_t1 is not None) == subject.capabilities.logprobs_t1
                if rollout.logprobs_t1 is None:
                    continue
                assert len(rollout.logprobs_t1) == len(rollout.tokens)
                assert (rollout.logprobs_t1 <= 1e-6).all()
                if temperature == 1.0:
                    np.testing.assert_allclose(rollout.logprobs, rollout.logprobs_t1, atol=1e-5)
                elif temperature == 0.0:
                    assert not rollout.logprobs.any()
                    assert rollout.logprobs_t1.any()

    def test_it_samples_with_the_weights_that_it_says_it_has(self, subject: Subject, talk: Talk) -> None:
        requests = make_requests(4, seed=8, max_new_tokens=12)
        old = talk.run(requests)
        manifest, _ = talk.update(subject.weights, seed=3)
        new = talk.run(requests)
        assert {rollout.weights_version for rollout in new.values()} == {manifest.version}
        talk.update(subject.weights, seed=0)  # what it began with
        assert not subject.capabilities.batch_invariant or same(talk.run(requests), old)

    def test_weights_arrive_while_requests_run_and_none_is_lost(self, subject: Subject, talk: Talk) -> None:
        requests = make_requests(8, seed=9, max_new_tokens=60)
        talk.submit(requests)
        before = talk.until(lambda events: any(isinstance(event, Progress) for event in events))
        talk.versions += 1
        manifest, buffer = subject.weights(talk.versions, 0)
        talk.engine.send(UpdateWeights(manifest), buffer)
        buffer[:] = 0  # it was copied
        events = [*before, *talk.idle(8 - len(finished(before)))]
        (loaded,) = [event for event in events if isinstance(event, EngineAnswer)]
        assert loaded.checksum == manifest.checksum  # type: ignore[attr-defined]
        assert finished(events).keys() == {request.request_id for request in requests}

    @pytest.mark.parametrize("fault", ["damaged", "cut short"])
    def test_weights_that_are_not_what_was_sent_end_it_with_the_reason(self, subject: Subject, fault: str) -> None:
        talk = Talk(subject.start("plain"))
        try:
            manifest, buffer = subject.weights(41, 1)
            if fault == "damaged":
                buffer[len(buffer) // 2] ^= 255
            talk.engine.send(UpdateWeights(manifest), buffer if fault == "damaged" else buffer[:-4])
            events = talk.until(lambda events: any(isinstance(event, EngineFailed) for event in events))
            (failed,) = [event for event in events if isinstance(event, EngineFailed)]
            assert "41" in failed.reason
            assert not [event for event in events if isinstance(event, EngineAnswer)]
            with pytest.raises(EngineDiedError):  # whatever it is asked from now on
                talk.until(lambda events: False)
            with pytest.raises(EngineDiedError):
                talk.submit(make_requests(1))
        finally:
            talk.engine.close()
            talk.engine.close()

    def test_sleep_is_refused_at_work_and_changes_no_token(self, talk: Talk, invariant: bool) -> None:
        requests = make_requests(4, seed=10, max_new_tokens=30)
        talk.submit(requests)
        talk.engine.send(Sleep())
        events = talk.idle(4)
        (refused,) = [event for event in events if isinstance(event, Slept)]
        assert refused.refusal
        assert talk.ask(Sleep()) == Slept()
        talk.engine.send(Wake())
        talk.engine.send(Wake())  # awake already
        assert not invariant or same(talk.run(requests), finished(events))

    def test_windows_say_which_steps_were_an_evaluation(self, talk: Talk) -> None:
        for evaluation in (False, True, False):
            requests = [replace(r, evaluation=evaluation) for r in make_requests(5, seed=11, max_new_tokens=9)]
            talk.submit(requests)
            windows = [event for event in talk.idle(5) if isinstance(event, EngineWindow)]
            assert {window.evaluation for window in windows} == {evaluation}
            assert sum(window.decode_tokens for window in windows) == 45
            assert (windows[-1].running, windows[-1].waiting) == (0, 0)

    def test_two_engines_draw_the_same_tokens_in_any_company(self, subject: Subject, talk: Talk) -> None:
        if not subject.capabilities.batch_invariant:
            pytest.skip("its tokens depend on the batch, and it says so")
        requests = make_requests(10, prompts=4, seed=12)
        together = talk.run(requests)
        other = Talk(subject.start("plain"))
        try:
            alone: dict[int, Rollout] = {}
            for request in reversed(requests):
                alone |= other.run([request])
        finally:
            other.engine.close()
        assert same(together, alone)

    def test_drafters_are_told_saved_and_restored_and_no_token_changes(
        self, subject: Subject, talk: Talk, tmp_path: Path, invariant: bool
    ) -> None:
        (tmp_path / "file").touch()
        refused = talk.ask(SaveDrafters(str(tmp_path / "file" / "below")))
        assert "file" in str(refused.failure)
        drafts = "suffix" in subject.capabilities.drafters
        requests = make_requests(6, seed=13, max_new_tokens=40, temperature=0.0)
        kept = str(tmp_path / "kept")
        whole = talk.run(requests)
        first, second = (Talk(subject.start("suffix:6" if drafts else "plain")) for _ in range(2))
        try:
            made = [(request.prompt_tokens, whole[request.request_id].tokens, 0) for request in requests]
            first.engine.send(Remember(1), pack(made))
            Path(kept).mkdir()
            saved = first.ask(SaveDrafters(kept))
            assert (saved.directory, saved.failure) == (kept, None)
            second.engine.send(LoadDrafters(kept))
            second.engine.send(LoadDrafters(str(tmp_path / "nothing")))
            for knowing in (first, second):
                results = knowing.run(requests)
                assert not invariant or same(results, whole)
                if drafts:
                    assert sum(r.verifications for r in results.values()) < 6 * 40 - 20
        finally:
            first.engine.close()
            second.engine.close()

    def test_drafter_weights_are_taken_between_two_steps_or_refused_with_the_reason(
        self, subject: Subject, talk: Talk, invariant: bool
    ) -> None:
        can = "eagle" in subject.capabilities.drafters
        requests = make_requests(4, seed=14, max_new_tokens=60)
        whole = talk.run(requests)
        manifest, buffer = subject.drafter_weights(5)
        drafting = Talk(subject.start("eagle:2" if can else "plain"))
        try:
            drafting.submit(requests)
            before = drafting.until(lambda events: any(isinstance(event, Progress) for event in events))
            drafting.engine.send(UpdateDrafter("eagle", manifest), buffer)
            events = [*before, *drafting.idle(4 - len(finished(before)))]
            (loaded,) = [event for event in events if isinstance(event, EngineAnswer)]
            assert (loaded.name, loaded.version) == ("eagle", 5)  # type: ignore[attr-defined]
            assert bool(loaded.reason) is not can  # type: ignore[attr-defined]
            assert loaded.checksum == checksum(buffer) or not can  # type: ignore[attr-defined]
            assert not invariant or same(finished(events), whole)
            assert drafting.ask(UpdateDrafter("nobody", manifest), buffer).reason
            damaged = buffer.copy()
            damaged[3] ^= 255
            assert drafting.ask(UpdateDrafter("eagle", manifest), damaged).reason
            again = drafting.run(requests)
            assert not invariant or same(again, whole)
        finally:
            drafting.engine.close()

    def test_idle_is_said_once(self, talk: Talk) -> None:
        talk.submit(make_requests(3, seed=15, max_new_tokens=5))
        events = talk.idle(3)
        events += talk.engine.poll(0.05)
        assert sum(isinstance(event, EngineIdle) for event in events) == 1
