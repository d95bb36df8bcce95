"""The native rollout engine, synchronous and in this process: requests in, events out, one forward per `step`.

Owns requests from submit to their last event, the weights' version and the accept rule's effect on the sequences.
It never waits, never starts a thread or a process (`actors.engine.process` does) and reads no clock but the one given.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.engine.native.blocks import BlockPool
from actors.engine.native.intake import Limits, ended_by_prefix, reason_to_reject
from actors.engine.native.runner import Draws, ModelRunner
from actors.engine.native.scheduler import Scheduler, StepPlan, Ticket
from actors.engine.native.slots import SlotTable
from actors.engine.native.speculation import Speculator
from actors.engine.native.telemetry import WindowMeter
from actors.engine.native.verify import accept
from actors.engine.options import EngineOptions
from actors.engine.types import (
    Capabilities,
    EngineIdle,
    Event,
    Finished,
    FinishReason,
    Prefix,
    Progress,
    Rejected,
    Request,
    Rollout,
    WeightsLoaded,
)
from drafter.protocol import Drafter
from models import weights
from models.checkpoint import load_hf_state_dict
from models.manifest import WeightsManifest
from models.transformer import Transformer

EMPTY_PREFIX = Prefix(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


class NativeEngine:
    """Continuous batching over one model. `weights_version` is the version of the weights that `model` holds."""

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions,
        *,
        weights_version: int = 0,
        max_draft_tokens: int = 16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        config = model.config
        model_tokens = options.max_model_tokens or config.max_position_embeddings
        if model_tokens > config.max_position_embeddings:
            raise ValueError(
                f"rollout.engine.max_model_tokens={model_tokens} is more than the model's own limit of "
                f"{config.max_position_embeddings} (max_position_embeddings)"
            )
        block_tokens = options.block_tokens
        blocks = options.kv_tokens // block_tokens
        if blocks < 1:
            raise ValueError(f"rollout.engine.kv_tokens={options.kv_tokens} is less than one block of {block_tokens}")
        self._limits = Limits(config.vocab_size, model_tokens, blocks, block_tokens)
        # No sequence can be longer than the cache plus the last token, whose K/V are not stored.
        max_tokens = min(model_tokens, blocks * block_tokens + 1)
        self._table = SlotTable(options.max_running, max_tokens, -(-max_tokens // block_tokens))
        self._scheduler = Scheduler(self._table, BlockPool(blocks), block_tokens, options.prefill_chunk_tokens)
        max_rows = options.max_running * (1 + max_draft_tokens) + options.prefill_chunk_tokens
        self._runner = ModelRunner(model, self._table, blocks, block_tokens, max_rows)
        self._speculator = Speculator(self._table, config.vocab_size, max_draft_tokens)
        self._progress_every_tokens = options.progress_every_tokens
        self._model = model
        self._version = weights_version
        self._clock = clock
        self._meter = WindowMeter()
        self._events: list[Event] = []
        self._idle = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("native", drafter_switch=True, invariant_tokens=self._model.batch_invariant)

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do or to tell."""
        return self._scheduler.has_work or bool(self._events) or not self._idle

    @property
    def speculator(self) -> Speculator:
        """Counts of drafted and accepted tokens."""
        return self._speculator

    def set_drafter(self, drafter: Drafter | None, depth: int = 0) -> None:
        """Speculate with `drafter`, up to `depth` tokens per request and step, from the next step on; None: do not."""
        self._speculator.use(drafter, depth)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._scheduler:
                self._events.append(Rejected(request.request_id, "a request with this id is running already"))
            elif (reason := reason_to_reject(request, self._limits)) is not None:
                self._events.append(Rejected(request.request_id, reason))
            elif (ended := ended_by_prefix(request, self._limits)) is not None:
                now_s, response = self._clock(), request.prefix or EMPTY_PREFIX
                self._events.append(_finished(request, response, ended, self._version, now_s, now_s))
            else:
                prefix = request.prefix if request.prefix is not None and len(request.prefix.tokens) else None
                known = 0 if prefix is None else len(prefix.tokens)
                limit = self._limits.sequence_limit(request)
                self._scheduler.add(Ticket(request, prefix, known, limit, len(request.prompt_tokens) + known))
        self._idle = False

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests now: each is Finished with reason ABORT and the tokens it has (none, if it never ran)."""
        now_s = self._clock()
        for request_id in request_ids:
            if request_id not in self._scheduler:
                continue
            ticket = self._scheduler.ticket(request_id)
            tokens = ticket.prefix or EMPTY_PREFIX if ticket.slot < 0 else self._table.response(ticket.slot)
            version = self._version if ticket.weights_version < 0 else ticket.weights_version
            started_s = ticket.started_s or now_s
            self._scheduler.remove(request_id)
            self._events.append(_finished(ticket.request, tokens, FinishReason.ABORT, version, started_s, now_s))
            self._idle = False

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> WeightsLoaded:
        """Load new weights in place. Running requests go on with them, on the K/V they have; no other request reuses
        K/V of the old ones.

        Raises models.weights.WeightsCorruptError, or models.checkpoint.WeightsMismatchError, before anything changed.
        """
        start_s = self._clock()
        load_hf_state_dict(self._model, dict(weights.unpack(manifest, buffer)))  # Computes and checks the checksum.
        self._runner.weights_changed()
        self._scheduler.restart_unstarted()
        self._version = manifest.version
        return WeightsLoaded(manifest.version, manifest.checksum, self._clock() - start_s)

    def sleep(self) -> None:
        """Release the KV cache. Raises ValueError while there are requests."""
        if self._scheduler.has_work:
            raise ValueError("the engine has requests: wait for them or abort them before sleep")
        self._scheduler.restart_unstarted()
        self._runner.sleep()

    def wake(self) -> None:
        self._runner.wake()

    def step(self) -> list[Event]:
        """One forward of the running batch; returns what happened since the last call."""
        now_s = self._clock()
        plan = self._scheduler.schedule(self._version, now_s)
        if plan is not None:
            drafts = self._speculator.draft(plan, self._scheduler)
            draws = self._runner.run(plan, None if drafts is None else drafts.counts)
            decode_tokens = self._advance(plan, draws, None if drafts is None else drafts.tokens)
            self._meter.count(now_s, plan.prefill_tokens, decode_tokens)
        events, self._events = self._events, []
        now_s = self._clock()
        idle = not self._scheduler.has_work
        if self._meter.due(now_s) or (idle and self._meter.engine_steps):
            events.append(self._meter.cut(now_s, self._scheduler))
        if idle and not self._idle:
            events.append(EngineIdle(now_s))
        self._idle = idle
        return events

    def _advance(self, plan: StepPlan, draws: Draws, drafts: NDArray[np.int64] | None) -> int:
        """Enter what was computed and drawn into the table; returns the number of new tokens."""
        table = self._table
        table.computed[plan.slots] += plan.rows
        self._scheduler.computed()
        slots = plan.slots if len(draws.tokens) == len(plan.slots) else plan.slots[plan.samples]
        if not len(slots):
            return 0
        length = table.length[slots]
        if drafts is None:
            tokens = draws.tokens[:, 0]
            table.tokens[slots, length] = tokens
            table.logprobs[slots, length] = draws.logprobs[:, 0]
            table.logprobs_t1[slots, length] = draws.logprobs_t1[:, 0]
            stopped = (draws.tokens == table.stop[slots]).any(axis=1)
            new_length = length + 1
        else:
            remaining = table.limit[slots] - length
            emitted, accepted, stopped = accept(draws.tokens, drafts, table.stop[slots], remaining)
            self._speculator.count_accepted(int(accepted.sum()))
            new_length = length + emitted
            kept = np.arange(draws.tokens.shape[1]) < emitted[:, None]  # [R, K+1]
            rows = slots.repeat(emitted)
            places = (length[:, None] + np.arange(draws.tokens.shape[1]))[kept]
            table.tokens[rows, places] = draws.tokens[kept]
            table.logprobs[rows, places] = draws.logprobs[kept]
            table.logprobs_t1[rows, places] = draws.logprobs_t1[kept]
            # K/V of accepted drafts stand; those behind are overwritten before they can be read.
            table.computed[slots] = new_length - 1
        table.length[slots] = new_length
        ended = stopped | (new_length >= table.limit[slots])
        if ended.any():
            now_s = self._clock()
            for i in np.flatnonzero(ended):
                self._finish(int(slots[i]), FinishReason.STOP if stopped[i] else FinishReason.LENGTH, now_s)
        due = (new_length - table.reported[slots] >= self._progress_every_tokens) & ~ended
        if due.any():
            for slot in slots[due]:
                self._report(int(slot))
        return int((new_length - length).sum())

    def _finish(self, slot: int, reason: FinishReason, now_s: float) -> None:
        ticket = self._scheduler.ticket_in(slot)
        response = self._table.response(slot)
        self._scheduler.remove(ticket.request.request_id)
        event = _finished(ticket.request, response, reason, ticket.weights_version, ticket.started_s, now_s)
        self._events.append(event)

    def _report(self, slot: int) -> None:
        delta = self._table.response(slot, start=int(self._table.reported[slot]))
        self._table.reported[slot] = self._table.length[slot]
        self._events.append(Progress(int(self._table.request_id[slot]), delta))


def _finished(
    request: Request, response: Prefix, reason: FinishReason, version: int, started_s: float, finished_s: float
) -> Finished:
    return Finished(
        Rollout(
            request.request_id,
            response.tokens,
            response.logprobs,
            response.logprobs_t1,
            reason,
            version,
            started_s,
            finished_s,
        )
    )
