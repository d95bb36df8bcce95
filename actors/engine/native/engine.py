"""The native rollout engine, synchronous and in this process: requests in, events out, one forward per `step`.

Owns the model's weights, and applies the accept rule to the sequences. It never blocks, starts no thread or process
(`actors.engine.process` does) and reads only the given clock.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.batch.account import StepAccount
from actors.engine.batch.early import ROWS, EarlyTexts, rest_of, together
from actors.engine.batch.engine import BatchEngine
from actors.engine.batch.intake import EngineLimits
from actors.engine.batch.plan import SlotWatcher, StepPlan, Ticket
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.speculation import Speculator
from actors.engine.batch.step.build import step_arrays
from actors.engine.batch.step.types import Settled, StepDrafts
from actors.engine.batch.stops import RuleStops
from actors.engine.batch.telemetry import EngineStepRecord, PromptMeter
from actors.engine.calibrated import PassNews
from actors.engine.native.forward.context import MakeMemory
from actors.engine.native.forward.draws import Draws
from actors.engine.native.forward.graphs import CudaGraphCapture
from actors.engine.native.forward.kv_memory import kv_memory
from actors.engine.native.forward.runner import ModelRunner
from actors.engine.native.hidden.recent import ComputedStep, HiddenStore
from actors.engine.native.hidden.recording import SequenceRecorder
from actors.engine.native.ranks.leader import Followers
from actors.engine.native.ranks.orders import EndPieces
from actors.engine.native.schedule.blocks import BlockPool
from actors.engine.native.schedule.scheduler import Scheduler
from actors.handoff.receive import Receiver
from actors.pacing import Pacer
from config.formats import SCALE_SUFFIX, LowBitFormat, Quantization
from config.rollout import EngineOptions
from config.strategy import PLAIN
from contracts.handoff import HandOffError, Offer, Received
from contracts.rollout import (
    Event,
    Finished,
    Rejected,
    Request,
    Rollout,
    WeightsLoaded,
)
from drafter.build import history_tokens
from drafter.protocol import Drafter, GraphCapture, KVPlaces
from models.checkpoint import hf_targets, load_packed
from models.lora import AdapterBase, room_for
from models.manifest import TensorSpec, WeightsManifest
from models.peft import AdapterError, are_adapters
from models.tensor_parallel import RankTransformer
from models.transformer import Transformer
from models.weights import unpack
from policies.speculation.budget import DraftBudget
from policies.speculation.graph_plan import batch_buckets, bucketed_plan
from policies.speculation.policy import StrategyPolicy
from policies.speculation.savings import Savings
from policies.steps import Load

NO_DRAFTERS: Mapping[str, Drafter] = {}


class NativeEngine(BatchEngine):
    """Continuous batching over one model. `weights_version` is the version of the weights that `model` holds.

    Speculation: `policy` is called before every step that decodes, and names one of `drafters` (by their keys); None,
    or no drafters: plain decoding. `budget` limits each request's drafts; None: only the strategy does.
    `hidden_tokens`: engine steps whose hidden states are kept for drafters that need them. `recording_bytes`: of hidden
    states of whole sequences, recorded per version of the weights (0: none).
    `recorded_layers`: whose outputs stand before the final state in what is kept; default: those the drafters need.
    `timer` measures steps; `steps` receives a record of each. `graph_capture` captures graphs, those of the plan at
    once; by default CUDA's where `options.cuda_graphs`. `make_memory` makes what holds the KV cache. `news`: what the
    driver hears of the passes. `adapter_base`: what adapters are merged into that come in the place of weights.
    `pacer`, on the `timer`: of experiments, lets passes, drafts and new weights last as long as on another device.
    `followers`: the other ranks of `model`, which then is rank 0's part (models.tensor_parallel).
    `truncated`: some requests will have top-k or top-p, so that graphs are captured for them.
    """

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions,
        *,
        weights_version: int = 0,
        drafters: Mapping[str, Drafter] = NO_DRAFTERS,
        policy: StrategyPolicy | None = None,
        budget: DraftBudget | None = None,
        verification: Literal["coupled", "rejection"] = "coupled",
        hidden_tokens: int = 64,
        recording_bytes: int = 0,
        recorded_layers: tuple[int, ...] | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
        steps: list[EngineStepRecord] | None = None,
        graph_capture: GraphCapture | None = None,
        make_memory: MakeMemory = kv_memory,
        news: PassNews | None = None,
        adapter_base: AdapterBase | None = None,
        pacer: Pacer | None = None,
        followers: Followers | None = None,
        truncated: bool = False,
    ) -> None:
        super().__init__(weights_version, clock)
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
        max_tokens = history_tokens(model, options)
        self._limits = EngineLimits(config.vocab_size, model_tokens, blocks, block_tokens)
        self._table = SlotTable(options.max_running, max_tokens, -(-max_tokens // block_tokens))
        recorded = _recorded_layers(drafters, recorded_layers)
        empty = next(model.parameters()).detach().new_empty(0, (len(recorded) + 1) * config.hidden_size)
        self._recording = (
            SequenceRecorder(self._table, recording_bytes, empty, weights_version) if recording_bytes else None
        )
        self._hidden: HiddenStore | None = None
        kv: KVPlaces | None = None
        if any(drafter.needs_hidden for drafter in drafters.values()):
            self._hidden = HiddenStore(self._table, hidden_tokens, empty)
            block_tables = self._table.block_tables.view()
            block_tables.flags.writeable = False
            kv = KVPlaces(block_tables, block_tokens)
        self._steps = step_arrays(self._table, block_tokens)
        self._max_nodes = 0 if policy is None else policy.max_nodes
        on_cuda = next(model.parameters()).device.type == "cuda"
        if graph_capture is None and options.cuda_graphs and on_cuda and followers is None:
            graph_capture = CudaGraphCapture()
        self._truncated = truncated
        self._batches = batch_buckets(options.max_running) if graph_capture is not None else ()
        self._chunk_tokens = options.prefill_chunk_tokens
        self._graph_capture = graph_capture
        self._runner = ModelRunner(
            model,
            self._table,
            blocks,
            block_tokens,
            options.prefill_chunk_tokens,
            self._max_nodes,
            steps=self._steps,
            rejection=verification == "rejection",
            graph_capture=graph_capture,
            recorded=recorded,
            keep_rows=self._hidden is not None or self._recording is not None,
            make_memory=make_memory,
            checked_rows=ROWS,
            truncated=truncated,
            followers=followers,
        )
        self._speculator = Speculator(
            self._table,
            self._steps,
            config.vocab_size,
            next(model.parameters()).device,
            drafters,
            policy,
            budget=budget,
            rejection=verification == "rejection",
            hidden=self._hidden,
            kv=kv,
            target=self._runner.passes,
            events=self._events,
            timer=timer,
            pacer=pacer,
        )
        self._pacer = pacer
        self._speculator.new_target(weights_version)
        self._stops = RuleStops(self._table, config.vocab_size)
        prompts, savings = PromptMeter(self._table), Savings(self._table.length)
        # Rejection sampling accepts with other draws than plain decoding: early text would change tokens.
        self._early = None if verification == "rejection" else EarlyTexts(self._table, self._steps, config.vocab_size)
        watchers: list[SlotWatcher] = [self._stops]
        if self._early is not None:
            watchers.append(self._early)
        if self._speculator.has_drafters:
            watchers += [self._speculator, prompts, savings]
        if self._recording is not None:
            watchers.append(self._recording)
        self._scheduler = Scheduler(
            self._table, BlockPool(blocks), block_tokens, options.prefill_chunk_tokens, watchers
        )
        self._queue = self._occupancy = self._scheduler
        self._account = StepAccount(self._table, self._speculator, prompts, savings, steps, timer, news)
        self._plan_graphs(policy)
        self._progress_every_tokens = options.progress_every_tokens
        self._model, self._low_bit, self._adapter_base = model, model.low_bit, adapter_base
        self._held: WeightsManifest | None = None  # of the buffer that the parameters hold, bit for bit
        self._receiver: Receiver | None = None  # made at the first offer of weights
        self._half_loaded = False
        self._followers = followers

    @property
    def has_work(self) -> bool:
        """Whether `step` has work or events to report, and the weights are complete."""
        return not self._half_loaded and super().has_work

    def use(self, policy: StrategyPolicy | None) -> None:
        """Use `policy` from the next step on. None: plain decoding."""
        self._speculator.use(policy)
        if policy is not None and policy.max_nodes > self._max_nodes:
            self._max_nodes = policy.max_nodes
            self._runner.resize(self._max_nodes)
        self._plan_graphs(policy)

    def _plan_graphs(self, policy: StrategyPolicy | None) -> None:
        if self._graph_capture is None:
            return
        arms_at = (lambda _: ()) if policy is None else policy.arms_at
        plan = bucketed_plan(arms_at, self._batches, chunk_tokens=self._chunk_tokens)
        self._runner.plan_graphs(plan)
        self._tell(self._runner.graphs_failed())
        self._speculator.plan_graphs(plan.drafts, self._graph_capture, self._truncated)

    def _accept(self, ticket: Ticket) -> None:
        if self._recording is not None and not ticket.request.evaluation:
            self._recording.submitted(ticket.limit)
        super()._accept(ticket)

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> WeightsLoaded:
        """See BatchEngine. An engine that started in a low-bit format accepts weights in that format or in full
        precision. Adapters are merged into the initial weights, in the initial format."""
        start_s, begin_s = self._clock(), 0.0 if self._pacer is None else self._pacer.clock()
        self._held = None
        if are_adapters(manifest.tensors):
            self._merge(dict(unpack(manifest, buffer)))  # computes and checks the checksum
        elif isinstance(self._model, RankTransformer) and self._followers is not None:
            self._followers.load(self._model, manifest, buffer)  # also checks it
        else:
            with self._model.storing(self._form_of(manifest.tensors)):
                load_packed(self._model, manifest, buffer)  # also checks it
            self._held = manifest
        return self._holds(manifest.version, manifest.checksum, start_s, begin_s)

    def receive_weights(self, offer: Offer) -> WeightsLoaded:
        """See BatchEngine. An engine with half overwritten weights has no work until `update_weights` loads whole
        ones."""
        start_s, begin_s = self._clock(), 0.0 if self._pacer is None else self._pacer.clock()
        if self._receiver is None:
            self._receiver = Receiver(next(self._model.parameters()).device)
        held, self._held = self._held, None
        try:
            if adapters := are_adapters(offer.tensors):
                room = room_for(offer.tensors, next(self._model.parameters()).device)
                received = self._receiver.receive(offer, room)
                self._merge(room)
            elif isinstance(self._model, RankTransformer) and self._followers is not None:
                received = self._receive_parts(self._receiver, offer, self._followers, self._model)
            else:
                with self._model.storing(self._form_of(offer.tensors)):
                    received = self._receiver.receive(offer, hf_targets(self._model), held)
                self._held = WeightsManifest(offer.version, received.checksum, offer.tensors, offer.total_bytes)
        except (HandOffError, torch.OutOfMemoryError) as error:  # OutOfMemoryError: no memory for another precision
            began = isinstance(error, HandOffError) and error.began
            self._held = None if began else held
            self._half_loaded |= began and not adapters
            seconds = self._clock() - start_s
            return WeightsLoaded(
                version=self._version,
                checksum=0,
                seconds=seconds,
                quantization=self._quantization,
                failure=str(error),
            )
        return self._holds(offer.version, received.checksum, start_s, begin_s, received.way)

    def _receive_parts(
        self, receiver: Receiver, offer: Offer, followers: Followers, model: RankTransformer
    ) -> Received:
        try:
            relay = followers.pieces(model, offer.tensors)
        except ValueError as error:
            raise receiver.refused(offer, error) from error
        received = receiver.receive_into(offer, relay)
        followers.ask(EndPieces())
        return received

    def _merge(self, adapters: Mapping[str, torch.Tensor]) -> None:
        if self._adapter_base is None:
            raise AdapterError("adapters came to an engine that was started without learner.lora")
        new = self._model.low_bit != self._low_bit  # after weights in full precision
        with self._model.storing(self._low_bit):
            self._adapter_base.merge_into(self._model, adapters, everything=new)

    def _form_of(self, tensors: Sequence[TensorSpec]) -> LowBitFormat | None:
        """Return the storage format of the tensors: only low-bit weights have scales."""
        return self._low_bit if any(spec.name.endswith(SCALE_SUFFIX) for spec in tensors) else None

    @property
    def _quantization(self) -> Quantization:
        return "none" if self._model.low_bit is None else self._model.low_bit.name

    def _holds(self, version: int, checksum: int, start_s: float, begin_s: float, way: str = "store") -> WeightsLoaded:
        """Switch to the loaded version: the model's parameters are complete. `start_s`, `begin_s`: start of the load,
        on the clock and the pacer's clock."""
        self._half_loaded = False
        if self._recording is not None:
            self._tell(self._recording.new_target(version))
        self._runner.weights_changed()
        self._scheduler.restart_unstarted()
        self._version = version
        self._account.new_weights()
        self._speculator.new_target(version)
        if self._pacer is not None:
            self._pacer.hold("hand-over", begin_s, self._pacer.pace.hand_over_s)
        return WeightsLoaded(
            version=version,
            checksum=checksum,
            seconds=self._clock() - start_s,
            way=way,
            quantization=self._quantization,
        )

    def _load_drafter(self, name: str, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> str:
        return self._speculator.update(name, manifest, buffer)

    def _release(self) -> None:
        self._scheduler.restart_unstarted()
        if self._hidden is not None:
            self._hidden.clear()
        self._runner.sleep()

    def wake(self) -> None:
        """See BatchEngine."""
        self._runner.wake()

    def close(self) -> None:
        """See BatchEngine."""
        if self._followers is not None:
            self._followers.close()

    def _advance(self, now_s: float) -> None:
        plan = self._scheduler.schedule(self._version, now_s)
        if plan is None:
            return
        load = self._speculator.load_of(plan, self._scheduler.waiting)
        if plan.copies:  # before drafters read them
            self._runner.copy_blocks(plan.copies)
        checked = None if self._early is None else self._early.draft(plan, self._scheduler.reserve_drafts)
        rest = plan if checked is None else rest_of(plan, checked)
        strategy = PLAIN
        if rest is not None:
            own = load if rest is plan else self._speculator.load_of(rest, self._scheduler.waiting)
            strategy = self._speculator.choose(own)
            if rest is not plan:  # no trees beside early text, which is a chain of many tokens
                strategy = strategy.chain
        drafts = self._speculator.draft(rest or plan, strategy, self._scheduler.reserve_drafts)
        verified = drafts if checked is None else together(plan, checked, drafts)
        draws = self._run(plan, load, verified)
        self._tell(self._runner.graphs_failed())
        settled = self._enter(plan, draws, verified, checked)
        self._speculator.drew(settled.new_tokens)
        if self._early is not None:
            self._early.drew(plan)
        window = self._account.count(
            plan,
            strategy,
            load,
            drafts,
            settled,
            self._scheduler,
            now_s,
            undisturbed=not plan.copies,
            captured=draws.captured or self._speculator.captured,
            checked=checked,
        )
        self._tell(window)

    def _run(self, plan: StepPlan, load: Load, drafts: StepDrafts | None) -> Draws:
        pacer = self._pacer
        if pacer is None:
            return self._runner.run(plan, drafts)
        begin_s, rows = pacer.clock(), int(plan.rows.sum()) + (0 if drafts is None else drafts.drafted)
        draws = self._runner.run(plan, drafts)
        context_tokens = load.context_tokens if load.running else int(self._table.length[plan.slots].sum())
        pacer.hold("pass", begin_s, pacer.pace.pass_s(len(plan.slots), rows, context_tokens))
        return draws

    def record(self, on: bool) -> None:
        """See BatchEngine."""
        if self._recording is not None:
            self._recording.on = on

    def _before_idle(self) -> list[Event]:
        if self._pacer is not None:
            self._pacer.write()
        recorded = None if self._recording is None else self._recording.flush()
        return [] if recorded is None else [recorded]

    def generate(self, requests: Sequence[Request]) -> dict[int, Rollout]:
        """Finished rollouts by request id. Raises as `stream`."""
        finished = (event.rollout for event in self.stream(requests) if isinstance(event, Finished))
        return {rollout.request_id: rollout for rollout in finished}

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Submit, and step until nothing is left: every event. Raises ValueError for a request that is rejected."""
        self.submit(requests)
        while self.has_work:
            for event in self.step():
                yield event
                if isinstance(event, Rejected):
                    raise ValueError(f"request {event.request_id}: {event.reason}")

    def _enter(
        self, plan: StepPlan, draws: Draws, drafts: StepDrafts | None, checked: StepDrafts | None = None
    ) -> Settled:
        """Enter what was computed and drawn into the table; end and report requests. `checked`: the drafts that are
        early text."""
        hidden = None if self._speculator.rests else self._hidden
        keeping = hidden is not None or (self._recording is not None and self._recording.at_work)
        first = self._table.computed[plan.slots] if keeping else None
        settled = self._steps.settle(
            plan, draws.tokens, draws.logprobs, draws.logprobs_t1, drafts, self._progress_every_tokens
        )
        settled = self._stops.apply(plan, settled)
        if checked is not None and self._early is not None:
            self._early.uncount(plan, checked, settled)
        if settled.moves is not None:
            self._runner.compact(settled.moves)
        if first is not None:
            known = plan.rows
            if settled.emitted is not None:
                known = known.copy()
                known[plan.samples] += settled.emitted - 1
            step = ComputedStep(
                rows=draws.rows,
                slots=plan.slots,
                first=first,
                counts=known,
                offsets=draws.offsets.copy(),
                path=settled.path,
            )
            if hidden is not None:
                hidden.add(step)
            if self._recording is not None:
                self._tell(self._recording.add(step))
        self._scheduler.computed()
        broken = self._without_numbers(plan, draws)
        for slot in broken:
            self._refuse(slot)
        if settled.ended:
            now_s = self._clock()
            for slot, reason in settled.ended:
                if slot not in broken:
                    self._ended(self._scheduler.ticket_in(slot), slot, reason, now_s)
        self._events += [self._table.progress(slot) for slot in settled.due if slot not in broken]
        return settled

    def _without_numbers(self, plan: StepPlan, draws: Draws) -> set[int]:
        """Return slots with tokens drawn from logits with a NaN (or a +inf): their log-probs are NaN too."""
        if not np.isnan(draws.logprobs_t1).any():
            return set()
        table = self._table
        return {
            slot
            for slot in plan.slots[plan.samples].tolist()
            if np.isnan(table.logprobs_t1[slot, table.prompt_length[slot] : table.length[slot]]).any()
        }

    def _refuse(self, slot: int) -> None:
        """Reject a request whose logits are not finite: nothing can be learned from it. The others continue."""
        ticket, table = self._scheduler.ticket_in(slot), self._table
        sampled = int(table.length[slot] - table.prompt_length[slot])
        self._queue.remove(ticket.request.request_id, finished=False)
        self._tell(
            Rejected(
                ticket.request.request_id,
                f"the model's logits are NaN at its token {sampled}, under weights of version {self._version}: the "
                "weights have diverged, or they overflow in model.dtype; lower learner.optimizer.lr, or use float32",
            )
        )


def _recorded_layers(drafters: Mapping[str, Drafter], given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The layers whose outputs every row holds: one choice serves all."""
    wanted = {d.hidden_layers for d in drafters.values() if d.hidden_layers}
    if given:
        wanted.add(given)
    if len(wanted) > 1:
        raise ValueError(
            f"hidden states are asked for with outputs of layers {' and '.join(map(str, sorted(wanted)))}: "
            "drafter.layers and the drafters of rollout.speculation must agree"
        )
    return wanted.pop() if wanted else ()
