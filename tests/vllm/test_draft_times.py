"""Drafting by a network of vLLM's own happens within its step: what of the step's time it took, policies hear all the
same. No vLLM here: its backend and its model runner are pretended."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.vllm.drafter_passes import NOT_AT_ALL, DrafterPasses
from actors.engine.vllm.engine import VllmEngine
from actors.engine.vllm.worker_drafts import WorkerDrafter
from config.strategy import PLAIN, Strategy
from contracts.rollout import Request, Sampled, SamplingParams
from policies.speculation.policy import FixedPolicy
from policies.steps import Load, StepKind, StepOutcome

DRAFT_S = 0.125
TICK_S = 2.0**-10  # exact, as are its multiples


class Ticking:
    """A timer that goes on by TICK_S whenever it is read, so that a span is as long as it has readings."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK_S
        return self.now


class Alternating(FixedPolicy):
    """Plain decoding for some steps, then a strategy; keeps what it hears."""

    def __init__(self, strategy: Strategy, plain_steps: int) -> None:
        super().__init__(strategy)
        self.plain_left, self.heard = plain_steps, list[StepOutcome]()

    def choose(self, load: Load) -> Strategy:
        self.plain_left -= 1
        return PLAIN if self.plain_left >= 0 else super().choose(load)

    def record(self, outcome: StepOutcome) -> None:
        self.heard.append(outcome)


class Pretended:
    """A Backend that drafts [1, 2, 3] for each request at the end of a step, as deep as it is asked to, and lets the
    first draft stand."""

    kv_blocks, block_tokens, model_tokens, vocab_size, preempted, refusal = 64, 16, 256, 61, 0, ""

    def __init__(self) -> None:
        self.asked = list[int]()
        self.running = list[Any]()

    def attach(self, control: Any) -> None:
        self.control = control

    def submit(self, request: Request, prefix: Sampled | None, limit: int) -> None:
        name = str(request.request_id)
        known = len(request.prompt_tokens)
        self.running.append(
            SimpleNamespace(request_id=name, num_computed_tokens=known - 1, num_tokens=known, spec_token_ids=[])
        )

    def step(self) -> None:
        self.control.before_schedule(self.running)
        drafts = {request.request_id: request.spec_token_ids for request in self.running if request.spec_token_ids}
        tokens = {request.request_id: 1 + len(request.spec_token_ids) for request in self.running}
        made = self.control.drafts_to_make()
        drawn = [[1, 9] if request.request_id in drafts else [9] for request in self.running]
        starts = np.cumsum([0, *(len(each) for each in drawn)])
        scheduled = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
        )
        logprobs = SimpleNamespace(
            logprobs=np.full((int(starts[-1]), 1), -0.5, np.float32), cu_num_generated_tokens=starts.tolist()
        )
        output = SimpleNamespace(
            req_id_to_index={request.request_id: i for i, request in enumerate(self.running)},
            sampled_token_ids=drawn,
            logprobs=logprobs,
        )
        self.control.sampled(scheduled, output)
        for request, each in zip(self.running, drawn, strict=True):
            request.num_computed_tokens += len(each)
            request.num_tokens += len(each)
            request.spec_token_ids = [1, 2, 3][: max(made, 0)]

    def draft_s(self, drafts: int) -> float | None:
        self.asked.append(drafts)
        return DRAFT_S

    def kv_tokens_used(self) -> int:
        return 0


def test_policies_hear_what_of_a_step_was_drafting() -> None:
    backend, policy = Pretended(), Alternating(Strategy.parse("eagle:3"), plain_steps=3)
    typed: Any = backend
    worker = WorkerDrafter("eagle", copies_target=False)
    engine = VllmEngine(typed, max_running=4, progress_every_tokens=8, worker=worker, policy=policy, timer=Ticking())
    prompt = np.arange(4, dtype=np.int32)
    engine.submit(
        [
            Request(request_id=i, prompt_id=7 + i, prompt_tokens=prompt, noise_key=i, sampling=SamplingParams(200))
            for i in range(2)
        ]
    )
    for _ in range(30):
        engine.step()
    plain, switching, drafting = policy.heard[:3], policy.heard[3], policy.heard[4:]
    assert [outcome.strategy for outcome in plain] == [PLAIN] * 3
    assert all(outcome.draft_s == 0.0 for outcome in plain)
    assert all(outcome.reached is None for outcome in plain)
    assert (switching.strategy, switching.kind) == (PLAIN, StepKind.DISTURBED), "it made the drafts of the next"
    assert switching.draft_s == DRAFT_S, "the host had none to offer yet"
    for outcome in drafting:
        assert (str(outcome.strategy), outcome.kind) == ("eagle:3", StepKind.USUAL)
        assert outcome.draft_s == DRAFT_S + TICK_S, "and what the host does with its drafts"
        assert outcome.elapsed_s > TICK_S
        assert outcome.rows == 2 * (1 + 3)
        assert outcome.prompt_ids is not None
        assert outcome.reached is not None
        assert outcome.stood is not None
        assert (outcome.prompt_ids.tolist(), outcome.reached.tolist(), outcome.stood.tolist()) == (
            [7, 8],
            [3, 3],
            [1, 1],
        )
        assert outcome.load.prompt_ids.tolist() == [7, 8]
    assert backend.asked == [3] * 5, "in the first four steps, and once in sixteen after that"


class Timer:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_passes_are_timed_where_they_run() -> None:
    timer, took = Timer(), deque([0.5, 0.3, 4.0])

    def propose(drafts: int, **keywords: Any) -> torch.Tensor:
        timer.now += took.popleft()
        return torch.zeros(2, drafts, dtype=torch.int64)

    runner = SimpleNamespace(
        drafter=SimpleNamespace(propose=propose), input_batch=SimpleNamespace(req_ids=["a", "b"]), device="cpu"
    )
    passes = DrafterPasses(runner, copies_target=False, timer=timer)
    attention = SimpleNamespace(batch_size=lambda: 2)
    for drafts in (3, 3, 2, NOT_AT_ALL):
        passes.propose(drafts, common_attn_metadata=attention)
    assert passes.seconds(3) == pytest.approx(0.4)
    assert passes.seconds(3) is None, "nothing since"
    assert passes.seconds(2) == pytest.approx(4.0)
    assert passes.seconds(NOT_AT_ALL) is None
