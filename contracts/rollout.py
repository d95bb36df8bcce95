"""Requests to and events from a rollout engine. Plain data; no torch, no Ray, no I/O.

`contracts.engine` defines the commands; `actors.engine.core` executes them.

Clock: every `*_s` time stamp is `time.time()` of the machine that produced it (seconds since the epoch). Spans of
different processes of one node can therefore be drawn on one axis.
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
    TURNS = "turns"  # episodes: environment.max_turns were taken; nothing was cut
    ANSWERED = "answered"  # its StopRule found a complete answer
    GIVEN_UP = "given_up"  # its StopRule expects no answer any more: not trained on
    ABORT = "abort"  # the driver requested it; the tokens so far are valid


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
    """A text to find in responses, as an automaton over tokens. No tokenizer is needed to run it.

    State 0: nothing found yet. The last of the S states: found (absorbing). tokens[i] moves state s to moves[kinds[i],
    s]; any other token moves it to rest[s]. Made by actors.data.stop_strings, run by actors.engine.stopping.
    """

    key: bytes  # equal for equal markers
    tokens: IntArray  # [n], ascending
    kinds: NDArray[np.uint16]  # [n], each below K
    moves: NDArray[np.uint16]  # [K, S]
    rest: NDArray[np.uint16]  # [S]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """When a response ends, besides stop tokens and max_new_tokens. A function of the response's tokens and noise key.

    actors.engine.stopping implements it. The prompt never matters."""

    strings: Marker | None = None  # ends it as STOP with the token that completes one
    answer: Marker | None = None  # ends it as ANSWERED, not before `poll_from_tokens`, after `grace_tokens` more
    poll_from_tokens: int = 1
    grace_tokens: int = 0
    give_up_at_tokens: int | None = None  # ends it as GIVEN_UP there, if no answer was found by then ...
    keep: float = 0.0  # ... except with this probability, drawn from its noise key


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of a response, all or a consecutive part, with the log-probs under which they were drawn."""

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
        """Concatenate: [T_1] .. [T_n] -> [sum T]."""
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
    prefix: Sampled | None = None  # the existing part of a re-issued request's response
    expected_tokens: float = 0.0  # expected response length; longest expected is started first
    evaluation: bool = False  # of a held-out evaluation: excluded from drafter training and drafter statistics
    stop: StopRule | None = None
    # In a later turn of an episode: how many of the last prompt tokens are earlier turns and observations. The noise
    # index continues over them, and drafters receive the first prompt only.
    earlier_tokens: int = 0
    continues: bool = False  # another turn may follow, with these tokens before it: K/V are kept while there is room
    # Draft of the response, sampled with older weights under the same noise; always verified. An engine that cannot
    # verify it (Capabilities.early_text) ignores it.
    early: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished response."""

    request_id: int
    sampled: Sampled  # T >= 1, with the prefix of a re-issued request and the stop token
    finish_reason: FinishReason
    weights_version: int
    started_s: float  # admitted to the running batch
    finished_s: float
    verifications: int = 0  # engine steps that drew its tokens; accept length is tokens drawn there per verification
    propensity: float = 1.0  # probability with which its StopRule lets such a response run to its end
    reused_tokens: int = 0  # prompt tokens whose K/V were cached at its last admission

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
    """A request has ended: an engine's report, and the dispatcher's event, once per request."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens that a running request gained since its last Progress. Deltas keep the traffic linear."""

    request_id: int
    delta: Sampled


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that cannot run, with reason and remedy: longer than the model or the KV cache, or non-finite
    logits."""

    request_id: int
    reason: str


@dataclass(slots=True, kw_only=True)  # not frozen: the engine increments it in every step
class DraftCounts:
    """Sums over engine steps of one or several strategies. Steps with prompt chunks count as steps, and in no seconds
    but saved ones. Seconds are engine seconds, summed over workers."""

    engine_steps: int = 0
    request_steps: int = 0  # verifications: decoding requests, summed over the steps
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # of the timed steps, including drafting
    draft_s: float = 0.0  # of `seconds`, drafting
    saved_s: float = 0.0  # plain-decoding seconds of the same responses, minus their own; 0 where unknown
    expected_s: float = 0.0  # sum of the predicted times of the timed steps that had a prediction ...
    measured_s: float = 0.0  # ... and of their measured times, a part of `seconds`
    missed_s: float = 0.0  # sum over steps of |measured - predicted|
    offered: tuple[int, ...] = ()  # [depth]: requests whose draft reached this depth
    taken: tuple[int, ...] = ()  # [depth]: how many of those were accepted at this depth

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
        """Tokens per verification: accepted ones plus the one that every verification draws. 1 is plain decoding."""
        return 1 + self.accepted / self.request_steps if self.request_steps else None

    @property
    def acceptance(self) -> float | None:
        """Accepted divided by drafted tokens. At most one path of a tree can be accepted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def predicted_error(self) -> float | None:
        """Mean absolute error of predicted step times, relative to the measured times."""
        return self.missed_s / self.measured_s if self.measured_s else None

    @property
    def predicted_ratio(self) -> float | None:
        """Measured over predicted time. 1 if errors of single steps cancel out."""
        return self.measured_s / self.expected_s if self.expected_s else None

    def by_position(self) -> list[float | None]:
        """[depth]: share of drafts at least this deep that were accepted to this depth."""
        return [taken / offered if offered else None for offered, taken in zip(self.offered, self.taken, strict=True)]


def _sums(counts: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Add elementwise; the shorter tuple is padded with zeros."""
    return tuple(a + b for a, b in zip_longest(counts, others, fillvalue=0))


@dataclass(slots=True, kw_only=True)
class StrategyUse(DraftCounts):
    """Counts of one strategy in a window. Immutable once the window is sent."""

    strategy: str  # str(config.strategy.Strategy)


@dataclass(frozen=True, slots=True)
class PromptUse:
    """Drafted and accepted tokens of one prompt's rollouts, without evaluations."""

    prompt_id: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class ReasonUse:
    """Number of engine steps for which a policy gave a reason."""

    reason: str  # a policies.speculation.policy.Reason
    engine_steps: int = 0
    judged: int = 0  # steps with a predicted speedup of the best drafts over plain decoding
    advantage: float = 0.0  # sum of those predicted speedups; 1 is the speed of plain decoding

    def add(self, other: "ReasonUse") -> None:
        self.engine_steps += other.engine_steps
        self.judged += other.judged
        self.advantage += other.advantage

    @property
    def mean_advantage(self) -> float | None:
        """The mean predicted speed of the best drafts relative to plain decoding, over the steps with a prediction."""
        return self.advantage / self.judged if self.judged else None

    def to_json(self) -> list[float]:
        return [self.engine_steps, self.judged, round(self.advantage, 3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUse:
    """Sums over engine steps that verified early text (Request.early)."""

    engine_steps: int = 0
    checked: int = 0  # early tokens verified
    stood: int = 0  # of those, accepted
    seconds: float = 0.0  # duration of those steps, without other requests' prompts and captures of graphs
    # Seconds of the usual decoding, with drafts, of the tokens of those steps, minus `seconds`; 0 where unknown.
    saved_s: float = 0.0

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
    """Telemetry of the engine steps in [start_s, end_s): one record about every 0.2 s and when the engine becomes
    idle."""

    start_s: float
    end_s: float
    engine_steps: int
    prefill_tokens: int
    decode_tokens: int
    running: int  # at the end of the window
    waiting: int
    kv_tokens_used: int
    preempted: int = 0  # requests to be recomputed because the cache was full
    strategies: tuple[StrategyUse, ...] = ()
    # (time, requests running, drafter) after every change of either, at most one per 5 ms.
    trace: tuple[tuple[float, int, str], ...] = ()
    evaluation: bool = False  # these steps decoded a held-out evaluation; no window has steps of both kinds
    prompts: tuple[PromptUse, ...] = ()  # since the last window; many prompts are spread over several windows
    reasons: tuple[ReasonUse, ...] = ()  # why decoding steps used their strategy; empty without a policy
    early: EarlyUse | None = None  # None: no early text was verified
    origins: tuple[tuple[str, int], ...] = ()  # accepted drafted tokens by where their drafter found them, if it says
    # Of a sample of drafts: their number, accepted tokens, and those accepted without siblings under way.
    sibling_gain: tuple[int, int, int] = (0, 0, 0)
    heard_tokens: int = 0  # of siblings under way on other workers, that the drafters received
    heard_delay_s: float = 0.0  # sum over those tokens: from the driver's clock to this engine's


class EngineAnswer:
    """An event that answers a command (`contracts.engine.Answered`). Only the caller receives it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(EngineAnswer):
    """The weights that the engine holds now. The checksum is of the bytes that were read."""

    version: int
    checksum: int
    seconds: float
    way: str = "store"  # how they arrived: "store", "delta", "ipc" or "broadcast"
    quantization: Quantization = "none"  # of the weights that the engine stores and computes with
    failure: str = ""  # why offered weights did not arrive: `version` is not theirs
    instead: str = ""  # why a full copy was loaded although a delta was sent


@dataclass(frozen=True, slots=True)
class DraftersSaved(EngineAnswer):
    """All drafter state is in the directory, or `failure` says what is missing and why."""

    directory: str
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """Hidden states of sequences that ended, or that new weights cut off, and their cost."""

    records: tuple[SequenceRecord, ...]
    seconds: float  # of recording, in engine steps since the last such event
    skipped: int  # requests that ended since then without a record, because of the byte budget or changed weights
    failure: str = ""  # why the first record was lost; reported once per engine

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.records)


@dataclass(frozen=True, slots=True)
class DrafterLoaded(EngineAnswer):
    """The weights that the drafter holds now. The checksum is of the bytes that were read."""

    name: str
    version: int
    checksum: int
    seconds: float
    reason: str = ""  # why it kept its earlier weights, if it did


@dataclass(frozen=True, slots=True)
class Slept(EngineAnswer):
    """The KV cache's memory is released, or `refusal` gives the reason why not."""

    refusal: str = ""


@dataclass(frozen=True, slots=True)
class DrafterFailed:
    """A drafter raised. The engine decodes without it until new weights arrive or, if `final`, for good."""

    name: str
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class GraphsFailed:
    """A CUDA graph could not be captured. The engine launches every kernel of its steps from now on."""

    graph: str  # its shape
    reason: str


@dataclass(frozen=True, slots=True)
class EngineIdle:
    """No work is left. Sent once per transition to idle."""

    at_s: float


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine cannot continue and exits after this. The traceback is on its stderr."""

    reason: str


class PassEvent:
    """Telemetry of an engine about the time of its own forward passes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PassesKnown(PassEvent):
    """Number of calibrated passes at the engine's start; 0 without a calibration for it."""

    key: CalibrationKey
    passes: int


@dataclass(frozen=True, slots=True)
class PassesRefined(PassEvent):
    """All measurements so far, for the next run."""

    calibration: Calibration


@dataclass(frozen=True, slots=True)
class PassesDrifted(PassEvent):
    """Steps take `factor` times the calibrated time; the last report said `before`."""

    factor: float
    before: float


# to the driver
DriverEvent = Finished | Progress | Rejected | EngineWindow | PassEvent | DrafterFailed | GraphsFailed | EngineFailed
Event = DriverEvent | Recorded | EngineIdle | EngineAnswer


class EngineDiedError(RuntimeError):
    """There is no engine process: none was started, or it ended unexpectedly, with its exit code or signal and the tail
    of its stderr."""
