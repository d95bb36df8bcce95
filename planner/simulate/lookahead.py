"""Early samples in a simulated run (`rollout.lookahead`): the next RL step's responses, sampled a step ahead.

A worker's idle seconds in an RL step decode its share of the next step's responses, in this simulator's engine. Text is
accepted up to its first difference; the mean distance is `differs` tokens. Accepted text is checked like a prompt, and
the rest is sampled anew. This is a lower bound, since in a run old text behind a difference still drafts. With drafter
training only the learner's seconds are used for early samples.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from planner.simulate.engine import Engine, Running, SimulatedWorker
from planner.simulate.scenario import Scenario
from planner.simulate.workload import Asked, Workload


@dataclass(slots=True, kw_only=True)
class EarlySamples:
    """The early samples of a run; deterministic by its seed."""

    scenario: Scenario
    workload: Workload
    known: list[float] = field(default_factory=list)  # of each response of the present RL step, tokens that stand
    _asked: list[Asked] | None = None  # of the next one
    _ahead: list[float] = field(default_factory=list)  # of each of those, tokens that stand
    _steps: int = 0

    def asked(self) -> list[Asked]:
        """The responses of the RL step that begins."""
        found, self._asked = self._asked or self.workload.step(), None
        self.known, self._ahead = self._ahead or [0.0] * len(found), []
        return found

    def look(self, seats: Collection[SimulatedWorker], meanwhile_s: float) -> None:
        """End an RL step: use each worker's `spare_s`, and `meanwhile_s` seconds of the learner's update."""
        options, training = self.scenario.lookahead, self.scenario.speculation
        spare = [(seat.spare_s, seat) for seat in seats if seat.up and not seat.leaving]
        for seat in seats:
            seat.spare_s = 0.0
        if not options.enabled or not spare:
            return
        if training.training.enabled and training.mode != "off":
            spare = [(0.0, seat) for _, seat in spare]  # the tail is the trainers'
        apart = self.scenario.fleet.layout == "disaggregated"  # else the learner has the workers' devices
        self._steps += 1
        self._asked = asked = self.workload.step()
        differs = np.random.default_rng([self.scenario.seed, 9, self._steps]).exponential(options.differs, len(asked))
        sampled = self._sampled(asked, spare, meanwhile_s if apart else 0.0)
        self._ahead = [min(tokens, float(first)) for tokens, first in zip(sampled, differs, strict=True)]

    def _sampled(
        self, asked: Sequence[Asked], spare: Sequence[tuple[float, SimulatedWorker]], meanwhile_s: float
    ) -> list[float]:
        """Tokens of each response that workers sample who are idle for the last so many seconds of the rollout, and
        for those of the learner. They share what there is as `launch.dispatch.early.EarlySampling` has them."""
        share = min(math.ceil(len(asked) / len(spare)), self.scenario.engine.max_running)
        origin_s = max(seconds for seconds, _ in spare)
        end_s, waiting = origin_s + meanwhile_s, deque(range(len(asked)))
        found, holder = [0.0] * len(asked), dict[int, Engine]()
        engines = [
            Engine(costs=s.engine.costs, speculator=s.engine.speculator, slots=share, kv_tokens=s.engine.kv_tokens)
            for _, s in spare
        ]
        due = [(origin_s - seconds, place) for place, (seconds, _) in enumerate(spare)]
        heapify(due)
        while due and due[0][0] < end_s:
            now_s, place = heappop(due)
            engine = engines[place]
            engine.advance(now_s)
            while waiting and 2 * engine.running <= share:
                for index in [waiting.popleft() for _ in range(min(len(waiting), share - engine.running))]:
                    holder[index], found[index] = engine, asked[index].tokens - 1.0  # the last one is the check's
                    engine.admit(self._running(index, asked[index]))
            if engine.running:
                heappush(due, (max(engine.next_s(), now_s), place))
        for engine in engines:
            engine.advance(end_s)
        for index, engine in holder.items():
            if engine.holds(index):
                found[index] = min(engine.tokens_of(index), found[index])
        return found

    def _running(self, index: int, one: Asked) -> Running:
        prompt_tokens = self.scenario.workload.prompt_tokens
        return Running(request=index, prompt=one.prompt, prompt_tokens=prompt_tokens, tokens=0.0, length=one.tokens)
