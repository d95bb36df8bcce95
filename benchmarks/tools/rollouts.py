"""Rollouts of the demo in this process, made by the engine of a rollout worker, with a record of every step.

Owns a case's requests and one timed run, not the meaning of figures. A *wave* is a number of requests submitted
together and decoded until the last has ended, so that it has the long tail of an RL step. A run is some waves in one
engine.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from benchmarks.tools.targets import Target, Task
from config.rollout import EngineOptions
from config.strategy import PLAIN, Strategy
from contracts.rollout import Request, SamplingParams
from drafter.protocol import Drafter
from drafter.self import SelfDrafter
from models.noise import noise_key
from policies.speculation.budget import DraftBudget
from policies.speculation.policy import StrategyPolicy

GROUP = 8  # responses per prompt, as in the demo's RL steps
MAX_NEW_TOKENS = 200  # the demo's limit
HISTORY_EPOCH, WARMUP_EPOCH, MEASURED_EPOCH = 0, 1, 2  # each with its own noise
SEED = 0

Tokens = NDArray[np.int32]


class _NoCapture:
    """Stands in for graph capture on a CPU: a self-drafter that plans graphs only makes its copy."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute

    def reset(self) -> None:
        pass


NO_CAPTURE = _NoCapture()
History = tuple[list[Tokens], list[Tokens]]  # prompts and responses, index by index


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one timed run."""

    seconds: float
    responses: dict[int, Tokens]  # by request id
    steps: list[EngineStepRecord]  # empty unless requested
    prep_s: float = 0.0  # before the run: making low-bit copies of the target, once per version of its weights

    @property
    def tokens(self) -> int:
        return sum(map(len, self.responses.values()))


def wave(task: Task, number: int, count: int, epoch: int, temperature: float = 1.0) -> list[Request]:
    """Return `count` requests: groups of 8 for successive prompts; fewer than 8 are samples of one prompt.

    Waves with different numbers use different prompts until all are used, then other samples of them.
    """
    groups = -(-count // GROUP)
    requests = []
    for i in range(count):
        turn, index = divmod(number * groups + i // GROUP, len(task.prompts))
        sample = turn * GROUP + i % GROUP
        sampling = SamplingParams(task.max_new_tokens, temperature, stop_token_ids=task.stop_token_ids)
        key = noise_key(SEED, epoch, index, sample)
        requests.append(
            Request(
                request_id=number * count + i,
                prompt_id=index,
                prompt_tokens=task.prompts[index],
                noise_key=key,
                sampling=sampling,
            )
        )
    return requests


def waves(task: Task, number: int, count: int, epoch: int, temperature: float = 1.0) -> list[list[Request]]:
    return [wave(task, i, count, epoch, temperature) for i in range(number)]


def engine_options(running: int, tokens: int = 320) -> EngineOptions:
    """Return options with room for `running` requests of `tokens` tokens, so that nothing waits for the cache."""
    return EngineOptions(max_running=running, kv_tokens=max(4096, tokens * running))


def options_of(waves: Sequence[Sequence[Request]], running: int | None = None) -> EngineOptions:
    """Return options of an engine that decodes `running` of these requests together; default: a whole wave."""
    longest = max(len(r.prompt_tokens) + r.sampling.max_new_tokens for requests in waves for r in requests)
    return engine_options(running or max(map(len, waves)), max(longest + 16, 320))  # plus a partly filled block


def decode(
    target: Target,
    waves: Sequence[Sequence[Request]],
    *,
    policy: StrategyPolicy | None = None,
    drafters: Mapping[str, Drafter] | None = None,
    budget: DraftBudget | None = None,
    history: History | None = None,
    running: int | None = None,
    record: bool = True,
    ready: bool = True,
) -> Run:
    """Decode the waves one after the other in a fresh engine that has seen `history`. Only decoding is timed; the work
    that self-drafters do once per RL step is timed separately.

    running: most requests decoded together; default: a whole wave. Not `ready`: self-drafters make their copy within
    the measured time, if they are used at all.
    """
    steps: list[EngineStepRecord] = []
    options = options_of(waves, running)
    engine = NativeEngine(
        target.model,
        options,
        drafters=drafters or {},
        policy=policy,
        budget=budget,
        steps=steps if record else None,
    )
    if history is not None:
        teach((drafters or {}).values(), history)
        if budget is not None:
            budget.remember(*history)
            budget.new_target()
    responses: dict[int, Tokens] = {}
    start_s = perf_counter()
    for drafter in (drafters or {}).values():
        if ready and isinstance(drafter, SelfDrafter):
            drafter.plan_graphs([(1, Strategy("self", 1))], NO_CAPTURE)
    prep_s = perf_counter() - start_s
    gc.collect()
    start_s = perf_counter()
    for requests in waves:
        responses |= {number: rollout.tokens for number, rollout in engine.generate(requests).items()}
    return Run(perf_counter() - start_s, responses, steps, prep_s)


def teach(drafters: Iterable[Drafter], history: History) -> None:
    """Show the drafters rollouts as if their own engine had decoded them."""
    for drafter in drafters:
        for prompt, response in zip(*history, strict=True):
            drafter.begin(0, prompt, response[:0])
            drafter.end(0, np.concatenate((prompt, response)), len(prompt), finished=True)


def record_history(target: Target, task: Task, temperature: float = 1.0) -> History:
    """Return one earlier epoch: a group of responses to every prompt."""
    requests = [
        request for i in range(len(task.prompts)) for request in wave(task, i, GROUP, HISTORY_EPOCH, temperature)
    ]
    responses = decode(target, [requests], running=64, record=False).responses
    return [request.prompt_tokens for request in requests], [responses[request.request_id] for request in requests]


def first_difference(expected: Mapping[int, Tokens], found: Mapping[int, Tokens]) -> str | None:
    """Return the first difference between two runs of the same requests; None if there is none."""
    for request_id, tokens in expected.items():
        other = found.get(request_id)
        if other is None:
            return f"request {request_id} has no response"
        if not np.array_equal(tokens, other):
            common = min(len(tokens), len(other))
            at = next((i for i in range(common) if tokens[i] != other[i]), common)
            return f"request {request_id} differs from token {at} on"
    return None


def require_same(expected: Run, found: Run, name: str) -> None:
    """Exit if a contender drew other tokens, since its time is then meaningless."""
    difference = first_difference(expected.responses, found.responses)
    if difference is not None:
        raise SystemExit(f"{name} is not lossless: {difference}")


@dataclass(frozen=True, slots=True)
class Speed:
    """Sums over steps without prompt chunks."""

    steps: int
    request_steps: int
    drafted: int
    emitted: int
    elapsed_s: float
    draft_s: float

    @classmethod
    def of(cls, steps: Sequence[EngineStepRecord]) -> "Speed":
        return cls(
            len(steps),
            sum(step.running for step in steps),
            sum(step.drafted for step in steps),
            sum(step.emitted for step in steps),
            sum(step.elapsed_s for step in steps),
            sum(step.draft_s for step in steps),
        )

    @property
    def accept_length(self) -> float:
        """Tokens per verification of a request; 1 for plain decoding."""
        return self.emitted / max(self.request_steps, 1)

    @property
    def token_s(self) -> float:
        """Seconds per token."""
        return self.elapsed_s / max(self.emitted, 1)


def speed_of(
    steps: Sequence[EngineStepRecord], keep: Callable[[Strategy], bool] = lambda _: True, running: int | None = None
) -> Speed:
    """Return the speed of the decoding steps whose strategy is kept, with exactly `running` requests if given."""
    return Speed.of(
        [
            step
            for step in steps
            if not step.prefill_tokens and keep(step.strategy) and (running is None or step.running == running)
        ]
    )


def is_speculative(strategy: Strategy) -> bool:
    return strategy != PLAIN
