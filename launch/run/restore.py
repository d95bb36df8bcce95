"""Whether a run can continue from a checkpoint: read every file and try every part of the state before Ray starts.

Owns the checks, and which folders of a checkpoint are dispensable. `launch.run.resume` chooses the checkpoint.
"""

from pathlib import Path
from typing import Any

from actors.data import DataError
from actors.data.mixture import make_order
from actors.training.checkpoint import LEARNER_DIR, STATE_FILE, Checked, CheckpointError, check, checkpoints, read_state
from launch.config import Config
from launch.drafter.weights import WEIGHTS_DIR
from launch.errors import PacelineError
from launch.run.ahead import read_ahead
from launch.run.checkpoints import DRAFTERS_DIR
from launch.run.inputs import Inputs
from launch.run.job import prompt_skip
from launch.run.resume import ResumeError
from launch.run.rounds import read_texts, round_sampling
from launch.run.token_budget import TokenBudget
from policies.drafter.canary import Canary
from policies.drafter.drift import DriftMonitor
from policies.drafter.payoff import TrainingPayoff
from policies.lengths import LengthModel

SPARE = (DRAFTERS_DIR, WEIGHTS_DIR)  # folders that only save time


def readable(checkpoint: Path) -> Checked:
    """Check every file. Raises CheckpointError that names the first unusable one, and PermissionError."""
    from actors.training.persistence import check_tensors  # imports torch, for readers of checkpoints only

    found = check(checkpoint, SPARE)
    try:
        check_tensors(checkpoint / LEARNER_DIR)
    except FileNotFoundError as error:
        raise CheckpointError(str(error)) from error
    return found


def usable(config: Config, inputs: Inputs, checkpoint: Path) -> Checked:
    """Check that a run of `config` can continue from it. Raises CheckpointError as `readable` does. Raises DataError or
    ResumeError if it is intact, but belongs to other data or another configuration."""
    found = readable(checkpoint)
    try:
        _try(config, inputs, read_state(checkpoint), checkpoint.name)
        read_ahead(checkpoint, inputs.prompts)
        read_texts(checkpoint, inputs.prompts)
    except CheckpointError as error:
        if not found.sealed:
            raise
        remedy = "its files are intact: resume with the configuration and the prompts that the run had"
        raise ResumeError(f"--resume: {error}", remedy=remedy) from error
    return found


def require_readable(checkpoint: Path) -> Checked:
    """Do `readable` for a command with a given checkpoint. Raises PacelineError, which names an intact one."""
    try:
        return readable(checkpoint)
    except CheckpointError as error:
        others = (path for path in reversed(checkpoints(checkpoint.parent)) if path != checkpoint and _intact(path))
        other = next(others, None)
        remedy = "no other checkpoint of the run is intact: bring it back from a copy"
        if other is not None:
            remedy = f"{other.name} is intact: --step {int(other.name.removeprefix('step_'))}"
        raise PacelineError(str(error), remedy=remedy) from error


def _intact(checkpoint: Path) -> bool:
    try:
        readable(checkpoint)
    except (CheckpointError, PermissionError):
        return False
    return True


def _try(config: Config, inputs: Inputs, state: dict[str, Any], name: str) -> None:
    """Do what `Job.load_state_dict` does, on throw-away parts. Raises CheckpointError, DataError."""
    try:
        if type(state["steps_done"]) is not int or state["steps_done"] != state["step"]:
            raise ValueError(f"steps_done is {state['steps_done']!r} and step {state['step']}")
        make_order(inputs.prompts, config.run.seed, config.data.shuffle).load_state_dict(state["order"])
        LengthModel(config.rollout.sampling.max_new_tokens / 2).load_state_dict(state["lengths"])
        TokenBudget(config, inputs.stop, inputs.answer).load_state_dict(state.get("token_budget", {}))
        if (skip := prompt_skip(config, inputs.prompts)) is not None:
            skip.load_state_dict(state.get("skip") or {})
        if (rounds := round_sampling(config, inputs.prompts)) is not None:
            rounds.rounds.load_state_dict(state.get("rounds") or {})
        for step, metrics in state["evaluations"].items():
            if not isinstance(metrics, dict):
                raise ValueError(f"the evaluation after step {step} is {metrics!r}")
        if config.drafter.train and state.get("drafter") is not None:
            DriftMonitor(config.drafter.drift, config.drafter.every_steps).load_state_dict(state["drafter"]["drift"])
            Canary(config.drafter.canary).load_state_dict(state["drafter"]["canary"])
            if "payoff" in state["drafter"]:
                TrainingPayoff().load_state_dict(state["drafter"]["payoff"])
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{STATE_FILE} of {name} is not the state of a run: {said}") from error
