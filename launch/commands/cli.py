"""The command line. Owns arguments; each command imports its work when it runs.

No torch or ray at module level, so that `paceline --help` answers at once.
Exit codes: 0 done, 1 failed, 2 usage or configuration, 75 Ray was lost, 130 interrupted.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.commands.admin import add_commands
from launch.commands.failures import failures
from launch.commands.flags import WithOverrides
from launch.errors import UsageError
from launch.run.standing import one_tree
from planner.simulate.command import add_command as add_simulate

if TYPE_CHECKING:
    from launch.commands.preflight import Command
    from launch.config import Config, Loaded

app = typer.Typer(
    name="paceline",
    help="RL post-training of language models on Ray, without the long tail. Start with: paceline train CONFIG",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file (see examples/)", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="overrides, e.g. run.steps=20")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of a failure")]


def _version(asked: bool) -> None:
    if asked:
        from launch.cluster.installed import installed

        typer.echo("\n".join(f"{name}: {value}" for name, value in installed().items()))
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show what is installed, and exit")
    ] = False,
) -> None:
    pass


@app.command(cls=WithOverrides)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest intact checkpoint")] = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="continue if there is a checkpoint, else start (for schedulers)")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="KEY", help="with --resume: key or section that may differ from the run's"),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="with --resume: checkpoint to continue from; later ones are set aside")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model: warm start if configured, RL steps, evaluation, checkpoints, report, exported model."""
    with failures(debug):
        if allow and not (resume or resume_or_start):
            raise UsageError("--allow needs --resume: it names keys that may differ from the run's configuration")
        if step is not None and not resume:
            raise UsageError("--step needs --resume: it names the checkpoint to continue from")
        loaded = _load(config, overrides, fetch=True)
        if resume_or_start:
            from launch.run.resume import can_resume

            resume = can_resume(loaded.config)
        _require(loaded.config, "train")
        from launch.run.train import train as run

        source = shlex.join([str(config), *(overrides or [])])
        code = run(loaded.config, config_source=source, resume=resume, allowed=allow or [], step=step)
    raise typer.Exit(code)


@app.command(cls=WithOverrides)
def warmup(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train on demonstrations (warm start) and print the folder of the model."""
    with failures(debug):
        loaded = _load(config, overrides, fetch=True)
        if loaded.config.warmup is None:
            raise UsageError(f"{config} has no section warmup", remedy="add warmup.data=FILE (demonstrations)")
        _require(loaded.config, "warmup")
        from launch.run.warmup import warmup as run

        typer.echo(run(loaded.config))


@app.command("eval", cls=WithOverrides)
def evaluate(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="WHAT",
            help="configuration, or folder of a run, checkpoint or model",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="CONFIG", help="configuration of the evaluation; default: the run's"),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="checkpoint of a run; default: its final model")] = None,
    best: Annotated[bool, typer.Option("--best", help="best model of a run")] = False,
    base: Annotated[bool, typer.Option("--base", help="also evaluate the run's initial model, and compare")] = False,
    debug: Debug = False,
) -> None:
    """Evaluate a model on held-out prompts (data.eval or eval.sets): reward, pass@k, maj@k and all responses."""
    with failures(debug):
        from launch.commands.eval_target import base_of, find
        from launch.config import ConfigError
        from launch.config.hub import fetched
        from launch.config.overrides import contradictions

        if issues := contradictions(overrides or []):
            raise ConfigError(issues)
        target = find(what, overrides or [], config=config, step=step, best=best)
        if not target.config.eval_sets:
            raise UsageError(f"{what} has no held-out prompts", remedy="set data.eval=FILE, or eval.sets")
        began = base_of(target) if base else None
        with target.weights() as chosen:
            chosen = fetched(chosen, sys.stdout)
            _require(chosen, "eval")
            from launch.commands.eval_show import show_comparison, show_metrics
            from launch.report import write_report
            from launch.run.evaluate import evaluate_each

            if began is not None:
                _require(began, "eval")
            *before, (metrics, folder) = evaluate_each([began, chosen] if began is not None else [chosen])
        base_folder = before[0][1] if before else None
        if base_folder is None:
            show_metrics(metrics)
        else:
            show_comparison(base_folder, folder)
        typer.echo(f"responses  {folder / 'eval_samples.jsonl'}")
        typer.echo(f"report     {write_report(folder, against=base_folder)}")


@app.command(cls=WithOverrides)
def chat(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="WHAT", help="folder of a run, checkpoint or model, or a configuration", show_default=False
        ),
    ],
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="answer this prompt and exit")] = None,
    single: Annotated[bool, typer.Option("--single", help="treat each prompt as a new conversation")] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, max=10, help="0: greedy; default: the run's")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="tokens of an answer; default: the run's")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="checkpoint of a run; default: its final model")] = None,
    best: Annotated[bool, typer.Option("--best", help="best model of a run")] = False,
    debug: Debug = False,
) -> None:
    """Chat with a model in the terminal, or line by line from a pipe, with its run's template and sampling."""
    with failures(debug, into_pipe=True):
        from launch.commands.eval_target import find
        from launch.config import ConfigError
        from launch.config.hub import fetched
        from launch.config.overrides import contradictions

        if issues := contradictions(overrides or []):
            raise ConfigError(issues)
        target = find(what, overrides or [], step=step, best=best)
        with target.weights() as chosen:
            chosen = fetched(chosen, sys.stderr)
            from launch.commands.chat import chat as run

            run(
                chosen,
                target.what,
                prompt=prompt,
                single=single,
                temperature=temperature,
                max_new_tokens=max_tokens,
            )


@app.command("config", cls=WithOverrides)
def show_config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file", show_default=False)] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="describe every key")] = False,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration with the source of every value. Fails if a run would be refused here."""
    with failures(debug, into_pipe=True):
        from launch.config.bias import biases_of
        from launch.config.manual import schema_markdown
        from launch.config.show import resolved_lines

        if schema:
            typer.echo(schema_markdown(), nl=False)
            raise typer.Exit
        if config is None:
            raise UsageError("give a configuration file, or --schema")
        loaded = _load(config, overrides)
        lines = list(resolved_lines(loaded))
        column = min(max(len(line) for line, _ in lines), 72)
        for line, source in lines:
            typer.echo(f"{line:<{column}}  # {source}" if source else line)
        from launch.commands.preflight import preflight

        for reason in biases_of(loaded.config):
            typer.secho(f"biased: {reason}", fg="yellow", err=True)
        refused = preflight(loaded.config)
        for issue in refused:
            typer.secho(f"error: {issue}", fg="red", err=True)
    if refused:
        raise typer.Exit(2)


@app.command("plan-graphs", cls=WithOverrides)
def plan_graphs(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Show which CUDA graphs an engine captures and their predicted memory. Needs no GPU."""
    with failures(debug, into_pipe=True):
        loaded = _load(config, overrides)
        from rich.console import Console

        from planner.plan_graphs import graph_report, rendered

        Console(width=None if sys.stdout.isatty() else 120).print(rendered(graph_report(loaded.config)))


@app.command("plan-step", cls=WithOverrides)
def plan_step(
    config: ConfigPath,
    overrides: Overrides = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="GPU", help="GPU type; default: cluster.gpu, else this machine's")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    debug: Debug = False,
) -> None:
    """Predict step time and memory on a GPU, without one. Fails if the run cannot fit."""
    with failures(debug, into_pipe=True):
        loaded = _load(config, overrides)
        from launch.config import ConfigError
        from planner.plan_step import rendered, step_report

        report = step_report(loaded.config, device)
        if as_json:
            import json

            typer.echo(json.dumps(report.as_json(), indent=1))
        else:
            from rich.console import Console

            Console(width=None if sys.stdout.isatty() else 120).print(rendered(report))
        if report.misfit is not None:
            raise ConfigError([report.misfit])


@app.command(cls=WithOverrides)
def calibrate(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="output folder; default: run.dir/calibrations, where runs look"),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="approximate measuring time")] = 60.0,
    debug: Debug = False,
) -> None:
    """Measure the cost of engine steps and drafts for this model and device, for the strategy choice of later runs."""
    with failures(debug):
        loaded = _load(config, overrides, fetch=True)
        _require(loaded.config, "calibrate")
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from planner.calibrate import CalibrationReport, rendered
        from planner.calibrate import calibrate as run

        columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("the model", total=1.0)
            for report in run(loaded.config, out, seconds):
                if isinstance(report, tuple):
                    progress.update(task, completed=report[0], description=report[1])
        assert isinstance(report, CalibrationReport)
        Console(width=None if sys.stdout.isatty() else 120).print(rendered(report))
        typer.echo(f"calibration  {report.path}")
        typer.echo(f"plot         {report.plot}")


@app.command("check-cluster")
def check_cluster(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="files for `ray up`, or KubeRay manifests", show_default=False),
    ],
    debug: Debug = False,
) -> None:
    """Check cluster files (cluster.yaml, RayJob, RayCluster) without contacting a cloud."""
    with failures(debug):
        from launch.config import ConfigError, Issue
        from launch.manifests import check_manifest

        issues: list[Issue] = []
        for file in files:
            found = check_manifest(file)
            issues += [Issue(each.key, each.message, str(file), each.remedy) for each in found]
            if not found:
                typer.echo(f"{file}: no problems found")
        if issues:
            raise ConfigError(issues)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, finished or not", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="output folder; default: below RUN/exported")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="checkpoint; default: the newest")] = None,
    best: Annotated[bool, typer.Option("--best", help="export the best model by checkpoint.best_metric")] = False,
    quantization: Annotated[
        str, typer.Option("--quantization", help="w8a8 or fp8: quantise layers (compressed-tensors, for vLLM)")
    ] = "none",
    debug: Debug = False,
) -> None:
    """Export a run's checkpoint or best model as a Hugging Face model. Needs neither Ray nor a GPU."""
    with failures(debug):
        from launch.commands.export_model import export as write
        from launch.commands.export_model import export_best

        if best and (step is not None or quantization != "none"):
            raise UsageError("--best exports the model as it was saved: leave out --step and --quantization")
        if best:
            typer.echo(export_best(run, out or run / "exported/best"))
        else:
            named = "newest" if step is None else f"step_{step:06d}"
            typer.echo(write(run, out or run / "exported" / named, step, quantization))


@app.command("export-drafter")
def export_drafter(
    drafter: Annotated[
        Path, typer.Argument(metavar="DRAFTER", help="folder of a drafter, or of a run", show_default=False)
    ],
    target: Annotated[Path, typer.Option("--target", metavar="DIR", help="folder of its target model")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="output folder")],
    method: Annotated[
        Literal["eagle", "eagle3"] | None, typer.Option("--method", help="required method; default: any")
    ] = None,
    form: Annotated[
        Literal["vllm", "speculators"], typer.Option("--format", help="vllm: also SpecForge's, for SGLang")
    ] = "vllm",
    debug: Debug = False,
) -> None:
    """Export a trained drafter for stock vLLM (methods eagle and eagle3), SGLang and the speculators library."""
    with failures(debug):
        from launch.drafter.export import export

        typer.echo(export(drafter, target, out, method, form))


@app.command("warmup-drafter")
def warmup_drafter(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="output folder")],
    target: Annotated[
        Path | None, typer.Option("--target", metavar="DIR", help="folder of the target model; default: RUN/model")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="prompts, in a form that data.train accepts")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="run whose prompts and sampling are used")
    ] = None,
    algorithm: Annotated[Literal["eagle", "hass", "eagle3", "osd"], typer.Option("--algorithm")] = "eagle",
    init: Annotated[Path | None, typer.Option("--init", metavar="DIR", help="drafter to continue from")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="rollouts per prompt")] = 4,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="number of prompts")] = None,
    prompt_field: Annotated[str, typer.Option("--prompt-field", help="its value for --data")] = "prompt",
    response_field: Annotated[
        str | None, typer.Option("--response-field", help="learn from this field, not from own rollouts")
    ] = None,
    template: Annotated[Literal["chat", "plain"], typer.Option("--template", help="its value for --data")] = "chat",
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, help="default: the run's, or 1")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="tokens of a rollout")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="default: the run's, or 1e-3")] = None,
    max_steps: Annotated[int, typer.Option("--max-steps", min=1, help="micro-steps at most")] = 20_000,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device")] = "auto",
    debug: Debug = False,
) -> None:
    """Fit a drafter to a target model before a run. Use the folder as rollout.speculation.eagle.path."""
    with failures(debug):
        from launch.drafter.fit import DrafterWarmup
        from launch.drafter.fit import warmup_drafter as run_it

        given = DrafterWarmup(
            out=out,
            target=target,
            data=data,
            run=run,
            algorithm=algorithm,
            init=init,
            samples=samples,
            limit=limit,
            response_field=response_field,
            prompt_field=prompt_field,
            template=template,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            learning_rate=learning_rate,
            max_steps=max_steps,
            seed=seed,
            device=device,
        )
        for line in run_it(given):
            typer.echo(line)
        typer.echo(out)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, finished or not", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="output file; default: RUN/report.html")] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="RUN", help="another run to show beside it")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run's report (one HTML file) and Perfetto trace. Works while the run is going on."""
    with failures(debug):
        from launch.report import write_report

        typer.echo(write_report(run, output, against))


add_simulate(app)
add_commands(app)


def main() -> None:
    """Run the command that the arguments name. Adds the working directory to the import path, as `python -m` does: a
    console script has its own folder there, and users' modules would not be found."""
    try:
        with failures(debug=False):
            here = Path.cwd()
            one_tree(here)
    except typer.Exit as refused:
        sys.exit(refused.exit_code)
    if not {"", str(here)} & set(sys.path):
        sys.path.insert(0, str(here))
    app()


def _load(config: Path, overrides: list[str] | None, *, fetch: bool = False) -> "Loaded":
    """Load a configuration. Converts a model in a GGUF file and makes the files of data.reasoning_gym. `fetch`: also
    download what Hub ids name, unless it is cached."""
    from launch.config import ConfigError, load_config
    from launch.config.overrides import contradictions

    if issues := contradictions(overrides or []):
        raise ConfigError(issues)
    loaded = load_config(config, overrides or [])
    from launch.config.hub import converted, fetched

    made = fetched if fetch else converted
    return replace(loaded, config=made(loaded.config, sys.stderr))  # stdout: the result


def _require(config: "Config", command: "Command") -> None:
    from launch.commands.preflight import require

    require(config, command)
