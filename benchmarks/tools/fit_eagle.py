"""A short offline fit of an EAGLE head to a fixed target, for benchmarks: `python -m benchmarks.tools.fit_eagle`.

    python -m benchmarks.tools.fit_eagle --target runs/demo/model --size demo --out /path/to/drafter

The demo's own rollouts and prompts, also for an inflated target, which has the same function; learning and its end are
those of `paceline warmup-drafter`.
"""

import argparse
from pathlib import Path

from benchmarks.tools.rollouts import record_history
from benchmarks.tools.targets import SIZES, find_demo, load_target, load_task
from drafter.eagle import save_eagle
from drafter.training.fit import FitProgress, PlateauRule, TargetRecords, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from policies.drafter.options import DrafterOptions


def tell_fit(progress: FitProgress) -> None:
    print(
        f"fit {progress.step}: held-out loss {progress.held_out_loss:.4f}, top-3 {progress.held_out_top3:.4f}, "
        f"{progress.seconds:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="model directory of the demo; default: the newest in runs/")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--out", required=True, help="where the drafter goes")
    parser.add_argument("--steps", type=int, default=600, help="micro-steps, if no plateau is reached before")
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()
    directory = find_demo(arguments.target)
    prompts, responses = record_history(load_target(directory, "demo", "float32"), load_task(directory))
    target = load_target(directory, arguments.size, "float32").model.requires_grad_(False)
    trainer = DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(learning_rate=arguments.lr))
    fit(trainer, TargetRecords(target, prompts, responses), PlateauRule(max_steps=arguments.steps), report=tell_fit)
    save_eagle(trainer.model, Path(arguments.out))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
