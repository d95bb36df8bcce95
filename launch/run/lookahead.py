"""Lookahead (`rollout.lookahead`): which samples of the next RL step idle workers may sample now, and its results.

The text belongs to the dispatcher. Lookahead never decides what is requested, and no state of a run depends on it. All
of it may be lost, so a checkpoint has none of it.
"""

import math
import time
from copy import deepcopy
from dataclasses import dataclass, field

from actors.data import PromptOrder, PromptSet
from actors.data.mixture import MixedOrder
from contracts.rollout import SamplingParams, StopRule
from launch.batch import Batch
from launch.config import Config
from launch.dispatch.early import EarlySampling
from launch.observe import StepDrafter
from launch.run.skip import next_picks
from policies.idle import IdleTime, IdleUse, Turn
from policies.lengths import LengthModel
from policies.lookahead import PROBE, EarlyGain, Extent, Worth


@dataclass(slots=True, kw_only=True)
class Lookahead:
    """The lookahead of one run."""

    early: EarlySampling
    config: Config
    prompts: PromptSet
    sampling: SamplingParams
    stop: StopRule | None
    worth: Worth = field(default_factory=Worth)
    idle: IdleTime | None = None  # None: no drafter wants the idle seconds
    own_s: float = 0.0  # that planning took since the last `take`; the dispatcher's own seconds are in the tally

    @property
    def extent(self) -> Extent:
        """The next RL step's extent. With `rollout.lookahead: always` it is ALL whether it pays or not."""
        return Extent.ALL if self.config.rollout.lookahead == "always" else self.worth.extent

    def plan(self, order: PromptOrder | MixedOrder, lengths: LengthModel, step: int, *, trains: bool = False) -> bool:
        """Plan early samples before RL step `step` is sampled. Return whether idle workers look ahead.

        The order's next prompts belong to the step after it or, with dynamic sampling, to a further round of this one.
        Only samples that are sure to be requested are planned. Their stop rule at that time may differ.
        trains: otherwise idle workers train the drafter."""
        options, extent, begin_s = self.config.rollout, self.extent, time.perf_counter()
        yields = trains and self.idle is not None and self.idle.turn is Turn.TRAIN
        if step >= self.config.run.steps or extent is Extent.NONE or yields:
            self.early.plan(())
            return False
        count = options.prompts_per_step
        count = math.ceil(PROBE * count) if extent is Extent.PROBE else count
        picks, _ = next_picks(deepcopy(order), self.prompts, count, None)
        least = options.budget.min_rollouts if options.budget.on else options.rollouts_per_prompt
        batch = Batch(
            picks,
            [least] * len(picks),
            self.sampling,
            seed=self.config.run.seed,
            expected_tokens=[lengths.expected_tokens(pick.prompt.prompt_id) for pick in picks],
            stop=self.stop,
        )
        self.early.plan(batch.requests)
        self.own_s += time.perf_counter() - begin_s
        return True

    def take(self, step_s: float, workers: int, drafter: StepDrafter | None = None) -> tuple[dict[str, float], str]:
        """Metrics of the RL step that has ended, which took so many seconds; decides how far the next one looks ahead,
        and says why where that changes. `drafter`: of the same RL step."""
        tally = self.early.take()
        own_s, self.own_s = self.own_s + tally.own_s, 0.0
        measured = EarlyGain(
            checked=tally.use.checked, won_s=tally.use.saved_s, own_s=own_s, all_s=step_s * max(workers, 1)
        )
        news = self.worth.observe(measured)
        metrics = {
            "lookahead/sampled_tokens": float(tally.sampled),
            "lookahead/spent_s": tally.spent_s,
            "lookahead/won_s": tally.use.saved_s,
            "lookahead/own_s": own_s,
        }
        if self.idle is not None and drafter is not None:
            self.idle.observe(
                IdleUse(
                    looked_s=tally.spent_s,
                    won_s=measured.net_s,
                    trained_s=drafter.worker_s,
                    saved_s=0.0 if drafter.drafted is None else drafter.drafted.saved_s,
                    acceptance=drafter.acceptance,
                )
            )
            values = {"lookahead/value": self.idle.looking, "drafter/value": self.idle.training}
            metrics |= {name: value for name, value in values.items() if value is not None}
        if tally.responses:
            metrics |= {
                "lookahead/responses": float(tally.responses),
                "lookahead/tokens": float(tally.tokens),
                "lookahead/stood": tally.stood / max(tally.tokens, 1),
                "lookahead/head_start": tally.stood / max(tally.drawn, 1),
                "lookahead/checked_tokens": float(tally.use.checked),
                "lookahead/check_s": tally.use.seconds,
            }
        return metrics, "" if self.config.rollout.lookahead == "always" else news
