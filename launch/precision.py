"""The precision of rollouts and of the learner: its description, and the last evaluation in both.

Owns the words, and the note beside an exported model. The configuration alone decides the precisions.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from launch.config import Config
from launch.observe.journal import replace

EVALUATION = "evaluation.json"  # in the folder of an exported model: the evaluated precision and its rewards
REWARD, MASTER_REWARD = "eval/reward", "eval/master_reward"


def aligned(config: Config) -> bool:
    """Whether the learner's forward pass multiplies exactly the numbers that rollouts multiply."""
    return config.rollout.quantization == "none" or config.learner.quantization == "rollout"


def evaluated_as(config: Config) -> str:
    """Return the precision of rollouts and evaluations: a low-bit format, or model.dtype."""
    form = config.rollout.quantization
    return config.model.dtype if form == "none" else form


def precision_text(rollouts: str, learner: str, dtype: str) -> str:
    """Return text such as `rollouts in w8a8, which the learner mirrors; what it trains in float32`. `rollouts`:
    rollout.quantization, `learner`: learner.quantization, `dtype`: model.dtype."""
    if rollouts == "none":
        return f"rollouts and learner in {dtype}"
    if learner == "rollout":
        return f"rollouts in {rollouts}, which the learner mirrors; what it trains in {dtype}"
    return f"rollouts in {rollouts}, the learner in {dtype}: not aligned, the log-prob gap says how far apart they are"


def note_evaluation(
    config: Config, folder: Path, step: int, metrics: Mapping[str, float], weights: str | None = None
) -> None:
    """Write a note beside a low-bit run's model: the precision of its evaluation, and the rewards in both precisions.
    `weights`: precision of the folder's weights; default: model.dtype, as trained."""
    if config.rollout.quantization == "none" or REWARD not in metrics:
        return
    rewards = {evaluated_as(config): metrics[REWARD]}
    if MASTER_REWARD in metrics:
        rewards[config.model.dtype] = metrics[MASTER_REWARD]
    weights = weights or config.model.dtype
    note = {"step": step, "weights": weights, "evaluated_as": evaluated_as(config), REWARD: rewards}
    replace(folder / EVALUATION, json.dumps(note) + "\n")
