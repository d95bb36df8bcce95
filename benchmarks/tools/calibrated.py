"""What engine steps cost with a target in this process: the calibration that choosers of a benchmark begin with.

Made once per target, by decoding in the benchmark's own engine: passes of more and more rows behind drafts that are all
wrong, so that nothing of their acceptance is learnt, and what each strategy's drafts cost.
"""

from collections.abc import Sequence
from dataclasses import replace

from actors.engine.types import Request
from benchmarks.harness import machine
from benchmarks.tools.contenders import WrongDrafter
from benchmarks.tools.rollouts import WARMUP_EPOCH, History, decode, engine_options, wave
from benchmarks.tools.targets import Target, Task
from drafter.build import build_drafters
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey
from policies.speculation.defaults import default_arms
from policies.speculation.options import SpeculationOptions
from policies.speculation.policy import FixedPolicy
from policies.speculation.strategy import PLAIN, Strategy

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
DEPTHS = (1, 2, 3, 5, 7, 11, 15)
MOST_ROWS = 320
STEPS = 6  # at least, of a shape; the first tokens' contexts are short, as the demo's responses are
ROWS = "rows"  # name of what drafts wrongly


def calibrate(target: Target, task: Task, history: History, most_requests: int = REQUESTS[-1]) -> Calibration:
    """Of passes for up to so many requests, and of the default strategies at each."""
    costs = CostModel()
    options = SpeculationOptions()
    for requests in (count for count in REQUESTS if count <= max(most_requests, 2)):
        engine = engine_options(requests)
        asked = _short(wave(task, 0, requests, WARMUP_EPOCH), 3 * STEPS)
        wrong = {ROWS: WrongDrafter(ROWS, target.model.config.vocab_size)}
        for depth in (0, *(depth for depth in DEPTHS if requests * (1 + depth) <= MOST_ROWS)):
            strategy = Strategy(ROWS, depth) if depth else PLAIN
            decode(target, [asked], policy=FixedPolicy(strategy, costs=costs), drafters=wrong, record=False)
        drafters = build_drafters(options, target.model, engine)
        for strategy in default_arms(drafters):
            drafters = build_drafters(options, target.model, engine)
            decode(
                target,
                [asked],
                policy=FixedPolicy(strategy, costs=costs),
                drafters=drafters,
                history=history,
                record=False,
            )
    facts = machine()
    found = costs.refined(
        CalibrationKey(model=target.size, precision=target.dtype, device=f"{facts['cpu']}, {facts['cores']} cores")
    )
    drafts = tuple(draft for draft in found.drafts if not draft.strategy.startswith(f"{ROWS}:"))
    return found.model_copy(update={"drafts": drafts})


def _short(requests: Sequence[Request], tokens: int) -> list[Request]:
    return [replace(of, sampling=replace(of.sampling, max_new_tokens=tokens, stop_token_ids=())) for of in requests]
