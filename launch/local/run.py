"""`paceline.train(..., backend="local")`: a whole run in this process, with the folder, report and model of any run.

Owns the limits of such a run: each is reported, or refused. No checkpoints are written, so no run can be resumed.
"""

from collections.abc import Iterator
from pathlib import Path

from actors.data import note_end_tokens
from actors.stacks import stacks_into
from config.speculation import SpeculationOptions
from launch.config import Config, ConfigError, Issue
from launch.errors import as_expected
from launch.interrupt import Interrupt, Interrupted, interrupt_flag
from launch.local.job import initial_weights, open_job, threads_of
from launch.local.steps import run_steps
from launch.observe import Observer
from launch.precision import note_evaluation
from launch.report import write_report
from launch.report.summary import print_summary
from launch.reward_functions import code_paths
from launch.run.train import EXIT_INTERRUPTED, evaluate_if_due
from launch.run_folder import claim, set_aside
from models.durable import naming


def train_here(config: Config) -> int:
    """Run to the end and return the exit code. An older folder of the run's name is set aside. Raises ConfigError for
    what one process cannot do. Errors of the parts are raised unwrapped, so that a debugger stops at their origin."""
    if issues := list(refusals(config)):
        raise ConfigError(issues)
    run_dir = Path(config.run.dir) / config.run.name
    with naming(run_dir), claim(run_dir):
        code = _train(config, run_dir)
    if code == 0:
        print_summary(run_dir, report=write_report(run_dir), model=run_dir / "model")
    return code


def _train(config: Config, run_dir: Path) -> int:
    older = set_aside(run_dir)
    code_paths(config)
    with interrupt_flag() as interrupt, Observer(run_dir, config) as observer, stacks_into(run_dir / "run.log"):
        if older is not None:
            observer.event("set_aside", f"the older run of this name is now {older}")
        if left := ", ".join(left_out(config)):
            observer.event("local", f"one process, without Ray: {left}")
        interrupt.when_asked(observer)
        try:
            _run(_embedded(config), observer, interrupt, run_dir)
        except (Interrupted, KeyboardInterrupt):
            observer.event("interrupted", "a run in one process writes no checkpoints: start it again")
            return EXIT_INTERRUPTED
        except Exception as error:
            expected = as_expected(error)
            observer.event("failed", (expected.message if expected is not None else str(error)) or type(error).__name__)
            raise
        observer.event("finished", f"{config.run.steps} RL steps; model in {run_dir / 'model'}")
    return 0


def _run(config: Config, observer: Observer, interrupt: Interrupt, run_dir: Path) -> None:
    initial = initial_weights(config, observer, interrupt)
    with (
        threads_of(config),
        open_job(config, observer, initial, speculation=_speculation(config), interrupt=interrupt) as job,
    ):
        for _ in run_steps(job):
            evaluate_if_due(job, run_dir)
        observer.progress("export")
        job.learner.export(run_dir / "model")
        note_end_tokens(run_dir / "model", job.sampling.stop_token_ids)
        note_evaluation(config, run_dir / "model", job.steps_done, job.evaluations.get(str(job.steps_done), {}))


def refusals(config: Config) -> Iterator[Issue]:
    """Yield what one process cannot do."""
    if config.rollout.engine.backend != "native":
        message = f"{config.rollout.engine.backend}, but a run in one process has the native engine"
        yield Issue("rollout.engine.backend", message, remedy="set it to native, or leave backend='local' out")
    if config.learner.ranks != 1:
        message = f"{config.learner.ranks}, but a run in one process is one rank"
        yield Issue("learner.ranks", message, remedy="set it to 1, or leave backend='local' out")
    if config.engine_ranks > 1:
        key, message = "rollout.engine.tensor_parallel", f"{config.engine_ranks}, but one process is one rank"
        yield Issue(key, message, remedy="leave it out, or leave backend='local' out")
    threads = config.learner.threads_of(1)
    if config.rollout.engine.threads not in (None, threads):
        message = f"{config.rollout.engine.threads}, but the learner has {threads} in the same process"
        yield Issue("rollout.engine.threads", message, remedy=f"set it to {threads}, or learner.threads to the same")


def left_out(config: Config) -> Iterator[str]:
    """Yield the settings without effect in one process; no token and no loss depends on them."""
    yield "no checkpoints"
    if config.rollout.workers.max > 1:
        yield f"one engine instead of {config.rollout.workers.max} workers"
    if config.drafter.train:
        yield "no drafter is trained"
    if config.rollout.lookahead == "always":
        yield "nothing is sampled ahead (rollout.lookahead)"


def _embedded(config: Config) -> Config:
    """Return the configuration for one device, whose memory nothing else needs."""
    cluster = config.cluster.model_copy(update={"layout": "embedded", "offload": "never", "weights": "store"})
    return config.model_copy(update={"cluster": cluster})


def _speculation(config: Config) -> SpeculationOptions:
    """Return the options without the fresh weights of a drafter to train, unless strategies name it."""
    named = config.rollout.speculation.strategies is not None
    return config.speculation if named else config.rollout.speculation
