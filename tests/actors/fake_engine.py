"""A rollout engine in a real process of its own whose tokens are known: token i is a hash of (noise key, i).

So tokens depend on nothing but the noise key, as with the native engine, and any loss, re-issue or double count shows.
"""

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

import numpy as np
from numpy.typing import NDArray

from actors.engine.types import (
    Capabilities,
    DrafterFailed,
    DrafterLoaded,
    DraftersSaved,
    EngineDiedError,
    EngineIdle,
    EngineWindow,
    Event,
    Finished,
    FinishReason,
    IntArray,
    Progress,
    Rejected,
    Request,
    Rollout,
    Sampled,
    SamplingParams,
    WeightsLoaded,
)
from models.manifest import WeightsManifest

VOCAB = 97
STOP = 7


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


def token(noise_key: int, position: int) -> int:
    return zlib.crc32(f"{noise_key}/{position}".encode()) % VOCAB


def logprob(noise_key: int, position: int) -> float:
    return -(zlib.crc32(f"{noise_key}:{position}".encode()) % 1000) / 256  # exact in float32


def response(request: Request) -> tuple[list[int], FinishReason]:
    """The oracle: what any engine must answer, disturbed or not."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens:
        tokens.append(token(request.noise_key, len(tokens)))
        if tokens[-1] in request.sampling.stop_token_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def make_request(request_id: int, prompt_id: int = 0, *, max_new_tokens: int = 24, seed: int = 0) -> Request:
    return Request(
        request_id=request_id,
        prompt_id=prompt_id,
        prompt_tokens=np.arange(3, dtype=np.int32),
        noise_key=seed * 100_000 + request_id,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(STOP,)),
        expected_tokens=float(max_new_tokens),
    )


class FakeEngine:
    """The parent's end: a RolloutEngine."""

    def __init__(self, options: FakeOptions) -> None:
        if options.fail_to_start:
            raise RuntimeError(options.fail_to_start)
        ours, theirs = socketpair()
        with theirs:
            root = str(Path(__file__).parents[2])
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.actors.fake_engine", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=root,
                env=os.environ | {"PYTHONPATH": root},
            )
        self._pipe = Connection(ours.detach())
        self._pipe.send(options)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(backend="fake", invariant_tokens=True, notes=(f"pid={self._child.pid}",))

    def submit(self, requests: Sequence[Request]) -> None:
        self._send(("submit", list(requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(("abort", list(request_ids)))

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        self._send(("weights", (manifest, buffer)))

    def sleep(self) -> None:
        self._send(("sleep", None))

    def wake(self) -> None:
        self._send(("wake", None))

    def remember(self, prompts: Sequence[IntArray], responses: Sequence[IntArray]) -> None:
        shown = [[prompt.tolist(), response.tolist()] for prompt, response in zip(prompts, responses, strict=True)]
        self._send(("note", {"remember": shown}))

    def save_drafters(self, directory: str) -> None:
        self._send(("save", directory))

    def load_drafters(self, directory: str) -> None:
        self._send(("note", {"load": directory}))

    def update_drafter(self, name: str, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        self._send(("drafter", (name, manifest, buffer)))

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        try:
            while self._pipe.poll(0 if events else timeout_s):
                events.extend(self._pipe.recv())
        except (EOFError, OSError):
            if not events:
                raise EngineDiedError(f"the engine ended with exit code {self._child.wait(5)}") from None
        return events

    def close(self) -> None:
        self._child.kill()
        self._child.wait(5)
        self._pipe.close()

    def _send(self, message: tuple[str, object]) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise EngineDiedError("the engine is gone") from error


@dataclass
class _Running:
    request: Request
    tokens: list[int]
    reported: int

    def delta(self) -> Sampled:
        positions = range(self.reported, len(self.tokens))
        return part(self.request.noise_key, self.tokens, positions)


def part(noise_key: int, tokens: list[int], positions: range) -> Sampled:
    logprobs = np.array([logprob(noise_key, p) for p in positions], np.float32)
    return Sampled(np.array([tokens[p] for p in positions], np.int32), logprobs, logprobs * 2)


def _child(pipe: Connection) -> None:
    options: FakeOptions = pipe.recv()
    waiting: list[Request] = []
    running: dict[int, _Running] = {}
    version = 0

    def finished(item: _Running, reason: FinishReason) -> Finished:
        whole = part(item.request.noise_key, item.tokens, range(len(item.tokens)))
        prefix = item.request.prefix
        if prefix is not None:  # what was handed over is handed back, not made up again
            rest = part(item.request.noise_key, item.tokens, range(len(prefix), len(item.tokens)))
            whole = Sampled.join([prefix, rest])
        now = time.time()
        rollout = Rollout(
            request_id=item.request.request_id,
            sampled=whole,
            finish_reason=reason,
            weights_version=version,
            started_s=now,
            finished_s=now,
        )
        return Finished(rollout)

    while True:
        busy = bool(waiting or running)
        events: list[Event] = []
        while pipe.poll(options.step_s if busy else 1.0):
            kind, value = pipe.recv()
            if kind == "submit":
                for request in value:
                    if request.request_id == options.poison:
                        os._exit(3)
                    if request.request_id == options.hang_on:
                        time.sleep(3600)
                    if len(request.prompt_tokens) > 1000:
                        events.append(Rejected(request.request_id, "prompt of more than 1000 tokens"))
                    else:
                        waiting.append(request)
            elif kind == "abort":
                for request_id in value:
                    if (item := running.pop(request_id, None)) is not None:
                        events.append(finished(item, FinishReason.ABORT))
                for request in [r for r in waiting if r.request_id in value]:
                    waiting.remove(request)
                    tokens = [] if request.prefix is None else request.prefix.tokens.tolist()
                    events.append(finished(_Running(request, tokens, 0), FinishReason.ABORT))
            elif kind == "note" and options.notes:
                with Path(options.notes).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(value) + "\n")
            elif kind == "save" and not options.mute_drafters:
                failure = None
                try:
                    (Path(value) / "index").write_text("drafts", encoding="utf-8")
                except OSError as error:
                    failure = str(error)
                events.append(DraftersSaved(value, failure))
            elif kind == "drafter":
                name, manifest, buffer = value
                if options.notes:
                    with Path(options.notes).open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"drafter": name, "version": manifest.version}) + "\n")
                if options.failing_drafter:
                    events.append(DrafterFailed(name, options.failing_drafter, final=True))
                loaded = DrafterLoaded(name, manifest.version, zlib.crc32(buffer), 0.001, options.failing_drafter)
                events.append(loaded)
            elif kind == "weights":
                manifest, buffer = value
                version = manifest.version
                checksum = zlib.crc32(buffer) ^ options.wrong_checksum
                events.append(WeightsLoaded(version, checksum, 0.001))
            busy = bool(waiting or running)
        start_s = time.time() - options.step_s
        while waiting and len(running) < options.max_running:
            request = waiting.pop(0)
            tokens = [] if request.prefix is None else request.prefix.tokens.tolist()
            running[request.request_id] = _Running(request, tokens, len(tokens))
        steps = len(running)
        for item in list(running.values()):
            request = item.request
            item.tokens.append(token(request.noise_key, len(item.tokens)))
            if item.tokens[-1] in request.sampling.stop_token_ids:
                events.append(finished(item, FinishReason.STOP))
            elif len(item.tokens) >= request.sampling.max_new_tokens:
                events.append(finished(item, FinishReason.LENGTH))
            elif len(item.tokens) - item.reported >= options.progress_every_tokens:
                events.append(Progress(request.request_id, item.delta()))
                item.reported = len(item.tokens)
                continue
            else:
                continue
            del running[request.request_id]
        if steps:
            events.append(
                EngineWindow(
                    start_s=start_s,
                    end_s=time.time(),
                    engine_steps=1,
                    prefill_tokens=0,
                    decode_tokens=steps,
                    running=len(running),
                    waiting=len(waiting),
                    kv_tokens_used=0,
                )
            )
            if not running and not waiting:
                events.append(EngineIdle(time.time()))
        if events:
            pipe.send(events)


if __name__ == "__main__":
    try:
        # Under its own name, not as __main__: what is pickled here must be found there.
        from tests.actors import fake_engine

        fake_engine._child(Connection(int(sys.argv[1])))
    except (EOFError, OSError):
        pass  # the parent is gone
