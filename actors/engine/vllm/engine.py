"""The rollout engine over stock vLLM, synchronous and in this process: requests in, events out, one step per `step`.

vLLM owns the model, the KV cache and the draws. Slots, drafts, stop rules and telemetry are those of the native engine
(`actors.engine.batch`). Tokens are not invariant: the batch's composition changes the last bits of logits, and
speculation changes which noise a token gets.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.batch.account import StepAccount
from actors.engine.batch.engine import BatchEngine
from actors.engine.batch.intake import EngineLimits
from actors.engine.batch.plan import SlotWatcher, StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.speculation import Speculator
from actors.engine.batch.step.build import step_arrays
from actors.engine.batch.stops import RuleStops
from actors.engine.batch.telemetry import EngineStepRecord, PromptMeter
from actors.engine.calibrated import PassNews
from actors.engine.vllm.queue import AdmissionQueue
from actors.engine.vllm.readout import ReadStep, read_decoding, read_step
from actors.engine.vllm.worker_drafts import WorkerDrafter
from config.formats import Quantization
from config.strategy import PLAIN
from contracts.handoff import Offer
from contracts.rollout import (
    DrafterFailed,
    Request,
    Sampled,
    WeightsLoaded,
)
from drafter.protocol import Drafter
from models.manifest import WeightsManifest
from models.weights import WeightsCorruptError
from policies.speculation.policy import StrategyPolicy
from policies.speculation.savings import Savings
from policies.steps import Load

Int64Array = NDArray[np.int64]
NO_DRAFTERS: Mapping[str, Drafter] = {}
_BLOCKS = 1 << 40  # KV blocks are vLLM's: the table assumes that there are always enough


class Backend(Protocol):
    """The interface of vLLM that this engine uses (`actors.engine.vllm.backend`)."""

    kv_blocks: int
    block_tokens: int
    model_tokens: int
    vocab_size: int
    refusal: str  # why nothing may be drafted at temperatures above 0, or "" (`actors.engine.vllm.self_test`)

    @property
    def preempted(self) -> int:
        """Number of preemptions by vLLM for lack of KV cache so far."""

    def attach(self, control: Any) -> None:
        """Let `control` (`actors.engine.vllm.scheduler.StepControl`) make the decisions from now on."""

    def submit(self, request: Request, prefix: Sampled | None, limit: int) -> None: ...
    def abort(self, request_ids: Sequence[int]) -> None: ...

    def step(self) -> None:
        """Run one engine step, if there is anything to compute or clean up."""

    def kv_tokens_used(self) -> int: ...
    def draft_s(self, drafts: int) -> float | None:
        """Return recent seconds of vLLM's network for this many drafts per request, on the first rank; None: no such
        pass since the last call."""

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> Sequence[int]:
        """Load weights. Returns the requests without draws, which start again."""

    def update_drafter(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        """Update the network that vLLM drafts with. Raises ValueError or WeightsCorruptError if it cannot load them."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class VllmEngine(BatchEngine):
    """Continuous batching by vLLM. `weights_version`: version of its loaded weights. `quantization`: the backend's
    precision.

    `drafters`, `policy`, `steps`, `news`: as in NativeEngine. Drafts are chains. `worker`: vLLM's own drafter. It
    drafts at the end of a step for the next one. Every strategy is then chosen one step before its use, which the
    policy must know (`lag`).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_running: int,
        progress_every_tokens: int,
        weights_version: int = 0,
        quantization: Quantization = "none",
        drafters: Mapping[str, Drafter] = NO_DRAFTERS,
        worker: WorkerDrafter | None = None,
        policy: StrategyPolicy | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
        steps: list[EngineStepRecord] | None = None,
        news: PassNews | None = None,
    ) -> None:
        super().__init__(weights_version, clock)
        self._backend, self._quantization = backend, quantization
        self._limits = EngineLimits(
            backend.vocab_size, backend.model_tokens, backend.kv_blocks, backend.block_tokens, logprobs_t1=False
        )
        table = self._table = SlotTable(max_running, backend.model_tokens, 1, logprobs_t1=False)
        table.block_counts[:] = _BLOCKS
        self._steps = step_arrays(table, 1)
        self._speculator = Speculator(
            table,
            self._steps,
            backend.vocab_size,
            torch.device("cpu"),
            drafters if worker is None else {**drafters, worker.name: worker},
            policy,
            events=self._events,
            timer=timer,
        )
        self._speculator.new_target(weights_version)
        self._stops = RuleStops(table, backend.vocab_size)
        prompts, savings = PromptMeter(table), Savings(table.length)
        watchers: list[SlotWatcher] = [self._stops]
        if self._speculator.has_drafters:
            watchers += [self._speculator, prompts, savings]
        self._worker = worker
        if backend.refusal:
            names = [*drafters, *(() if worker is None else (worker.name,))]
            self._events += [DrafterFailed(name, backend.refusal, final=True) for name in names]
        self._queue = self._admission = AdmissionQueue(table, watchers)
        self._occupancy = self
        self._account = StepAccount(table, self._speculator, prompts, savings, steps, timer, news=news)
        self._progress_every_tokens = progress_every_tokens
        # The current step: vLLM's decoding requests, the plan of their slots, and the result.
        self._decoding: list[Any] = []
        self._names: list[str] = []
        self._plan = _plan(np.zeros(0, np.int64))
        self._load, self._strategy, self._next = Load(0, 0, 0), PLAIN, PLAIN
        self._step: ReadStep | None = None
        backend.attach(self)

    # interface telemetry.Occupancy

    @property
    def running(self) -> int:
        return self._admission.running

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def kv_tokens_used(self) -> int:
        return self._backend.kv_tokens_used()

    @property
    def preempted(self) -> int:
        return self._backend.preempted

    # Commands.

    def abort(self, request_ids: Sequence[int]) -> None:
        """See BatchEngine."""
        known = [request_id for request_id in request_ids if request_id in self._admission]
        self._backend.abort([request_id for request_id in known if self._admission.ticket(request_id).slot >= 0])
        super().abort(request_ids)

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> WeightsLoaded:
        """See BatchEngine."""
        start_s = self._clock()
        for request_id in self._backend.update_weights(manifest, buffer):
            self._admission.ticket(request_id).weights_version = manifest.version
        self._version = manifest.version
        self._account.new_weights()
        self._speculator.new_target(manifest.version)
        return WeightsLoaded(
            version=manifest.version,
            checksum=manifest.checksum,
            seconds=self._clock() - start_s,
            quantization=self._quantization,
        )

    def receive_weights(self, offer: Offer) -> WeightsLoaded:
        """Refuse: vLLM's ranks read whole tensors from memory, so its weights come through the object store."""
        reason = "vllm takes weights from the object store only"
        return WeightsLoaded(version=self._version, checksum=0, seconds=0.0, failure=reason)

    def _load_drafter(self, name: str, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> str:
        if self._worker is None or self._worker.name != name:
            return f"there is no drafter {name!r} with weights in this engine"
        try:
            self._backend.update_drafter(manifest, buffer)
        except (ValueError, WeightsCorruptError) as error:
            return str(error)
        self._speculator.renewed(name)
        return ""

    def _release(self) -> None:
        self._backend.sleep()

    def record(self, on: bool) -> None:
        """No hidden states are recorded here."""

    def wake(self) -> None:
        """See BatchEngine."""
        self._backend.wake()

    def close(self) -> None:
        """See BatchEngine."""
        self._backend.close()

    # A step.

    def _advance(self, now_s: float) -> None:
        for ticket in self._admission.admit(self._version, now_s):
            self._backend.submit(ticket.request, ticket.prefix, ticket.limit)
        if self._admission.has_work:
            self._backend.step()  # calls before_schedule and sampled
            step, self._step = self._step, None
            if step is not None:
                self._settle(step, now_s)

    def before_schedule(self, running: list[Any]) -> None:
        """Choose a strategy for the decoding requests and draft by it; see StepControl."""
        decoding = [request for request in running if request.num_computed_tokens >= request.num_tokens - 1]
        if decoding != self._decoding:  # otherwise keep the same array: its users compare its identity
            self._decoding, self._names = decoding, [request.request_id for request in decoding]
            self._plan = _plan(np.array([self._slot_of(name) for name in self._names], np.int64))
        plan = self._plan
        self._load = self._speculator.load_of(plan, self._admission.waiting)
        if self._worker is not None:
            self._worker.made([request.spec_token_ids for request in decoding])
            for request in running:  # only chosen drafts are verified
                request.spec_token_ids = []
        if self._backend.refusal and self._table.temperature[plan.slots].any():
            self._strategy = self._next = PLAIN
            return
        self._strategy, self._next = self._next, self._speculator.choose(self._load)
        if self._worker is None:
            self._strategy = self._next
        drafts = self._speculator.draft(plan, self._strategy, _unlimited)
        if drafts is not None:
            chains = zip(decoding, drafts.tokens.tolist(), drafts.counts.tolist(), strict=True)
            for request, tokens, count in chains:
                request.spec_token_ids = tokens[:count]

    def verifies_network(self) -> bool:
        """See StepControl."""
        return self._worker is not None and self._strategy.drafter == self._worker.name

    def drafts_to_make(self) -> int:
        """See StepControl."""
        return 0 if self._worker is None else self._worker.drafts_to_make(self._next)

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        """Write the draws to the table and apply the stop rules; see StepControl."""
        if scheduled.total_num_scheduled_tokens == len(self._names) and self._names == [
            *scheduled.num_scheduled_tokens
        ]:
            step = read_decoding(self._plan, self._names, output)
        else:
            step = read_step(scheduled, output, self._slot_of)
        self._step, table, slots = step, self._table, step.plan.slots[step.plan.samples]
        greedy = table.temperature[slots] == 0.0
        if greedy.any():
            step.logprobs[greedy.repeat(step.rows)] = 0.0  # as SamplingParams defines it
        settled = self._steps.settle(
            step.plan, step.tokens, step.logprobs, step.logprobs, step.drafts, self._progress_every_tokens
        )
        step.settled = self._stops.apply(step.plan, settled)
        ended = {slot for slot, _ in step.settled.ended}
        if not ended:
            return set()
        names = {name for name, slot in zip(step.sampled, slots.tolist(), strict=True) if slot in ended}
        if step.settled.emitted is not None:
            for name, emitted in zip(step.sampled, step.settled.emitted.tolist(), strict=True):
                if name in names:
                    del output.sampled_token_ids[output.req_id_to_index[name]][emitted:]
        return names

    def _settle(self, step: ReadStep, now_s: float) -> None:
        """Report the step's result, after vLLM has recorded the step as well."""
        settled = step.settled
        self._speculator.drew(settled.new_tokens)
        if self._worker is not None:  # it drafted at the end of this step
            self._speculator.draft_s += self._worker.seconds(self._backend.draft_s)
        window = self._account.count(
            step.plan,
            self._strategy,
            self._load,
            step.drafts,
            settled,
            self,
            now_s,
            # otherwise this step's time includes another strategy's drafts, or excludes its own
            undisturbed=self._next is self._strategy,
        )
        if window is not None:
            self._events.append(window)
        ended_s = self._clock() if settled.ended else 0.0
        for slot, reason in settled.ended:
            ticket = self._admission.ticket(int(self._table.request_id[slot]))
            self._ended(ticket, slot, reason, ended_s)
        self._events += [self._table.progress(slot) for slot in settled.due]

    def _slot_of(self, name: str) -> int:
        return self._admission.ticket(int(name)).slot


def _plan(slots: Int64Array) -> StepPlan:
    """Return the plan of a step in which all slots decode."""
    return StepPlan(slots, np.ones(len(slots), np.int64), np.ones(len(slots), np.bool_))


def _unlimited(slots: Int64Array, counts: Int64Array) -> Int64Array:
    """Return all counts: vLLM manages KV blocks and preempts if there are too few."""
    return counts
