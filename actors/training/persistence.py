"""Tensors of a trainer to and from a directory, through torch.distributed.checkpoint: one set of files for any number
of ranks. Owns nothing but the call and its error messages."""

from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from actors.training.errors import CheckpointMismatchError


def save_tensors(state: dict[str, Tensor], directory: str | Path, *, distributed: bool) -> None:
    """Write sharded and plain tensors; every rank calls it. Raises OSError if the files cannot be written."""
    try:
        save(state, checkpoint_id=str(directory), no_dist=not distributed)
    except CheckpointException as error:
        raise _cause(error) from error


def load_tensors(state: dict[str, Tensor], directory: str | Path, *, distributed: bool) -> None:
    """Fill the tensors of `state` in place; every rank calls it.

    Raises FileNotFoundError if there is no checkpoint, CheckpointMismatchError if it lacks a tensor or has another
    shape.
    """
    if not (Path(directory) / ".metadata").is_file():
        raise FileNotFoundError(f"{directory} holds no learner checkpoint")
    try:
        load(state, checkpoint_id=str(directory), no_dist=not distributed)
    except (CheckpointException, RuntimeError, ValueError) as error:
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        raise CheckpointMismatchError(
            f"{directory} does not fit this model, learner.optimizer.name and objective.kl: {cause}"
        ) from error


def _cause(error: CheckpointException) -> BaseException:
    """The first failure of any rank, an OSError if it was one."""
    failures = [wrapped[0] for _, wrapped in sorted(error.failures.items())]
    for failure in failures:
        if isinstance(failure, OSError):
            return OSError(failure.errno, f"cannot write the checkpoint: {failure}")
    return failures[0] if failures else error
