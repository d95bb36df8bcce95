"""Stock vLLM at three points of the step table, if installed: random weights of the same shape."""

import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.session import Session, part
from benchmarks.tools.qwen import network
from policies.roofline.timing import step_time


def run(session: Session) -> None:
    if importlib.util.find_spec("vllm") is None or session.rehearse:
        session.row(vllm="skipped: it is not installed" if not session.rehearse else "skipped: this is a rehearsal")
        return
    config = session.config("7b")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
        from vllm import LLM

        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=9216,
            max_num_seqs=64,
            gpu_memory_utilization=0.85,
        )
    for batch, context in ((1, 1024), (32, 1024), (64, 8192)):
        if session.left_s < 5:
            break
        few, many = (_seconds(engine, batch, context, tokens) for tokens in (16, 80))
        predicted = step_time(network(config), session.gpu, batch, 1, context)
        ms = (many - few) / 64 * 1e3
        session.row(batch=batch, context=context, ms=ms, predicted_ms=predicted.ms, floor_ms=predicted.floor_ms)


def _seconds(engine: Any, batch: int, context: int, tokens: int) -> float:
    """Return the seconds of prompts plus `tokens` new tokens; the prompts are cached after the first call."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + j) % 5000 for j in range(context - 80)]} for i in range(batch)]
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.generate(prompts, sampling, use_tqdm=False)
    start_s = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    part(run, "peer")
