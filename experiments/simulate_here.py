"""The simulator's accuracy on this machine: real runs of 1, 2 and 3 workers against their predictions.

    python -m experiments.simulate_here [--target MODEL] [--names demo 20m] [--workers 1 2 3]
    python -m experiments.simulate_here --again          only compare again what the record holds; measures nothing

For each model, in this order: `paceline calibrate` (engine steps of a single engine); 1 to 3 engines that decode side
by side, for the cost of sharing cores; a reference run of two workers with another seed. The latter gives the learner's
tokens per second, the time of grading and of handing over weights, and the cores that the program uses besides its
engines. The runs' steps are predicted from these, and from the actual lengths. Every engine has one thread; plain
decoding. The first step of a run is left out. About four minutes on two quiet cores.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import psutil
import torch

from actors.data import load_prompts, load_tokenizer
from actors.engine.native.engine import NativeEngine
from benchmarks.harness import DEMO, ROOT, command, load, markdown, save, write
from benchmarks.tools.inflating import PRESETS
from benchmarks.tools.targets import find_demo, inflated, load_target
from contracts.rollout import Request, SamplingParams
from launch.config import Config, load_config
from launch.observe import now
from launch.observe.journal import read
from launch.run.opening import engine_options
from models.checkpoint import load_model, save_model
from planner.simulate.outcome import Outcome
from planner.simulate.run import simulate
from planner.simulate.scenario import Scenario, scenario_of

OUT = ROOT / "experiments/results/simulate_here.json"
QUESTION = "how far is the simulator from real runs of this machine?"
CONFIG = DEMO / "config.yaml"
PROMPTS = {"demo": 16, "20m": 8}  # per RL step
STEPS = {"demo": 6, "20m": 4}
REFERENCE_WORKERS, REFERENCE_SEED, SEED = 2, 1, 0
TIMEOUT_S = 600.0
CALIBRATE_S, TOGETHER_S = 10.0, 4.0
DECODING, CONTEXT = 24, 40  # requests of an engine that decodes next to others, and their initial tokens
ENGINE = "actors.engine.child"
PARTS = ("rollout", "reward_wait", "learn", "publish", "sync", "step")


def configuration(name: str, folder: Path, workers: int, seed: int) -> list[str]:
    return [
        f"run.name={name}-{'reference' if seed == REFERENCE_SEED else workers}",
        f"run.dir={folder}",
        f"run.steps={STEPS[name]}",
        f"run.seed={seed}",
        f"model.path={folder / name}",
        "warmup=null",
        "data.eval=null",
        f"rollout.workers={workers}",
        f"rollout.prompts_per_step={PROMPTS[name]}",
        "rollout.speculation.mode=off",
        "drafter.train=false",
        "drafter.offline=null",
        "observe={live: false, tensorboard: false}",
    ]


def run(settings: Sequence[str], *, watched: bool = False) -> dict[str, Any]:
    """Run to its end. Returns the seconds of its steps, lengths, and if watched, the cores that processes other than
    engines used in rollouts."""
    config = load_config(CONFIG, list(settings)).config
    folder = Path(config.run.dir) / config.run.name
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        command_line = [sys.executable, "-m", "launch", "train", str(CONFIG), *settings]
        process = subprocess.Popen(command_line, stdout=out, stderr=out, cwd=ROOT)
        try:
            cores = _cores_beside_engines(process, folder) if watched else None
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
    if code != 0:
        sys.exit(log.read_text(errors="replace")[-3000:])
    steps = [row for row in read(folder / "metrics.jsonl") if row["kind"] == "step"]
    return {
        "seconds": [{part: round(row[f"seconds/{part}"], 4) for part in PARTS} for row in steps],
        "lengths": [row["lengths"] for row in read(folder / "lengths.jsonl")],
        "other_cores": cores,
    }


def _cores_beside_engines(process: subprocess.Popen[bytes], folder: Path) -> float:
    """Watch until the run ends."""
    used_s = rollout_s = 0.0
    before: dict[int, float] = {}
    engines: set[int] = set()
    seen_s, phase = time.monotonic(), ""
    deadline_s = seen_s + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.2)
        doing = now.read(folder)
        now_s, was = time.monotonic(), phase
        phase = "" if doing is None else doing.phase
        after = _cpu_seconds(process.pid, engines, before)
        if was == phase == "rollout":
            used_s += sum(after[pid] - before[pid] for pid in after if pid in before)
            rollout_s += now_s - seen_s
        before, seen_s = after, now_s
    return used_s / max(rollout_s, 1e-9)


def _is_engine(process: psutil.Process) -> bool:
    return any(ENGINE in word for word in process.cmdline())


def _cpu_seconds(root: int, engines: set[int], before: Mapping[int, float]) -> dict[int, float]:
    """Return the CPU seconds of all processes of a run except engines, whose ids are added to `engines`. `before`: the
    last result."""
    found: dict[int, float] = {}
    try:
        processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    except psutil.Error:
        return found
    for process in processes:
        try:
            if process.pid not in engines and process.pid not in before and _is_engine(process):
                engines.add(process.pid)
            if process.pid in engines:
                continue
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[process.pid] = times.user + times.system
    return found


def calibrated(name: str, folder: Path) -> dict[str, Any]:
    """Return the calibration document."""
    settings = configuration(name, folder, 1, SEED)
    words = ["calibrate", str(CONFIG), *settings, "--seconds", str(CALIBRATE_S), "--out", str(folder / f"{name}-costs")]
    shutil.rmtree(folder / f"{name}-costs", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "launch", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    (path,) = (folder / f"{name}-costs").glob("*.json")
    return load(path)


def together(name: str, folder: Path, most: int) -> list[float]:
    """Return the mean engine steps per second of each of 1, 2, ... engines that decode at the same time."""
    words = [sys.executable, "-m", "experiments.simulate_here", "--busy", "--beside", str(folder / name)]
    engines = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(most)
    ]
    try:
        for engine in engines:
            assert engine.stdout is not None
            engine.stdout.readline()  # it is ready
        found = []
        for count in range(1, most + 1):
            for engine in engines[:count]:
                assert engine.stdin is not None
                engine.stdin.write("go\n")
                engine.stdin.flush()
            found.append(mean(float(engine.stdout.readline()) for engine in engines[:count] if engine.stdout))
        return found
    finally:
        for engine in engines:
            engine.kill()


def decode(model: Path) -> None:
    """Run an engine that is ready. For each line of the standard input it decodes for a while and prints its engine
    steps per second."""
    config: Config = load_config(CONFIG, [*configuration("demo", model.parent, 1, SEED), f"model.path={model}"]).config
    torch.set_num_threads(1)
    network = load_model(str(model), dtype=torch.float32, device="cpu", batch_invariant=True)
    engine = NativeEngine(network, engine_options(config))
    _decode(engine, 0, 0.2)
    print("ready", flush=True)
    for turn, _ in enumerate(iter(sys.stdin.readline, ""), 1):
        print(_decode(engine, turn * 100_000, TOGETHER_S), flush=True)


def _decode(engine: NativeEngine, first: int, seconds: float) -> float:
    prompt = np.arange(10, 10 + CONTEXT, dtype=np.int32)
    steps, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < seconds:
        ids = range(first, first + DECODING)
        if steps % 128 == 0:  # restart with the same contexts
            engine.abort(ids)
            first += DECODING
            sampling = SamplingParams(max_new_tokens=700, temperature=0.0)
            ids = range(first, first + DECODING)
            engine.submit(
                [
                    Request(request_id=one, prompt_id=one, prompt_tokens=prompt, noise_key=one, sampling=sampling)
                    for one in ids
                ]
            )
        engine.step()
        steps += 1
    engine.abort(ids)
    while engine.has_work:
        engine.step()
    return steps / elapsed_s


# The prediction.


def shared(rates: Sequence[float], other_cores: float, cores: int) -> list[float]:
    """Return the slow-down by number of computing engines: their mutual cost as measured side by side, and the cores
    that the rest of the program uses where they leave no room."""
    return [
        rates[0] / rate * max(1.0, (min(count, cores) + other_cores) / cores) for count, rate in enumerate(rates, 1)
    ]


def scenario(name: str, workers: int, folder: Path, found: Mapping[str, Any], lengths: Sequence[Any]) -> Scenario:
    """Return the scenario of a run with these lengths."""
    reference = found["reference"]
    seconds = reference["seconds"][1:]
    prompt = found["prompt_tokens"]
    tokens = sum(sum(step) + len(step) * prompt for step in reference["lengths"][1:])
    path, costs = folder / "lengths.jsonl", folder / "costs.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": i, "lengths": one}) + "\n" for i, one in enumerate(lengths)))
    costs.write_text(json.dumps(found["calibration"]))
    rest_s = mean(one["step"] - one["rollout"] - one["reward_wait"] - one["learn"] for one in seconds)
    tree: dict[str, Any] = {
        "name": f"{name}-{workers}",
        "model": found["shape"],
        "fleet": {"nodes": 1, "gpus_per_node": workers, "layout": "colocated", "device": None},
        "workload": {
            "steps": len(lengths),
            "prompts_per_step": PROMPTS[name],
            "rollouts_per_prompt": len(lengths[0]) // PROMPTS[name],
            "known": False,
            "prompt_tokens": round(prompt),
            "grade_s": mean(one["reward_wait"] for one in seconds),
        },
        "lengths": {"file": str(path), "max_tokens": 200},
        "engine": {"max_running": found["max_running"], "kv_tokens": found["kv_tokens"]},
        "costs": {
            "source": "calibration",
            "file": str(costs),
            "shared": shared(found["rates"], reference["other_cores"], found["cores"]),
        },
        "learning": {
            "tokens_s": tokens / sum(one["learn"] for one in seconds),
            "overhead_s": 0.0,
            "weights_s": rest_s,
            "checkpoint_every": 1000,
        },
    }
    return scenario_of(tree)


def compared(found: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the table: measured, simulated, error, of rollouts and of whole steps after the first."""
    rows = []
    for name, own in found.items():
        for workers, ran in own["runs"].items():
            outcome: Outcome = simulate(
                scenario(name, int(workers), folder / f"{name}-{workers}-said", own, ran["lengths"])
            )
            row: dict[str, Any] = {"model": name, "workers": int(workers)}
            for part, of in (("rollout", "rollout_s"), ("learn", "learn_s"), ("step", "step_s")):
                measured = mean(one[part] for one in ran["seconds"][1:])
                simulated = mean(getattr(one, of) for one in outcome.steps[1:])
                row |= {part: (round(measured, 3), round(simulated, 3), round(simulated / measured - 1, 4))}
            rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["model", "workers"]
    for part in ("rollout", "learn", "step"):
        head += [f"{part} measured, s", "simulated", "error"]
    return markdown(
        head,
        [
            [row["model"], row["workers"]]
            + [
                text
                for part in ("rollout", "learn", "step")
                for text in (f"{row[part][0]:.2f}", f"{row[part][1]:.2f}", f"{row[part][2]:+.0%}")
            ]
            for row in rows
        ],
    )


def measured(name: str, folder: Path, workers: Sequence[int]) -> dict[str, Any]:
    """Measure everything for one model: the inputs of the prediction, then its subject."""
    config = load_config(CONFIG, configuration(name, folder, 1, SEED)).config
    prompts = load_prompts(config.data, "train", load_tokenizer(str(folder / name)))
    shape = json.loads((folder / name / "config.json").read_text())
    found: dict[str, Any] = {
        "shape": {
            "vocab_size": shape["vocab_size"],
            "hidden_size": shape["hidden_size"],
            "intermediate_size": shape["intermediate_size"],
            "num_layers": shape["num_hidden_layers"],
            "num_heads": shape["num_attention_heads"],
            "num_kv_heads": shape["num_key_value_heads"],
            "head_dim": shape["head_dim"],
            "item_bytes": 4,
        },
        "prompt_tokens": mean(len(prompt.tokens) for prompt in prompts),
        "max_running": config.rollout.engine.max_running,
        "kv_tokens": config.rollout.engine.kv_tokens,
        "cores": os.cpu_count() or 1,
    }
    print(name, "calibrate", flush=True)
    found["calibration"] = calibrated(name, folder)
    print(name, "side by side", flush=True)
    found["rates"] = together(name, folder, max(workers))
    print(name, "reference", [round(found["rates"][0] / rate, 3) for rate in found["rates"]], flush=True)
    found["reference"] = run(configuration(name, folder, REFERENCE_WORKERS, REFERENCE_SEED), watched=True)
    found["runs"] = {}
    for count in workers:
        print(name, count, "workers", flush=True)
        found["runs"][str(count)] = run(configuration(name, folder, count, SEED))
    return found


def models(names: Sequence[str], demo: Path, folder: Path) -> None:
    """Write the models' checkpoints to `folder`."""
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
        if name in PRESETS:
            larger = inflated(load_target(demo, "demo", "float32").model, PRESETS[name], batch_invariant=True)
            save_model(larger, folder / name, tokenizer_dir=demo, source_dir=demo)
        else:
            shutil.copytree(demo, folder / name)


def main(
    *,
    target: Annotated[Path | None, "the demo's trained model; default: the newest of a run"] = None,
    names: Annotated[Sequence[str], "demo, 20m"] = tuple(PROMPTS),
    workers: Annotated[Sequence[int], "of the runs"] = (1, 2, 3),
    folder: Annotated[Path, "of runs and models"] = ROOT / "runs/simulate_here",
    again: Annotated[bool, "compare the record's measurements, measure nothing"] = False,
    beside: Annotated[Path | None, "decode beside others: a model (internal)"] = None,
    out: Annotated[Path, "record, and a table beside it"] = OUT,
) -> None:
    if beside is not None:
        decode(beside)
        return
    settings = {"seed": SEED, "reference seed": REFERENCE_SEED, "threads": 1}
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if again:
        found = load(out)["measured"]
    else:
        models(names, find_demo(target), folder)
        found = {}
        for name in names:  # a model's results stay if the next one fails
            found[name] = measured(name, folder, workers)
            write(out, QUESTION, {"measured": found}, settings=settings)
    rows = compared(found, folder)
    out.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")
    print(table(rows))
    save(out, load(out) | {"rows": rows})


if __name__ == "__main__":
    command(main)
