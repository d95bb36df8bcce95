"""Turns of episodes move to workers that run nothing: the real ledger under a virtual clock."""

import heapq
from dataclasses import dataclass, field
from statistics import geometric_mean

import numpy as np
import pytest

from contracts.rollout import FinishReason, Request, Rollout, Sampled, SamplingParams
from launch.dispatch.ledger import Ledger
from policies import balance


def request(request_id: int, context: int, left: float, earlier: int = 0) -> Request:
    return Request(
        request_id=request_id,
        prompt_id=request_id // 8,
        prompt_tokens=np.zeros(context, np.int32),
        noise_key=request_id,
        sampling=SamplingParams(max_new_tokens=10_000),
        expected_tokens=max(left, 1.0),
        earlier_tokens=earlier,
        continues=True,
    )


def finished(request_id: int, tokens: int) -> Rollout:
    zeros = np.zeros(tokens, np.float32)
    return Rollout(
        request_id=request_id,
        sampled=Sampled(np.zeros(tokens, np.int32), zeros, zeros),
        finish_reason=FinishReason.STOP,
        weights_version=0,
        started_s=0.0,
        finished_s=0.0,
    )


@dataclass
class Fleet:
    """Workers whose engine step takes `fixed_s` and `row_s` for every request and every token of context that the
    worker has not. Episodes are lists of turns, each `turns[i]` tokens, with a tool's seconds between them."""

    episodes: list[tuple[list[int], list[float]]]
    expected: list[float]
    workers: int
    fixed_s: float = 0.002
    row_s: float = 0.001
    prompt: int = 20
    observation: int = 10
    moved: int = 0
    now_s: float = 0.0
    events: list[tuple[float, int, bool, int]] = field(default_factory=list)

    def makespan(self) -> float:
        """Play all episodes; return the seconds until the last has ended."""
        count = len(self.episodes)
        self.ledger = Ledger([request(i, self.prompt, self.expected[i]) for i in range(count)], max_retries=1)
        self.turn, self.home, self.context = [0] * count, dict[int, int](), [self.prompt] * count
        self.running: list[dict[int, int]] = [{} for _ in range(self.workers)]
        self.prefill, self.busy = [0] * self.workers, [False] * self.workers
        for worker in range(self.workers):
            self.ledger.offer(str(worker), 64)
        self.give()
        while self.events:
            self.now_s, _, is_step, which = heapq.heappop(self.events)
            (self.step if is_step else self.answer)(which)
        assert self.ledger.done
        assert all(turn == len(turns) for turn, (turns, _) in zip(self.turn, self.episodes, strict=True))
        return self.now_s

    def at(self, delay_s: float, is_step: bool, which: int) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, len(self.events) + 1000 * which, is_step, which))

    def give(self) -> None:
        for name, requests in self.ledger.assign().items():
            worker = int(name)
            for one in requests:
                i = one.request_id
                stays = self.home.get(i) == worker
                self.moved += i in self.home and not stays
                self.prefill[worker] += self.observation if stays else self.context[i]
                self.home[i], self.running[worker][i] = worker, self.episodes[i][0][self.turn[i]]
            self.start(worker)

    def start(self, worker: int) -> None:
        if self.running[worker] and not self.busy[worker]:
            self.busy[worker] = True
            rows, self.prefill[worker] = len(self.running[worker]) + self.prefill[worker], 0
            self.at(self.fixed_s + self.row_s * rows, True, worker)

    def step(self, worker: int) -> None:
        self.busy[worker] = False
        for i in list(self.running[worker]):
            self.running[worker][i] -= 1
            self.context[i] += 1
            if not self.running[worker][i]:
                del self.running[worker][i]
                turns, tools_s = self.episodes[i]
                self.ledger.finish(str(worker), finished(i, turns[self.turn[i]]))
                self.turn[i] += 1
                if self.turn[i] < len(turns):
                    self.at(tools_s[self.turn[i]], False, i)
        self.start(worker)
        self.give()

    def answer(self, i: int) -> None:
        self.context[i] += self.observation
        drawn = sum(self.episodes[i][0][: self.turn[i]])
        earlier = self.context[i] - self.prompt
        self.ledger.add(request(i, self.context[i], self.expected[i] - drawn, earlier), str(self.home[i]))
        self.give()


def played(monkeypatch: pytest.MonkeyPatch, seed: int, workers: int, tool_s: float, *, moves: bool) -> Fleet:
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(8):  # prompts of different difficulty, eight episodes each
        turns = 6 * rng.lognormal(0, 0.8)
        for _ in range(8):
            count = max(1, round(turns * rng.lognormal(0, 0.4)))
            tokens = [max(1, int(rng.exponential(30))) for _ in range(count)]
            episodes.append((tokens, (rng.exponential(1.0, count) * tool_s).tolist()))
    expected = [sum(tokens) * float(np.exp(rng.normal(0, 0.7))) for tokens, _ in episodes]
    monkeypatch.setattr(balance, "MOVE_CONTEXT", 0.5 if moves else 0.0)
    fleet = Fleet(episodes, expected, workers)
    fleet.makespan()
    return fleet


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("tool_s", [0.0, 0.05])
def test_turns_that_move_to_idle_workers_end_no_later(
    monkeypatch: pytest.MonkeyPatch, workers: int, tool_s: float
) -> None:
    pairs = [
        (
            played(monkeypatch, seed, workers, tool_s, moves=False),
            played(monkeypatch, seed, workers, tool_s, moves=True),
        )
        for seed in range(4)
    ]
    assert all(stay.moved == 0 for stay, _ in pairs)
    ratios = [stay.now_s / move.now_s for stay, move in pairs]
    assert min(ratios) >= 0.98
    if workers > 2:
        assert sum(move.moved for _, move in pairs) > 0
        assert geometric_mean(ratios) > 1.01


def test_a_turn_moves_only_from_company_to_an_idle_worker_and_with_little_context() -> None:
    def place(others: int, context: int, idle: bool) -> str:
        ledger = Ledger([request(i, 10, 100.0) for i in range(others + 1)], max_retries=1)
        ledger.offer("home", 8)
        ledger.assign()
        if idle:
            ledger.offer("idle", 8)
        ledger.finish("home", finished(0, 5))
        ledger.add(request(0, context, 100.0, earlier=5), "home")
        return next(name for name, given in ledger.assign().items() if given)

    assert place(2, 50, idle=True) == "idle"
    assert place(1, 50, idle=True) == "home"
    assert place(2, 51, idle=True) == "home"
    assert place(2, 50, idle=False) == "home"
