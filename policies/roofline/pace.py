"""Durations of a run's parts on a device that is not present: data that an experiment passes to a run.

`experiments.paced_run` makes one for an A100 or H100. A part with a Pace does its work and then sleeps until the device
would have finished (`actors.pacing`). All product paths have None. Owns the prices, but no clock or sleep.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from config.strategy import Strategy
from policies.calibration.roofline import Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of the device, by load. Contexts are passed as counted here. They stand for `context_scale` times as many
    tokens, so that a toy's responses have the KV cache of long ones."""

    device: str  # its name and the model, in words
    scale: float  # seconds slept here per second on the device
    target: Roofline  # a pass of the target
    levels: Mapping[str, Roofline]  # by drafter: one level of its drafts; others take their own time, scaled
    context_scale: float = 1.0
    copy_s: float = 0.0  # of copying the target again, besides its first draft
    micro_step_s: float = 0.0  # of the drafter's trainer
    learner_token_s: float = 0.0  # of an RL step, per response token
    hand_over_s: float = 0.0  # of new weights, at an engine
    tally_dir: str = ""  # where processes write how many parts were late; empty: nowhere

    @property
    def name(self) -> str:
        """The device name under which calibrations are kept."""
        return f"paced {self.device}, {self.scale:g} s per second, context x {self.context_scale:g}"

    def pass_s(self, requests: int, rows: int, context_tokens: int) -> float:
        """Return the seconds of a pass of `rows` rows for `requests` requests with `context_tokens` tokens in total."""
        return self.target.seconds(max(requests, 1), rows, round(context_tokens * self.context_scale))

    def draft_s(self, strategy: Strategy, requests: int, context_tokens: int, *, caught_up: bool) -> float | None:
        """Return the seconds of drafting for `requests` requests; None: the drafter is no network. `caught_up`: it was
        made ready first, which costs time for a copy of the target."""
        level = self.levels.get(strategy.drafter)
        if level is None:
            return None
        rows = requests * (strategy.top_k if strategy.is_tree else 1)
        seconds = strategy.depth * level.seconds(max(requests, 1), rows, round(context_tokens * self.context_scale))
        return seconds + (self.copy_s if caught_up and strategy.drafter == "self" else 0.0)

    def learner_s(self, response_tokens: int) -> float:
        """Return the seconds of an RL step's update."""
        return self.learner_token_s * response_tokens
