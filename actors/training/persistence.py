"""Tensors of a trainer to and from a directory, through torch.distributed.checkpoint: one set of files for any number
of ranks. Owns nothing but the call and its error messages."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from actors.training.errors import CheckpointMismatchError
from actors.training.parallel import Rank


def save_tensors(state: dict[str, Tensor], directory: str | Path, *, distributed: bool) -> None:
    """Write sharded and plain tensors; every rank calls it. Raises OSError if the files cannot be written."""
    try:
        with _single_process_is_meant():
            save(state, checkpoint_id=str(directory), no_dist=not distributed)
    except CheckpointException as error:
        raise _write_error(directory, error) from error


def load_tensors(state: dict[str, Tensor], directory: str | Path, *, distributed: bool) -> None:
    """Fill the tensors of `state` in place; every rank calls it.

    Raises FileNotFoundError if there is no checkpoint, CheckpointMismatchError if it lacks a tensor or has another
    shape.
    """
    if not (Path(directory) / ".metadata").is_file():
        raise FileNotFoundError(f"{directory} holds no learner checkpoint")
    try:
        with _single_process_is_meant():
            load(state, checkpoint_id=str(directory), no_dist=not distributed)
    except (CheckpointException, RuntimeError, ValueError) as error:
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        raise CheckpointMismatchError(
            f"{directory} does not fit this model, learner.optimizer.name and objective.kl: {cause}"
        ) from error


def frozen_sums(module: nn.Module, rank: Rank) -> Tensor:
    """Of what is not trained, and so in no checkpoint: the sum of each parameter's bits, int64 [frozen parameters];
    equal for any number of ranks, which all call it."""
    frozen = [p.detach() for p in module.parameters() if not p.requires_grad]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in frozen]
    words = {2: torch.int16, 4: torch.int32}
    sums = [p.contiguous().view(words[p.element_size()]).sum(dtype=torch.int64) for p in local]
    return rank.sum(torch.stack(sums)).cpu()


@contextlib.contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """torch warns about it even when told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: CheckpointException) -> BaseException:
    """The first failure of any rank."""
    failures = [wrapped[0] for _, wrapped in sorted(error.failures.items())]
    return failures[0] if failures else error


def _write_error(directory: str | Path, error: CheckpointException) -> OSError:
    """Of a failed save. torch's file writer hides what the system said (a full disk shows as a wrong position in its
    archive), so whatever stopped it counts as a write error; the free space tells the rest."""
    cause = _cause(error)
    if isinstance(cause, OSError) and cause.errno is not None:
        return OSError(cause.errno, cause.strerror, str(directory))
    return OSError(f"writing {directory} failed: {str(cause).strip().splitlines()[0] if str(cause) else cause!r}")
