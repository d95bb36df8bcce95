"""The model with the highest held-out reward so far, kept beside the checkpoints as a Hugging Face directory. Owns when
it is written and what is said of it; the learner writes it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.observe.journal import replace
from launch.precision import REWARD, evaluated_as
from launch.run.job import Job

BEST_DIR = "best"  # in the run's folder
RECORD = "best.json"  # in it: {"step", "eval/reward"}, of a low-bit run also {"evaluated_as", "weights"}


def keep_best(job: Job, run_dir: Path) -> None:
    """After an evaluation: if it was the best of several, export the weights that it measured."""
    options = job.config
    step = job.steps_done
    if not (options.checkpoint.best and options.eval.every and improves(job.evaluations, step)):
        return
    reward, folder = job.evaluations[str(step)][REWARD], run_dir / BEST_DIR
    if _recorded(folder) == step:  # a run that was resumed here has written it
        return
    (folder / RECORD).unlink(missing_ok=True)  # a folder without it was not finished
    job.learner.export(folder)
    record: dict[str, Any] = {"step": step, REWARD: reward}
    if options.rollout.quantization != "none":  # what is kept is what is trained, what was measured are its rollouts
        record |= {"evaluated_as": evaluated_as(options), "weights": options.model.dtype}
    replace(folder / RECORD, json.dumps(record) + "\n")
    job.observer.event(
        "best_model", f"held-out reward {reward:.3f} after step {step}, the best so far: kept in {folder}"
    )


def improves(evaluations: Mapping[str, Mapping[str, float]], step: int) -> bool:
    """The evaluation after `step` RL steps is better than every one before it. The one before training is no model of
    the run."""
    rewards = {int(at): metrics[REWARD] for at, metrics in evaluations.items() if REWARD in metrics}
    return step > 0 and step in rewards and all(rewards[step] > reward for at, reward in rewards.items() if at < step)


def _recorded(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / RECORD).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
