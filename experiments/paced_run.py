"""The gain of the drafters at a GPU's costs: the real product, with each part paced to its time on the device.

    python -m experiments.paced_run --device A100 --share 0.7 --scale 4 --arms off ngram suffix default das

Every arm is one run of the product (`launch.run.train`) on the demo: real tokens, drafters, scheduling and training.
Engine passes, drafts, micro-steps of the drafter's trainer, updates of the learner and new weights last as long as on
the device (`experiments.pacing`), times `scale`: the work is done, and the rest of the time is slept. Retrieval
drafters take their own time, times `scale`. So this measures the machinery at the device's costs with the demo's text;
it predicts no acceptance for a 7B model's text.

- The learner is priced so that plain decoding takes the share `share` of rollout and update together. A pilot of two RL
  steps without drafts gives the rollout's seconds per token.
- All arms of a seed must have the same tokens and losses, except those with rounds by length and one step off. With
  rounds an epoch's prompts come in another order, so use whole epochs, whose sums are compared. One step off responses
  come from older weights, so the record has the reward; its last RL step samples nothing and is in no ratio.
- Each arm begins cold: no calibration, no drafter but the one fitted offline to the warm start.
- Parts that took this machine longer than their pace are late. A run with more than 5 % late parts is void, and marked
  so in the table.
- Ratios are paired by RL step against plain decoding, RL steps from 2 on: medians, bootstrap 95 % intervals.

One call runs what the journal in --run-dir lacks; `--tables` only writes the record and the pages.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from actors.pacing import read_tallies
from benchmarks.harness import ROOT, command, write
from benchmarks.same_losses import first_difference
from config.drafter import DrafterOptions
from experiments.ablation import NOTHING, QUIET, of_the_task, warm_start
from experiments.paced_report import OTHER_TOKENS, write_pages
from experiments.pacing import CONTEXT_SCALE, DeviceName, pace_of
from launch.config import Config, load_config
from launch.drafter.offline_fit import fitted_folder
from launch.observe.journal import read
from policies.roofline.pace import Pace

TASKS = ("guess_and_check", "long_guess_and_check")
TASK = TASKS[0]
PILOT_STEPS = 2
PRETENDED = "RAY_OVERRIDE_RESOURCES"  # what Ray takes this machine to have
LAYOUTS = ("embedded", "colocated", "disaggregated")
TALLIES = "paced"  # in a run's folder
ROUNDS = "rollout.rounds.factor=1.5", "rollout.rounds.quantile=0.67"
_UNTRAINED = "drafter={train: false}"
_RETRIEVAL = "[suffix:8, suffix:4, suffix:2, suffix:1, suffix:16, ngram:12, ngram:6, ngram:3, plain]"
_ALWAYS = "drafter.while_it_pays=false"
_EAGLE = '["eagle:4", "eagle:2", "eagle:8", "eagle:4x3/12", plain]'
# Arm: its configuration and changes.
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "off": (f"{TASK}/config.yaml", NOTHING),
    "ngram": (
        f"{TASK}/config.yaml",
        (_UNTRAINED, "rollout.speculation.strategies=[ngram:12, ngram:6, ngram:3, plain]"),
    ),
    "suffix": (
        f"{TASK}/config.yaml",
        (_UNTRAINED, "rollout.speculation.strategies=[suffix:8, suffix:4, suffix:2, suffix:1, suffix:16, plain]"),
    ),
    "retrieval": (f"{TASK}/config.yaml", (_UNTRAINED, f"rollout.speculation.strategies={_RETRIEVAL}")),
    "eagle-trained": (f"{TASK}/config.yaml", (f"rollout.speculation.strategies={_EAGLE}", _ALWAYS)),
    "eagle-planned": (f"{TASK}/config.yaml", (f"rollout.speculation.strategies={_EAGLE}",)),
    "eagle-frozen": (f"{TASK}/config.yaml", (f"rollout.speculation.strategies={_EAGLE}", _UNTRAINED)),
    "eagle-scratch": (
        f"{TASK}/config.yaml",
        (f"rollout.speculation.strategies={_EAGLE}", _ALWAYS, "drafter.offline=null"),
    ),
    "self": (
        f"{TASK}/config.yaml",
        (_UNTRAINED, "rollout.speculation.strategies=[self:5, self:3, self:7, self:10, self:15, plain]"),
    ),
    "das": ("systems/das.yaml", ()),
    "efficient_rollout": ("systems/efficient_rollout.yaml", ()),
    "tlt": ("systems/tlt.yaml", ()),
    "default": (f"{TASK}/config.yaml", ()),
    "default-not-ahead": (f"{TASK}/config.yaml", ("rollout.lookahead=off",)),
    "lookahead": (f"{TASK}/config.yaml", (*NOTHING, "rollout.lookahead=always")),
    "das-lookahead": ("systems/das.yaml", ("rollout.lookahead=always",)),
    "das-auto": ("systems/das.yaml", ("rollout.lookahead=auto",)),
    "one-step-off": (f"{TASK}/config.yaml", ("rollout.staleness=1",)),
    "rounds": (f"{TASK}/config.yaml", (*NOTHING, *ROUNDS)),
    "das-rounds": ("systems/das.yaml", ROUNDS),
}
SUMMED = {"rollout_s": "seconds/rollout", "rl_s": "seconds/step", "learn_s": "seconds/learn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The common setting of all arms of a call. Plain data, passed to another process."""

    device: DeviceName
    model: str
    share: float
    scale: float
    context_scale: float
    workers: int
    steps: int
    layout: str
    extra: tuple[str, ...]
    run_dir: Path
    task: str = TASK
    once: bool = False  # each prompt at most once: the held-out ones join those of training

    @property
    def key(self) -> str:
        """The key of the journal."""
        numbers = f"share {self.share:g}, scale {self.scale:g}, context {self.context_scale:g}"
        apart = "" if self.layout == "embedded" else f"{self.layout}, "
        task = ("" if self.task == TASK else f"{self.task}, ") + ("each prompt once, " if self.once else "")
        return f"{self.device} {self.model}, {numbers}, {self.workers} workers, {apart}{task}{' '.join(self.extra)}"

    def places(self) -> tuple[str, ...]:
        """The resources of the layout, all on this machine: workers and learner take shares of its cores.
        No GPU is used; those that a colocated worker and the learner share are pretended."""
        if self.layout == "embedded":
            return ()
        share, gpus = 0.9 * (os.cpu_count() or 1) / (self.workers + 1), int(self.layout == "colocated")
        return (
            f"cluster={{layout: {self.layout}, gpus_per_worker: {gpus}, gpus_per_learner: {gpus}, weights: store, "
            f"cpus_per_worker: {share:.3f}, cpus_per_learner: {share:.3f}}}",
            "rollout.engine.device=cpu",
            "rollout.engine.threads=1",
            "learner.device=cpu",
        )

    def pace(self, folder: Path, learner_token_s: float, micro_step_tokens: int) -> Pace:
        return pace_of(
            self.device,
            scale=self.scale,
            model=self.model,
            context_scale=self.context_scale,
            learner_token_s=learner_token_s,
            micro_step_tokens=micro_step_tokens,
            tally_dir=str(folder / TALLIES),
        )


def configuration(setting: Setting, arm: str, seed: int, warm: Path, name: str) -> tuple[Config, str]:
    """Return the configuration of an arm, from that warm start, and the arguments that reproduce it."""
    file, changes = ARMS[arm]
    path = ROOT / "examples" / file
    mine = [
        *of_the_task(load_config(ROOT / "examples" / setting.task / "config.yaml").config),
        *("warmup=null", f"model.path={warm}", f"run.dir={setting.run_dir}", f"run.name={name}", f"run.seed={seed}"),
        *(f"run.steps={setting.steps}", "data.eval=null", "eval.every=0", *QUIET, "observe.samples_per_step=100000"),
        f"rollout.workers={setting.workers}",
        *setting.places(),
        *((f"data.train={all_prompts(setting)}",) if setting.once else ()),
        *(() if arm == "off" else ("rollout.speculation.calibration=off",)),
        *(() if arm == "default" else ("rollout.lookahead=off",)),
        *changes,
        *((f"rollout.speculation.eagle.path={fitted(setting, seed, warm)}",) if arm == "eagle-frozen" else ()),
        *setting.extra,
    ]
    last = {pair.partition("=")[0]: pair for pair in mine}
    overrides = list(last.values())
    config = load_config(path, overrides).config
    wanted = setting.steps * config.rollout.prompts_per_step
    if setting.once and wanted > (there := len(all_prompts(setting).read_text(encoding="utf-8").splitlines())):
        raise SystemExit(f"--once: {setting.steps} RL steps take {wanted} prompts, there are {there}: fewer --steps")
    return config, " ".join([str(path.relative_to(ROOT)), *overrides])


def all_prompts(setting: Setting) -> Path:
    """Return a file of all prompts of the task, those of training first."""
    data, path = ROOT / "examples" / setting.task / "data", setting.run_dir / f"{setting.task}.jsonl"
    text = "".join((data / name).read_text(encoding="utf-8") for name in ("train.jsonl", "eval.jsonl"))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def fitted(setting: Setting, seed: int, warm: Path) -> Path:
    """Return the initial drafter of eagle-trained and default. SystemExit if neither has run."""
    config, _ = configuration(setting, "eagle-trained", seed, warm, "eagle-trained")
    folder = fitted_folder(config, warm)
    if folder is None or not folder.is_dir():
        raise SystemExit(f"eagle-frozen, seed {seed}: there is no fitted drafter yet, make the arm eagle-trained first")
    return folder


def run_arm(setting: Setting, arm: str, seed: int, warm: Path, learner_token_s: float, name: str) -> None:
    """Run the product once, in a separate process. Raises RuntimeError if it ends with an error."""
    folder = setting.run_dir / name
    shutil.rmtree(folder, ignore_errors=True)
    context = get_context("spawn")
    child = context.Process(target=_train, args=(setting, arm, seed, warm, learner_token_s, name))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"{name} ended with exit code {child.exitcode}: see {folder}")


def _train(setting: Setting, arm: str, seed: int, warm: Path, learner_token_s: float, name: str) -> None:
    from launch.run.train import train

    if setting.layout == "colocated":
        os.environ[PRETENDED] = json.dumps({"GPU": setting.workers})
    config, source = configuration(setting, arm, seed, warm, name)
    pace = setting.pace(config_folder(config), learner_token_s, config.drafter.micro_step_tokens)
    sys.exit(train(config, config_source=source, resume=False, pace=pace))


def config_folder(config: Config) -> Path:
    return (Path(config.run.dir) / config.run.name).resolve()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read(folder / "metrics.jsonl") if record["kind"] == "step"]


def pilot(setting: Setting, seed: int, warm: Path) -> float:
    """Return the device's seconds per response token that the learner takes at this share."""
    run_arm(replace(setting, steps=PILOT_STEPS), "off", seed, warm, 0.0, "pilot")
    steps = steps_of(setting.run_dir / "pilot")
    per_token = sum(step["seconds/rollout"] for step in steps) / sum(step["tokens/generated"] for step in steps)
    return float(per_token * (1 - setting.share) / setting.share / setting.scale)


def row_of(setting: Setting, arm: str, seed: int, folder: Path, learner_token_s: float) -> dict[str, Any]:
    """Return the run's results per RL step, and its tallies."""
    steps = steps_of(folder)
    tallies = read_tallies(folder / TALLIES)
    count, late = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("count", "late"))
    engine = [tally for kind, tally in tallies.items() if kind not in ("learner", "micro-step", "hand-over")]
    found: dict[str, Any] = {key: [round(step[name], 4) for step in steps] for key, name in SUMMED.items()}
    means = {"accept_length": "speculation/accept_length", "speculated": "speculation/share"}
    means |= {"predicted": "speculation/predicted_ratio", "reward": "reward/mean", "staleness": "staleness/mean"}
    means |= {"trained_s": "drafter/worker_s", "top3": "drafter/top3_accuracy"}
    found |= {
        key: [None if step.get(name) is None else round(step[name], 3) for step in steps] for key, name in means.items()
    }
    drafter = read(folder / "drafter.jsonl") if (folder / "drafter.jsonl").exists() else []
    return {
        "setting": setting.key,
        "arm": arm,
        "seed": seed,
        "learner_token_s": learner_token_s,
        "steps": len(steps),
        "workers": setting.workers,
        "tokens": sum(step["tokens/generated"] for step in steps),
        **found,
        "saved_s": sum(step.get("speculation/saved_s", 0.0) for step in steps),
        "engine_s": sum(tally.spent_s for tally in engine),
        "micro_steps": sum(record["micro_steps"] for record in drafter),
        "late_share": late / count if count else 0.0,
        "late": {kind: [tally.late, tally.count] for kind, tally in sorted(tallies.items())},
        "strategies": _strategies(folder),
    }


def _strategies(folder: Path) -> dict[str, float]:
    """Return the seconds by drafter."""
    total: dict[str, float] = {}
    for record in read(folder / "speculation.jsonl") if (folder / "speculation.jsonl").exists() else []:
        for name, use in record["strategies"].items():
            drafter = name.partition(":")[0]
            total[drafter] = round(total.get(drafter, 0.0) + use["seconds"], 2)
    return total


def missing(setting: Setting, arms: Sequence[str], seeds: Sequence[int], journal: Path) -> Iterator[tuple[str, int]]:
    """Yield missing runs seed by seed, starting with plain decoding, since the others are compared with it."""
    done = {(row["arm"], row["seed"]) for row in rows_of(setting, journal)}
    for seed in seeds:
        yield from ((arm, seed) for arm in sorted(arms, key=list(ARMS).index) if (arm, seed) not in done)


def rows_of(setting: Setting, journal: Path) -> list[dict[str, Any]]:
    """Return the last row of each of its runs: a void one may be repeated."""
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    rows = [row for row in map(json.loads, lines) if row["setting"] == setting.key]
    return list({(row["arm"], row["seed"]): row for row in rows}.values())


def learner_price(setting: Setting, seed: int, warm: Path, journal: Path, given: float | None) -> float:
    """Return the learner's price: `given`, or from the pilot, which runs once for all arms and seeds."""
    known = [row["learner_token_s"] for row in rows_of(setting, journal)]
    if given is not None and known not in ([], [given] * len(known)):
        raise SystemExit(f"--learner-token-s {given:g}: the journal's runs have {known[0]:g}; use another --run-dir")
    return known[0] if known else pilot(setting, seed, warm) if given is None else given


def prices(setting: Setting) -> dict[str, Any]:
    """Return the device's prices, for the record."""
    pace = setting.pace(setting.run_dir, 0.0, DrafterOptions().micro_step_tokens)
    levels = {name: level.model_dump() for name, level in pace.levels.items()}
    return asdict(pace) | {"target": pace.target.model_dump(), "levels": levels, "tally_dir": ""}


def make(setting: Setting, arm: str, seed: int, journal: Path, learner_token_s: float | None = None) -> dict[str, Any]:
    """Run one arm, and add it to the journal. `learner_token_s`: see `learner_price`."""
    warm = warm_start(setting.task, seed, setting.run_dir)
    price, name = learner_price(setting, seed, warm, journal, learner_token_s), f"{arm}-{seed}"
    run_arm(setting, arm, seed, warm, price, name)
    row = row_of(setting, arm, seed, setting.run_dir / name, price)
    plain = setting.run_dir / f"off-{seed}"
    row["differs"] = None if arm == "off" or arm in OTHER_TOKENS else first_difference(plain, setting.run_dir / name)
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def main(
    *overrides: Annotated[str, "KEY=VALUE of the configuration, for all arms"],
    task: Annotated[str, "the example that all arms are trained on", TASKS] = TASK,
    device: Annotated[str, "whose costs", ("A100", "H100")] = "A100",
    model: Annotated[str, "Qwen2.5 of this size; the A100's sweep is of 7b"] = "7b",
    share: Annotated[float, "of rollout in rollout and update together, for plain decoding"] = 0.7,
    scale: Annotated[float, "seconds here per second there: higher where passes are late"] = 4.0,
    context_scale: Annotated[float, "tokens there per token of the demo, for the KV cache"] = CONTEXT_SCALE,
    workers: Annotated[int, "rollout workers"] = 2,
    layout: Annotated[
        str, "disaggregated: the learner's device is none of the workers', colocated: one of theirs", LAYOUTS
    ] = "embedded",
    once: Annotated[bool, "each prompt at most once: held-out prompts join those of training"] = False,
    steps: Annotated[int, "RL steps; the first is not counted in ratios"] = 8,
    arms: Annotated[Sequence[str], "who takes part", tuple(ARMS)] = tuple(ARMS),
    seeds: Sequence[int] = (0, 1, 2),
    learner_token_s: Annotated[float | None, "seconds there of learning a token; default: by a pilot"] = None,
    tables: Annotated[bool, "write the record and the pages from the journal"] = False,
    run_dir: Annotated[Path, "journal, warm starts, runs"] = ROOT / "runs/paced",
    out: Path = ROOT / "experiments/results/paced_run.json",
) -> None:
    setting = Setting(
        device=device,  # type: ignore[arg-type]
        model=model,
        share=share,
        scale=scale,
        context_scale=context_scale,
        workers=workers,
        steps=steps,
        layout=layout,
        extra=tuple(overrides),
        run_dir=run_dir.resolve(),
        task=task,
        once=once,
    )
    if not (needed := ROOT / "examples" / task / "data/model").is_dir():
        raise SystemExit(f"{needed} is not there: python -m examples.{task}.make_data")
    journal = setting.run_dir / "journal.jsonl"
    setting.run_dir.mkdir(parents=True, exist_ok=True)
    for arm, seed in () if tables else missing(setting, arms, seeds, journal):
        row = make(setting, arm, seed, journal, learner_token_s)
        said = (
            f"{sum(row['rollout_s']):.1f} s of rollout, {sum(row['rl_s']):.1f} s in all, {row['late_share']:.1%} late"
        )
        tokens = "tokens of its own" if arm in OTHER_TOKENS else row["differs"] or "same tokens"
        print(f"{arm} seed {seed}: {said}; {tokens}", flush=True)
    found = {"runs": rows_of(setting, journal), "pace": prices(setting)}
    settings = {"setting": setting.key, "steps": steps, "share": share, "scale": scale, "overrides": overrides}
    write(out, "what are the drafters worth at a GPU's costs?", found, settings=settings)
    print(write_pages(out))


if __name__ == "__main__":
    command(main, timed=False)
