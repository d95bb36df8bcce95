"""One rollout engine in virtual time: continuous batching from one change of the batch to the next.

Owns the running requests and their progress; never assigns or returns requests itself. All running requests gain tokens
at the same rate, so one counter of tokens per request gives the progress of each. Between two changes of the batch (an
end, an arrival, a full cache) a step's seconds grow linearly with the context. If they do not, a segment is cut after
`_GROWTH` of its context. Tokens are real numbers here: single engine steps are not modelled, only their mean gain.
tests/simulate/test_engine.py measures the distance from a loop over steps.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from config.strategy import PLAIN, Strategy
from planner.simulate.costs import SimulatedCosts
from planner.simulate.speculation import SimulatedSpeculator

_GROWTH = 0.3  # share of the context after which a rate is evaluated again
_LEAST = 48.0  # tokens per request of a segment, at least
# Below this it is no time and no token: after months of virtual time a double still resolves such moments.
_INSTANT_S, _NOTHING = 1e-8, 1e-3


@dataclass(slots=True, kw_only=True)
class Running:
    """A request in an engine."""

    request: int
    prompt: int
    prompt_tokens: int
    tokens: float  # of the response, at its admission
    length: int  # of the complete response
    since: float = 0.0  # engine's counter at its admission
    moved: bool = False  # its tokens were computed elsewhere before
    gone: bool = False  # invalid entry of the heap

    @property
    def left(self) -> float:
        return self.length - self.tokens


@dataclass(slots=True, kw_only=True)
class Spent:
    """Worker-seconds and tokens."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    again_s: float = 0.0  # part of it: prefill of tokens computed elsewhere before
    speculating_s: float = 0.0  # of decode_s
    tokens: float = 0.0
    steps: float = 0.0  # of the engine
    preempted: int = 0


@dataclass(slots=True, kw_only=True)
class Engine:
    """The engine of one worker. Times are the caller's clock. Call `advance` first, then change, then read `next_s`."""

    costs: SimulatedCosts
    speculator: SimulatedSpeculator
    slots: int
    kv_tokens: float = math.inf
    on_end: Callable[[Running], None] = lambda running: None
    spent: Spent = field(default_factory=Spent)
    strategy: Strategy = PLAIN
    _now_s: float = 0.0
    _busy_until_s: float = 0.0  # prefill
    _counter: float = 0.0  # tokens per request since the start
    _context: float = 0.0  # tokens of all running requests
    _order: deque[Running] = field(default_factory=deque)  # by admission
    _heap: list[tuple[float, int, Running]] = field(default_factory=list)  # by the counter at which they end
    _running: int = 0
    _waiting: deque[Running] = field(default_factory=deque)  # for room in the cache
    _prompts: dict[int, int] = field(default_factory=dict)  # running requests by prompt, which share its prefill
    _segment: float = 0.0  # tokens per request until the rate is evaluated again; 0: now
    _rate: tuple[float, float] = (0.0, 0.0)  # seconds per token of a request now, and their growth per token
    _taken: dict[int, Running] = field(default_factory=dict)
    _spread: float = 1.0  # tokens of a request per engine step

    @property
    def running(self) -> int:
        """The number of requests that it holds, including waiting ones."""
        return len(self._taken)

    @property
    def decoding(self) -> int:
        return self._running

    def holds(self, request: int) -> bool:
        """It was given that one, which has not ended."""
        return request in self._taken

    def tokens_of(self, request: int) -> float:
        """Return the response's tokens so far."""
        one = self._taken[request]
        return min(one.tokens + (self._counter - one.since if one.since >= 0 else 0.0), one.length)

    def admit(self, request: Running) -> None:
        """Give it a request."""
        self._taken[request.request] = request
        request.since = -1.0
        self._waiting.append(request)
        self._fill()

    def take_back(self) -> list[int]:
        """Take back all requests, in order of arrival; the engine is then empty. Read `tokens_of` before."""
        found = list(self._taken)
        self._taken.clear()
        self._heap.clear()
        self._order.clear()
        self._waiting.clear()
        self._prompts.clear()
        self._running, self._context, self._segment = 0, 0.0, 0.0
        return found

    def refresh(self) -> None:
        """Note that the gain of drafts has changed."""
        self._segment = 0.0

    def next_s(self) -> float:
        """Return the time of the next internal change; infinite while nothing runs."""
        if not self._running:
            return math.inf
        if not self._segment:
            self._ask()
        rate, slope = self._rate
        span = self._segment
        return max(self._now_s, self._busy_until_s) + span * (rate + slope * span / 2)

    def advance(self, now_s: float) -> None:
        """Advance time, at most until `next_s`."""
        begin_s = max(self._now_s, self._busy_until_s)
        self._now_s = max(now_s, self._now_s)
        if not self._running or now_s <= begin_s:
            return
        if not self._segment:
            self._ask()
        rate, slope = self._rate
        elapsed_s, span = now_s - begin_s, self._segment
        whole_s = span * (rate + slope * span / 2)
        if elapsed_s >= whole_s - _INSTANT_S:
            gained = span
        elif slope > 1e-15:
            gained = (math.sqrt(rate * rate + 2 * slope * elapsed_s) - rate) / slope
        else:
            gained = elapsed_s / rate
        gained = min(gained, span)
        spent = self.spent
        spent.decode_s += elapsed_s
        if self.strategy.depth:
            spent.speculating_s += elapsed_s
        spent.tokens += gained * self._running
        spent.steps += gained / self._spread
        self._counter += gained
        self._context += gained * self._running
        self._segment = max(span - gained, 0.0)
        self._rate = rate + slope * gained, slope
        self._end()

    def _end(self) -> None:
        """Report ended requests, and preempt some if the cache is full."""
        heap, changed = self._heap, False
        while heap and (heap[0][2].gone or heap[0][0] <= self._counter + _NOTHING):
            _, _, one = heapq.heappop(heap)
            if one.gone:
                continue
            one.gone, changed = True, True
            self._leave(one)
            del self._taken[one.request]
            self.on_end(one)
        while self._context > self.kv_tokens and self._running > 1:
            while self._order and self._order[-1].gone:
                self._order.pop()
            one = self._order.pop()
            again = Running(
                request=one.request,
                prompt=one.prompt,
                prompt_tokens=one.prompt_tokens,
                tokens=one.tokens + self._counter - one.since,
                length=one.length,
                since=-1.0,
            )
            one.gone, changed = True, True
            self._leave(one)
            self._taken[one.request] = again
            self._waiting.appendleft(again)
            self.spent.preempted += 1
        if changed:
            self._segment = 0.0
            self._fill()

    def _leave(self, one: Running) -> None:
        self._running -= 1
        self._context -= one.prompt_tokens + one.tokens + self._counter - one.since
        self._prompts[one.prompt] -= 1
        if not self._prompts[one.prompt]:
            del self._prompts[one.prompt]
        if not self._running:
            self._context = 0.0

    def _fill(self) -> None:
        """Admit waiting requests as far as there is room. Prompts are computed before decoding continues."""
        tokens = again = 0
        while self._waiting and self._running < self.slots:
            one = self._waiting[0]
            size = one.prompt_tokens + one.tokens
            # A tenth stays free for growth. An engine that admits by the present free space would preempt
            # at once.
            if self._running and self._context + size > 0.9 * self.kv_tokens:
                break
            self._waiting.popleft()
            shared = one.prompt in self._prompts
            tokens += 0 if shared else one.prompt_tokens
            tokens += round(one.tokens)
            again += round(one.tokens) + (0 if shared else one.prompt_tokens) if one.moved else 0
            self._prompts[one.prompt] = self._prompts.get(one.prompt, 0) + 1
            one.since = self._counter
            self._order.append(one)
            heapq.heappush(self._heap, (self._counter + one.left, one.request, one))
            self._running += 1
            self._context += size
            self._segment = 0.0
        if tokens:
            seconds = self.costs.prefill_s(tokens)
            self.spent.prefill_s += seconds
            self.spent.again_s += seconds * again / tokens
            self._busy_until_s = max(self._busy_until_s, self._now_s) + seconds

    def _ask(self) -> None:
        """Evaluate the rate from here on, and how far it is valid."""
        running, context = self._running, max(self._context, 1.0)
        while self._heap[0][2].gone:
            heapq.heappop(self._heap)
        span = self._heap[0][0] - self._counter
        span = min(span, max(_LEAST, _GROWTH * context / running))
        if self.kv_tokens < math.inf and running > 1:
            span = min(span, max((self.kv_tokens - context) / running, 0.0) + 1.0)
        span = max(span, _NOTHING)
        self.strategy = strategy = self.speculator.choose(running, context)
        gain = 1.0 + self.speculator.accepted(strategy)
        rows = running * (1 + self.speculator.drafted(strategy))
        now = self.costs.step_s(running, rows, context) + self.costs.draft_s(strategy, running, context)
        after = context + span * running
        then = self.costs.step_s(running, rows, after) + self.costs.draft_s(strategy, running, after)
        self._spread, self._segment = gain, span
        self._rate = now / gain, (then - now) / gain / span


@dataclass(slots=True, kw_only=True)
class SimulatedWorker:
    """The place of a worker; who sits there may change."""

    name: str
    node: int
    engine: Engine
    up: bool = True
    leaving: bool = False  # it gets nothing more
    let_go: bool = False  # of its own accord: it is neither up nor missed
    down_since_s: float = 0.0
    version: int = 0  # of what it is to do next: older wake-ups say nothing
    working: bool = False
    idle_since_s: float = 0.0
    spare_s: float = 0.0  # that it had nothing to do in this RL step's rollout
    told: dict[int, float] = field(default_factory=dict)  # tokens of running requests that the driver knows

    def rested(self, now_s: float) -> float:
        """Book its idle seconds until now, and return them."""
        seconds = now_s - self.idle_since_s
        self.spare_s += seconds
        return seconds
