"""How fast a rollout worker answers the driver while its engine decodes, and how fresh finished rollouts arrive.

    python -m benchmarks.control_latency [--seconds 20] [--workers 1] [--out benchmarks/results/control_latency.json]

The dispatcher keeps the real native engine busy on one thread; meanwhile another calls status, abort (of an unknown
request) and submit (of nothing) on the worker, one after the other, and times each round trip. The same calls to the
idle worker are the baseline. Target: p99 under 20 ms while decoding. Run it on an otherwise idle machine.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.engine.commands import Abort, Submit
from actors.engine.options import EngineOptions, RolloutOptions
from actors.engine.process import spawn_engine
from actors.engine.types import Request, Rollout, SamplingParams
from benchmarks.machine import describe_machine
from launch.cluster.session import ray_session
from launch.dispatch import RolloutDispatcher, spawner
from models.checkpoint import init_model, save_model
from models.noise import noise_key
from models.options import ModelOptions

TARGET_P99_MS = 20.0
CONFIG = {  # 0.6 million parameters, as the demo's model
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds) * 1e3
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {"calls": len(seconds), "p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "max_ms": round(values.max(), 3)}


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


def requests(n: int, round_: int) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=400)
    prompt = np.arange(1, 33, dtype=np.int32)
    return [
        Request(
            request_id=i,
            prompt_id=i // 8,
            prompt_tokens=prompt,
            noise_key=noise_key(0, round_, i // 8, i),
            sampling=sampling,
        )
        for i in range(n)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--running", type=int, default=64, help="requests decoded together, per worker")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of an engine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/control_latency.json"))
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory, ray_session(cpus=args.workers):
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(CONFIG))
        save_model(init_model(path, 0), path / "model")
        engine = EngineOptions(max_running=args.running, kv_tokens=64 * 1024, threads=args.threads)
        model = ModelOptions(path=str(path / "model"))
        spawn = spawner(lambda name: partial(spawn_engine, model, engine, name=name))
        handles: list[Any] = []

        def remember(index: int) -> Any:
            handles.append(spawn(index))
            return handles[-1]

        dispatcher = RolloutDispatcher(remember, RolloutOptions(workers=args.workers, engine=engine))
        dispatcher.start()
        delays: list[float] = []
        tokens = 0
        stop = threading.Event()

        def on_finished(rollout: Rollout) -> None:
            nonlocal tokens
            delays.append(time.time() - rollout.finished_s)
            tokens += len(rollout.tokens)

        def decode() -> None:
            round_ = 0
            while not stop.is_set():
                dispatcher.run(requests(2 * args.running * args.workers, round_), on_finished, should_stop=stop.is_set)
                round_ += 1

        time_calls(handles[0], 1.0)  # warm-up
        idle = time_calls(handles[0], min(args.seconds, 5.0))
        thread = threading.Thread(target=decode)
        thread.start()
        time.sleep(1.0)
        before, start_s = tokens, time.monotonic()
        decoding = time_calls(handles[0], args.seconds)
        tokens_per_s = (tokens - before) / (time.monotonic() - start_s)
        stop.set()
        thread.join(60)
        dispatcher.close()

    worst_ms = max(row["p99_ms"] for row in decoding.values())
    result = {
        "benchmark": "control_latency",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "machine": describe_machine(),
        "idle": idle,
        "decoding": decoding,
        "decoded_tokens_per_s": round(tokens_per_s),
        "finished_to_driver": quantiles_ms(delays),
        "target_p99_ms": TARGET_P99_MS,
        "met": bool(worst_ms < TARGET_P99_MS),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
