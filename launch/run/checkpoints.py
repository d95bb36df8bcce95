"""Writing of checkpoints during a run: their contents, and the last saved step. launch.run.resume owns reading them."""

import shutil
from pathlib import Path

from actors.training.checkpoint import LEARNER_DIR, CheckpointError, checkpoint_path, new_checkpoint
from launch.drafter.weights import WEIGHTS_DIR
from launch.run.ahead import AHEAD_FILE, write_ahead
from launch.run.job import Job
from launch.run.rounds import TEXT_FILE, write_texts

DRAFTERS_DIR = "drafters"  # next to the learner's, in a checkpoint; may be missing


def save_first(job: Job) -> bool:
    """Save the last complete step for a notice, unless it is saved. Returns false if there is no state to save now: the
    step being learned or handed over comes first."""
    if job.boundary is None or job.learner.busy or job.saving:
        return False
    if job.unsaved:
        try:
            save(job)
        except CheckpointError as error:  # it was a precaution: the run itself is fine
            job.observer.event("checkpoint_failed", str(error))
    return True


def save(job: Job) -> None:
    """Save the last complete step. Raises CheckpointError."""
    job.saving = True
    try:
        job.saved = write(job)
    finally:
        job.saving = False


def write(job: Job) -> int:
    """Checkpoint the last complete step and return its number."""
    assert job.boundary is not None, "the learner is between two states"
    job.observer.progress("checkpoint")
    state = {**job.boundary, "evaluations": job.evaluations}
    responses, put_off = state.pop("ahead", None), state.pop("put_off", None)
    if job.drafter is not None:  # in its present state, like its weights
        state["drafter"] = job.drafter.state_dict()
    folder, step = job.context.run_dir / "checkpoints", int(state["steps_done"])
    with (
        job.context.learner_span("checkpoint"),
        job.dispatcher.unheard(),
        new_checkpoint(folder, step, state, job.config.checkpoint.keep) as learner_dir,
    ):
        job.observer.sync()  # the rows of its steps are on disk before it is
        job.learner.save(learner_dir)
        if responses:
            write_ahead(learner_dir.parent / AHEAD_FILE, responses)
        if put_off:
            write_texts(learner_dir.parent / TEXT_FILE, put_off)
        save_drafters(job, learner_dir.parent / DRAFTERS_DIR)
        save_drafter_weights(job, learner_dir.parent / WEIGHTS_DIR)
    path = checkpoint_path(folder, step)
    job.learner.saved_as(path / LEARNER_DIR)
    if (drafters := path / DRAFTERS_DIR).is_dir():
        job.dispatcher.drafters.saved_as(str(drafters.resolve()))
    job.observer.event("checkpoint", str(path))
    return step


def save_drafters(job: Job, directory: Path) -> None:
    """Save the drafters' state for a checkpoint. It only saves time: the checkpoint is complete without it."""
    if job.speculation is None:
        return
    failure = job.dispatcher.drafters.save(str(directory.resolve()))
    if failure is not None:
        shutil.rmtree(directory, ignore_errors=True)
        job.observer.event("drafters_not_saved", f"the checkpoint lacks the drafters' state: {failure}")


def save_drafter_weights(job: Job, directory: Path) -> None:
    """Save the weights that engines draft with and those to roll back to. The checkpoint is complete without them."""
    if job.drafter is None:
        return
    try:
        job.drafter.save(directory)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        job.observer.event("drafters_not_saved", f"the checkpoint lacks the trained drafter's weights: {error}")
