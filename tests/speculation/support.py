"""Requests that join and leave a running engine, and the drafters and policies that the suite runs them with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import PLAIN, Strategy
from contracts.rollout import FinishReason, Request, Rollout
from drafter.build import build_drafters
from drafter.protocol import BatchView, Drafter, Drafts
from models.checkpoint import init_model
from models.transformer import Transformer
from policies.speculation.policy import Reason, StrategyPolicy
from policies.steps import Load, StepOutcome
from tests.engine.support import VOCAB, DrafterBase, options_of, rollouts, write_config

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
]
MAX_RUNNING = 32
ENGINE = options_of(max_running=MAX_RUNNING, kv_tokens=16_384, prefill_chunk_tokens=64)


def model_of(
    directory: Path, family: str, *, dtype: torch.dtype = torch.float32, invariant: bool = True
) -> Transformer:
    """A small model of the family. Fresh weights have zero biases, which would make Qwen2 a Llama: these have not."""
    model = init_model(write_config(directory / family, family), 0, dtype=dtype, batch_invariant=invariant)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


class Trees(DrafterBase):
    """Knows the answers. Grows trees (chains where top_k is 1) around them whose next node is right with `hit`."""

    def __init__(self, answers: Mapping[int, Rollout], hit: float, seed: int = 0) -> None:
        self.answers, self.hit, self.rng = answers, hit, np.random.default_rng(seed)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        count, nodes = len(batch.slots), strategy.tokens_to_verify
        tokens, parents = np.zeros((count, nodes), np.int64), np.full((count, nodes), -1)
        counts = np.full(count, nodes)
        for r, request_id in enumerate(batch.request_ids):
            done = int(batch.lengths[r] - batch.prompt_lengths[r])
            answer = self.answers[int(request_id)].tokens[done:]
            depths = np.zeros(nodes, np.int64)
            right = np.zeros(nodes, np.bool_)
            siblings: dict[int, set[int]] = {}
            for i in range(nodes):
                parent = int(self.rng.integers(max(-1, i - 3), i)) if strategy.is_tree else i - 1
                while parent >= 0 and (depths[parent] >= strategy.depth or len(siblings.get(parent, ())) >= 3):
                    parent = int(parents[r, parent])
                depth = int(depths[parent]) + 1 if parent >= 0 else 1
                taken = siblings.setdefault(parent, set())
                wanted = int(answer[depth - 1]) if depth <= len(answer) and (parent < 0 or right[parent]) else -1
                token = wanted if wanted >= 0 and wanted not in taken and self.rng.random() < self.hit else -1
                while token < 0 or (token in taken):
                    token = int(self.rng.integers(VOCAB))
                taken.add(token)
                tokens[r, i], parents[r, i], depths[i], right[i] = token, parent, depth, token == wanted
        return Drafts(tokens, counts, parents if strategy.is_tree else None)


class Mixed:
    """A policy that takes any of its strategies, at every step another, and forgets those that became unavailable."""

    def __init__(self, strategies: Sequence[str], seed: int = 0) -> None:
        self.strategies = [Strategy.parse(text) for text in strategies]
        self.rng = np.random.default_rng(seed)

    @property
    def max_nodes(self) -> int:
        return max(strategy.tokens_to_verify for strategy in self.strategies)

    def arms_at(self, running: int) -> list[Strategy]:
        return self.strategies

    def choose(self, load: Load) -> Strategy:
        return self.strategies[int(self.rng.integers(len(self.strategies)))]

    @property
    def reason(self) -> Reason:
        return Reason.FIXED

    @property
    def advantage(self) -> float | None:
        return None

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return None

    def record(self, outcome: StepOutcome) -> None:
        pass

    def renewed(self, drafter: str) -> None:
        pass

    def new_target(self) -> None:
        pass

    def unavailable(self, drafter: str) -> None:
        self.strategies = [s for s in self.strategies if s.drafter != drafter] or [PLAIN]

    def plain_s(self, load: Load) -> float | None:
        return None


def real_drafters(model: Transformer, seed: int = 0) -> dict[str, Drafter]:
    """Every drafter there is, EAGLE with random weights."""
    torch.manual_seed(seed)
    options = SpeculationOptions(eagle=EagleOptions(path="random"))
    return build_drafters(options, model, ENGINE)


class Served:
    """Requests through one engine that holds 1 to 32 of them at a time; some are aborted on the way.

    `rollouts`: what finished. `aborted`: what was cut off. `records`: the steps.
    """

    def __init__(
        self,
        model: Transformer,
        requests: Sequence[Request],
        policy: StrategyPolicy | None,
        drafters: Mapping[str, Drafter] | None = None,
        *,
        seed: int = 0,
        memory: Mapping[int, Rollout] | None = None,
    ) -> None:
        self.records: list[EngineStepRecord] = []
        core = NativeEngine(model, ENGINE, drafters=drafters or {}, policy=policy, steps=self.records)
        if memory:
            known = [request for request in requests if request.request_id in memory]
            core.remember([r.prompt_tokens for r in known], [memory[r.request_id].tokens for r in known])
        rng, events = np.random.default_rng(seed), []
        waiting = [requests[i] for i in rng.permutation(len(requests))]
        doomed = {request.request_id for request in requests if request.request_id % 13 == 5}
        core.submit([waiting.pop()])  # The first runs alone for some steps, the last ones run out alone.
        for _ in range(8):
            events += core.step()
        core.submit([waiting.pop() for _ in range(len(waiting) // 2)])
        while waiting or core.has_work:
            events += core.step()
            if waiting and rng.random() < 0.2:
                core.submit([waiting.pop() for _ in range(min(len(waiting), int(rng.integers(1, 6))))])
            if doomed and rng.random() < 0.05:
                core.abort([doomed.pop()])
        everything = rollouts(events)
        self.rollouts = {k: v for k, v in everything.items() if v.finish_reason is not FinishReason.ABORT}
        self.aborted = {k: v for k, v in everything.items() if v.finish_reason is FinishReason.ABORT}

    @property
    def tokens(self) -> int:
        return sum(len(rollout.tokens) for rollout in (*self.rollouts.values(), *self.aborted.values()))

    @property
    def running(self) -> set[int]:
        return {record.running for record in self.records}

    def accepted(self, drafter: str) -> int:
        return sum(record.accepted for record in self.records if record.strategy.drafter == drafter)

    def drafted(self, drafter: str) -> int:
        return sum(record.drafted for record in self.records if record.strategy.drafter == drafter)

    def assert_same(self, expected: Mapping[int, Rollout]) -> None:
        """Tokens, reasons and, bitwise, both log-probs are `expected`'s; what was aborted is a start of it."""
        assert self.rollouts.keys() | self.aborted.keys() == expected.keys()
        for request_id, rollout in (self.rollouts | self.aborted).items():
            wanted, count = expected[request_id], len(rollout.tokens)
            assert rollout.tokens.tobytes() == wanted.tokens[:count].tobytes(), request_id
            assert rollout.logprobs.tobytes() == wanted.logprobs[:count].tobytes(), request_id
            assert rollout.logprobs_t1 is not None
            assert wanted.logprobs_t1 is not None
            assert rollout.logprobs_t1.tobytes() == wanted.logprobs_t1[:count].tobytes(), request_id
            if request_id in self.rollouts:
                assert rollout.finish_reason == wanted.finish_reason
                assert count == len(wanted.tokens)
