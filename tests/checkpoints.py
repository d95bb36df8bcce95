"""A checkpoint written by one call, for tests that need some."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.training.checkpoint import checkpoint_path, new_checkpoint


def write_checkpoint(
    root: Path, step: int, save: Callable[[Path], object], state: Mapping[str, Any], keep: int
) -> Path:
    """Return the checkpoint's folder. `save` writes the learner's files."""
    with new_checkpoint(root, step, state, keep) as learner_dir:
        save(learner_dir)
    return checkpoint_path(root, step)
