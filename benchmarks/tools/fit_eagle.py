"""A short offline fit of an EAGLE head to a fixed target, for benchmarks: `python -m benchmarks.tools.fit_eagle`.

    python -m benchmarks.tools.fit_eagle --target runs/demo/model --size demo --out /path/to/drafter

It uses the demo's own rollouts and prompts, also for an inflated target, which has the same function. Training and its
stopping rule are those of `paceline warmup-drafter`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from benchmarks.harness import command
from benchmarks.tools.rollouts import record_history
from benchmarks.tools.targets import SIZES, find_demo, load_target, load_task
from config.drafter import DrafterOptions
from drafter.eagle import save_eagle
from drafter.training.fit import FitProgress, PlateauRule, TargetRecords, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer


def told(fit: Iterable[FitProgress | None]) -> list[FitProgress]:
    """Train to the end of `fit`; what it found, printed as it comes."""
    history = list[FitProgress]()
    for progress in fit:
        if progress is not None:
            history.append(progress)
            print(
                f"fit {progress.step}: held-out loss {progress.held_out_loss:.4f}, "
                f"top-3 {progress.held_out_top3:.4f}, {progress.seconds:.0f} s",
                flush=True,
            )
    return history


def main(
    *,
    target: Annotated[Path | None, "model directory of the demo; default: the newest in runs/"] = None,
    size: Annotated[str, "of the target", SIZES] = "demo",
    out: Annotated[Path, "where the drafter goes"],
    steps: Annotated[int, "micro-steps, if no plateau is reached before"] = 600,
    lr: float = 2e-3,
) -> None:
    directory = find_demo(target)
    prompts, responses = record_history(load_target(directory, "demo", "float32"), load_task(directory))
    model = load_target(directory, size, "float32").model.requires_grad_(False)
    trainer = DrafterTrainer(TargetHead.of(model, 0), DrafterOptions(learning_rate=lr))
    told(fit(trainer, TargetRecords(model, prompts, responses), PlateauRule(max_steps=steps)))
    save_eagle(trainer.model, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    command(main, timed=False)
