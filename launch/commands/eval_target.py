"""Resolve what `paceline eval` evaluates: the model of a configuration, run, checkpoint or Hugging Face folder.

Owns the choice of configuration and weights. Evaluates nothing.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.training.checkpoint import LEARNER_DIR, checkpoints, step_of
from launch.config import Config, load_config
from launch.config.hub import GGUF, PACKAGE
from launch.config.load import load_values
from launch.config.paths import replaced, tokenizer_dir
from launch.errors import UsageError
from launch.run_folder import best_model

KEEPS_ALL = "observe.eval_samples=null"  # a separate evaluation is made to be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model to evaluate. `config.model.path` has the weights, unless `checkpoint`, (run, step), does."""

    config: Config
    what: str  # for people
    checkpoint: tuple[Path, int] | None = None
    run: Path | None = None  # the run that the model belongs to

    @contextmanager
    def weights(self) -> Iterator[Config]:
        """Yield the configuration with weights that exist as long as the block."""
        if self.checkpoint is None:
            yield self.config
            return
        from launch.commands.export_model import export

        Path(self.config.run.dir).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self.config.run.dir, prefix=".eval-") as folder:
            run, step = self.checkpoint
            export(run, Path(folder) / "model", step)
            yield with_model(self.config, Path(folder) / "model")


def find(
    what: Path, overrides: Sequence[str], *, config: Path | None = None, step: int | None = None, best: bool = False
) -> Target:
    """`what`: a configuration file, the folder of a run, checkpoint or Hugging Face model, a GGUF file, or
    `package:NAME` (launch.config.hub.converted makes a folder of the last two).

    `config`: how to evaluate; default: as the run did, changed by `overrides`. `step`: the checkpoint of a run. `best`:
    its best model. Default: its exported model, or else its newest checkpoint. Raises UsageError, ConfigError.
    """
    if not any(override.partition("=")[0] == "observe.eval_samples" for override in overrides):
        overrides = [KEEPS_ALL, *overrides]
    run, step = _run_of(what, step)
    if run is None and (step is not None or best):
        raise UsageError(f"--step and --best are for runs, and {what} is none", remedy="give the folder of a run")
    of_gguf = what.name.endswith(GGUF) or str(what).startswith(PACKAGE)
    if what.is_file() and not of_gguf:
        if config is not None:
            raise UsageError(f"{what} is a configuration already", remedy="leave --config out")
        return Target(config=load_config(what, overrides, training=False).config, what="model.path")
    if run is not None:
        loaded = load_config(config or run / "config.yaml", overrides, training=False).config
        return _of_run(run, loaded, step, best)
    if (what / "config.json").is_file() or of_gguf:
        if config is not None:
            return Target(
                config=_as(load_config(config, overrides, training=False).config, what, of_gguf), what=str(what)
            )
        name = re.sub(r"[^A-Za-z0-9._-]", "-", what.resolve().name).lstrip(".-") or "model"
        path = str(what) if of_gguf else str(what.resolve())
        values = {"run": {"name": name}, "model": {"path": path}, "data": {}}
        return Target(config=load_values(values, str(what), overrides, training=False).config, what=str(what))
    near = difflib.get_close_matches(what.name, [path.name for path in what.parent.glob("*")], n=1)
    raise UsageError(
        f"{what} is neither a configuration file nor the folder of a run, a checkpoint or a Hugging Face model"
        + "".join(f"; did you mean {what.parent / name}?" for name in near if not what.exists()),
        remedy="a run's folder has config.yaml, a checkpoint's state.json, a model's config.json; a model may also be "
        "a .gguf file or package:NAME",
    )


def _run_of(what: Path, step: int | None) -> tuple[Path | None, int | None]:
    """Return (the run, the step) that a folder stands for."""
    if (what / "state.json").is_file() and (what / LEARNER_DIR).is_dir():
        run = what.resolve().parent.parent
        try:
            own = step_of(what)
        except ValueError as error:  # a checkpoint that a run has set aside
            raise UsageError(str(error), remedy="give a checkpoint, or the run's folder with --step") from error
        if step not in (None, own):
            raise UsageError(f"{what} is the checkpoint of step {own}", remedy="leave --step out, or give the run")
        return run, own
    return (what if (what / "config.yaml").is_file() else None), step


def _of_run(run: Path, config: Config, step: int | None, best: bool) -> Target:
    if best:
        if step is not None:
            raise UsageError("--step and --best are two models", remedy="give one of them")
        return Target(config=with_model(config, best_model(run)), what=f"the best model of {run}", run=run)
    if step is None and (run / "model/config.json").is_file():
        return Target(config=with_model(config, run / "model"), what=f"the model of {run}", run=run)
    there = [step_of(path) for path in checkpoints(run / "checkpoints")]
    if not there:
        every = config.checkpoint.every
        raise UsageError(
            f"no model and no checkpoint in {run} yet",
            remedy=f"a run writes checkpoints (checkpoint.every={every}: RL steps) and at its end its model: "
            f"paceline status {run}",
        )
    if step is not None and step not in there:
        raise UsageError(f"no checkpoint of step {step} in {run}", remedy=f"there are {', '.join(map(str, there))}")
    step = there[-1] if step is None else step
    return Target(config=config, what=f"step {step} of {run}", checkpoint=(run, step), run=run)


def base_of(target: Target) -> Config:
    """Return `target.config` with the run's initial weights and adapters, as the run NAME-base. Raises UsageError."""
    if target.run is None:
        raise UsageError(f"--base is for runs, and {target.what} is none", remedy="give the folder of a run")
    from launch.run.warmup import initial_weights  # imports ray, which `paceline chat` does without

    began = load_config(target.run / "config.yaml", []).config
    try:
        base = initial_weights(began)
        why = f"no config.json in {base}" if not (base / "config.json").is_file() else ""
    except OSError as error:  # inputs of the warm start, which identify it
        why = str(error)
    if why:
        raise UsageError(
            f"the model that {target.run} began with is not here: {why}",
            remedy="bring it back; the run's own evaluation before training is in its metrics.jsonl (step 0)",
        )
    config = replaced(with_model(target.config, base), "learner.lora", began.learner.lora)
    return replaced(config, "run.name", f"{config.run.name}-base")


def _as(config: Config, what: Path, of_gguf: bool) -> Config:
    return replaced(config, "model.path", str(what)) if of_gguf else with_model(config, what)


def with_model(config: Config, model: Path) -> Config:
    """Return `config` with the weights of the folder `model`, and its old tokenizer if that still exists. The weights
    already include any initial adapters."""
    tokenizer = tokenizer_dir(config)
    path = {"path": str(model.resolve()), "tokenizer": tokenizer if Path(tokenizer).is_dir() else None}
    if config.learner.lora is not None:
        config = replaced(config, "learner.lora.path", None)
    return config.model_copy(update={"model": config.model.model_copy(update=path)})
