"""What crosses the boundary of a rollout engine: requests in, events out. Plain data; no torch, no Ray, no I/O.

How an engine is told anything is in `contracts.engine`, who does what it is told in `actors.engine.core`.

Clock: every `*_s` time stamp is `time.time()` of the machine that produced it (seconds since the epoch), so that
spans of different processes of one node can be drawn on one axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from config.formats import Quantization
from contracts.records import SequenceRecord
from policies.calibration.document import Calibration, CalibrationKey

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token was sampled, or one that completed a stop string; it is the last of the response
    LENGTH = "length"  # max_new_tokens or the model's limit was reached
    TURNS = "turns"  # of an episode: environment.max_turns were taken; nothing of it was cut
    ANSWERED = "answered"  # by its StopRule the answer is there
    GIVEN_UP = "given_up"  # by its StopRule no answer is expected any more: not to be trained on
    ABORT = "abort"  # the driver asked for it; the tokens so far are valid


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Token i of a response ~ softmax(logits / temperature) restricted by top-k, then top-p (1 and 0 are 'off')."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Marker:
    """A text to be found in responses, as an automaton that reads tokens: no tokenizer is needed to run it.

    State 0: nothing found yet; the last of the S states: found, for good. tokens[i] takes state s to
    moves[kinds[i], s], any other token takes it to rest[s]. Made by actors.data.stop_strings, run by
    actors.engine.stopping.
    """

    key: bytes  # equal for equal markers
    tokens: IntArray  # [n], ascending
    kinds: NDArray[np.uint16]  # [n], each below K
    moves: NDArray[np.uint16]  # [K, S]
    rest: NDArray[np.uint16]  # [S]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """What ends a response beside stop tokens and max_new_tokens, as a function of its tokens and its noise key; the
    law is actors.engine.stopping. Only what the response itself says counts, never the prompt."""

    strings: Marker | None = None  # ends it with the token that completes it, as STOP
    answer: Marker | None = None  # ends it as ANSWERED, not before `poll_from_tokens`, after `grace_tokens` more
    poll_from_tokens: int = 1
    grace_tokens: int = 0
    give_up_at_tokens: int | None = None  # ends it as GIVEN_UP there, if the answer has not been found by then ...
    keep: float = 0.0  # ... unless its coin, which falls so with this probability, lets it run on


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a response, all or consecutive ones of it, with the log-probs under which they were drawn."""

    tokens: IntArray  # [T]
    logprobs: FloatArray  # [T], of the sampling distribution (after temperature, top-k, top-p); 0 at temperature 0
    # [T], of softmax(logits) without temperature or truncation; None where the engine cannot give them
    logprobs_t1: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> "Sampled":
        logprobs_t1 = None if self.logprobs_t1 is None else self.logprobs_t1[:count]
        return Sampled(self.tokens[:count], self.logprobs[:count], logprobs_t1)

    @staticmethod
    def join(parts: Sequence["Sampled"]) -> "Sampled":
        """One behind the other: [T_1] .. [T_n] -> [sum T]."""
        known = [p.logprobs_t1 for p in parts if p.logprobs_t1 is not None]
        return Sampled(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.logprobs for p in parts]),
            np.concatenate(known) if len(known) == len(parts) else None,
        )


NOTHING_SAMPLED = Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to be sampled. Requests with equal `prompt_id` have equal `prompt_tokens` and share one prefill."""

    request_id: int
    prompt_id: int
    prompt_tokens: IntArray  # [L], L >= 1
    noise_key: int  # 64 bit, from (run seed, epoch, prompt, sample); never from worker, retry or turn
    sampling: SamplingParams
    prefix: Sampled | None = None  # what exists already of a re-issued request's response
    expected_tokens: float = 0.0  # expected response length; longest expected is started first
    evaluation: bool = False  # of a held-out evaluation: drafters neither learn from it nor are judged by it
    stop: StopRule | None = None
    # Of a later turn of an episode: so many of the last prompt tokens are its earlier turns and what was observed.
    # Noise counts on over them, and drafters are told of the first prompt.
    earlier_tokens: int = 0
    continues: bool = False  # another turn may follow, with these tokens before it: their K/V stay while there is room
    # A guess at the response, sampled with older weights under the same noise: checked, never trusted. An engine that
    # cannot check (Capabilities.early_text) ignores it.
    early: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished response."""

    request_id: int
    sampled: Sampled  # T >= 1, the prefix of a re-issued request and the stop token included
    finish_reason: FinishReason
    weights_version: int
    started_s: float  # admitted to the running batch
    finished_s: float
    verifications: int = 0  # engine steps that drew tokens of it; accept length is tokens drawn there per verification
    propensity: float = 1.0  # probability with which its StopRule let such a response run to its end
    reused_tokens: int = 0  # of the prompt, those whose K/V were there when it was admitted last

    @property
    def tokens(self) -> IntArray:
        return self.sampled.tokens

    @property
    def logprobs(self) -> FloatArray:
        return self.sampled.logprobs

    @property
    def logprobs_t1(self) -> FloatArray | None:
        return self.sampled.logprobs_t1


@dataclass(frozen=True, slots=True)
class Finished:
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens that a running request gained since its last Progress (deltas, so that traffic stays linear)."""

    request_id: int
    delta: Sampled


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that cannot run at all (longer than the model or the whole KV cache), or whose logits are no numbers,
    with reason and remedy."""

    request_id: int
    reason: str


@dataclass(slots=True, kw_only=True)  # not frozen: an engine counts in it, step by step
class DraftCounts:
    """What engine steps did, of one strategy or of several: sums. Steps with prompt chunks count as steps, not in any
    seconds. Seconds are engine seconds: workers add up."""

    engine_steps: int = 0
    request_steps: int = 0  # verifications: decoding requests, summed over the steps
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of the timed steps, drafting included
    draft_s: float = 0.0  # of it, drafting
    saved_s: float = 0.0  # measured plain-decoding seconds of the same tokens, less `seconds`; 0 where not known
    expected_s: float = 0.0  # of those timed steps whose time was predicted beforehand, the sum of the predictions ...
    measured_s: float = 0.0  # ... and what they took: part of `seconds`
    missed_s: float = 0.0  # sum of the absolute differences of the two, step by step
    offered: tuple[int, ...] = ()  # [depth]: requests whose draft reached this depth
    taken: tuple[int, ...] = ()  # [depth]: of them, accepted there

    def add(self, other: "DraftCounts") -> None:
        self.engine_steps += other.engine_steps
        self.request_steps += other.request_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.seconds += other.seconds
        self.draft_s += other.draft_s
        self.saved_s += other.saved_s
        self.expected_s += other.expected_s
        self.measured_s += other.measured_s
        self.missed_s += other.missed_s
        self.offered = _sums(self.offered, other.offered)
        self.taken = _sums(self.taken, other.taken)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification: the accepted ones and the one that every verification draws. 1 is plain decoding."""
        return 1 + self.accepted / self.request_steps if self.request_steps else None

    @property
    def acceptance(self) -> float | None:
        """Accepted of drafted tokens. Of a tree at most one path can be accepted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def predicted_error(self) -> float | None:
        """Mean absolute error of the predicted times of engine steps, relative to what they took."""
        return self.missed_s / self.measured_s if self.measured_s else None

    @property
    def predicted_ratio(self) -> float | None:
        """What they took over what was predicted: 1 where errors of single steps even out."""
        return self.measured_s / self.expected_s if self.expected_s else None

    def by_position(self) -> list[float | None]:
        """[depth]: share of the drafts of at least this depth that were accepted to it."""
        return [taken / offered if offered else None for offered, taken in zip(self.offered, self.taken, strict=True)]


def _sums(counts: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Place by place; the shorter one counts as 0 beyond its end."""
    return tuple(a + b for a, b in zip_longest(counts, others, fillvalue=0))


@dataclass(slots=True, kw_only=True)
class StrategyUse(DraftCounts):
    """What one strategy did in a window. Nobody changes it once the window is told."""

    strategy: str  # str(config.strategy.Strategy)


@dataclass(frozen=True, slots=True)
class PromptUse:
    """What was drafted for the rollouts of one prompt, and what of it stood; evaluations do not count."""

    prompt_id: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class ReasonUse:
    """How many engine steps a policy chose for a reason."""

    reason: str  # a policies.speculation.policy.Reason
    engine_steps: int
    judged: int = 0  # of them, those for which the speed of the best drafts beside plain decoding was predicted
    advantage: float = 0.0  # sum of those predictions; 1 is plain decoding's speed


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUse:
    """What engine steps that checked early text did (Request.early): sums."""

    engine_steps: int = 0
    checked: int = 0  # early tokens
    stood: int = 0  # of them
    seconds: float = 0.0  # of those steps
    saved_s: float = 0.0  # measured plain-decoding seconds of the same tokens, less `seconds`; 0 where not known

    def plus(self, other: "EarlyUse") -> "EarlyUse":
        return EarlyUse(
            engine_steps=self.engine_steps + other.engine_steps,
            checked=self.checked + other.checked,
            stood=self.stood + other.stood,
            seconds=self.seconds + other.seconds,
            saved_s=self.saved_s + other.saved_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWindow:
    """Telemetry of the engine steps in [start_s, end_s): one record about every 0.2 s and when the engine idles."""

    start_s: float
    end_s: float
    engine_steps: int
    prefill_tokens: int
    decode_tokens: int
    running: int  # at the end of the window
    waiting: int
    kv_tokens_used: int
    preempted: int = 0  # requests recomputed because the cache was full
    strategies: tuple[StrategyUse, ...] = ()
    # (time, requests running, drafter) after every change of either, at most one per 5 ms.
    trace: tuple[tuple[float, int, str], ...] = ()
    evaluation: bool = False  # these steps decoded a held-out evaluation; no window has steps of both kinds
    prompts: tuple[PromptUse, ...] = ()  # since the last window; very many are spread over several
    reasons: tuple[ReasonUse, ...] = ()  # why the steps that decoded did it the way they did; none without a policy
    early: EarlyUse | None = None  # None: no early text was checked


class EngineAnswer:
    """An event that answers a command (`contracts.engine.Answered`); whoever asked gets it, nobody else."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(EngineAnswer):
    """What the engine holds now. The checksum is computed over what was read."""

    version: int
    checksum: int
    seconds: float
    way: str = "store"  # how they came: "store", "delta", "ipc" or "broadcast"
    quantization: Quantization = "none"  # of what the engine stores and computes with now
    failure: str = ""  # why weights that were offered did not come: `version` is not theirs
    instead: str = ""  # why they came whole although a delta was sent


@dataclass(frozen=True, slots=True)
class DraftersSaved(EngineAnswer):
    """Everything is in the directory, or `failure` says what is missing and why."""

    directory: str
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the target computed over sequences that have ended (or that new weights cut off), and what that cost."""

    records: tuple[SequenceRecord, ...]
    seconds: float  # of engine steps since the last such event
    skipped: int  # requests that ended since then and were left out, by the byte budget or because weights changed
    failure: str = ""  # why the first record was lost that should have been recorded; said once by an engine

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.records)


@dataclass(frozen=True, slots=True)
class DrafterLoaded(EngineAnswer):
    """What the drafter holds now. The checksum is computed over what was read."""

    name: str
    version: int
    checksum: int
    seconds: float
    reason: str = ""  # why it holds what it held before, if so


@dataclass(frozen=True, slots=True)
class Slept(EngineAnswer):
    """The KV cache's memory is released, or `refusal` says why not."""

    refusal: str = ""


@dataclass(frozen=True, slots=True)
class DrafterFailed:
    """A drafter raised: this engine decodes without it, until new weights bring it back or, if `final`, for good."""

    name: str
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class EngineIdle:
    """Nothing left to do. Sent once per transition to idle."""

    at_s: float


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine cannot go on; it exits after this. The traceback is on its stderr."""

    reason: str


class PassEvent:
    """Telemetry of an engine about its own passes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PassesKnown(PassEvent):
    """With what an engine began: so many passes of its calibration, 0 where there is none for it."""

    key: CalibrationKey
    passes: int


@dataclass(frozen=True, slots=True)
class PassesRefined(PassEvent):
    """Everything measured so far, for the next run."""

    calibration: Calibration


@dataclass(frozen=True, slots=True)
class PassesDrifted(PassEvent):
    """Steps take `factor` times what the calibration says; what was said last was `before`."""

    factor: float
    before: float


DriverEvent = Finished | Progress | Rejected | EngineWindow | PassEvent | DrafterFailed | EngineFailed  # to the driver
Event = DriverEvent | Recorded | EngineIdle | EngineAnswer


class EngineDiedError(RuntimeError):
    """The engine process ended without being asked to: exit code or signal, and the tail of its stderr."""
