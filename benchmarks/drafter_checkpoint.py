"""How long a drafter's checkpoint blocks training: `python -m benchmarks.drafter_checkpoint`.

Owns `results/drafter_checkpoint.json`. It compares four ways to save one trainer, in turn, after a micro-step each (TLT
Figure 17a compares the first with the last):

    synchronous full          all tensors of the drafter with its optimizer, and the target's embedding, norm and head,
                              which it uses frozen; by torch.distributed.checkpoint in the thread that trains
    synchronous selective     the same without what is frozen
    asynchronous full         copied aside in the thread that trains, written behind it
    asynchronous selective    what a spot trainer does (`actors.spot.checkpoints`)

All write to the same disk and are durable (fsync) when they end. `blocking` is the time that the training thread
waited. A micro-step follows every save; `beside` is its time while the file is being written, on the same core.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any, cast

import torch
from torch import Tensor

from actors.processes.link import Link
from actors.spot.checkpoints import Checkpoints, history, newest
from actors.training.persistence import save_tensors
from benchmarks.harness import RESULTS, command, paired, write
from benchmarks.tools.drafting import random_record
from benchmarks.tools.targets import fresh_model
from config.drafter import DrafterOptions
from contracts.spot import Checkpointed
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer

# The demo's target, and one with the vocabulary and (untied) head that dominate a real drafter's checkpoint.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("float32", {}),
    "hidden 512, vocabulary 16k": (
        "bfloat16",
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 16_000,
            "tie_word_embeddings": False,
        },
    ),
}
FULL, OURS = "synchronous full", "asynchronous selective"


def frozen(trainer: DrafterTrainer) -> dict[str, Tensor]:
    head = trainer.head
    return {"frozen.embedding": head.embedding, "frozen.norm": head.norm, "frozen.lm_head": head.lm_head}


@dataclass(frozen=True, slots=True)
class Save:
    blocking_s: float
    beside_s: float  # of the micro-step that followed at once
    durable_s: float
    bytes: int


def compare(trainer: DrafterTrainer, repeats: int, rows: int, disk: Path | None) -> dict[str, Any]:
    """Run every way in turn, `repeats` times after an uncounted one."""

    def micro_step() -> float:
        record = random_record(rows, trainer.head.config, trainer.steps)
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
        tensors = newest(history(Path(directory) / OURS), restored.state_dict())
        assert tensors is not None
        restored.load_state_dict(tensors)
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
    blocking = ([save.blocking_s for save in found[name][1:]] for name in (FULL, OURS))
    answer["blocking_ratio"] = paired(*blocking)
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
        link = cast(Link, SimpleNamespace(send=reports.extend))
        checkpoints = Checkpoints(root / name, 1, torch.float32, link)

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


def main(
    *,
    repeats: int = 15,
    rows: Annotated[int, "of the micro-step before every save"] = 512,
    disk: Annotated[Path | None, "directory to write to; default: the system's for temporary files"] = None,
    out: Path = RESULTS / "drafter_checkpoint.json",
) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, (dtype, changes) in TARGETS.items():
        trainer = DrafterTrainer(TargetHead.of(fresh_model("demo", dtype, **changes), 0), DrafterOptions())
        results[name] = compare(trainer, repeats, rows, disk)
        print(name, json.dumps(results[name]), flush=True)
    settings = {"threads": 1, "repeats": repeats, "rows": rows, "seed": 0}
    write(out, "what does a drafter's checkpoint make training wait for?", {"targets": results}, settings=settings)


if __name__ == "__main__":
    command(main)
