"""Save and load a trainer's tensors through torch.distributed.checkpoint: one set of files for any number of ranks.
Defines the error messages, and the allowed contents of a directory.

torch stores the description of the tensors, and objects other than tensors, as pickles, which can run arbitrary code
when read. Here the description may contain only torch's own records of tensors, so that directories from elsewhere are
safe.
"""

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from actors.training.checkpoint import CheckpointError

METADATA_FILE = ".metadata"
_NAMED: dict[tuple[str, str], Any] = {  # allowed classes of a description of tensors
    **{
        (metadata.__name__, kind.__name__): kind
        for kind in (
            *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta),
            *(metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata),
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePosixPath,  # of the original folder
    ("pathlib._local", "PosixPath"): PurePosixPath,  # the same in Python 3.13
}


def save_tensors(state: dict[str, Tensor], directory: str | Path, *, distributed: bool) -> None:
    """Write sharded and plain tensors; every rank calls it. Raises OSError if the files cannot be written."""
    try:
        with _single_process_is_meant():
            save(state, checkpoint_id=str(directory), no_dist=not distributed)
    except CheckpointException as error:
        raise _write_error(directory, error) from error


def load_tensors(state: dict[str, Tensor], directory: str | Path, *, distributed: bool) -> None:
    """Fill the tensors of `state` in place; every rank calls it.

    Raises FileNotFoundError if there is no checkpoint, CheckpointError if it lacks a tensor or has another shape, or if
    what describes it is damaged or describes more than tensors.
    """
    reader = _Reader(directory)
    reader.read_metadata()
    try:
        with _single_process_is_meant():
            load(state, storage_reader=reader, no_dist=not distributed)
    except (CheckpointException, RuntimeError, ValueError) as error:
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        raise CheckpointError(
            f"{directory} does not fit this model, learner.optimizer.name and objective.kl: {str(cause) or repr(cause)}"
        ) from error


def check_tensors(directory: str | Path) -> None:
    """Read the description of the tensors, and compare their files' sizes with it, without loading any.

    Raises FileNotFoundError if there is no checkpoint, CheckpointError that names the file.
    """
    for info in _Reader(directory).read_metadata().storage_data.values():
        path = Path(directory) / info.relative_path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size < info.offset + info.length:
            raise CheckpointError(f"{path} is damaged: it ends within a tensor")


class _Reader(filesystem.FileSystemReader):
    """torch's reader with a safe description."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        path = Path(self.path) / METADATA_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{self.path} holds no learner checkpoint")
        try:
            found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            _check(found)
        except PermissionError:
            raise
        except Exception as error:  # damaged bytes can raise anything in pickle
            said = str(error) if isinstance(error, pickle.UnpicklingError) else repr(error)
            raise CheckpointError(f"{path} does not describe a learner's tensors and is not used: {said}") from error
        assert isinstance(found, metadata.Metadata)
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _NAMED.get((module, name))
        if known is None and module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            known = dtype
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known


def _check(found: object) -> None:
    """Raise UnpicklingError if the description contains objects other than tensors, which torch would unpickle."""
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError("it is something else")
    for name, of in found.state_dict_metadata.items():
        if not isinstance(of, metadata.TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is no tensor")
    for info in found.storage_data.values():
        if not isinstance(info, filesystem._StorageInfo) or info.transform_descriptors:
            raise pickle.UnpicklingError("a tensor lies where none was put")
        if PurePosixPath(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"a tensor lies in {info.relative_path}")


@contextlib.contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Suppress torch's warning about a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: CheckpointException) -> BaseException:
    """Return the first failure of any rank."""
    failures = [wrapped[0] for _, wrapped in sorted(error.failures.items())]
    return failures[0] if failures else error


def _write_error(directory: str | Path, error: CheckpointException) -> OSError:
    """Return an OSError for a failed save. torch's file writer hides the system's error (a full disk appears as a wrong
    position in its archive), so any cause counts as a write error; the message reports free space."""
    cause = _cause(error)
    if isinstance(cause, OSError) and cause.errno is not None:
        return OSError(cause.errno, cause.strerror, str(directory))
    return OSError(f"writing {directory} failed: {str(cause).strip().splitlines()[0] if str(cause) else cause!r}")
