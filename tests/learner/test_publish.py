"""Weights leave the learner one parameter at a time: what it holds beside them, measured, and that ranks agree."""

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from actors.training.parallel import Rank
from actors.training.trainer import Trainer
from config.learner import LearnerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from models.checkpoint import hf_shapes, hf_state_dict, hf_tensors, init_model
from models.weights import unpack
from tests.learner.ranks import run_ranks
from tests.learner.tiny import make_trainer, write_config

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 512}


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch's allocator held at a time for `work`, beside what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        work()
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.max(initial=0))


def largest_bytes(trainer: Trainer, item_bytes: int) -> int:
    return max(p.numel() for p in trainer.module.parameters()) * item_bytes


def test_publishing_in_bfloat16_holds_one_parameter_at_a_time(tmp_path: Path) -> None:
    trainer = make_trainer(write_config(tmp_path, **WIDE), dtype="bfloat16", autocast_bf16=True)
    largest = largest_bytes(trainer, 2)
    all_of_them = sum(p.numel() for p in trainer.module.parameters()) * 2
    assert all_of_them > 15 * largest
    assert 0 < peak_bytes(lambda: trainer.weights.publish(1)) <= 1.1 * largest


def test_exporting_holds_one_parameter_beside_the_file_it_writes(tmp_path: Path) -> None:
    trainer = make_trainer(write_config(tmp_path / "model", **WIDE), dtype="bfloat16", autocast_bf16=True)
    largest = largest_bytes(trainer, 2)
    written = sum(p.numel() for p in trainer.module.parameters()) * 2  # one file's tensors, on the host
    assert peak_bytes(lambda: trainer.weights.export(tmp_path / "out")) <= written + 1.1 * largest


def test_shapes_are_known_before_anything_is_gathered(model_dir: Path) -> None:
    model = init_model(model_dir, 5)
    assert hf_shapes(model) == {name: tensor.shape for name, tensor in hf_state_dict(model).items()}
    assert peak_bytes(lambda: hf_shapes(model)) == 0


def publish_sharded(rank: Rank, model_dir: str) -> tuple[int, int, set[torch.dtype], object]:
    """Of one rank: how many parameters it gathered, how many of them lived at most when the next was gathered, in which
    dtypes, and what was published."""
    trainer = Trainer(
        ModelOptions(path=model_dir, dtype="bfloat16"),
        LearnerOptions(ranks=rank.size, autocast_bf16=True),
        ObjectiveOptions(),
        rank=rank,
        init="random",
        seed=5,
    )
    gathered: list[weakref.ref[torch.Tensor]] = []
    alive, dtypes, gather = [0], set(), DTensor.full_tensor

    def counted(self: DTensor) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in gathered))
        full = gather(self)
        gathered.append(weakref.ref(full))
        dtypes.add(full.dtype)
        return full

    DTensor.full_tensor = counted  # type: ignore[assignment, method-assign]
    try:
        published = trainer.weights.publish(1)
        trainer.weights.export(Path(model_dir) / "out")
    finally:
        DTensor.full_tensor = gather  # type: ignore[method-assign]
    return len(gathered), max(alive), dtypes, published


def test_two_ranks_gather_parameter_by_parameter_in_the_engines_dtype(tmp_path: Path) -> None:
    directory = write_config(tmp_path, **WIDE)
    results = run_ranks(2, publish_sharded, str(directory))
    model = init_model(directory, 5)
    for count, alive, dtypes, _ in results:
        assert count == 2 * len(list(model.parameters()))
        assert alive == 0
        assert dtypes == {torch.bfloat16}
    assert results[1][3] is None
    manifest, buffer = results[0][3]
    expected = dict(hf_tensors(model, torch.bfloat16))
    found = dict(unpack(manifest, buffer))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
