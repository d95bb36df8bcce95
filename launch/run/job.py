"""The parts of one run, and its state in a checkpoint. launch.run.opening starts and ends the parts; other modules own
the steps.
"""

from dataclasses import dataclass, field
from typing import Any

from actors.data import PromptOrder, PromptSet
from actors.data.mixture import MixedOrder
from actors.data.tokenizers import Tokenizer
from contracts.rollout import SamplingParams, StopRule
from launch.config import Config
from launch.context import RunContext
from launch.dispatch import RolloutDispatcher
from launch.drafter.training import DrafterTraining
from launch.failover import FailoverLearner
from launch.fleet import Fleet
from launch.fleet.notices import Notices
from launch.interrupt import Interrupt
from launch.observe import Observer, SpeculationMeter
from launch.run.ahead import Responses
from launch.run.collect import Collector, Round
from launch.run.inputs import HeldOut
from launch.run.lookahead import Lookahead
from launch.run.partial import Carried
from launch.run.phases import SharedMemory
from launch.run.publish import Published, Publisher
from launch.run.rounds import RoundSampling
from launch.run.token_budget import TokenBudget
from policies.lengths import LengthModel
from policies.token_budget.curriculum import PromptCurriculum, Skipping
from policies.token_budget.skip import PromptSkip


@dataclass(kw_only=True)
class Job:
    """The parts of one run. `steps_done` counts complete RL steps and is the version of the current weights."""

    context: RunContext
    tokenizer: Tokenizer
    prompts: PromptSet
    held_out: tuple[HeldOut, ...]
    sampling: SamplingParams
    stop: StopRule | None  # of every response
    order: PromptOrder | MixedOrder
    lengths: LengthModel
    budget: TokenBudget
    learner: FailoverLearner
    dispatcher: RolloutDispatcher
    publisher: Publisher
    memory: SharedMemory
    collector: Collector
    fleet: Fleet | None = None  # None: fixed workers
    notices: Notices | None = None  # None: notices are not watched
    skip: Skipping | None = None  # None: no prompt is skipped
    rounds: RoundSampling | None = None  # None: prompts in data order
    speculation: SpeculationMeter | None = None  # None: it is off
    drafter: DrafterTraining | None = None  # None: no drafter is trained
    lookahead: Lookahead | None = None  # None: idle workers sample nothing of the next step
    steps_done: int = 0
    ahead: list[Round] | None = None  # the next step's responses, if sampled while this one is learned
    carried: list[Carried] = field(default_factory=list)  # by rollout.partial, to be continued in the next sampling
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # by steps done
    saved: int = 0  # the last step with a checkpoint, or from which the run continues
    saving: bool = False
    boundary: dict[str, Any] | None = None  # state after the last complete step; None once the learner has advanced

    @property
    def config(self) -> Config:
        return self.context.config

    @property
    def observer(self) -> Observer:
        return self.context.observer

    @property
    def interrupt(self) -> Interrupt:
        return self.context.interrupt

    @property
    def unsaved(self) -> bool:
        """Whether a complete step has no checkpoint."""
        return self.steps_done > self.saved

    @property
    def sampled_step(self) -> int:
        """The last RL step whose responses were sampled."""
        return self.steps_done + (self.ahead is not None)

    def publish(self) -> Published:
        """Hand the learner's weights to every rollout worker. Returns when all have confirmed them."""
        if self.drafter is not None:
            self.drafter.reached("publishing", self.sampled_step)
            self.dispatcher.settle()  # fetches trainers' weights while the target's are on their way
        published = self.publisher.publish(self.steps_done)
        if self.drafter is not None:
            self.drafter.hand_out(self.dispatcher, self.steps_done)
        return published

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's side of a checkpoint. It is JSON except for `ahead` and `put_off`, which get their own
        files (launch.run.ahead, launch.run.rounds)."""
        return {
            "steps_done": self.steps_done,
            "ahead": Responses(self.ahead, self.carried),
            "order": self.order.state_dict(),
            "lengths": self.lengths.state_dict(),
            "token_budget": self.budget.state_dict(),
            "skip": self.skip.state_dict() if self.skip is not None else None,
            "rounds": self.rounds.rounds.state_dict() if self.rounds is not None else None,
            "put_off": dict(self.rounds.texts) if self.rounds is not None else {},
            "evaluations": self.evaluations,
            "drafter": self.drafter.state_dict() if self.drafter is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_done = int(state["steps_done"])
        responses: Responses = state.get("ahead") or Responses()
        self.ahead, self.carried = responses.ahead, responses.carried
        self.order.load_state_dict(state["order"])
        self.lengths.load_state_dict(state["lengths"])
        self.budget.load_state_dict(state.get("token_budget", {}))
        if self.skip is not None:
            self.skip.load_state_dict(state.get("skip") or {})
        if self.rounds is not None:
            self.rounds.rounds.load_state_dict(state.get("rounds") or {})
            self.rounds.texts = dict(state.get("put_off") or {})
        self.evaluations = dict(state["evaluations"])
        if self.drafter is not None and state.get("drafter") is not None:
            self.drafter.load_state_dict(state["drafter"])


def prompt_skip(config: Config, prompts: PromptSet) -> Skipping | None:
    """See Job.skip."""
    options, seed = config.rollout.skip, config.run.seed
    if options.target is not None:
        known = {prompt.prompt_id: prompt.success for prompt in prompts if prompt.success is not None}
        return PromptCurriculum(options, seed, right_from=config.reward.right_from, known=known)
    return PromptSkip(options, seed) if options.after is not None else None
