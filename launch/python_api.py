"""`paceline.train` and `paceline.evaluate`: the commands' work, called from Python.

Owns how a configuration and reward functions are passed, and the results. Imports neither torch nor ray before a run.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launch.config import Config, load_config
from launch.config.load import load_values
from launch.errors import UsageError
from launch.observe import journal
from launch.reward_functions import reward_override

Reward = Callable[..., Any] | Mapping[str, Any]  # a function, or a term of reward.terms that may contain one
Rewards = Reward | Sequence[Reward]
Given = str | Path | Mapping[str, Any]
_NAME = "configuration"  # name of a configuration that is in no file


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run."""

    path: Path

    @property
    def model(self) -> Path:
        """The folder of the trained model in Hugging Face format. It exists once the run has ended."""
        return self.path / "model"

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each RL step, as in metrics.jsonl: {"step": 1, "reward/mean": ..., ...}."""
        return list(self._rows("step"))

    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each held-out evaluation: {"step": 0, "eval/reward": ..., ...}."""
        return list(self._rows("eval"))

    def _rows(self, kind: str) -> Iterator[dict[str, Any]]:
        return (row for row in journal.read(self.path / "metrics.jsonl") if row.get("kind") == kind)


def train(
    config: Given,
    *overrides: str,
    rewards: Rewards | None = None,
    resume: bool = False,
    step: int | None = None,
    backend: Literal["ray", "local"] = "ray",
) -> Run:
    """Train as `paceline train` does, with this process as the driver, and return the run.

    config: a YAML file, or its content as nested mappings. overrides: "key=value". rewards: functions as in
    docs/howto/rewards.md, or terms ({"function": f, "weight": 0.2}, {"kind": "math"}). They replace reward.terms, and
    may be defined in the calling script or notebook. resume: continue from the run's newest intact checkpoint, or from
    that of `step`. backend: "local" runs everything in this process, without Ray: the same tokens, rewards and losses,
    for debugging, notebooks and tests. It writes no checkpoints, so it cannot resume. It refuses several learner ranks
    and vLLM.

    Ctrl-C checkpoints the last complete step and raises KeyboardInterrupt. Raises PacelineError (ConfigError, ...) for
    errors that a user can fix. If Ray's own servers are lost, this process ends, as the command does.
    """
    _on_main_thread()
    if step is not None and not resume:
        raise UsageError("step is for resume=True: it names the checkpoint to go on from")
    if backend not in ("ray", "local"):
        raise UsageError(f"backend is {backend!r}", remedy='use "ray" or "local"')
    if backend == "local" and resume:
        raise UsageError("backend='local' writes no checkpoints to resume from", remedy="leave one of the two out")
    loaded = _load(config, overrides)
    if rewards is not None:
        loaded = _load(config, [*overrides, reward_override(_listed(rewards), loaded)])
    from launch.config.hub import fetched

    loaded = fetched(loaded, sys.stdout)
    _require(loaded, "train")
    path = Path(loaded.run.dir) / loaded.run.name
    if backend == "local":
        from launch.local.run import train_here

        if train_here(loaded) != 0:
            raise KeyboardInterrupt("the run was stopped")
        return Run(path)
    from launch.run.train import train as run

    source = _NAME if isinstance(config, Mapping) else str(config)
    if run(loaded, config_source=" ".join([source, *overrides]), resume=resume, step=step) != 0:
        raise KeyboardInterrupt("the run was stopped; go on with resume=True")
    return Run(path)


def evaluate(
    what: Given, *overrides: str, config: str | Path | None = None, rewards: Rewards | None = None
) -> dict[str, float]:
    """Return held-out metrics (eval/reward, ...), as `paceline eval` measures them.

    what: a configuration, as for `train`, or the folder of a run, a checkpoint or a model. config: how to evaluate such
    a folder. The other arguments and the errors are those of `train`.
    """
    _on_main_thread()
    from launch.commands.eval_target import Target, find

    def target(more: Sequence[str]) -> Target:
        given = [*overrides, *more]
        if isinstance(what, Mapping):
            return Target(config=_load(what, given, training=False), what="model.path")
        return find(Path(what), given, config=None if config is None else Path(config))

    found = target(())
    if rewards is not None:
        found = target([reward_override(_listed(rewards), found.config)])
    if not found.config.eval_sets:
        raise UsageError("there are no held-out prompts", remedy="set data.eval=FILE, or eval.sets")
    from launch.config.hub import fetched
    from launch.run.evaluate import evaluate as run

    with found.weights() as chosen:
        chosen = fetched(chosen, sys.stdout)
        _require(chosen, "eval")
        return run(chosen)[0]


def _load(config: Given, overrides: Sequence[str], *, training: bool = True) -> Config:
    if not isinstance(config, Mapping):
        return load_config(config, overrides, training=training).config
    values = json.loads(json.dumps(config, default=str))  # a copy with plain values: a Path becomes text
    return load_values(values, _NAME, overrides, training=training).config


def _listed(rewards: Rewards) -> list[Reward]:
    return [rewards] if callable(rewards) or isinstance(rewards, Mapping) else list(rewards)


def _on_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a run must be started on the main thread, which gets the signals")


def _require(config: Config, command: Any) -> None:
    from launch.commands.preflight import require

    require(config, command)
