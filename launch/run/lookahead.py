"""Looking ahead (`rollout.lookahead`): which samples of the next RL step idle workers may sample now, and what it
brought. Owns no text: that is the dispatcher's. It never decides what is asked for, and no state of a run follows from
it: all of it may be lost, so nothing of it is in a checkpoint.
"""

from copy import deepcopy
from dataclasses import dataclass, field

from actors.data import PromptOrder, PromptSet
from actors.data.mixture import MixedOrder
from contracts.rollout import SamplingParams, StopRule
from launch.batch import Batch
from launch.config import Config
from launch.dispatch.early import EarlySampling
from launch.run.skip import next_picks
from policies.lengths import LengthModel
from policies.lookahead import Worth


@dataclass(slots=True, kw_only=True)
class Lookahead:
    """Of one run."""

    early: EarlySampling
    config: Config
    prompts: PromptSet
    sampling: SamplingParams
    stop: StopRule | None
    worth: Worth = field(default_factory=Worth)

    def plan(self, order: PromptOrder | MixedOrder, lengths: LengthModel, step: int) -> None:
        """Before RL step `step` is sampled, its prompts taken from the order: the next ones of the order come in the
        step after it, or, with dynamic sampling, in a further round of this one. Of each prompt only so many samples
        as are sure to be asked for. How they end follows from their own rule, which may be another then."""
        options = self.config.rollout
        if step >= self.config.run.steps or not self.worth.pays:
            self.early.plan(())
            return
        picks, _ = next_picks(deepcopy(order), self.prompts, options.prompts_per_step, None)
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

    def take(self) -> dict[str, float]:
        """Metrics of the RL step that has ended; decides whether the next one looks ahead."""
        tally = self.early.take()
        self.worth.observe(tally.use.checked, tally.use.saved_s)
        metrics = {"lookahead/sampled_tokens": float(tally.sampled), "lookahead/won_s": tally.use.saved_s}
        if tally.responses:
            metrics |= {
                "lookahead/responses": float(tally.responses),
                "lookahead/tokens": float(tally.tokens),
                "lookahead/stood": tally.stood / max(tally.tokens, 1),
                "lookahead/head_start": tally.stood / max(tally.drawn, 1),
                "lookahead/checked_tokens": float(tally.use.checked),
                "lookahead/check_s": tally.use.seconds,
            }
        return metrics
