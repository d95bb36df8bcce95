"""`paceline export`: write a Hugging Face model from a checkpoint of a run. Needs neither Ray nor a GPU.

Owns the choice of the checkpoint; the learner's own code reads and writes it.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from actors.data import DataError, note_end_tokens
from actors.training.checkpoint import LEARNER_DIR, checkpoints, read_state, step_of
from actors.training.trainer import Trainer
from config.formats import FORMATS
from config.learner import LearnerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from launch.config import Config, load_config
from launch.config.paths import tokenizer_dir
from launch.errors import UsageError
from launch.precision import note_evaluation
from launch.run.inputs import stop_tokens_of, tokenizer_of
from launch.run.restore import require_readable
from launch.run.resume import UNSEALED
from launch.run.warmup import initial_weights
from launch.run_folder import BEST_RECORD, best_model
from models.compressed_tensors import EXPORTED
from models.peft import ADAPTER_DIR


def export_best(run: Path, out: Path) -> str:
    """Copy the run's best model to `out`. Returns a message. Raises UsageError."""
    folder = best_model(run)
    if (out / "config.json").exists():
        raise UsageError(f"--out: {out} holds a model already", remedy="choose another directory")
    record = json.loads((folder / BEST_RECORD).read_text(encoding="utf-8"))
    shutil.copytree(folder, out, dirs_exist_ok=True)
    (metric, value), *_ = ((name, value) for name, value in record.items() if name.startswith("eval/"))
    return f"{out}: the model after {record['step']} RL steps, the best by {metric}, {value:.4g}"


def export(run: Path, out: Path, step: int | None = None, quantization: str = "none") -> str:
    """Write the model after `step` RL steps (default: of the newest checkpoint) to `out`. Returns a message.
    `quantization`: the format of its layers, as stock vLLM loads it; none: as trained. Raises UsageError, and
    PacelineError that names the damaged file of a checkpoint."""
    if quantization != "none" and quantization not in EXPORTED:
        raise UsageError(
            f"--quantization: no checkpoint is written in {quantization}", remedy=f"one of {', '.join(EXPORTED)}, none"
        )
    if not (run / "config.yaml").is_file():
        raise UsageError(f"no run in {run}", remedy="give the folder that contains config.yaml")
    found = {step_of(path): path for path in checkpoints(run / "checkpoints")}
    if not found:
        raise UsageError(f"no checkpoint in {run}", remedy="checkpoint.every says how often a run writes one")
    if step is not None and step not in found:
        kept = ", ".join(map(str, sorted(found)))
        raise UsageError(
            f"no checkpoint of step {step} in {run}", remedy=f"there are {kept}; checkpoint.keep says how many are kept"
        )
    if (out / "config.json").exists():
        raise UsageError(f"--out: {out} holds a model already", remedy="choose another directory")
    step = max(found) if step is None else step
    checked = require_readable(found[step])
    config = load_config(run / "config.yaml", []).config
    lora = config.learner.lora
    learner = LearnerOptions(device="cpu", autocast_bf16=config.learner.autocast_bf16, lora=lora)
    if lora is None:
        # Fresh weights: every one is replaced, so the run's initial weights need not exist any more.
        trainer = Trainer(config.model, learner, ObjectiveOptions(), init="random")
    else:
        learner = learner.model_copy(update={"lora": lora.model_copy(update={"path": None})})  # likewise
        trainer = Trainer(_begun_with(config), learner, ObjectiveOptions())
    trainer.load_weights(found[step] / LEARNER_DIR)
    form = FORMATS.get(quantization)
    trainer.weights.export(out, form)
    with suppress(DataError):  # no tokenizer is there, so none is exported
        note_end_tokens(out, stop_tokens_of(config, tokenizer_of(config)))
    evaluated = read_state(found[step]).get("evaluations", {}).get(str(step), {})
    note_evaluation(config, out, step, evaluated, weights=None if form is None else form.name)
    said = "" if form is None else f", in {form.name}"
    if not checked.sealed:
        said += f"; of the checkpoint: {UNSEALED}"
    if config.rollout.quantization != "none":
        said += f"; rollouts and evaluations of the run are in {config.rollout.quantization}"
    if lora is not None:
        said += f"; its adapters alone: {out / ADAPTER_DIR}"
    return f"{out}: the model after {step} RL steps{said}"


def _begun_with(config: Config) -> ModelOptions:
    """Return the model that a run's adapters belong to."""
    try:
        base = initial_weights(config)
    except OSError as error:  # inputs of the warm start, which identify it
        base, why = Path(config.run.dir), str(error)
    else:
        why = f"no *.safetensors in {base}"
    if not any(base.glob("*.safetensors")):
        raise UsageError(
            f"the run's checkpoints hold adapters, and the weights that they belong to are not here: {why}",
            remedy="bring them back; the adapters of the run's end are in its folder, model/adapter",
        )
    return config.model.model_copy(update={"path": str(base), "tokenizer": tokenizer_dir(config)})
