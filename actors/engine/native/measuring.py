"""Measure the cost of passes and drafts on this device: an engine decodes random requests by a script.

Chooses the measured cells, their order and duration. The engine is that of real runs, so scheduling, sampling and
settling are included; on a GPU every step ends with its tokens on the host, so no work is pending when it is timed. The
sampled tokens do not matter, so random weights of the right shape suffice.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from actors.engine.calibrated import calibration_key
from actors.engine.native.engine import NativeEngine
from config.formats import Quantization, low_bit_format
from config.model import ModelOptions, batch_invariance
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import PLAIN, Strategy
from contracts.rollout import Request, SamplingParams
from drafter.build import build_drafters, history_tokens
from drafter.protocol import BatchView, Drafter, Drafts
from models.checkpoint import init_model, load_model, save_model
from models.device import choose_device
from models.transformer import Transformer
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, DraftCost, PassCost
from policies.speculation.defaults import default_arms
from policies.speculation.policy import Reason
from policies.steps import Load, StepKind, StepOutcome

PROBE = "probe"  # the drafter with arbitrary drafts, for passes of many rows
MOST_ROWS = 512  # of one pass
ROUNDS = 7  # measured steps per cell and visit, after one uncounted step
LEAST_ROUNDS = 3  # cells with fewer are discarded
LEAST_VISITS = 3  # made however long they take
SWEEPS = 3  # most passes over all cells: a disturbance of some seconds does not hit the same cell every time
DRAFT_STEPS = 6
REMEMBERED = 8  # random rollouts per prompt, for drafters that look up text
_REQUESTS = (1, 4, 16, 64, 2, 8, 32, 128, 3, 6, 12, 24, 48, 96)  # coarse first
_COARSE = 4  # number of coarse ones, measured with the coarse depths
_COARSE_DEPTHS, _DEPTHS = (0, 3, 15), (0, 1, 2, 3, 5, 7, 11, 15)
_DRAFTING = (1, 8, 32, 3)  # requests in measurements of drafters


@dataclass(frozen=True, slots=True)
class Check:
    """A pass as predicted from earlier measurements, and as measured."""

    requests: int
    rows: int
    context_tokens: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Result. `checks`: predictions of later cells from earlier ones."""

    calibration: Calibration
    checks: tuple[Check, ...]
    seconds: float


_Cell = tuple[int, int, int]  # requests, rows, initial context of each request


@dataclass(frozen=True, slots=True)
class _Visit:
    """Requests that decode together for a while, with this many context tokens each."""

    requests: int
    context: int
    depths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Approximate number of cached tokens."""
        return self.requests * (self.context + 16 + (1 + ROUNDS) * len(self.depths))

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.context} tokens of context"


@dataclass(slots=True)
class Script:
    """A StrategyPolicy with a preset strategy that stores the outcomes."""

    arms: Sequence[Strategy]
    strategy: Strategy = PLAIN
    outcomes: list[StepOutcome] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    @property
    def max_nodes(self) -> int:
        return max(arm.tokens_to_verify for arm in self.arms)

    def arms_at(self, running: int) -> Sequence[Strategy]:
        return [arm for arm in self.arms if running * (1 + arm.tokens_to_verify) <= MOST_ROWS]

    def choose(self, load: Load) -> Strategy:
        return self.strategy

    @property
    def reason(self) -> Reason:
        return Reason.FIXED

    @property
    def advantage(self) -> float | None:
        return None

    def record(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def unavailable(self, drafter: str) -> None:
        self.failed.add(drafter)

    def renewed(self, drafter: str) -> None:
        self.failed.discard(drafter)

    def new_target(self) -> None:
        pass

    def plain_s(self, load: Load) -> float | None:
        return None

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return None


class Probe(Drafter):
    """Proposes the same token as often as it is asked to."""

    name = PROBE

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        requests = len(batch.slots)
        counts = np.minimum(batch.room, strategy.depth).astype(np.int64)
        return Drafts(np.zeros((requests, strategy.depth), np.int64), counts)


def measure_engine(
    model: ModelOptions,
    options: EngineOptions,
    speculation: SpeculationOptions,
    quantization: Quantization,
    *,
    contexts: Sequence[int],
    seconds: float,
) -> "Iterator[tuple[float, str] | Measured]":
    """Measure an engine of this configuration in this process: its passes, and the drafts of every available drafter.
    Yields as `Measuring.run`.

    Raises whatever keeps such an engine from starting.
    """
    device = choose_device(options.device, "rollout.engine.device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    network = _network(model, device, quantization)
    drafters = build_drafters(speculation, network, options)
    if speculation.strategies is None:
        arms = default_arms(drafters, trees=device == "cpu" or not network.batch_invariant)
    else:
        arms = tuple(arm for arm in map(Strategy.parse, speculation.strategies) if arm != PLAIN)
    key = calibration_key(model, options, quantization, device)
    measuring = Measuring(network, options, key, drafters, arms, contexts, verification=speculation.verification)
    yield from measuring.run(seconds)


def _network(model: ModelOptions, device: str, quantization: Quantization) -> Transformer:
    """Load the model at `model.path`, with random weights if it has none yet (a run trains them first)."""
    dtype, low_bit = getattr(torch, model.dtype), low_bit_format(quantization, device)
    invariant = batch_invariance(model, device, "rollout.engine.device", engine=True)
    if any(Path(model.path).glob("*.safetensors")):
        return load_model(model.path, dtype=dtype, device=device, batch_invariant=invariant, low_bit=low_bit)
    made = init_model(model.path, 0, dtype=dtype, device=device, batch_invariant=invariant)
    if low_bit is None:
        return made
    with TemporaryDirectory(prefix="paceline-calibrate-") as folder:
        save_model(made, folder)
        return load_model(folder, dtype=dtype, device=device, batch_invariant=invariant, low_bit=low_bit)


class Measuring:
    """One calibration. `timer` measures the steps, in seconds."""

    def __init__(
        self,
        model: Transformer,
        options: EngineOptions,
        key: CalibrationKey,
        drafters: Mapping[str, Drafter],
        arms: Sequence[Strategy],
        contexts: Sequence[int],
        timer: Callable[[], float] = perf_counter,
        verification: Literal["coupled", "rejection"] = "coupled",
    ) -> None:
        """`drafters` and `arms`: measured drafts. `contexts`: tokens per request, the usual number first; shortened to
        what model and cache can hold."""
        self._key, self._options, self._timer = key, options, timer
        self._vocab, self._most = model.config.vocab_size, history_tokens(model, options) - 1
        probes = [Strategy(PROBE, depth) for depth in _DEPTHS if depth]
        self._script = Script([*probes, *arms])
        self._arms = list(arms)
        self._contexts = list(dict.fromkeys(min(context, self._most * 3 // 4) for context in contexts))
        self._engine = NativeEngine(
            model,
            options,
            drafters={**drafters, PROBE: Probe()},
            policy=self._script,
            timer=timer,
            verification=verification,
        )
        self._passes: defaultdict[_Cell, list[tuple[float, int]]] = defaultdict(list)  # (seconds, context tokens)
        self._drafts: defaultdict[tuple[Strategy, int], list[float]] = defaultdict(list)
        self._checks: list[Check] = []
        self._took_s: dict[_Visit, float] = {}
        self._random = np.random.default_rng(0)
        self._next_id = 0

    def run(self, seconds: float) -> Iterator[tuple[float, str] | Measured]:
        """Measure for about this long: coarse cells and drafters first, then finer ones while there is time. Yields the
        share of the whole that is done, 0 to 1, and what comes next; the results at the end."""
        begin_s = self._timer()
        coarse, fine = self._visits()
        for number, visit in enumerate(coarse):
            if number >= LEAST_VISITS and self._timer() - begin_s > seconds / 2:
                break  # a model with very long visits
            yield number / len(coarse) / 4, str(visit)
            self._visit(visit, patience_s=seconds / 4 / len(coarse))
        for requests in _DRAFTING:
            yield 0.25, f"drafts for {requests} requests"
            self._draft(requests)
        queue = fine + (coarse + fine) * (SWEEPS - 1)
        for number, visit in enumerate(queue):
            left_s = seconds - (self._timer() - begin_s)
            if left_s < self._took_s.get(visit, 0.0) or left_s <= 0:
                break
            yield max(0.3 + 0.7 * number / len(queue), 1 - left_s / seconds), str(visit)
            self._check(visit, patience_s=left_s)
        yield 1.0, "fitting"
        yield Measured(self.calibration(), tuple(self._checks), self._timer() - begin_s)

    def calibration(self) -> Calibration:
        """Return the calibration from the measurements so far."""
        passes = tuple(
            PassCost(
                requests=requests,
                rows=rows,
                context_tokens=median_low(context for _, context in steps),
                seconds=median_low(seconds for seconds, _ in steps),
                count=len(steps),
            )
            for (requests, rows, _), steps in sorted(self._passes.items())
            if len(steps) >= LEAST_ROUNDS
        )
        drafts = tuple(
            DraftCost(strategy=str(arm), requests=requests, seconds=median_low(times_s), count=len(times_s))
            for (arm, requests), times_s in self._drafts.items()
        )
        raw = Calibration(key=self._key, passes=passes, drafts=drafts)
        return raw.model_copy(update={"fitted": CostModel(raw).refined(self._key).fitted})

    def _visits(self) -> "tuple[list[_Visit], list[_Visit]]":
        """Return coarse visits, which are always made, and fine ones. Visits that exceed the cache are skipped."""
        most = self._options.max_running
        first = [requests for requests in _REQUESTS[:_COARSE] if requests <= most]
        others = [requests for requests in (*_REQUESTS, most) if requests <= most]
        ends = dict.fromkeys((self._contexts[0], self._contexts[-1]))
        coarse = [_Visit(requests, context, _COARSE_DEPTHS) for context in ends for requests in first]
        fine = [_Visit(requests, context, _DEPTHS) for context in self._contexts for requests in dict.fromkeys(others)]
        room = self._options.kv_tokens
        return [one for one in coarse if one.tokens <= room], [one for one in fine if one.tokens <= room]

    def _check(self, visit: "_Visit", patience_s: float) -> None:
        """Make a visit, and compare its new cells with predictions from earlier ones."""
        known, costs, begin_s = set(self._passes), CostModel(self.calibration()), self._timer()
        self._visit(visit, patience_s)
        self._took_s[visit] = self._timer() - begin_s
        for cell in sorted(set(self._passes) - known):
            steps = self._passes[cell]
            context = median_low(context for _, context in steps)
            predicted_s = costs.step_s(cell[0], cell[1], context)
            if predicted_s is not None and len(steps) >= LEAST_ROUNDS:
                measured_s = median_low(seconds for seconds, _ in steps)
                self._checks.append(Check(cell[0], cell[1], context, predicted_s, measured_s))

    def _visit(self, visit: "_Visit", patience_s: float) -> None:
        """Measure passes of that many requests; depths alternate, so that a disturbance affects all of them."""
        requests = visit.requests
        depths = [depth for depth in visit.depths if requests * (1 + depth) <= MOST_ROWS]
        self._begin(requests, visit.context)
        begin_s = self._timer()
        for round_number in range(1 + ROUNDS):
            if round_number > LEAST_ROUNDS and self._timer() - begin_s > patience_s:
                break
            for depth in depths:
                for outcome in self._step(Strategy(PROBE, depth) if depth else PLAIN, requests):
                    whole = outcome.rows == requests * (1 + depth)  # no draft was cut at a response's end
                    if round_number and whole and outcome.elapsed_s > outcome.draft_s:
                        step = outcome.elapsed_s - outcome.draft_s, outcome.load.context_tokens
                        self._passes[requests, outcome.rows, visit.context].append(step)
        self._end()

    def _draft(self, requests: int) -> None:
        """Measure every arm's drafts for that many requests, as far as they fit."""
        visit = _Visit(requests, self._contexts[0], (max(arm.depth for arm in self._arms),) if self._arms else ())
        if not self._arms or requests > self._options.max_running or visit.tokens > self._options.kv_tokens:
            return
        for arm in self._arms:
            self._begin(requests, visit.context)
            for number in range(1 + DRAFT_STEPS):
                for outcome in self._step(arm, requests):
                    if number and outcome.draft_s > 0 and arm.drafter not in self._script.failed:
                        self._drafts[arm, requests].append(outcome.draft_s)
            self._end()

    def _step(self, arm: Strategy, requests: int) -> list[StepOutcome]:
        """Run one engine step; return its outcome, if it counts."""
        self._script.strategy = arm
        before = len(self._script.outcomes)
        self._engine.step()
        return [
            outcome
            for outcome in self._script.outcomes[before:]
            if outcome.kind is StepKind.USUAL and outcome.load.running == requests and outcome.strategy is arm
        ]

    def _begin(self, requests: int, context: int) -> None:
        """Let that many requests decode, each with a prompt of its own."""
        prompts = [self._random.integers(0, self._vocab, context, dtype=np.int32) for _ in range(requests)]
        self._script.outcomes.clear()
        # Repetitive, like real text: a successful lookup costs more than a failed one.
        history = [np.tile(self._random.integers(0, self._vocab, 16, dtype=np.int32), 8) for _ in range(REMEMBERED)]
        self._engine.remember([prompt for prompt in prompts[:8] for _ in history], history * len(prompts[:8]))
        self._ids = list(range(self._next_id, self._next_id + requests))
        self._next_id += requests
        self._engine.submit(
            [
                Request(
                    request_id=number,
                    prompt_id=number,
                    prompt_tokens=prompt,
                    noise_key=number,
                    sampling=SamplingParams(max_new_tokens=max(self._most - context, 1), temperature=0.0),
                )
                for number, prompt in zip(self._ids, prompts, strict=True)
            ]
        )
        self._script.strategy = PLAIN
        # If the cache is too small for all of them, they never run together: those steps do not count.
        for _ in range(4 + 2 * -(-requests * context // self._options.prefill_chunk_tokens)):
            if not self._engine.has_work:
                break
            self._engine.step()
            last = self._script.outcomes[-1] if self._script.outcomes else None
            if last is not None and last.load.running == requests and not last.prompt_tokens:
                break

    def _end(self) -> None:
        self._engine.abort(self._ids)
        while self._engine.has_work:
            self._engine.step()
