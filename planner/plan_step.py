"""`paceline plan-step`: predict the cost of an engine step on a GPU, and whether everything fits its memory.

Owns the tables. Predicts from the configuration and the model's config.json alone, so it works on any machine;
`policies.roofline` has the model of time and memory. Nothing here was measured by Paceline on a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.engine.capabilities import capabilities_of
from config.formats import LowBitFormat
from config.network import Network
from config.strategy import PLAIN, Strategy
from launch.config import Config, Issue
from launch.config.hub import require_shape
from launch.config.memory import (
    device_of,
    drafters_of,
    fitting,
    learner_shape,
    memory_plans,
    misfit,
    network_of,
    residency,
    self_format,
)
from launch.errors import UsageError
from models.config import ModelConfig, read_config
from policies.calibration.costs import CostModel
from policies.calibration.roofline import FreeRows
from policies.roofline.devices import DEVICES, Device, device_named
from policies.roofline.kernels import draft_kernels, step_kernels
from policies.roofline.learning import MFU, NETWORK_BYTES_S, hand_over_s, learner_tokens_s, quantising_s
from policies.roofline.memory import GIB, MemoryPlan
from policies.roofline.ranks import gathers_s, part_of_network
from policies.roofline.timing import DEFAULT, StepTime, step_time, time_of
from policies.speculation.build import build_policy

_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1024, 8192, 32_768)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """One draft and its verification, compared with a plain step."""

    strategy: str
    draft_ms: float
    verify_ms: float
    cycle_ms: float  # both, and the host's time
    pays_from: float  # accepted tokens per draft above which it beats plain decoding
    gains_at_most: float  # speed-up if every token is accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Decoding of a number of requests with a given context each."""

    batch: int
    context: int
    floor_ms: float
    plain_ms: float
    eager_ms: float  # without graphs
    decides: str
    launches: int
    tokens_s: float  # plain decoding, one engine
    strategies: tuple[StrategyRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRow:
    """The learner and its hand-over to the engines; estimates."""

    ranks: int
    micro_batch_tokens: int
    tokens_s: float
    mfu: float
    hand_over_s: dict[str, float]
    quantising_s: float  # of all matrices once; 0: the learner computes with its masters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The complete prediction for one device."""

    device: str
    device_bytes: int
    ranks: int  # GPUs of one engine
    quantization: str  # of the engines' matrices
    weight_bytes: int  # of an engine
    steps: tuple[StepRow, ...]
    learner: LearnerRow | None
    engines_sleep: bool  # required by the memory plan
    optimizer_away: bool
    memory: tuple[MemoryPlan, ...]
    awake: tuple[MemoryPlan, ...]  # with neither, for comparison
    note: str  # changes of the self-drafter for lack of memory
    misfit: Issue | None

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("memory", "awake"):
            found[name] = [
                {"place": plan.place, "phases": {phase.name: dict(phase.items) for phase in plan.phases}}
                for plan in getattr(self, name)
            ]
        found["fits"] = self.misfit is None
        return found


def step_report(config: Config, device_name: str | None) -> StepReport:
    """Predict the step. Raises UsageError if no device is known, ModelConfigError for a model of another
    architecture."""
    require_shape(config.model.path)
    device = _device(config, device_name)
    ModelConfig.from_hf(read_config(config.model.path))  # raises for an unsupported model
    config, note = fitting(config, device)
    net = network_of(config)
    assert net is not None
    learner = learner_shape(config)
    sleep, away = residency(config, net, device.memory_bytes)
    plans, awake = (
        memory_plans(config, net, device.memory_bytes, engines_sleep=on[0], optimizer_away=on[1])
        for on in ((sleep, away), (False, False))
    )
    row = None
    if learner is not None:
        length = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens / 2
        row = LearnerRow(
            ranks=learner.ranks,
            micro_batch_tokens=learner.micro_batch_tokens,
            tokens_s=learner_tokens_s(net, learner, device, length),
            mfu=MFU,
            hand_over_s=hand_over_s(
                net,
                learner,
                device,
                same_gpu=config.cluster.layout == "colocated",
                merged_there=learner.adapters is not None and capabilities_of(config).adapters,
            ),
            quantising_s=quantising_s(net, learner, device),
        )
    return StepReport(
        device=device.name,
        device_bytes=device.memory_bytes,
        ranks=config.engine_ranks,
        quantization=config.rollout.quantization,
        weight_bytes=net.weight_bytes,
        steps=tuple(_steps(config, net, device)),
        learner=row,
        engines_sleep=sleep,
        optimizer_away=away,
        memory=plans,
        awake=awake,
        note=note,
        misfit=misfit(config, device),
    )


def _device(config: Config, name: str | None) -> Device:
    device = device_named(name) if name is not None else device_of(config)
    if device is None:
        known = ", ".join(DEVICES)
        said = (
            f"no GPU is known as {name!r}" if name is not None else "neither cluster.gpu nor this machine names a GPU"
        )
        raise UsageError(said, remedy=f"--device takes one of {known}")
    return device


def _steps(config: Config, net: Network, device: Device) -> Iterator[StepRow]:
    engine = config.rollout.engine
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    longest = min(longest, engine.max_model_tokens or longest)
    batches = [*(batch for batch in _BATCHES if batch < engine.max_running), engine.max_running]
    contexts = [*(context for context in _CONTEXTS if context < longest), longest]
    trees = config.model.batch_invariant != "engine"  # as the engine builds it on a GPU
    costs = CostModel(free=FreeRows(device.free_rows))
    policy = build_policy(config.speculation, drafters_of(config), trees=trees, costs=costs)
    copy = self_format(config)
    for batch in batches:
        for context in contexts:
            if batch * context > engine.kv_tokens:
                continue  # more than run together
            plain, eager = (_pass(config, net, device, batch, 1, context, eager=eager) for eager in (False, True))
            arms = [arm for arm in policy.arms_at(batch) if arm != PLAIN] if policy else []
            yield StepRow(
                batch=batch,
                context=context,
                floor_ms=plain.floor_ms,
                plain_ms=plain.ms,
                eager_ms=eager.ms,
                decides=plain.decides,
                launches=plain.launches,
                tokens_s=batch / plain.ms * 1e3,
                strategies=tuple(_strategy(config, net, device, batch, context, arm, plain, copy) for arm in arms),
            )


def _pass(
    config: Config, net: Network, device: Device, batch: int, rows: int, context: int, *, eager: bool = False
) -> StepTime:
    """A step of the engine. Over several ranks: of one rank's part, with the collectives; ours has no graphs then, and
    its host launches the collectives too."""
    ranks = config.engine_ranks
    if ranks == 1:
        return step_time(net, device, batch, rows, context, eager=eager)
    eager = eager or config.rollout.engine.backend == "native"
    time = step_time(part_of_network(net, ranks, tables=False), device, batch, rows, context)
    launches = time.launches + 2 * net.num_layers + 1
    added_ms = gathers_s(net, ranks, batch * rows, device) * 1e3
    if eager:
        device_ms = time.ms - time.host_ms + added_ms
        added_ms += max(0.0, launches * DEFAULT.eager_kernel_s * 1e3 - device_ms)
    return replace(time, ms=time.ms + added_ms, launch_ms=time.launch_ms + added_ms, launches=launches)


def _strategy(
    config: Config,
    net: Network,
    device: Device,
    batch: int,
    context: int,
    strategy: Strategy,
    plain: StepTime,
    copy: LowBitFormat | None,
) -> StrategyRow:
    draft = time_of(draft_kernels(net, batch, strategy, context, copy), device)
    rows = 1 + strategy.tokens_to_verify
    if config.engine_ranks == 1:
        verify = time_of(step_kernels(net, batch, rows, context), device)
    else:
        verify = _pass(config, net, device, batch, rows, context)
    draft_ms = draft.ms - DEFAULT.host_s * 1e3  # the step's host work counts once
    whole = draft_ms + verify.ms
    return StrategyRow(
        strategy=str(strategy),
        draft_ms=draft_ms,
        verify_ms=verify.ms,
        cycle_ms=whole,
        pays_from=whole / plain.ms - 1,
        gains_at_most=(1 + strategy.depth) * plain.ms / whole,
    )


# Tables.


def rendered(report: StepReport) -> RenderableType:
    """Render steps, strategies, the learner, and memory by phase."""
    parts: list[RenderableType] = [_step_table(report), _strategy_table(report)]
    if report.note:
        parts.append(Text(f"{report.note}\n"))
    learner = report.learner
    if learner is not None:
        ways = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in learner.hand_over_s.items())
        speed = f"{learner.tokens_s:,.0f} tokens/s on {learner.ranks} ranks, at {learner.mfu:.0%} MFU"
        mirror = f"; its matrices quantised once: {learner.quantising_s:.2f} s" if learner.quantising_s else ""
        parts.append(Text(f"learner (estimates): {speed}; weights to the engines: {ways}{mirror}\n"))
    parts += [_memory_table(plan, awake, report) for plan, awake in zip(report.memory, report.awake, strict=True)]
    parts.append(
        Text(
            "predicted from shapes and data sheets, fitted to an A100 sweep (docs/results/gpu.md), not measured here\n"
            f"between nodes {NETWORK_BYTES_S / 1e9:.0f} GB/s are assumed",
            style="dim",
        )
    )
    return Group(*parts)


def _step_table(report: StepReport) -> Table:
    stored = "" if report.quantization == "none" else f" in {report.quantization}"
    weights = f"weights{stored} {report.weight_bytes / GIB:.2f} GiB"
    place = f"one {report.device}" if report.ranks == 1 else f"{report.ranks} {report.device}"
    table = Table(title=f"One engine step on {place}, predicted; {weights}", title_justify="left")
    names = ("requests", "context", "floor ms", "step ms", "of floor", "without graphs", "tokens/s")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("decides")
    for row in report.steps:
        share = f"{row.floor_ms / row.plain_ms:.0%}"
        numbers = (f"{row.batch:,}", f"{row.context:,}", f"{row.floor_ms:.2f}", f"{row.plain_ms:.2f}", share)
        table.add_row(*numbers, f"{row.eager_ms:.2f}", f"{row.tokens_s:,.0f}", row.decides)
    return table


def _strategy_table(report: StepReport) -> RenderableType:
    speculating = [row for row in report.steps if row.strategies]
    if not speculating:
        return Text("no speculation\n")
    table = Table(title="Speculation, at the longest context", title_justify="left")
    for name in (
        "requests",
        "strategy",
        "draft ms",
        "verify ms",
        "cycle ms",
        "pays from, accepted tokens",
        "gains at most",
    ):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    longest = {row.batch: row for row in speculating}  # contexts ascend
    shown = {1, 8, 32, max(longest)}
    for row in longest.values():
        for arm in row.strategies if row.batch in shown else ():
            times = f"{arm.draft_ms:.2f}", f"{arm.verify_ms:.2f}", f"{arm.cycle_ms:.2f}"
            table.add_row(f"{row.batch:,}", arm.strategy, *times, f"{arm.pays_from:.2f}", f"{arm.gains_at_most:.1f}x")
    return table


def _memory_table(plan: MemoryPlan, awake: MemoryPlan, report: StepReport) -> Table:
    how = "engines sleep while the learner works" if report.engines_sleep else "nobody sleeps"
    how += ", the optimizer is in host memory while they decode" if report.optimizer_away else ""
    suffix = f"; {how}" if plan.place == "colocated" else ""
    title = f"Memory of a {plan.place} {report.device}, GiB of {report.device_bytes / GIB:.1f}{suffix}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for phase in plan.phases:
        table.add_column(phase.name, justify="right")
    for name in dict.fromkeys(name for phase in plan.phases for name in phase.items):
        sizes = [phase.items.get(name, 0) for phase in plan.phases]
        if max(sizes) >= GIB / 20:
            table.add_row(name, *(_gib(size) for size in sizes))
    table.add_section()
    table.add_row("sum", *(_gib(phase.total_bytes) for phase in plan.phases))
    if plan.place == "colocated":
        table.add_row("sum, nobody asleep", *(_gib(phase.total_bytes) for phase in awake.phases))
    table.add_row("fits", *_verdicts(plan, report.device_bytes))
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size else "-"


def _verdicts(plan: MemoryPlan, device_bytes: int) -> Sequence[str]:
    return ["yes" if phase.total_bytes <= device_bytes else "no" for phase in plan.phases]
