"""The training loop: warm start, RL steps, evaluations, checkpoints, export, report."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from actors.data import note_end_tokens
from actors.stacks import stacks_into
from actors.training.checkpoint import (
    LEARNER_DIR,
    CheckpointError,
    latest_checkpoint,
    read_state,
    step_of,
)
from launch.cache import require_readable
from launch.cluster.exposure import asks_for_token, exposure
from launch.cluster.session import ray_session
from launch.cluster.versions import NodeVersions, compared
from launch.config import Config
from launch.drafter.offline_fit import fitted_folder, offline_fit
from launch.drafter.weights import WEIGHTS_DIR
from launch.errors import PacelineError, RayLostError, as_expected, show
from launch.interrupt import Interrupt, Interrupted, interrupt_flag
from launch.observe import Observer
from launch.precision import note_evaluation
from launch.report import write_report
from launch.report.summary import print_summary
from launch.reward_functions import code_paths
from launch.run.ahead import read_ahead
from launch.run.best import keep_best
from launch.run.checkpoints import DRAFTERS_DIR, save, save_first
from launch.run.evaluate import evaluate_job, evaluate_masters
from launch.run.inputs import Inputs, load_inputs
from launch.run.job import Job
from launch.run.opening import open_job
from launch.run.restore import usable
from launch.run.resume import ResumeError, check_resume, checkpoints_to_resume, find_checkpoint
from launch.run.rl_step import rl_step
from launch.run.rounds import read_texts
from launch.run.warmup import initial_weights, learner_group, warm_start
from launch.run_folder import claim, set_aside
from models.durable import naming
from policies.roofline.pace import Pace

EXIT_INTERRUPTED = 130


def train(
    config: Config,
    *,
    config_source: str,
    resume: bool,
    allowed: Sequence[str] = (),
    step: int | None = None,
    pace: Pace | None = None,
) -> int:
    """Run to the end and return the exit code. `config_source`: the arguments that reproduce `config`.

    resume: continue from the newest intact checkpoint, or from that of `step`. `allowed`: keys that may differ from the
    run's own configuration. `pace`: of experiments: parts last as long as on another device.
    """
    run_dir = Path(config.run.dir) / config.run.name
    with naming(run_dir), claim(run_dir):
        code = _train(config, run_dir, config_source, resume, allowed, step, pace)
    if code == 0:
        print_summary(run_dir, report=write_report(run_dir), model=run_dir / "model")
    return code


def _train(
    config: Config,
    run_dir: Path,
    config_source: str,
    resume: bool,
    allowed: Sequence[str],
    step: int | None,
    pace: Pace | None,
) -> int:
    if resume:
        checkpoints_to_resume(run_dir, step)  # checked before anything slow
    changed = check_resume(run_dir, config, allowed) if resume else []
    inputs = load_inputs(config)
    _check_kept(config)
    found = find_checkpoint(run_dir, step, partial(usable, config, inputs)) if resume else None
    # A refusal up to here leaves the run's folder unchanged.
    cleared = [] if found is None else found.clear()
    older = None if resume else set_aside(run_dir)
    checkpoint = None if found is None else found.checkpoint
    with (
        interrupt_flag() as interrupt,
        Observer(run_dir, config, resume_from=None if checkpoint is None else step_of(checkpoint)) as observer,
        stacks_into(run_dir / "run.log"),
    ):
        for kind, message in cleared:
            observer.event(kind, message)
        if older is not None:
            observer.event("set_aside", f"the older run of this name is now {older}")
        if changed:
            observer.event("changed_configuration", "; ".join(map(str, changed)))
        interrupt.when_asked(observer)
        observer.progress("starting Ray")
        try:
            with ray_session(
                address=config.cluster.address,
                on_lost=lambda error: _ray_lost(error, observer, _how_to_go_on(run_dir, config_source)),
                lost_after_s=config.cluster.ray_timeout_s,
                code_paths=code_paths(config),
            ) as session:
                if session.dashboard_url:
                    observer.event("dashboard", session.dashboard_url)
                if open_to_others := exposure(session, token=asks_for_token(session)):
                    observer.event("ray_open", open_to_others)
                versions = compared(session, observer)
                run(config, observer, interrupt, run_dir, checkpoint, inputs, versions, pace)
            observer.event("finished", f"{config.run.steps} RL steps; model in {run_dir / 'model'}")
        except Interrupted as stop:
            observer.event("interrupted", f"{stop}: {_how_to_go_on(run_dir, config_source)}")
            return EXIT_INTERRUPTED
        except KeyboardInterrupt:
            observer.event("interrupted", f"at once: {_how_to_go_on(run_dir, config_source)}")
            return EXIT_INTERRUPTED
        except Exception as error:
            expected = as_expected(error)
            with suppress(OSError):  # a full disk must not hide the reason
                observer.event("failed", str(error) or type(error).__name__)
            if expected is None:
                raise
            # A refused checkpoint would be refused again.
            again = None if isinstance(error, ResumeError) else _how_to_go_on(run_dir, config_source)
            remedies = [expected.remedy, again]
            raise PacelineError(expected.message, remedy="; then ".join(filter(None, remedies))) from error
    return 0


def _check_kept(config: Config) -> None:
    """Raise PacelineError for a warm start or a fitted drafter of another user that this one cannot read."""
    target = initial_weights(config)
    require_readable(target)
    if (target / "config.json").is_file() and (fitted := fitted_folder(config, target)) is not None:
        require_readable(fitted)


def _ray_lost(error: RayLostError, observer: Observer, how_to_go_on: str) -> None:
    """Report a loss of Ray once, on a thread of its watch, while the loop may hang in a call to Ray. Then this process
    ends."""

    def into_files() -> None:
        with suppress(Exception):
            observer.event("failed", error.message)
            observer.close()

    writer = threading.Thread(target=into_files, daemon=True)  # the loop may hold a lock of the observer
    writer.start()
    writer.join(2.0)
    error.remedy = how_to_go_on
    show(error)


def _how_to_go_on(run_dir: Path, config_source: str) -> str:
    """Return the command that loses least; a resume only if there is something to resume."""
    command = f"paceline train {config_source}"
    if latest_checkpoint(run_dir / "checkpoints") is None:
        return f"start again (there is no checkpoint yet) with: {command}"
    return f"go on with: {command} --resume"


def run(
    config: Config,
    observer: Observer,
    interrupt: Interrupt,
    run_dir: Path,
    checkpoint: Path | None,
    inputs: Inputs | None,
    versions: NodeVersions,
    pace: Pace | None = None,
) -> None:
    """Everything that needs Ray. What is raised after the first step leaves a checkpoint of the last complete one."""
    initial = warm_start(config, interrupt, observer, partial(learner_group, avoid=versions.refused))
    config = offline_fit(config, interrupt, initial, run_dir, observer, versions.refused)
    observer.progress("starting the workers")
    with open_job(config, observer, interrupt, initial, run_dir, versions, inputs, pace) as job:
        job.learner.begin(config.learner.optimizer, config.run.steps * config.learner.mini_batches)
        if checkpoint is not None:
            observer.progress("loading the checkpoint")
            try:
                job.learner.load(checkpoint / LEARNER_DIR)
            except CheckpointError as error:
                raise ResumeError(
                    f"--resume: {error}",
                    remedy="undo what changed since, go on from an older checkpoint with --resume --step N, or start "
                    "without --resume: the folder is kept under another name",
                ) from error
            responses = {"ahead": read_ahead(checkpoint, job.prompts), "put_off": read_texts(checkpoint, job.prompts)}
            job.load_state_dict(read_state(checkpoint) | responses)
            if (drafters := checkpoint / DRAFTERS_DIR).is_dir():
                job.dispatcher.drafters.load(str(drafters.resolve()))
            if job.drafter is not None:
                job.drafter.load(checkpoint / WEIGHTS_DIR)
        if job.drafter is not None:
            job.drafter.start_trainers(job.dispatcher)
        job.boundary = job.state_dict()
        observer.progress("publish")
        job.publish()
        job.saved = job.steps_done
        try:
            evaluate_if_due(job, run_dir)  # before the first step, or missing from an interrupted run
            while job.steps_done < config.run.steps:
                interrupt.check()
                rl_step(job)
                if job.notices is not None and job.notices.endangered:
                    save_first(job)  # an evaluation takes long; a resume from here repeats it
                before = dict(job.evaluations)
                evaluate_if_due(job, run_dir)
                if due(job.steps_done, config.checkpoint.every, config.run.steps) and (
                    job.unsaved or job.evaluations != before
                ):
                    save(job)
        except BaseException as error:
            intact = job.boundary is not None and not job.learner.lost and not isinstance(error, CheckpointError)
            if intact and job.unsaved:
                save(job)
            raise
        observer.progress("export")
        job.learner.export(run_dir / "model")
        note_end_tokens(run_dir / "model", job.sampling.stop_token_ids)
        note_evaluation(config, run_dir / "model", job.steps_done, job.evaluations.get(str(job.steps_done), {}))


def evaluate_if_due(job: Job, run_dir: Path) -> None:
    """Evaluate before the first step, every eval.every steps, and after the last (there in both precisions), unless it
    was done already."""
    if job.steps_done == 0 or due(job.steps_done, job.config.eval.every, job.config.run.steps):
        evaluate_job(job)
        keep_best(job, run_dir)
    if job.steps_done == job.config.run.steps:
        evaluate_masters(job)


def due(step: int, every: int, last: int) -> bool:
    """Whether `step` is a multiple of `every` (0: never), or the last."""
    return step == last or (every > 0 and step % every == 0)
