"""Greedy decoding by stock vLLM with an exported drafter, in a process of its own. Needs vLLM and nothing of ours.

    python vllm_run.py JOB.json OUT.json

JOB: target, drafter, method, depth, prompts, max_tokens. OUT: version, tokens of each prompt, and per drafted position
how many drafts there were and how many were accepted to it.
"""

import json
import os
import sys
from pathlib import Path

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main(job_path: str, out_path: str) -> None:
    os.environ.update(SETTINGS)
    import vllm

    job = json.loads(Path(job_path).read_text())
    engine = vllm.LLM(
        model=job["target"],
        speculative_config={"method": job["method"], "model": job["drafter"], "num_speculative_tokens": job["depth"]},
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # which has the counts
        skip_tokenizer_init=True,
        seed=0,
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False),
    )
    found = {metric.name: metric for metric in engine.get_metrics() if "spec_decode" in metric.name}
    result = {
        "version": vllm.__version__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": found["vllm:spec_decode_num_drafts"].value,
        "accepted": list(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }
    Path(out_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
