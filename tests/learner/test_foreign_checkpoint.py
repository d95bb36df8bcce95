"""A learner's checkpoint from elsewhere is data: reading it runs nothing, whatever its description says."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from actors.training.checkpoint import CheckpointError
from actors.training.persistence import METADATA_FILE, check_tensors, load_tensors
from tests.learner.tiny import make_trainer


class Touch:
    """What unpickling it does: make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def saved(model_dir: Path, tmp_path: Path) -> Path:
    make_trainer(model_dir).save(tmp_path / "learner")
    return tmp_path / "learner"


def described(directory: Path) -> metadata.Metadata:
    return pickle.loads((directory / METADATA_FILE).read_bytes())


def test_what_was_saved_is_described_by_nothing_else(saved: Path) -> None:
    check_tensors(saved)


@pytest.mark.parametrize("where", ["alone", "within"])
def test_a_description_that_runs_something_is_refused_by_name(
    model_dir: Path, saved: Path, tmp_path: Path, where: str
) -> None:
    made = tmp_path / "made"
    crafted: Any = Touch(made)
    if where == "within":
        crafted = described(saved)
        crafted.planner_data = Touch(made)
    (saved / METADATA_FILE).write_bytes(pickle.dumps(crafted))
    with pytest.raises(CheckpointError, match=r"\.metadata .*not used: it names pathlib\.Path\.touch"):
        check_tensors(saved)
    for use in ("load", "load_weights"):
        with pytest.raises(CheckpointError, match=r"it names pathlib\.Path\.touch"):
            getattr(make_trainer(model_dir), use)(saved)
    assert not made.exists()
    pickle.loads((saved / METADATA_FILE).read_bytes())
    assert made.exists(), "read as torch reads it, it does"


def test_an_object_in_the_place_of_a_tensor_is_refused(saved: Path, tmp_path: Path) -> None:
    """torch unpickles such an object out of the tensors' file."""
    found, made = described(saved), tmp_path / "made"
    found.state_dict_metadata["rng"] = metadata.BytesStorageMetadata()
    payload = tmp_path / "payload"
    torch.save(Touch(made), payload)
    (saved / "__0_0.distcp").write_bytes(payload.read_bytes())
    (index,) = [index for index in found.storage_data if index.fqn == "rng"]
    del found.storage_data[index]
    size = payload.stat().st_size
    found.storage_data[metadata.MetadataIndex("rng")] = filesystem._StorageInfo("__0_0.distcp", 0, size)
    (saved / METADATA_FILE).write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        load_tensors({"rng": torch.get_rng_state()}, saved, distributed=False)
    assert not made.exists()


def test_tensors_lie_in_the_checkpoint_only(saved: Path, tmp_path: Path) -> None:
    found = described(saved)
    for info in found.storage_data.values():
        info.relative_path = "../elsewhere"
    (saved / METADATA_FILE).write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"a tensor lies in \.\./elsewhere"):
        check_tensors(saved)


@pytest.mark.parametrize("fault", ["missing", "short"])
def test_a_tensors_file_that_is_missing_or_short_is_named(saved: Path, fault: str) -> None:
    path = saved / "__0_0.distcp"
    data = path.read_bytes()
    path.unlink()
    if fault == "short":
        path.write_bytes(data[:-1000])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is (missing|damaged)"):
        check_tensors(saved)
