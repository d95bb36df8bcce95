"""How rounds by length shorten an epoch's rollouts: `python -m experiments.rounds`.

Owns `results/rounds.json`. Runs in one process on problems of examples/long_guess_and_check, a few of which are far: an
epoch without rounds, and with several factors. Reported: the longest response of each RL step, which is the number of
engine steps of its rollout if all requests have a slot, and the number of tokens sampled twice. Counts, no seconds, so
a busy machine gives the same. Postponed responses count until their group is out, at most to the mark.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import ROOT, command, write
from examples.guess_and_check.task import Problem, problems
from experiments.ablation import NOTHING, warm_start
from launch.config import load_config
from launch.local.record import RunRecord, record_run

TASK = "long_guess_and_check"
FACTORS = ((1.25, 0.8), (1.5, 0.67), (2.0, 0.5))  # with their quantiles
NEAR, FAR = (5, 7, 11, 13), (97,)


def write_prompts(path: Path, count: int, far: int, seed: int) -> None:
    """Write `count` prompts, `far` of them of modulus 97, as JSON lines."""
    rng = random.Random(f"rounds-{seed}")
    near = [problem for p in NEAR for problem in problems(p, range(1, p))]
    chosen = [*rng.sample(near, count - far), *rng.sample([q for p in FAR for q in problems(p, (2, 3))], far)]
    path.write_text("".join(json.dumps(_record(problem)) + "\n" for problem in chosen), encoding="utf-8")


def _record(problem: Problem) -> dict[str, str]:
    return {"id": problem.uid, "prompt": problem.prompt, "answer": str(problem.answer)}


def counted(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the counts of one run."""
    record = RunRecord(keep_responses=True)
    record_run(load_config(ROOT / "examples" / TASK / "config.yaml", list(overrides)).config, record)
    longest, tokens = [max(step.lengths) for step in record.steps], sum(sum(step.lengths) for step in record.steps)
    marks = [step.metrics["rounds/mark"] if _races(step.metrics) else 0.0 for step in record.steps]
    lasts = [max(pair) for pair in zip(longest, marks, strict=True)]
    return {
        "longest": longest,
        "engine_steps": int(sum(lasts)),
        "tokens": tokens,
        "put_off_tokens": sum(step.metrics.get("lookahead/put_off_tokens", 0.0) for step in record.steps),
        "prompts": sorted(sample.prompt for samples in record.responses.values() for sample in samples),
    }


def _races(metrics: Mapping[str, float]) -> bool:
    return not metrics.get("rounds/long") and metrics.get("rounds/waiting", 0.0) > 0


def main(
    prompts: Annotated[int, "of the epoch"] = 120,
    far: Annotated[int, "of them, of modulus 97"] = 10,
    prompts_per_step: int = 8,
    seeds: Sequence[int] = (0,),
    run_dir: Annotated[Path, "warm starts, prompts"] = ROOT / "runs/rounds",
    out: Path = ROOT / "experiments/results/rounds.json",
) -> None:
    """Print the counts and write the record. Raises SystemExit if an epoch's training data differ."""
    run_dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for seed in seeds:
        data, warm = run_dir / f"prompts-{seed}.jsonl", warm_start(TASK, seed, run_dir)
        write_prompts(data, prompts, far, seed)
        common = [
            *("warmup=null", f"model.path={warm}", f"run.dir={run_dir}", "run.name=rounds", f"run.seed={seed}"),
            *("data.eval=null", "eval.every=0", f"data.train={data}", f"rollout.prompts_per_step={prompts_per_step}"),
            *(f"run.steps={prompts // prompts_per_step}", "learner.threads=1", "rollout.engine.threads=1"),
            *("rollout.workers=1", *NOTHING),
        ]
        plain = counted(common)
        rows = {"without": plain}
        for factor, quantile in FACTORS:
            options = [f"rollout.rounds={{factor: {factor}, quantile: {quantile}}}"]
            rows[f"factor {factor}"] = row = counted([*common, *options])
            if row["prompts"] != plain["prompts"]:
                raise SystemExit(f"factor {factor}, seed {seed}: the epoch's prompts are not learned from once each")
        for name, row in rows.items():
            del row["prompts"]
            ratio = plain["engine_steps"] / row["engine_steps"]
            counts = f"{row['engine_steps']} engine steps, {ratio:.2f}x; {row['tokens']} tokens"
            print(f"seed {seed}, {name}: {counts}", flush=True)
        found[str(seed)] = rows
    settings = {"prompts": prompts, "far": far, "prompts_per_step": prompts_per_step}
    write(out, "How much shorter are an epoch's rollouts with rounds by length?", found, settings=settings)


if __name__ == "__main__":
    command(main, timed=False)
