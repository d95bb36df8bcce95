"""The latency of a rollout worker's answers while its engine decodes, and the delay of finished rollouts.

    python -m benchmarks.control_latency [--seconds 20] [--workers 1] [--out benchmarks/results/control_latency.json]

The dispatcher keeps the real native engine busy on one thread. Another thread calls status, abort (of an unknown
request) and submit (of nothing) on the worker, one after the other, and times each round trip. The same calls to the
idle worker are the baseline. Target: p99 under 20 ms while decoding. Run it on an otherwise idle machine.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import ray

from actors.engine.process import spawn_engine
from benchmarks.alone import DispatcherAlone, spawner
from benchmarks.harness import RESULTS, command, quantiles_ms, write
from benchmarks.tools.targets import fresh_model, random_prompts, requests_of
from config.model import ModelOptions
from config.rollout import EngineOptions, RolloutOptions, WorkerCount
from contracts.engine import Abort, Submit
from contracts.rollout import Rollout
from launch.cluster.session import ray_session
from models.checkpoint import save_model

TARGET_P99_MS = 20.0


def time_calls(handle: Any, seconds: float, pause_s: float = 0.005) -> dict[str, dict[str, float]]:
    calls: dict[str, Callable[[], Any]] = {
        "status": lambda: handle.status.remote(),
        "abort": lambda: handle.tell.remote(Abort((-1,))),
        "submit": lambda: handle.tell.remote(Submit(())),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for name, call in calls.items():
            start_s = time.perf_counter()
            ray.get(call(), timeout=30)
            taken[name].append(time.perf_counter() - start_s)
            time.sleep(pause_s)
    return {name: quantiles_ms(values) for name, values in taken.items()}


def main(
    *,
    seconds: float = 20.0,
    workers: int = 1,
    running: Annotated[int, "requests decoded together, per worker"] = 64,
    threads: Annotated[int | None, "CPU threads of an engine"] = None,
    out: Path = RESULTS / "control_latency.json",
) -> None:
    with tempfile.TemporaryDirectory() as directory, ray_session(cpus=workers):
        path = Path(directory)
        save_model(fresh_model(), path / "model")
        engine = EngineOptions(max_running=running, kv_tokens=64 * 1024, threads=threads)
        model = ModelOptions(path=str(path / "model"))
        spawn = spawner(lambda name: partial(spawn_engine, model, engine, name=name))
        handles: list[Any] = []

        def remember(name: str) -> Any:
            handles.append(spawn(name))
            return handles[-1]

        dispatcher = DispatcherAlone(remember, RolloutOptions(workers=WorkerCount.fixed(workers), engine=engine))
        dispatcher.start()
        delays: list[float] = []
        tokens = 0
        stop = threading.Event()

        def on_finished(rollout: Rollout) -> None:
            nonlocal tokens
            delays.append(time.time() - rollout.finished_s)
            tokens += len(rollout.tokens)

        def decode() -> None:
            round_, prompts = 0, random_prompts(2 * running * workers)
            while not stop.is_set():
                dispatcher.run(
                    requests_of(prompts, [400] * len(prompts), seed=round_), on_finished, should_stop=stop.is_set
                )
                round_ += 1

        time_calls(handles[0], 1.0)  # warm-up
        idle = time_calls(handles[0], min(seconds, 5.0))
        thread = threading.Thread(target=decode)
        thread.start()
        time.sleep(1.0)
        before, start_s = tokens, time.monotonic()
        decoding = time_calls(handles[0], seconds)
        tokens_per_s = (tokens - before) / (time.monotonic() - start_s)
        stop.set()
        thread.join(60)
        dispatcher.close()

    found = {
        "idle": idle,
        "decoding": decoding,
        "decoded_tokens_per_s": round(tokens_per_s),
        "finished_to_driver": quantiles_ms(delays),
        "target_p99_ms": TARGET_P99_MS,
        "met": max(row["p99_ms"] for row in decoding.values()) < TARGET_P99_MS,
    }
    print(json.dumps(found, indent=1))
    settings = {"seconds": seconds, "workers": workers, "running": running, "threads": threads, "seed": 0}
    write(out, "how fast does a worker answer the driver while its engine decodes?", found, settings=settings)


if __name__ == "__main__":
    command(main)
