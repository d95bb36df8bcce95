"""`paceline simulate`: a run of any size in virtual time. Owns the command and its tables, not the model."""

import json
import sys
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.commands.failures import failures
from launch.errors import UsageError
from planner.simulate.progress import ProgressLine

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.simulate.outcome import Outcome
    from planner.simulate.study import Ablation

_ScenarioPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="scenario (docs/howto/simulate.md) or configuration of a run", show_default=False
    ),
]
_Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="overrides, e.g. fleet.nodes=64")
]


def add_command(app: typer.Typer) -> None:
    """Register the command."""

    @app.command()
    def simulate(
        scenario: _ScenarioPath,
        overrides: _Overrides = None,
        sweep: Annotated[
            str | None, typer.Option("--sweep", metavar="KEY=V,V", help="values of a key, e.g. nodes=1,2,4,...,1024")
        ] = None,
        weak: Annotated[
            bool, typer.Option("--weak", help="with --sweep nodes: let prompts and learner nodes grow with the nodes")
        ] = False,
        ablation: Annotated[
            bool, typer.Option("--ablation", help="show the gain of each technique: all but one, and one alone")
        ] = False,
        plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="write the sweep as SVG")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="show the traceback of a failure")] = False,
    ) -> None:
        """Simulate a run at any size: step time, idle share, cost and the gain of each technique. Needs no GPU."""
        with failures(debug, into_pipe=True):
            from planner.simulate.of_run import load

            if sweep is None and (plot is not None or weak):
                raise UsageError("--plot and --weak need --sweep")
            given, assumed = load(scenario, overrides or [])
            for text in assumed:
                typer.secho(f"assumed: {text}", fg="yellow", err=True)
            from planner.simulate.study import ablation as ablated
            from planner.simulate.study import sized, sweep_values

            line = ProgressLine()
            found: Any
            if sweep is None:
                if ablation:
                    of = ablated(given, line)
                    line.done()
                    _print(of.as_json() if as_json else _ablation_table(of), as_json)
                    if not as_json:
                        typer.echo(_headroom(of.limits))
                    return
                outcome = _simulated(given, line)
                _print(outcome.as_json() if as_json else _table([("", outcome)], given.name), as_json)
                if not as_json:
                    typer.echo(_headroom(outcome.headroom))
                return
            key, values = sweep_values(sweep)
            rows: list[tuple[str, Outcome]] = []
            ablations: list[tuple[str, Ablation]] = []
            for value, one in sized(given, key, values, scaled=weak):
                line.of = f"{key}={value}: "
                if ablation:
                    of = ablated(one, line)
                    ablations.append((value, of))
                    rows.append((value, of.whole))
                else:
                    rows.append((value, _simulated(one, line)))
            line.done()
            if plot is not None:
                from planner.simulate.plot import sweep_svg

                plot.parent.mkdir(parents=True, exist_ok=True)
                plot.write_text(sweep_svg(given.name, key, rows, ablations), encoding="utf-8")
            if as_json:
                found = [{key: value} | one.as_json() for value, one in ablations or rows]
                _print(found, as_json)
            else:
                _print(_table(rows, given.name, key), as_json)
                for value, of in ablations:
                    _print(_ablation_table(of, f"{key}={value}"), as_json)


def _headroom(limits: dict[str, float]) -> str:
    largest = sorted(limits.items(), key=itemgetter(1), reverse=True)
    return "a step would be shorter, without " + ", ".join(f"{name}: by {share:.1%}" for name, share in largest)


def _simulated(scenario: Any, line: ProgressLine) -> "Outcome":
    from planner.simulate.run import simulate_beside

    outcome = simulate_beside(scenario, line)
    line.done()
    return outcome


def _print(found: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 150).print(found)


def _table(rows: "Sequence[tuple[str, Outcome]]", name: str, key: str = "") -> "RenderableType":
    from rich.table import Table

    table = Table(title=f"{name}: simulated, not measured", title_justify="left")
    if key:
        table.add_column(key.rpartition(".")[2], justify="right", no_wrap=True)
    for column in (
        "GPUs", "workers", "step s", "rollout", "tail", "learn", "weights", "tokens/s", "idle", "speculating", "ETTR",
        "goodput", "per Mtoken",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    table.add_column("limit")
    for value, one in rows:
        cells = (
            f"{one.gpus:,}",
            f"{one.workers:,}",
            *(f"{seconds:.4g}" for seconds in (one.step_s, one.rollout_s, one.tail_s, one.learn_s, one.weights_s)),
            f"{one.tokens_s:,.0f}",
            f"{one.idle_share:.1%}",
            f"{one.speculating_share:.1%}",
            f"{one.ettr:.3f}",
            "-" if one.goodput is None else f"{one.goodput:.3f}",
            f"{one.cost_per_million:.3g}",
        )
        table.add_row(*((value,) if key else ()), *cells, one.limit)
    return table


def _ablation_table(of: "Ablation", what: str = "") -> "RenderableType":
    from rich.table import Table

    head = f"{of.whole.name} {what}".strip()
    table = Table(
        title=f"{head}: RL step {of.whole.step_s:.4g} s with all, {of.none.step_s:.4g} s with none "
        f"({of.none.step_s / of.whole.step_s:.2f}x)",
        title_justify="left",
    )
    table.add_column("technique")
    for column in ("without it, s", "it brings", "alone, s", "alone it brings", "per Mtoken without"):
        table.add_column(column, justify="right")
    for one in of.techniques:
        table.add_row(
            one.name,
            f"{one.without.step_s:.4g}",
            f"{one.last:.2f}x",
            f"{one.alone.step_s:.4g}",
            f"{one.first:.2f}x",
            f"{one.without.cost_per_million:.3g}",
        )
    return table
