"""Drafters on real text: SmolLM2 thinks aloud; n-grams, a suffix index, EAGLE, EAGLE-3 and copies of it draft.

    python -m examples.smollm_think.make_data                      # once: the problems
    paceline warmup examples/smollm_think/config.yaml              # once: the model before RL
    python -m experiments.real_text [--config CONFIG] [--target DIR] [--eagle rl=DIR] [--fitted eagle hass eagle3 osd]
    python -m experiments.real_text --dtype bfloat16 --quantization w8a8 --out experiments/results/real_text_w8a8.json

Requests are the task's training prompts at its temperature with their natural lengths, batch invariant as in RL on a
CPU, decoded together until the last has ended; waves of other prompts follow. EAGLE and EAGLE-3 (--fitted: HASS and OSD
too) are fitted offline for the same time to rollouts of the held-out prompts, like `paceline warmup-drafter`; --eagle
adds weights that a run has trained. Nothing was decoded before, as in a first run without calibration. `warm`:
retrieval knows one earlier epoch of the same prompts (other noise), and the chooser has decoded them. Runs alternate
with plain decoding; a speed-up is the mean time of the plain runs around a run over its own. Every run must draw the
tokens of plain decoding in the target's precision. With another precision than float32 the same requests are also
decoded plainly in float32 in every turn (`over_float32`: tokens per second relative to that; the tokens then differ). A
low-bit target has no low-bit copies. A copy of the target is made before its run's time begins (`prep_s`), except for
the adaptive ones, whose time includes it.

About 15 minutes on two quiet cores. TLT's and EfficientRollout's figures, which are of other models, are shown too.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch

from actors.data import load_prompts, load_tokenizer
from benchmarks.harness import ROOT, command, interval, markdown, write
from benchmarks.tools import rollouts
from benchmarks.tools.rollouts import MEASURED_EPOCH, History, Run, decode, record_history, waves
from benchmarks.tools.targets import DTYPES, Target, Task
from config.drafter import Algorithm, DrafterOptions
from config.formats import Quantization, low_bit_format
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from drafter.build import build_drafters
from drafter.eagle import save_eagle
from drafter.protocol import Drafter
from drafter.training.fit import PlateauRule, TargetRecords, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from launch.config import Config, load_config
from launch.config.hub import converted
from launch.run.inputs import stop_tokens_of
from launch.run.warmup import initial_weights
from models.checkpoint import load_model, parameter_count
from policies.calibration.costs import CostModel
from policies.speculation.build import build_policy
from policies.speculation.policy import StrategyPolicy

CONFIG = ROOT / "examples/smollm_think/config.yaml"
FITTED: tuple[Algorithm, ...] = ("eagle", "eagle3")
BATCHES = (1, 4, 16)
# Papers' figures for their models on GPUs: accept length, speed-up of decoding.
PAPERS = {
    "eagle": "TLT Table 7 (Qwen2.5-7B, H100): 6.53, 2.24x",
    "hass": "TLT Table 7: 6.67, 2.29x",
    "eagle3": "TLT Table 7: 6.83, 2.55x",
    "osd": "TLT Table 8: 6.77",
    "self w8a8": "EfficientRollout Table 4 (Qwen2.5-7B, A100; W8, 5 drafted): 5.87",
    "self w4a8": "EfficientRollout Table 4 (W4, 5 drafted): 5.18; Table 2, whole rollouts: 1.24x (7B), 1.20x (14B)",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """Speculation of an engine; drafters are made anew for every run."""

    name: str
    options: SpeculationOptions
    warm: bool = False

    def drafters(self, target: Target, engine: EngineOptions) -> dict[str, Drafter]:
        return build_drafters(self.options, target.model, engine)


def fixed(name: str, strategy: str, *, warm: bool = False, sections: Mapping[str, Any] | None = None) -> Contender:
    values = {"mode": "fixed", "strategies": [strategy], **(sections or {})}
    return Contender(name, SpeculationOptions.model_validate(values), warm)


def contenders(weights: Mapping[str, Path], formats: Sequence[str]) -> list[Contender]:
    found = [fixed("ngram", "ngram:3"), fixed("suffix", "suffix:4"), fixed("suffix", "suffix:4", warm=True)]
    found += [fixed(name, "eagle:3", sections={"eagle": {"path": str(folder)}}) for name, folder in weights.items()]
    found += [fixed(f"self {form}", "self:5", sections={"self": {"format": form}}) for form in formats]
    eagle = {"path": str(weights["eagle"])} if "eagle" in weights else {}
    for warm in (False, True):
        found.append(Contender("adaptive", SpeculationOptions(), warm))
        found.append(Contender("adaptive, EAGLE", SpeculationOptions.model_validate({"eagle": eagle}), warm))
    return found


def load(directory: Path, dtype: str = "float32", quantization: Quantization = "none") -> Target:
    """Load the target with which RL begins."""
    low_bit = low_bit_format(quantization, "cpu")
    model = load_model(directory, dtype=getattr(torch, dtype), batch_invariant=True, low_bit=low_bit)
    precision = dtype if low_bit is None else f"{quantization}, rest {dtype}"
    return Target(directory.parent.parent.name, precision, model.eval().requires_grad_(False), parameter_count(model))


def load_tasks(config: Config, directory: Path) -> tuple[Task, Task]:
    """Return the training prompts and the held-out ones."""
    tokenizer = load_tokenizer(str(directory))
    stop, longest = stop_tokens_of(config, tokenizer), config.rollout.sampling.max_new_tokens
    tasks = [
        Task([prompt.tokens for prompt in load_prompts(config.data, split, tokenizer)], stop, longest)
        for split in ("train", "eval")
    ]
    return tasks[0], tasks[1]


def fit_for(seconds: float, algorithm: Algorithm, target: Target, history: History, folder: Path) -> dict[str, Any]:
    """Fit an EAGLE head of that kind and save it to `folder`."""
    trainer = DrafterTrainer(
        TargetHead.of(target.model, 0), DrafterOptions(algorithm=algorithm, learning_rate=1e-3, micro_step_tokens=1024)
    )
    layers = getattr(trainer.model, "layers", ()) if algorithm == "eagle3" else ()
    records = TargetRecords(target.model, *history, layers=layers)
    records.take(range(len(records.tokens)))  # made before the timed part
    start_s, last = time.monotonic(), list[Any]()
    for progress in fit(trainer, records, PlateauRule(every=20)):
        if progress is not None:
            last.append(progress)
        if time.monotonic() - start_s > seconds:
            break
    save_eagle(trainer.model, folder)
    top3 = round(last[-1].held_out_top3, 4) if last else None
    print(f"{algorithm}: {trainer.steps} micro-steps, held-out top-3 {top3}", flush=True)
    return {"micro_steps": trainer.steps, "held_out_top3": top3, "seconds": round(time.monotonic() - start_s, 1)}


def measure(
    target: Target,
    task: Task,
    history: History,
    everyone: Sequence[Contender],
    *,
    batch: int,
    requests: int,
    repeats: int,
    temperature: float,
    base: Target | None = None,
) -> dict[str, Any]:
    """Measure every contender at `requests` requests, in turns with plain decoding and, if given, with that of `base`,
    the same model in float32."""
    together = waves(task, max(requests // batch, 1), batch, MEASURED_EPOCH, temperature)
    reference = decode(target, together)
    engine = rollouts.options_of(together)

    def run(contender: Contender, policy: StrategyPolicy | None) -> Run:
        drafters = contender.drafters(target, engine)
        known = history if contender.warm else None
        ready = contender.options.mode == "fixed"
        made = decode(target, together, policy=policy, drafters=drafters, history=known, ready=ready)
        rollouts.require_same(reference, made, f"{contender.name} at {batch} requests")
        return made

    def policy_of(contender: Contender) -> StrategyPolicy | None:
        return build_policy(contender.options, list(contender.drafters(target, engine)), costs=CostModel())

    learnt = {(c.name, c.warm): policy_of(c) for c in everyone if c.warm}
    for contender in everyone:
        if contender.warm and contender.options.mode == "adaptive":
            run(contender, learnt[contender.name, True])
    rows: dict[str, Any] = {}
    plain = decode(target, together)
    for contender in everyone:
        made: list[Run] = []
        off, exact = [plain], list[Run]()
        for _ in range(repeats):
            policy = learnt[contender.name, True] if contender.warm else policy_of(contender)
            made.append(run(contender, policy))
            plain = decode(target, together)
            off.append(plain)
            exact += [] if base is None else [decode(base, together)]
        around_s = [fmean((a.seconds, b.seconds)) for a, b in pairwise(off)]
        speed = rollouts.speed_of([step for one in made for step in one.steps], rollouts.is_speculative)
        name = f"{contender.name}{', warm' if contender.warm else ''}"
        rows[name] = {
            "accept_length": round(speed.accept_length, 2),
            "accepted": round((speed.emitted - speed.request_steps) / max(speed.drafted, 1), 3),
            "draft_share": round(speed.draft_s / max(speed.elapsed_s, 1e-9), 3),
            "tokens_per_s": round(median(one.tokens / one.seconds for one in made), 1),
            "off_tokens_per_s": round(reference.tokens / fmean(around_s), 1),
            "prep_s": round(median(one.prep_s for one in made), 3),
            "speedup": interval([at / one.seconds for at, one in zip(around_s, made, strict=True)]),
        }
        if exact:
            rows[name] |= {"over_float32": over(made, exact), "plain_over_float32": over(off[1:], exact)}
        print(f"{batch} requests, {name}: {rows[name]}", flush=True)
    return {"requests": batch, "waves": len(together), "tokens": reference.tokens, "contenders": rows}


def over(runs: Sequence[Run], exact: Sequence[Run]) -> dict[str, float]:
    """Return tokens per second of the runs over those of float32's in the same turns: median and interval."""
    return interval([(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in zip(runs, exact, strict=True)])


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    names = cases[0]["contenders"]
    beside = any("over_float32" in row for row in names.values())
    columns = f"accept length, accepted, speed-up{', over float32' if beside else ''}"
    head = ["drafter", *(f"{case['requests']} requests: {columns}" for case in cases), "papers"]
    lines = []
    for name in names:
        cells = [case["contenders"][name] for case in cases]
        said = [
            f"{of['accept_length']:.2f}, {of['accepted']:.0%}, **{of['speedup']['median']:.2f}x**"
            + (f", {of['over_float32']['median']:.2f}x" if beside else "")
            for of in cells
        ]
        lines.append([name, *said, PAPERS.get(name, "")])
    return markdown(head, lines)


def main(
    *,
    config: Annotated[Path, "of the task"] = CONFIG,
    target: Annotated[Path | None, "model directory; default: the configuration's warm start"] = None,
    batches: Annotated[Sequence[int], "requests decoded together"] = BATCHES,
    requests: Annotated[Sequence[int], "of a run, by batch"] = (6, 16, 32),
    formats: Annotated[Sequence[str], "of copies of the target"] = ("w8a8", "w4a8"),
    fitted: Annotated[Sequence[Algorithm], "offline"] = FITTED,
    eagle: Annotated[Sequence[str], "NAME=DIR: further EAGLE weights"] = (),
    dtype: Annotated[str, "of the target", DTYPES] = "float32",
    quantization: Annotated[Quantization, "of the target's matrices"] = "none",
    fit_prompts: Annotated[int, "held-out prompts whose rollouts EAGLE is fitted to, 8 each"] = 24,
    fit_seconds: Annotated[float, "of each fit"] = 120.0,
    repeats: int = 1,
    threads: int = 2,
    folder: Annotated[Path, "where fitted weights go"] = ROOT / "runs/real_text",
    out: Path = ROOT / "experiments/results/real_text.json",
) -> None:
    torch.set_num_threads(threads)
    loaded = converted(load_config(config).config, sys.stdout)
    directory = target or initial_weights(loaded)
    if not (directory / "config.json").exists():
        raise SystemExit(f"{directory} is no model: `paceline warmup {config}` makes it, or give one with --target")
    exact = load(directory)
    plain = (dtype, quantization) == ("float32", "none")
    model = exact if plain else load(directory, dtype, quantization)
    train, held_out = load_tasks(loaded, directory)
    temperature = loaded.rollout.sampling.temperature
    fits, weights = {}, dict[str, Path]()
    if fit_seconds:
        rolled = record_history(exact, replace(held_out, prompts=held_out.prompts[:fit_prompts]), temperature)
        for algorithm in fitted:
            fits[algorithm] = fit_for(fit_seconds, algorithm, exact, rolled, folder / algorithm)
            weights[algorithm] = folder / algorithm
    weights |= {name: Path(at) for name, _, at in (text.partition("=") for text in eagle)}
    used = max(-(-count // min(batch, rollouts.GROUP)) for batch, count in zip(batches, requests, strict=True))
    history = record_history(model, replace(train, prompts=train.prompts[:used]), temperature)
    everyone = contenders(weights, formats if quantization == "none" else ())
    cases = [
        measure(
            model,
            train,
            history,
            everyone,
            batch=batch,
            requests=count,
            repeats=repeats,
            temperature=temperature,
            base=None if plain else exact,
        )
        for batch, count in zip(batches, requests, strict=True)
    ]
    settings = {"threads": threads, "temperature": temperature, "repeats": repeats, "seed": rollouts.SEED}
    found = {"target": model.name, "target_parameters": model.parameters, "fits": fits, "cases": cases}
    write(out, "what do drafters accept and save on real text?", found, settings=settings)
    text = table(cases)
    out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    command(main)
