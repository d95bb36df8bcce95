"""A rollout engine in a real process of its own whose tokens are known: token i is a hash of (noise key, i).

So tokens depend on nothing but the noise key, as with the native engine, and any loss, re-issue or double count shows.
Its core is one like any other (tests/engine/contract.py holds it to that), in the child's own loop.
"""

import json
import os
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from actors.data.stop_strings import compile_marker
from actors.engine.capabilities import Capabilities
from actors.engine.child import serve
from actors.engine.process import RolloutEngine
from actors.engine.shared_rollouts import unpack
from actors.engine.stopping import End, find_end
from actors.processes.child import parent_link
from contracts.engine import (
    Abort,
    EngineCommand,
    Hear,
    LoadDrafters,
    RecordStates,
    Remember,
    SaveDrafters,
    Sleep,
    Submit,
    UpdateDrafter,
    UpdateWeights,
    Wake,
)
from contracts.rollout import (
    DrafterFailed,
    DrafterLoaded,
    DraftersSaved,
    EngineAnswer,
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
    SamplingParams,
    Slept,
    StopRule,
    WeightsLoaded,
)
from models.checksum import checksum
from models.manifest import WeightsManifest

VOCAB = 97
STOP = 7
WORDS = [chr(97 + i % 5).encode() * (i % 3) for i in range(VOCAB)]  # what its tokens stand for
MARKER = compile_marker([b"ab", b"edd"], WORDS)
RULES = (
    None,
    StopRule(strings=MARKER),
    StopRule(answer=MARKER, poll_from_tokens=3, grace_tokens=2),
    StopRule(answer=MARKER, give_up_at_tokens=5, keep=0.5),
)
MAX_PROMPT_TOKENS = 1000
CAPABILITIES = Capabilities(drafters=frozenset({"eagle"}), batch_invariant=True, logprobs_t1=True)  # drafts nothing


@dataclass(frozen=True)
class FakeOptions:
    """How the fake behaves; `die_on_start` and the like make failures deterministic."""

    step_s: float = 0.001
    progress_every_tokens: int = 4
    max_running: int = 4
    fail_to_start: str = ""
    wrong_checksum: bool = False
    hang_on: int = -1  # request id whose submission makes the engine silent for ever
    poison: int = -1  # request id that kills the engine
    notes: str = ""  # file to which what the drafters are told is appended; empty: nowhere
    mute_drafters: bool = False  # saving is never answered
    failing_drafter: str = ""  # why new weights are refused, after the drafter failed
    logprobs_t1: bool = True  # given with each token


def token(noise_key: int, position: int) -> int:
    return zlib.crc32(f"{noise_key}/{position}".encode()) % VOCAB


def logprob(noise_key: int, position: int) -> float:
    return -(zlib.crc32(f"{noise_key}:{position}".encode()) % 1000) / 256  # exact in float32


def response(request: Request) -> tuple[list[int], FinishReason]:
    """The oracle: what any engine must answer, disturbed or not."""
    tokens: list[int] = []
    while (end := ended(request, tokens)) is None:
        tokens.append(token(request.noise_key, len(tokens)))
    return tokens, end.reason


def ended(request: Request, tokens: list[int]) -> End | None:
    return find_end(request, np.array(tokens, np.int32), request.sampling.max_new_tokens)


def part(noise_key: int, tokens: list[int], positions: range, temperature: float = 0.5) -> Sampled:
    """Log-probs as they might be at that temperature: twice as large without it as at a half."""
    logprobs = np.array([logprob(noise_key, p) for p in positions], np.float32)
    logprobs_t1 = logprobs / np.float32(temperature or 1.0)
    drawn = np.array([tokens[p] for p in positions], np.int32)
    return Sampled(drawn, logprobs if temperature else np.zeros_like(logprobs), logprobs_t1)


def weights(version: int, size: int = 4) -> tuple[WeightsManifest, NDArray[np.uint8]]:
    """Of whatever network: the engine looks at their checksum only."""
    buffer = np.full(size, version % 251, np.uint8)
    return WeightsManifest(version, checksum(buffer), (), buffer.nbytes), buffer


def make_request(
    request_id: int,
    prompt_id: int = 0,
    *,
    max_new_tokens: int = 24,
    seed: int = 0,
    stop: StopRule | None = None,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_id=prompt_id,
        prompt_tokens=np.arange(3, dtype=np.int32),
        noise_key=seed * 100_000 + request_id,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.5, stop_token_ids=(STOP,)),
        expected_tokens=float(max_new_tokens),
        stop=stop,
    )


class FakeEngine(RolloutEngine):
    """The parent's end."""

    def __init__(self, options: FakeOptions) -> None:
        if options.fail_to_start:
            raise RuntimeError(options.fail_to_start)
        super().__init__(options, "fake", module="tests.actors.fake_engine")
        self.wait_until_ready(60.0)


def main() -> None:
    with parent_link(EngineFailed) as link:
        serve(link, FakeCore(link.receive()))


@dataclass
class _Running:
    request: Request
    tokens: list[int]
    reported: int
    logprobs_t1: bool

    @classmethod
    def begin(cls, request: Request, logprobs_t1: bool) -> "_Running":
        tokens = [] if request.prefix is None else request.prefix.tokens.tolist()
        return cls(request, tokens, len(tokens), logprobs_t1)

    def part(self, start: int) -> Sampled:
        """The response from there on. What was handed over is handed back, not made up again."""
        prefix = self.request.prefix
        known = 0 if prefix is None else len(prefix)
        if prefix is not None and start < known:
            return Sampled.join([prefix, self.part(known)])
        positions, temperature = range(start, len(self.tokens)), self.request.sampling.temperature
        sampled = part(self.request.noise_key, self.tokens, positions, temperature)
        return sampled if self.logprobs_t1 else replace(sampled, logprobs_t1=None)

    def ended(self) -> End | None:
        return ended(self.request, self.tokens)


class FakeCore:
    """EngineCore; a step draws one token for each request that runs."""

    def __init__(self, options: FakeOptions) -> None:
        self._options = options
        self._waiting: list[_Running] = []
        self._running: dict[int, _Running] = {}
        self._events: list[Event] = []
        self._version = 0
        self._idle = True

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._events) or not self._idle

    def close(self) -> None:
        pass

    def apply(self, command: EngineCommand, memory: NDArray[np.uint8] | None) -> EngineAnswer | None:
        options = self._options
        match command:
            case Submit(requests):
                for request in requests:
                    self._submit(request)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._abort(request_id)
            case UpdateWeights(manifest):
                assert memory is not None
                if checksum(memory) != manifest.checksum:
                    raise ValueError(f"weights version {manifest.version} did not arrive whole")
                self._version = manifest.version
                held = checksum(memory) ^ options.wrong_checksum
                return WeightsLoaded(version=manifest.version, checksum=held, seconds=0.001)
            case Sleep():
                return Slept("it has requests" if self._waiting or self._running else "")
            case Wake():
                pass
            case Hear():
                pass  # it drafts nothing
            case Remember(own_index):
                assert memory is not None
                pairs = zip(*unpack(memory, own_index), strict=True)
                self._note({"remember": [[prompt.tolist(), response.tolist()] for prompt, response in pairs]})
            case RecordStates(on):
                self._note({"record": on})
            case SaveDrafters(directory):
                return None if options.mute_drafters else self._save(directory)
            case LoadDrafters(directory):
                self._note({"load": directory})
            case UpdateDrafter(name, manifest):
                assert memory is not None
                self._note({"drafter": name, "version": manifest.version})
                found, reason = checksum(memory), options.failing_drafter
                if reason:
                    self._events.append(DrafterFailed(name, reason, final=True))
                elif name not in CAPABILITIES.drafters:
                    reason = f"there is no drafter {name!r}"
                elif found != manifest.checksum:
                    reason = "the weights did not arrive whole"
                return DrafterLoaded(name, manifest.version, found, 0.001, reason)
            case _:
                assert_never(command)
        return None

    def step(self) -> list[Event]:
        start_s = time.time()
        while self._waiting and len(self._running) < self._options.max_running:
            item = self._waiting.pop(0)
            self._running[item.request.request_id] = item
        if self._running:
            time.sleep(self._options.step_s)
            self._draw(start_s)
        idle = not self._waiting and not self._running
        if idle and not self._idle:
            self._events.append(EngineIdle(time.time()))
        self._idle = idle
        events, self._events = self._events, []
        return events

    def _draw(self, start_s: float) -> None:
        steps, evaluation = len(self._running), any(item.request.evaluation for item in self._running.values())
        for request_id, item in list(self._running.items()):
            item.tokens.append(token(item.request.noise_key, len(item.tokens)))
            if (end := item.ended()) is not None:
                del self._running[request_id]
                self._finish(item, end)
            elif len(item.tokens) - item.reported >= self._options.progress_every_tokens:
                self._events.append(Progress(request_id, item.part(item.reported)))
                item.reported = len(item.tokens)
        window = EngineWindow(
            start_s=start_s,
            end_s=time.time(),
            engine_steps=1,
            prefill_tokens=0,
            decode_tokens=steps,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens_used=0,
            evaluation=evaluation,
        )
        self._events.append(window)

    def _submit(self, request: Request) -> None:
        if request.request_id == self._options.poison:
            os._exit(3)
        if request.request_id == self._options.hang_on:
            time.sleep(3600)
        self._idle = False
        item = _Running.begin(request, self._options.logprobs_t1)
        if len(request.prompt_tokens) > MAX_PROMPT_TOKENS:
            reason = f"prompt of more than {MAX_PROMPT_TOKENS} tokens"
            self._events.append(Rejected(request.request_id, reason))
        elif request.request_id in [item.request.request_id for item in [*self._running.values(), *self._waiting]]:
            self._events.append(Rejected(request.request_id, "a request with this id is running already"))
        elif (end := item.ended()) is not None:
            self._finish(item, end)
        else:
            self._waiting.append(item)

    def _abort(self, request_id: int) -> None:
        found = [item for item in [*self._running.values(), *self._waiting] if item.request.request_id == request_id]
        self._running.pop(request_id, None)
        self._waiting = [item for item in self._waiting if item not in found]
        for item in found:
            self._finish(item, End(len(item.tokens), FinishReason.ABORT))

    def _finish(self, item: _Running, end: End) -> None:
        now_s = time.time()
        rollout = Rollout(
            request_id=item.request.request_id,
            sampled=item.part(0).first(end.tokens),
            finish_reason=end.reason,
            weights_version=self._version,
            started_s=now_s,
            finished_s=now_s,
            propensity=end.propensity,
        )
        self._events.append(Finished(rollout))

    def _save(self, directory: str) -> DraftersSaved:
        try:
            (Path(directory) / "index").write_text("drafts", encoding="utf-8")
        except OSError as error:
            return DraftersSaved(directory, str(error))
        return DraftersSaved(directory)

    def _note(self, told: Any) -> None:
        if self._options.notes:
            with Path(self._options.notes).open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
