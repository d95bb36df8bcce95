"""`paceline calibrate`: measure the cost of engine steps and drafts on this device, and store it for later runs.

Owns the output: the table, the toggle boundary and the plot. It measures the engine that runs use
(`actors.engine.native.measuring`), on this machine, in this process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actors.engine.native.measuring import Check, Measured, measure_engine
from config.strategy import Strategy
from launch.calibrations import calibrations_folder, replace_in_folder
from launch.config import Config
from launch.errors import UsageError
from launch.run.opening import engine_options
from planner.calibration_plot import draw
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration

ACCEPTANCE = 0.8  # of every drafted token, for the boundary
DEPTHS = (3, 5, 8)
MOST_RUNNING = 256
FREE = "free drafts"
_LONGEST, _USUAL, _SHORTEST = 4096, 1024, 128  # most tokens of context measured
_SHOWN = 24  # passes in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The result of `paceline calibrate`."""

    path: Path
    plot: Path
    calibration: Calibration
    checks: tuple[Check, ...]  # passes predicted from coarser ones, before they were measured
    context: int  # tokens of a request, for the boundary
    seconds: float


def calibrate(config: Config, out: Path | None, seconds: float) -> Iterator[tuple[float, str] | CalibrationReport]:
    """Measure, and replace the calibration of this model, precision and device in `out` (default: the runs' folder).
    Yields the share that is done, 0 to 1, and what comes next; the report at the end.

    Raises UsageError for an engine that is not ours or has several ranks, and the errors of such an engine's start.
    """
    if config.rollout.engine.backend != "native":
        raise UsageError(
            f"rollout.engine.backend is {config.rollout.engine.backend}: its engines measure their passes in passing",
            remedy="just train: what they learn is kept for the next run (docs/howto/calibrate.md)",
        )
    if config.engine_ranks > 1:
        raise UsageError(
            f"engines of this configuration have {config.engine_ranks} ranks, and one process measures one",
            remedy="just train: what they learn is kept for the next run (docs/howto/calibrate.md)",
        )
    for measured in measure_engine(
        config.model,
        engine_options(config),
        config.speculation,
        config.rollout.quantization,
        contexts=measured_contexts(config),
        seconds=seconds,
    ):
        if isinstance(measured, Measured):
            yield _written(config, measured, out)
        else:
            yield measured


def _written(config: Config, measured: Measured, out: Path | None) -> CalibrationReport:
    path = replace_in_folder(calibrations_folder(config) if out is None else out, measured.calibration)
    report = CalibrationReport(
        path=path,
        plot=path.with_suffix(".svg"),
        calibration=measured.calibration,
        checks=measured.checks,
        context=measured_contexts(config)[0],
        seconds=measured.seconds,
    )
    report.plot.write_text(plotted(report), encoding="utf-8")
    return report


def measured_contexts(config: Config) -> list[int]:
    """Return the measured contexts in tokens: of a request in the middle of a response, at its end, at its begin."""
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    return [max(min(longest // 2, _USUAL), 8), max(min(longest, _LONGEST), 8), max(min(longest // 8, _SHORTEST), 8)]


def errors(report: CalibrationReport) -> dict[str, list[float]]:
    """Return relative errors of passes, by predictor: before their measurement, the present model, the
    roofline alone."""
    costs, fitted = CostModel(report.calibration), report.calibration.fitted
    found: dict[str, list[float]] = {"before it was measured": [abs(check.error) for check in report.checks]}
    found["with all measurements"] = [
        abs((costs.step_s(one.requests, one.rows, one.context_tokens) or 0.0) / one.seconds - 1)
        for one in report.calibration.passes
    ]
    if fitted is not None:
        found["by the roofline alone"] = [
            abs(fitted.seconds(one.requests, one.rows, one.context_tokens) / one.seconds - 1)
            for one in report.calibration.passes
        ]
    return {name: values for name, values in found.items() if values}


def speed(costs: CostModel, drafter: str, depth: int, running: int, context: int) -> float | None:
    """Return tokens per second relative to plain decoding, with acceptance ACCEPTANCE of every drafted token; None if
    unknown."""
    plain_s = costs.step_s(running, running, running * context)
    step_s = costs.step_s(running, running * (1 + depth), running * context)
    draft_s = 0.0 if drafter == FREE else costs.draft_s(Strategy(drafter, depth), running)
    if plain_s is None or step_s is None or draft_s is None:
        return None
    tokens = sum(ACCEPTANCE**accepted for accepted in range(depth + 1))
    return tokens * plain_s / (step_s + draft_s)


def pays_up_to(costs: CostModel, drafter: str, depth: int, context: int) -> int:
    """Return the most running requests up to which it always pays off; 0: not even for one."""
    for running in range(1, MOST_RUNNING + 1):
        if (speed(costs, drafter, depth, running, context) or 0.0) <= 1.0:
            return running - 1
    return MOST_RUNNING


def rendered(report: CalibrationReport) -> RenderableType:
    """Render the report for a terminal."""
    costs, key = CostModel(report.calibration), report.calibration.key
    passes = Table(title="Engine steps without drafting", title_justify="left")
    for head in ("requests", "rows", "context", "measured ms", "predicted ms", "error"):
        passes.add_column(head, justify="right")
    shown = report.calibration.passes
    for one in shown[:: max(-(-len(shown) // _SHOWN), 1)]:
        predicted_s = costs.step_s(one.requests, one.rows, one.context_tokens) or 0.0
        error = predicted_s / one.seconds - 1
        cells = (str(one.requests), str(one.rows), f"{one.context_tokens:,}", _ms(one.seconds), _ms(predicted_s))
        passes.add_row(*cells, f"{100 * error:+.1f} %")
    fit = Table(title="Error of a predicted step", title_justify="left")
    for head in ("predicted", "steps", "median", "worst"):
        fit.add_column(head, justify="left" if head == "predicted" else "right")
    for name, values in errors(report).items():
        fit.add_row(name, str(len(values)), f"{100 * median(values):.1f} %", f"{100 * max(values):.1f} %")
    drafters = list(dict.fromkeys(Strategy.parse(draft.strategy).drafter for draft in report.calibration.drafts))
    boundary = Table(
        title=f"Up to how many running requests a draft pays: acceptance {ACCEPTANCE}, context {report.context} tokens",
        title_justify="left",
    )
    boundary.add_column("draft")
    for drafter in (FREE, *drafters):
        boundary.add_column(drafter, justify="right")
    for depth in DEPTHS:
        limits = [pays_up_to(costs, drafter, depth, report.context) for drafter in (FREE, *drafters)]
        boundary.add_row(f"{depth} tokens", *(f">= {n}" if n == MOST_RUNNING else str(n) for n in limits))
    lines = [
        f"{key.device}: {key.model}, {key.precision}",
        f"{len(shown)} passes and {len(report.calibration.drafts)} drafts in {report.seconds:.0f} s",
    ]
    return Group(*map(Text, lines), passes, fit, boundary)


def plotted(report: CalibrationReport) -> str:
    """Plot predicted against measured times, and the gain of a draft over running requests, as SVG."""
    costs = CostModel(report.calibration)
    new = [(1e3 * check.measured_s, 1e3 * check.predicted_s) for check in report.checks]
    known = [
        (1e3 * one.seconds, 1e3 * (costs.step_s(one.requests, one.rows, one.context_tokens) or one.seconds))
        for one in report.calibration.passes
    ]
    drafts = [
        (1e3 * one.seconds, 1e3 * (costs.draft_s(Strategy.parse(one.strategy), one.requests) or one.seconds))
        for one in report.calibration.drafts
    ]
    scatter = {"before it was measured": new, "with all measurements": known, "drafts": drafts}
    running = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    gains = {f"{depth} tokens": _gains(costs, depth, running, report.context) for depth in DEPTHS}
    return draw(
        title=f"{report.calibration.key.device}, {report.calibration.key.precision}",
        scatter={name: points for name, points in scatter.items() if points},
        gains={name: points for name, points in gains.items() if points},
        gains_title=f"speed with free drafts, acceptance {ACCEPTANCE}",
    )


def _gains(costs: CostModel, depth: int, running: Sequence[int], context: int) -> list[tuple[float, float]]:
    found = ((float(n), speed(costs, FREE, depth, n, context)) for n in running)
    return [(n, gain) for n, gain in found if gain is not None]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
