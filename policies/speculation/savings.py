"""What drafts save of the seconds that plain decoding takes for the same responses.

A step is booked at once: plain seconds for as many tokens per request, less its own. That is exact where all requests
advance alike. Where they do not it is too much, or too little: plain decoding ends with its longest response, and what
drafts gain for others shortens little. So when an engine has no more work, all its responses are decoded once more in
virtual lockstep at the same prices, and the difference is charged to what accepted drafts were booked. An engine that
gets new weights with requests at hand begins anew: while its batch stays full, it waits for no longest response.

Owns the books of one engine; reads no clock. Prices are the policy's.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from config.strategy import PLAIN, Strategy
from policies.speculation.policy import StrategyPolicy
from policies.steps import Int64Array, Load, StepOutcome

MOST = 1.0  # of what was booked for accepted drafts: the largest difference that is charged
Price = Callable[[int, int], float | None]  # seconds of a plain step, by requests and their context tokens together


@dataclass(slots=True)
class _Decoded:
    start: int  # known tokens when it began
    tokens: int = 0


class Savings:
    """The books of one engine. A SlotWatcher (`actors.engine.batch.plan`).

    length: [slots], the known tokens of each; read when requests begin and end, and in `settle`."""

    def __init__(self, length: Int64Array) -> None:
        self._length = length
        self._running: dict[int, _Decoded] = {}  # by slot
        self._responses: list[_Decoded] = []  # in the order in which they began
        self._most = 0  # that ran at a time
        # By running requests: plain steps for as many tokens, those of accepted drafts, and the contexts' sum.
        self._steps: defaultdict[int, float] = defaultdict(float)
        self._gained: defaultdict[int, float] = defaultdict(float)
        self._context: defaultdict[int, float] = defaultdict(float)
        self._tokens = 0.0  # of those steps
        self._booked: defaultdict[Strategy, float] = defaultdict(float)  # seconds of its accepted tokens

    def begin(self, slot: int, prompt: object = None) -> None:
        """A request took the slot."""
        response = self._running[slot] = _Decoded(int(self._length[slot]))
        self._responses.append(response)
        self._most = max(self._most, len(self._running))

    def end(self, slot: int, finished: bool = True) -> None:
        """It left the slot, which still has its length."""
        response = self._running.pop(slot, None)
        if response is not None:
            response.tokens = int(self._length[slot]) - response.start

    def passed(self, load: Load, gained: int = 0) -> None:
        """Add a step of decoding requests whose drafts, or early text, gained so many tokens beyond one each."""
        running, steps = load.running, 1.0
        if gained:
            self._gained[running] += gained / running
            steps += gained / running
        self._steps[running] += steps
        self._context[running] += steps * load.context_tokens
        self._tokens += running + gained

    def book(
        self, outcome: StepOutcome, policy: StrategyPolicy, *, usual: bool, captured: bool = False
    ) -> tuple[float, float]:
        """Add a step with drafts. Return the seconds that it saved, and at most could have; 0 where prices are unknown.

        Not `usual`: prompts or new weights took a part of its time, so drafting and the rows of drafts are charged, the
        latter as predicted. `captured`: the capture of a graph took a part of drafting's."""
        self.passed(outcome.load, outcome.accepted)
        return self._gain(outcome, policy, usual=usual, captured=captured)

    def beside(self, outcome: StepOutcome, policy: StrategyPolicy, *, captured: bool = False) -> tuple[float, float]:
        """Return what `book` does of drafts beside early text, whose step is already `passed`. `outcome.load`: all
        decoding requests.

        Drafts get what they gained beside plain decoding, less drafting and their rows, as beside prompts. The text's
        own account (contracts.rollout.EarlyUse) is the step beside the engine's usual decoding, with drafts. Where
        drafts gain as usual, the sum is what the step saved beside plain decoding of the requests with drafts, and
        usual decoding of those with text."""
        return self._gain(outcome, policy, usual=False, captured=captured)

    def _gain(
        self, outcome: StepOutcome, policy: StrategyPolicy, *, usual: bool, captured: bool
    ) -> tuple[float, float]:
        load, strategy = outcome.load, outcome.strategy
        plain_s = policy.plain_s(load)
        if plain_s is None:
            return 0.0, 0.0
        gained_s = plain_s * outcome.accepted / load.running
        if usual:
            saved_s = gained_s + plain_s - outcome.elapsed_s
            # A verification takes at least as long as a plain step of the same requests.
            most_s = outcome.elapsed_s * outcome.accepted / load.running
        else:
            whole_s = policy.expected_s(outcome)
            target_s = policy.expected_s(replace(outcome, strategy=PLAIN))
            without_s = policy.expected_s(replace(outcome, strategy=PLAIN, drafted=0))
            if target_s is None or without_s is None or (captured and whole_s is None):
                return 0.0, 0.0
            draft_s = whole_s - target_s if captured and whole_s is not None else outcome.draft_s
            saved_s = gained_s - draft_s - max(target_s - without_s, 0.0)
            most_s = gained_s
        self._booked[strategy] += gained_s
        return saved_s, most_s

    def settle(self, price: Price) -> dict[Strategy, float]:
        """Decode all responses in lockstep, and begin anew. Return by strategy the seconds to add to what was booked;
        nothing with requests at hand, or without prices."""
        charged: dict[Strategy, float] = {}
        if not self._running and self._booked:
            seconds, tokens = self._lockstep(price)
            booked_s, gained_s = self._priced(self._steps, price), self._priced(self._gained, price)
            if seconds is not None and booked_s is not None and gained_s and tokens:
                # Some first tokens are of prompts' passes, in lockstep too: prices count, not how many.
                apart = (seconds * self._tokens / tokens - booked_s) / gained_s
                apart = min(max(apart, -MOST), MOST)
                charged = {strategy: apart * booked for strategy, booked in self._booked.items()}
        for sums in (self._steps, self._gained, self._context, self._booked, self._responses):
            sums.clear()
        self._tokens, self._most = 0.0, 0
        for slot in list(self._running):
            self.begin(slot)
        return charged

    def _lockstep(self, price: Price) -> tuple[float | None, int]:
        """Return seconds and tokens. As many run at a time as did."""
        at = tokens = context = 0
        seconds, waiting = 0.0, deque(self._responses)
        running: list[tuple[int, int, int]] = []  # where it ends, its number, and its tokens then
        while running or waiting:
            while waiting and len(running) < self._most:
                one = waiting.popleft()
                heapq.heappush(running, (at + one.tokens, len(waiting), one.start + one.tokens))
                context += one.start
            added = (running[0][0] - at) * len(running)
            if added:
                step_s = price(len(running), context + added // 2)
                if step_s is None:
                    return None, 0
                seconds += (running[0][0] - at) * step_s
            at, tokens, context = running[0][0], tokens + added, context + added
            context -= heapq.heappop(running)[2]
        return seconds, tokens

    def _priced(self, steps: Mapping[int, float], price: Price) -> float | None:
        """Return the seconds of so many plain steps, by running requests."""
        total_s = 0.0
        for running, number in steps.items():
            step_s = price(running, round(self._context[running] / self._steps[running]))
            if step_s is None:
                return None
            total_s += number * step_s
        return total_s
