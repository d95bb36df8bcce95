"""The gain of the adaptive drafter in whole RL steps: TLT's claim, on a target that is deep relative to its drafter.

    python -m experiments.whole_run [--steps 24] [--out experiments/results/whole_run.json]
    python -m experiments.whole_run --config examples/smollm_think/config.yaml --fit-steps 200 --steps 16

The demo's model is inflated, with the same function, to 19M parameters in 24 layers. It is as deep as a 0.5B model, so
one EAGLE layer costs the same share of a pass. Its prompts come once each, in one epoch, as from a large data set, so
the suffix index only knows siblings. The drafter is first fitted offline, on rollouts of other prompts (the held-out
ones). Then jobs take every RL step in turn, in changing order, on the same prompts and tokens (speculation is lossless,
so all learn the same):

    off        plain decoding
    retrieval  n-gram and suffix drafters
    frozen     and EAGLE as fitted offline
    adaptive   and EAGLE trained on idle workers, handed out as it improves

All but the first use the default chooser. Each worker's engine and trainer have one thread, pinned to one core. Ratios
are paired by RL step: their medians, with bootstrap 95 % intervals. The tail's share is of the time in which 1 to 8
requests of a worker run. About 15 minutes on two quiet cores, including the inflation and fit.

With --config the target is another example's initial model for RL (first `paceline warmup CONFIG`), unchanged: a real
language model is not inflated. The configuration's prompts, sampling and LoRA hold for all jobs.
"""

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

from benchmarks.harness import DEMO, ROOT, command, paired, write
from benchmarks.same_losses import first_difference
from benchmarks.tools.fit_eagle import told
from benchmarks.tools.rollouts import History, record_history
from benchmarks.tools.targets import Target, find_demo, inflated, load_target, load_task
from benchmarks.tools.turns import opened, pin, take_turns, wait_for_trainers
from drafter.eagle import save_eagle
from drafter.training.fit import PlateauRule, TargetRecords, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from experiments.real_text import load, load_tasks
from launch.cluster.session import ray_session
from launch.config import Config, load_config
from launch.config.hub import converted
from launch.observe.journal import read
from launch.run.warmup import initial_weights
from models.checkpoint import parameter_count, save_model

CONFIG = DEMO / "config.yaml"
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 24, "num_heads": 4, "num_kv_heads": 2}
JOBS = ("off", "retrieval", "frozen", "adaptive")
RATIOS = {
    "off / adaptive": ("off", "adaptive", 1.5),
    "retrieval / adaptive": ("retrieval", "adaptive", 1.15),
    "frozen / adaptive": ("frozen", "adaptive", 1.0),
    "off / retrieval": ("off", "retrieval", None),
    "off / frozen": ("off", "frozen", None),
}  # ratios of seconds: (over, under, wanted)
WARM_STEPS = 2  # not counted: first batches, first sessions, the chooser's first decisions
TAIL = 8  # requests of a worker, at most
PROMPTS, ROLLOUTS = 4, 8  # per RL step: 16 requests per worker
PROMPTS_IN_ALL = 96  # of the demo


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The training setting: the target and its folder, and rollouts of other prompts by the same function."""

    config: Path
    target: Target
    directory: Path
    history: History
    prompts: int  # for RL
    sizes: Mapping[str, int]  # of the inflated network; empty: unchanged


def inflated_demo(given: Path | None, folder: Path) -> Setting:
    """Return the demo's model, inflated, with rollouts of the original, which is faster and has the same function."""
    demo = find_demo(given)
    history = record_history(load_target(demo, "demo", "float32"), load_task(demo, "eval"))
    target = deep_target(demo, folder)
    return Setting(config=CONFIG, target=target, directory=folder, history=history, prompts=PROMPTS_IN_ALL, sizes=SIZES)


def example(config: Path, given: Path | None) -> Setting:
    """The model that another configuration begins RL with. SystemExit with the remedy where it was not made."""
    loaded = converted(load_config(config).config, sys.stdout)
    directory = given or initial_weights(loaded)
    if not (directory / "config.json").exists():
        raise SystemExit(f"{directory} is no model: `paceline warmup {config}` makes it, or give one with --target")
    target, (train, held_out) = load(directory), load_tasks(loaded, directory)
    history = record_history(target, held_out, loaded.rollout.sampling.temperature)
    return Setting(
        config=config, target=target, directory=directory, history=history, prompts=len(train.prompts), sizes={}
    )


def deep_target(demo: Path, folder: Path) -> Target:
    """Write the inflated model to `folder` and return it."""
    model = inflated(load_target(demo, "demo", "float32").model, SIZES, batch_invariant=True)
    save_model(model, folder, tokenizer_dir=demo, source_dir=demo)
    return Target("20M, 24 layers", "float32", model.eval().requires_grad_(False), parameter_count(model))


def fit_drafter(setting: Setting, folder: Path, steps: int) -> dict[str, Any]:
    """Fit a drafter to rollouts of prompts that no RL step has."""
    model, options = setting.target.model, load_config(setting.config).config.drafter
    trainer = DrafterTrainer(TargetHead.of(model, 0), options)
    progress = told(fit(trainer, TargetRecords(model, *setting.history), PlateauRule(max_steps=steps)))
    save_eagle(trainer.model, folder)
    last = progress[-1]
    return {"micro_steps": last.step, "held_out_top3": round(last.held_out_top3, 4), "seconds": round(last.seconds, 1)}


def configuration(name: str, config: Path, directory: Path, folder: Path, steps: int, extra: Sequence[str]) -> Config:
    """Return the configuration of a job on the model in `directory`, with the drafter fitted into `folder`."""
    speculation = {
        "off": ["rollout.speculation.mode=off"],
        "retrieval": [],
        "frozen": [f"rollout.speculation.eagle.path={folder / 'drafter'}"],
        "adaptive": [f"rollout.speculation.eagle.path={folder / 'drafter'}"],
    }
    overrides = [
        f"run.name={name}",
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"model.path={directory}",
        "warmup=null",
        "data.eval=null",
        "eval.every=0",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.rollouts_per_prompt={ROLLOUTS}",
        f"drafter.train={'true' if name == 'adaptive' else 'false'}",
        "drafter.while_it_pays=false",
        "drafter.offline=null",
        "observe={live: false, tensorboard: false, samples_per_step: 100000}",
        *speculation[name],
        *extra,
    ]
    return load_config(config, overrides).config


def tail_shares(run: Path, first_step: int) -> dict[str, float]:
    """Return the share of each drafter in the decode time with 1 to TAIL running requests of a worker."""
    seconds: dict[str, float] = defaultdict(float)
    for record in read(run / "speculation.jsonl")[first_step:]:
        names = record["drafters"]
        for points in record["traces"].values():
            for (begin_ms, running, drafter), (end_ms, _, _) in pairwise(points):
                if 1 <= running <= TAIL:
                    seconds[names[drafter]] += (end_ms - begin_ms) / 1000
    total = sum(seconds.values())
    return {name: round(value / total, 3) for name, value in sorted(seconds.items())} if total else {}


def accept_lengths(run: Path, drafter: str, first_step: int) -> list[float | None]:
    """Return the tokens per verification of the drafter's steps, by RL step."""
    found: list[float | None] = []
    for record in read(run / "speculation.jsonl")[first_step:]:
        used = [use for name, use in record["strategies"].items() if name.startswith(f"{drafter}:")]
        steps = sum(use["request_steps"] for use in used)
        found.append(round(1 + sum(use["accepted"] for use in used) / steps, 3) if steps else None)
    return found


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        label: paired(seconds[over], seconds[under])
        for label, (over, under, _) in RATIOS.items()
        if over in seconds and under in seconds
    }


def summary(folder: Path, names: Sequence[str], steps_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the figures of the counted RL steps."""
    records = {name: [r for r in read(folder / name / "metrics.jsonl") if r.get("kind") == "step"] for name in names}
    rollout_s = {name: [r["seconds/rollout"] for r in rows[WARM_STEPS:]] for name, rows in records.items()}
    tokens = {name: [r["tokens/generated"] for r in rows[WARM_STEPS:]] for name, rows in records.items()}
    return {
        "rollout": ratios(rollout_s),
        "rl_step": ratios(steps_s),
        "jobs": {
            name: {
                "rollout_s": round(median(rollout_s[name]), 3),
                "rl_step_s": round(median(steps_s[name]), 3),
                "tokens_per_s": round(sum(tokens[name]) / sum(rollout_s[name])),
                "tail": tail_shares(folder / name, WARM_STEPS) if name != "off" else {},
                "eagle_accept_length": accept_lengths(folder / name, "eagle", WARM_STEPS) if name != "off" else [],
            }
            for name in names
        },
        "seconds": {
            name: {"rollout": [round(s, 4) for s in rollout_s[name]], "rl_step": [round(s, 4) for s in steps_s[name]]}
            for name in names
        },
    }


def main(
    *overrides: Annotated[str, "of the configuration, for all jobs"],
    config: Annotated[Path, "of the task; the demo's model is inflated"] = CONFIG,
    target: Annotated[Path | None, "model directory before RL; default: the newest of the demo, or CONFIG's"] = None,
    steps: Annotated[int, "RL steps; more repeat prompts"] = PROMPTS_IN_ALL // PROMPTS,
    fit_steps: Annotated[int, "micro-steps of the offline fit, at most"] = 1500,
    jobs: Annotated[Sequence[str], "who takes part", JOBS] = JOBS,
    folder: Path = ROOT / "runs/whole_run",
    out: Path = ROOT / "experiments/results/whole_run.json",
) -> int:
    folder = folder.resolve()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = config.resolve()
    setting = inflated_demo(target, folder / "target") if config == CONFIG.resolve() else example(config, target)
    fitted = fit_drafter(setting, folder / "drafter", fit_steps)
    configs = {name: configuration(name, config, setting.directory, folder, steps, overrides) for name in jobs}
    for name in jobs:
        shutil.rmtree(folder / name, ignore_errors=True)  # a trainer would continue from an older run's checkpoint
    with ExitStack() as stack:
        stack.enter_context(ray_session(address="local", cpus=32, object_store_bytes=512 * 2**20))
        opened_jobs, seen = {}, set[int]()
        for name in jobs:
            opened_jobs[name] = stack.enter_context(opened(configs[name], folder / name))
            if configs[name].drafter.train:
                wait_for_trainers(folder / name, configs[name].rollout.workers.max)
            print(f"{name}: pinned to cores {pin(seen)}", flush=True)
        seconds = {name: series[WARM_STEPS:] for name, series in take_turns(opened_jobs, steps).items()}
    found = summary(folder, jobs, seconds)
    differs = {name: first_difference(folder / jobs[0], folder / name) for name in jobs[1:]}
    drafter = read(folder / "adaptive" / "drafter.jsonl") if "adaptive" in jobs else []
    result = {
        "target": {"parameters": setting.target.parameters, **setting.sizes},
        "requests": {"per_step": PROMPTS * ROLLOUTS, "workers": 2, "epochs": steps * PROMPTS / setting.prompts},
        "offline_fit": fitted,
        "counted_steps": steps - WARM_STEPS,
        **found,
        "micro_steps": sum(record["micro_steps"] for record in drafter),
        "trained_s": round(sum(record["worker_s"] for record in drafter), 2),
        "same_rollouts_and_losses": not any(differs.values()),
        "differences": differs,
    }
    settings = {
        "config": str(config.relative_to(ROOT)),
        "steps": steps,
        "warm_steps": WARM_STEPS,
        "fit_steps": fit_steps,
        "seed": 0,
    }
    write(out, "what is the adaptive drafter worth to whole RL steps?", result, settings=settings)
    for what in ("rollout", "rl_step"):
        for label, values in found[what].items():
            print("{:8s} {:22s} {median:.3f} [{low:.3f}, {high:.3f}]".format(what, label, **values))
    for name, job in found["jobs"].items():
        print(f"{name:10s} {json.dumps({key: of for key, of in job.items() if key != 'eagle_accept_length'})}")
    print(f"same rollouts and losses: {result['same_rollouts_and_losses']}")
    return 1 if any(differs.values()) else 0


if __name__ == "__main__":
    sys.exit(command(main))
