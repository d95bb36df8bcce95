"""Seconds of passes and drafts, from a roofline, a calibration, a sweep or four numbers.

Owns these sources and the cost of tensor parallelism; chooses nothing. An exact query per engine step would be too
slow. So a roofline is evaluated on a grid of contexts and interpolated. A calibration gives its own roofline times the
measured deviation of that shape.
"""

import csv
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from config.formats import FORMATS, LowBitFormat
from config.network import Network
from config.strategy import Strategy
from launch.config.issues import ConfigError, Issue
from launch.config.memory import network_at
from planner.simulate.scenario import ModelShape, Scenario
from planner.simulate.shapes import SHAPES
from policies.calibration.document import Calibration, CalibrationKey, DraftCost, PassCost
from policies.calibration.drafts import DraftCosts
from policies.calibration.passes import PassCosts
from policies.roofline.devices import DEVICES, Device, device_named
from policies.roofline.kernels import draft_kernels, step_kernels
from policies.roofline.timing import DEFAULT, time_of

_LINE = 1.25  # ratio of neighbouring contexts in the grid
_ALLREDUCE_S = 12e-6  # of one between the GPUs of a node, besides its bytes; an estimate
_CHUNK = 2048  # prompt rows computed at once


class SimulatedCosts(Protocol):
    """The interface of costs. `context_tokens`: of all requests together."""

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        """Return the seconds of a pass of `rows` rows, without drafting; a fractional number is a mean over steps."""

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: float) -> float: ...

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of prompt tokens, next to decoding steps."""


@dataclass(slots=True, kw_only=True)
class RooflineCosts:
    """Costs by shapes and data sheets (policies.roofline), over `gpus` of a node."""

    net: Network
    device: Device
    gpus: int = 1
    copy: LowBitFormat | None = None
    _wide: Device = field(init=False)
    _lines: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _drafts: dict[tuple[Strategy, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one, gpus = self.device, self.gpus
        self._wide = replace(
            one,
            bandwidth_bytes_s=one.bandwidth_bytes_s * gpus,
            bf16_flops_s=one.bf16_flops_s * gpus,
            multiprocessors=one.multiprocessors * gpus,
        )

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        (low, rest), context = _beside(max(rows / requests, 1.0)), context_tokens / requests
        at_low = self._between(requests, low, context)
        return (1 - rest) * at_low + rest * self._between(requests, low + 1, context) if rest else at_low

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: float) -> float:
        if not strategy.depth:
            return 0.0
        line = round(math.log(max(context_tokens / requests, 16.0)) / math.log(_LINE))
        key = strategy, requests, line
        if (known := self._drafts.get(key)) is None:
            kernels = draft_kernels(self.net, requests, strategy, round(_LINE**line), self.copy)
            known = time_of(kernels, self._wide).ms / 1e3 - DEFAULT.host_s if kernels else 0.0
            known = self._drafts[key] = known + (strategy.depth * self._reduced(requests, 1) if kernels else 0.0)
        return known

    def prefill_s(self, tokens: int) -> float:
        chunk = self._line(1, _CHUNK, round(math.log(_CHUNK) / math.log(_LINE)))
        return (chunk - DEFAULT.host_s) * tokens / _CHUNK

    def _between(self, requests: int, per: int, context: float) -> float:
        """Linear between the two lines of the grid beside `context`."""
        place = math.log(max(context, 16.0)) / math.log(_LINE)
        low = math.floor(place)
        below, above = self._line(requests, per, low), self._line(requests, per, low + 1)
        first, second = _LINE**low, _LINE ** (low + 1)
        return below + (above - below) * (max(context, 16.0) - first) / (second - first)

    def _line(self, requests: int, per: int, line: int) -> float:
        key = requests, per, line
        if (known := self._lines.get(key)) is None:
            context = max(round(_LINE**line), per)
            step = time_of(step_kernels(self.net, requests, per, context), self._wide, requests=requests)
            layers = self.net.num_layers
            known = self._lines[key] = step.ms / 1e3 + layers * self._reduced(requests * per, 2)
        return known

    def _reduced(self, rows: int, times: int) -> float:
        """Return the seconds of all-reduces of a layer's outputs over the GPUs of a worker."""
        if self.gpus == 1:
            return 0.0
        moved = 2 * (self.gpus - 1) / self.gpus * rows * self.net.hidden_size * self.net.item_bytes
        return times * (_ALLREDUCE_S + moved / self.device.peer_bytes_s)


def _beside(rows: float) -> tuple[int, float]:
    """The whole number below `rows`, and the share of steps that have one more."""
    low = math.floor(rows + 1e-6)
    rest = rows - low
    return low, 0.0 if rest < 1e-6 else rest


@dataclass(slots=True)
class MeasuredCosts:
    """Measured costs of passes and drafts, extrapolated to other shapes like an engine's policy does."""

    calibration: Calibration
    _passes: PassCosts = field(init=False)
    _drafts: DraftCosts = field(init=False)
    _factors: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._passes, self._drafts = PassCosts(self.calibration), DraftCosts(self.calibration)

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        low, rest = _beside(rows)
        at_low = self._whole(requests, low, context_tokens)
        return (1 - rest) * at_low + rest * self._whole(requests, low + 1, context_tokens) if rest else at_low

    def _whole(self, requests: int, rows: int, context_tokens: float) -> float:
        roofline = self._passes.roofline
        assert roofline is not None
        key = requests, rows
        if (factor := self._factors.get(key)) is None:
            known = self._passes.at(requests, rows, 1 << 12)
            assert known is not None
            factor = self._factors[key] = known / roofline.seconds(requests, rows, 1 << 12)
        return roofline.seconds(requests, rows, round(context_tokens)) * factor

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: float) -> float:
        if not strategy.depth:
            return 0.0
        found = self._drafts.at(strategy, requests)
        if found is None:
            raise ConfigError(
                [Issue("costs.file", f"nothing was measured of drafter {strategy.drafter}")],
                remedy="leave it out of speculation.strategies, or use costs.source=roofline",
            )
        return found

    def prefill_s(self, tokens: int) -> float:
        roofline = self._passes.roofline
        assert roofline is not None
        return tokens * roofline.row_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCosts:
    """Costs from four numbers."""

    fixed_s: float
    row_s: float
    context_s: float
    level_s: float

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        return self.fixed_s + self.row_s * rows + self.context_s * context_tokens

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: float) -> float:
        return self.level_s * strategy.depth

    def prefill_s(self, tokens: int) -> float:
        return self.row_s * tokens


@dataclass(frozen=True, slots=True)
class ScaledCosts:
    """Other costs times a factor, plus a constant per step; prompts at their own rate, if given."""

    of: SimulatedCosts
    factor: float
    more_s: float
    prefill_tokens_s: float | None
    drafting_s: float = 0.0

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        return self.factor * self.of.step_s(requests, rows, context_tokens) + self.more_s

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: float) -> float:
        if not strategy.depth:
            return 0.0
        return self.factor * self.of.draft_s(strategy, requests, context_tokens) + self.drafting_s

    def prefill_s(self, tokens: int) -> float:
        if self.prefill_tokens_s is not None:
            return tokens / self.prefill_tokens_s
        return self.factor * self.of.prefill_s(tokens)


@dataclass(slots=True)
class SharedCosts:
    """Other costs, on the cores of a node, which several engines share."""

    of: SimulatedCosts
    factors: tuple[float, ...]  # the slow-down of 1, 2, ... computing engines; more share the last one's speed
    factor: float = 1.0  # now

    def take(self, engines: int) -> bool:
        """Set the number of computing engines. Returns whether the factor changed."""
        before, known = self.factor, self.factors
        if engines:
            most = len(known)
            self.factor = known[engines - 1] if engines <= most else known[-1] * engines / most
        return self.factor != before

    def step_s(self, requests: int, rows: float, context_tokens: float) -> float:
        return self.factor * self.of.step_s(requests, rows, context_tokens)

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: float) -> float:
        return self.factor * self.of.draft_s(strategy, requests, context_tokens)

    def prefill_s(self, tokens: int) -> float:
        return self.factor * self.of.prefill_s(tokens)


def network(scenario: Scenario) -> Network:
    """Return the target's shape, in the engines' precision. Raises ModelConfigError, OSError."""
    model = scenario.model
    if isinstance(model, ModelShape):
        net = Network(**model.model_dump())
    else:
        net = SHAPES[model] if model in SHAPES else network_at(Path(model))
    return replace(net, low_bits=FORMATS.get(scenario.quantization))


def device(scenario: Scenario) -> Device | None:
    """Return the GPU, if any. Raises ConfigError for an unknown one."""
    name = scenario.fleet.device
    if name is None:
        return None
    if (found := device_named(name)) is None:
        raise ConfigError([Issue("fleet.device", f"no GPU is known as {name!r}; known: {', '.join(DEVICES)}")])
    return found


def costs_of(scenario: Scenario) -> SimulatedCosts:
    """Return the scenario's costs. Raises ConfigError, OSError."""
    given = scenario.costs
    of: SimulatedCosts
    match given.source:
        case "roofline":
            gpu = device(scenario)
            assert gpu is not None
            copy = FORMATS.get(scenario.speculation.copy_format)
            of = _roofline(network(scenario), gpu, scenario.fleet.gpus_per_worker, copy)
        case "table":
            of = TableCosts(fixed_s=given.fixed_s, row_s=given.row_s, context_s=given.context_s, level_s=given.draft_s)
        case "calibration" | "sweep":
            assert given.file is not None
            of = MeasuredCosts(_calibration(Path(given.file), given.source == "sweep", given.model))
    prefill = scenario.engine.prefill_tokens_s
    if given.factor == 1.0 and not given.step_s and not given.drafting_s and prefill is None:
        return of
    return ScaledCosts(of, given.factor, given.step_s, prefill, given.drafting_s)


@lru_cache(maxsize=16)
def _roofline(net: Network, gpu: Device, gpus: int, copy: LowBitFormat | None) -> RooflineCosts:
    """Return one object for all runs of a process, so that its cached values are shared."""
    return RooflineCosts(net=net, device=gpu, gpus=gpus, copy=copy)


def _calibration(path: Path, sweep: bool, model: str | None) -> Calibration:
    try:
        if sweep:
            return read_sweep(path, model)
        found = Calibration.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError([Issue("costs.file", f"{path}: {str(error).splitlines()[0]}")]) from None
    if not found.passes:
        raise ConfigError([Issue("costs.file", f"{path} holds no measured pass")])
    return found


def read_sweep(path: Path, model: str | None = None) -> Calibration:
    """Read a table of measured steps, with columns model, batch, seq, gamma, mode, median_ms: decoding, one pass of a
    draft, verification. Rows with batch or seq 0 are left out. Raises ValueError, OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    needed = {"model", "batch", "seq", "gamma", "mode", "median_ms"}
    if not rows or not needed <= set(rows[0]):
        raise ValueError(f"no sweep: its columns must be {', '.join(sorted(needed))}")
    names = sorted({row["model"] for row in rows})
    if model is None and len(names) > 1:
        raise ValueError(f"several models, {', '.join(names)}: name one in costs.model")
    if model is not None and model not in names:
        raise ValueError(f"there is no model {model!r}; there are {', '.join(names)}")
    passes: list[PassCost] = []
    drafts: dict[int, list[float]] = {}  # by requests, over all contexts
    for row in rows:
        batch, seq, length, seconds = (
            int(row["batch"]),
            int(row["seq"]),
            int(row["gamma"]),
            float(row["median_ms"]) / 1e3,
        )
        kind = row["mode"]
        if not batch or not seq or (model is not None and row["model"] != model):
            continue
        if kind == "drafter_decode":  # one of the passes of a draft
            drafts.setdefault(batch, []).append(seconds)
        elif kind in ("target_decode", "target_verify"):
            per = 1 if kind == "target_decode" else length + 1
            passes.append(
                PassCost(requests=batch, rows=batch * per, context_tokens=batch * seq, seconds=seconds, count=5)
            )
    if not passes:
        raise ValueError("no sweep: nothing was measured at a batch and a length")
    key = CalibrationKey(model=model or names[0], precision="of the sweep", device="of the sweep")
    costs = [
        DraftCost(strategy=f"self:{depth}", requests=batch, seconds=depth * sum(of) / len(of), count=5)
        for batch, of in sorted(drafts.items())
        for depth in (3, 7)
    ]
    return Calibration.measured(key, passes, costs)
