"""`paceline export-drafter`: write a trained drafter for stock vLLM, SGLang or speculators.

Owns the choice of the weights and the message; other modules own the formats.
"""

import tempfile
from pathlib import Path
from typing import Literal

from actors.spot.newest import write_newest
from config.catalogue import FRESH_WEIGHTS
from drafter.export import Format, export_drafter
from launch.config import load_config
from launch.drafter.training import CHECKPOINTS_DIR
from launch.errors import UsageError


def export(
    drafter: Path, target: Path, out: Path, method: Literal["eagle", "eagle3"] | None, form: Format = "vllm"
) -> str:
    """Write the checkpoint of a drafter's folder, or of the drafter that the run in `drafter` trained. Returns how to
    use it in vLLM."""
    run = (drafter / "config.yaml").is_file()
    for option, path in (("DRAFTER", drafter), ("--target", target)):
        if not (path / "config.json").is_file() and not (run and path == drafter):
            raise UsageError(f"{option}: no config.json in {path}", remedy="give the directory that holds it")
    with tempfile.TemporaryDirectory() as folder:
        done = export_drafter(
            _trained(drafter, target, Path(folder)) if run else drafter, target, out, method=method, form=form
        )
    return (
        f"{done.directory}: {done.tensors} tensors, {done.architecture}\n"
        f'vllm serve {target} --speculative-config \'{{"method": "{done.method}", "model": "{done.directory}", '
        '"num_speculative_tokens": 4}\''
    )


def _trained(run: Path, target: Path, out: Path) -> Path:
    """Write the newest drafter that a run's trainers have saved to `out`, in the dtype of the model."""
    config = load_config(run / "config.yaml", []).config
    path = config.speculation.eagle.path or FRESH_WEIGHTS
    saved = run / CHECKPOINTS_DIR
    if write_newest(saved, path, target, out, dtype=config.model.dtype, seed=config.drafter.seed) is None:
        raise UsageError(
            f"no trained drafter of {target} in {run}",
            remedy="give the run's model as --target; drafter.train trains one, saved as often as "
            "drafter.checkpoint_every says",
        )
    return out
