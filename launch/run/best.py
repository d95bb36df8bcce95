"""The best model so far by checkpoint.best_metric, kept beside the checkpoints as a Hugging Face directory.

Owns when it is written and its record; the learner writes it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.data import note_end_tokens
from launch.observe.journal import replace
from launch.precision import REWARD, evaluated_as
from launch.run.job import Job
from launch.run_folder import BEST_DIR, BEST_RECORD


def keep_best(job: Job, run_dir: Path) -> None:
    """Export the evaluated weights after an evaluation if it was the best of several."""
    options = job.config
    step = job.steps_done
    metric = options.checkpoint.best_metric
    if not (options.checkpoint.best and options.eval.every and improves(job.evaluations, step, metric)):
        return
    value, folder = job.evaluations[str(step)][metric], run_dir / BEST_DIR
    if _recorded(folder) == step:  # the resumed run has already written it
        return
    (folder / BEST_RECORD).unlink(missing_ok=True)  # a folder without it is incomplete
    job.learner.export(folder)
    note_end_tokens(folder, job.sampling.stop_token_ids)
    record: dict[str, Any] = {"step": step, metric: value}
    if options.rollout.quantization != "none":  # the kept weights are the trained ones, but the rollouts were measured
        record |= {"evaluated_as": evaluated_as(options), "weights": options.model.dtype}
    replace(folder / BEST_RECORD, json.dumps(record) + "\n")
    job.observer.event("best_model", f"{metric} {value:.3f} after step {step} is the best so far: saved in {folder}")


def improves(evaluations: Mapping[str, Mapping[str, float]], step: int, metric: str = REWARD) -> bool:
    """Whether the evaluation after `step` RL steps is better by `metric` than all before. The one before training never
    counts as best, since it is no model of the run."""
    values = {int(at): metrics[metric] for at, metrics in evaluations.items() if metric in metrics}
    return step > 0 and step in values and all(values[step] > value for at, value in values.items() if at < step)


def _recorded(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / BEST_RECORD).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
