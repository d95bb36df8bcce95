"""The engine of an older checkout, as a process: plain decoding, asked for by lines of JSON.

As a script (`python base_engine.py CHECKOUT MODEL DTYPE THREADS`) it is the process: it imports everything from
CHECKOUT, its compiled extension included if one lies there, and nothing from here. As a module it is the other end.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray


def serve(checkout: str, model_dir: str, dtype: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Libraries that print must not disturb the answers.
    # Editable installs answer before sys.path does: they would import the checkout that is measured against this one.
    sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
    sys.path[0] = checkout
    import torch

    from actors.engine.native import engine as module
    from actors.engine.options import EngineOptions
    from actors.engine.types import Finished, Request, SamplingParams
    from models.checkpoint import load_model

    if Path(module.__file__).resolve().parents[3] != Path(checkout).resolve():
        raise SystemExit(f"{module.__file__} is not of {checkout}: give it a Python without an editable install")
    torch.set_num_threads(int(threads))
    model = load_model(model_dir, dtype=getattr(torch, dtype), batch_invariant=False)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        case = json.loads(line)
        engine = module.NativeEngine(model, EngineOptions(**case["options"]))
        waves = [
            [
                Request(
                    request_id=r["id"],
                    prompt_id=r["prompt_id"],
                    prompt_tokens=np.array(r["prompt"], np.int32),
                    noise_key=r["key"],
                    sampling=SamplingParams(r["limit"], r["temperature"], stop_token_ids=tuple(r["stop"])),
                )
                for r in wave
            ]
            for wave in case["waves"]
        ]
        responses = {}
        start_s = perf_counter()
        for requests in waves:
            engine.submit(requests)
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, Finished):
                        responses[event.rollout.request_id] = event.rollout.tokens
        seconds = perf_counter() - start_s
        tokens = {request_id: tokens.tolist() for request_id, tokens in responses.items()}
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


class BaseEngine:
    """The process, seen from the benchmark."""

    def __init__(self, checkout: Path, python: str, model_dir: Path, dtype: str, threads: int) -> None:
        command = [python, __file__, str(checkout), str(model_dir), dtype, str(threads)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )
        self._answer()

    def decode(
        self, waves: Sequence[Sequence[Any]], options: dict[str, int]
    ) -> tuple[float, dict[int, NDArray[np.int32]]]:
        """Seconds and tokens by request id. SystemExit if the process ended."""
        case = {"options": options, "waves": [[_plain(request) for request in wave] for wave in waves]}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], {
            int(request_id): np.array(tokens, np.int32) for request_id, tokens in answer["tokens"].items()
        }

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine of the base checkout ended: its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _plain(request: Any) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "prompt_id": request.prompt_id,
        "prompt": request.prompt_tokens.tolist(),
        "key": request.noise_key,
        "limit": request.sampling.max_new_tokens,
        "temperature": request.sampling.temperature,
        "stop": list(request.sampling.stop_token_ids),
    }


if __name__ == "__main__":
    serve(*sys.argv[1:])
