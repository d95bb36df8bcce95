"""What a drafter's checkpoint makes training wait for: `python -m benchmarks.drafter_checkpoint`.

Owns `results/drafter_checkpoint.json`. Four ways to save one trainer, in turns, after a micro-step each (TLT Figure
17a compares the first with the last):

    synchronous full          all tensors of the drafter with its optimizer, and the target's embedding, norm and head,
                              which it uses frozen; by torch.distributed.checkpoint in the thread that trains
    synchronous selective     the same without what is frozen
    asynchronous full         copied aside in the thread that trains, written behind it
    asynchronous selective    what a spot trainer does (`actors.spot.checkpoints`)

All write to the same disk and are durable (fsync) when they end. `blocking` is what the training thread waited for.
A micro-step follows every save: `beside` is how long it takes while the file is being written, on the one core.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.spot.checkpoints import Checkpoints, history, restore
from actors.spot.types import Checkpointed
from actors.training.persistence import save_tensors
from benchmarks.engine_throughput import DEMO
from benchmarks.machine import describe_machine
from benchmarks.recording import interval
from drafter.training.head import TargetHead
from drafter.training.records import SequenceRecord
from drafter.training.trainer import DrafterTrainer
from models.checkpoint import init_model
from policies.drafter.options import DrafterOptions

ROOT = Path(__file__).resolve().parents[1]
# The demo's target, and one with the vocabulary and (untied) head that make up most of a real drafter's checkpoint.
TARGETS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "demo": (DEMO, torch.float32),
    "hidden 512, vocabulary 16k": (
        DEMO
        | {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 16_000,
            "tie_word_embeddings": False,
        },
        torch.bfloat16,
    ),
}
FULL, OURS = "synchronous full", "asynchronous selective"


def trainer_of(config: dict[str, Any], dtype: torch.dtype) -> DrafterTrainer:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        head = TargetHead.of(init_model(directory, 0, dtype=dtype), 0)
    return DrafterTrainer(head, DrafterOptions())


def record_of(trainer: DrafterTrainer, rows: int, seed: int) -> SequenceRecord:
    """Random states: what they say changes no time."""
    rng = np.random.default_rng(seed)
    config = trainer.head.config
    states = rng.standard_normal((rows, config.hidden_size)).astype(np.float32).view(np.uint8)
    tokens = rng.integers(0, config.vocab_size, rows + 1).astype(np.int32)
    return SequenceRecord(
        tokens=tokens,
        prompt_length=3,
        first=0,
        states=states,
        dtype="float32",
        width=config.hidden_size,
        target_version=0,
    )


def frozen(trainer: DrafterTrainer) -> dict[str, Tensor]:
    head = trainer.head
    return {"frozen.embedding": head.embedding, "frozen.norm": head.norm, "frozen.lm_head": head.lm_head}


@dataclass(frozen=True, slots=True)
class Save:
    blocking_s: float
    beside_s: float  # of the micro-step that followed at once
    durable_s: float
    bytes: int


def compare(trainer: DrafterTrainer, repeats: int, rows: int, disk: str | None) -> dict[str, Any]:
    """Every way in turn, `repeats` times after one that is not counted."""

    def micro_step() -> float:
        record = record_of(trainer, rows, trainer.steps)
        start_s = perf_counter()
        trainer.micro_step([record])
        return perf_counter() - start_s

    with tempfile.TemporaryDirectory(dir=disk) as directory:
        ways = _ways(trainer, Path(directory), micro_step)
        found: dict[str, list[Save]] = {name: [] for name in ways}
        alone = []
        saved = 0
        for _ in range(repeats + 1):
            for name, save in ways.items():
                alone.append(micro_step())
                saved = trainer.steps
                found[name].append(save())
        restored = DrafterTrainer(trainer.head, DrafterOptions(), seed=1)
        assert restore(history(Path(directory) / OURS), restored.load_state_dict, restored.state_dict())
        assert restored.steps == saved, "the last save is what is restored"
    answer: dict[str, Any] = {"trainable": sum(p.numel() for p in trainer.model.parameters())}
    answer["micro_step_ms"] = round(median(alone[1:]) * 1e3, 2)
    for name, saves in found.items():
        answer[name] = {
            "first_blocking_ms": round(saves[0].blocking_s * 1e3, 3),
            "blocking_ms": round(median(save.blocking_s for save in saves[1:]) * 1e3, 3),
            "beside_ms": round(median(save.beside_s for save in saves[1:]) * 1e3, 2),
            "durable_ms": round(median(save.durable_s for save in saves[1:]) * 1e3, 2),
            "bytes": saves[-1].bytes,
        }
    pairs = zip(found[FULL][1:], found[OURS][1:], strict=True)
    ratios = np.array([full.blocking_s / ours.blocking_s for full, ours in pairs])
    answer["blocking_ratio"] = round(float(median(ratios)), 1)
    answer["blocking_ratio_95"] = [round(x, 1) for x in interval(ratios)]
    return answer


Way = Callable[[], Save]
Tensors = Callable[[], Mapping[str, Tensor]]


def _ways(trainer: DrafterTrainer, root: Path, micro_step: Callable[[], float]) -> dict[str, Way]:
    def synchronous(name: str, tensors: Tensors) -> Way:
        def save() -> Save:
            shutil.rmtree(root / name, ignore_errors=True)
            start_s = perf_counter()
            save_tensors(dict(tensors()), root / name, distributed=False)
            seconds = perf_counter() - start_s
            return Save(seconds, micro_step(), seconds, _bytes(root / name))

        return save

    def asynchronous(name: str, tensors: Tensors) -> Way:
        reports: list[Checkpointed] = []
        checkpoints = Checkpoints(root / name, 1, torch.float32, reports.append)

        def save() -> Save:
            start_s = perf_counter()
            assert checkpoints.save(trainer.steps, tensors())
            blocking_s = perf_counter() - start_s
            beside_s = micro_step()
            checkpoints.wait()
            return Save(blocking_s, beside_s, reports[-1].seconds, _bytes(history(root / name)[-1]))

        return save

    def everything() -> dict[str, Tensor]:
        return trainer.state_dict() | frozen(trainer)

    return {
        FULL: synchronous(FULL, everything),
        "synchronous selective": synchronous("synchronous selective", trainer.state_dict),
        "asynchronous full": asynchronous("asynchronous full", everything),
        OURS: asynchronous(OURS, trainer.state_dict),
    }


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, default=512, help="of the micro-step before every save")
    parser.add_argument("--disk", help="directory to write to; default: the system's for temporary files")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "drafter_checkpoint.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, (config, dtype) in TARGETS.items():
        results[name] = compare(trainer_of(config, dtype), options.repeats, options.rows, options.disk)
        print(name, json.dumps(results[name]), flush=True)
    record = {"machine": describe_machine(), "threads": 1, "repeats": options.repeats, "targets": results}
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
