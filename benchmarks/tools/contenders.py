"""The contenders of the speculation benchmarks: a policy and its drafters. Owns how each is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.tools.targets import Target
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import Strategy
from drafter.build import build_drafters
from drafter.protocol import BatchView, Drafter, Drafts, Int64Array
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration
from policies.speculation.build import build_policy
from policies.speculation.policy import FixedPolicy, StrategyPolicy

FIXED = ("suffix:4", "suffix:12", "ngram:12", "suffix:8", "suffix:8x2/12", "ngram:4")
FIXED_EAGLE = ("eagle:3", "eagle:5", "eagle:4x2/8")


@dataclass(frozen=True, slots=True)
class Contender:
    """Drafters are made anew for every run, so that none has seen the tokens it is to draft."""

    name: str
    policy: Callable[[], StrategyPolicy | None]
    drafters: Callable[[EngineOptions], Mapping[str, Drafter]]
    knows_history: bool = True  # drafters have seen the previous epoch
    learns: bool = False  # the policy is kept from run to run, after an uncounted one


class WrongDrafter(Drafter):
    """Drafts as much as the strategy allows, all of it wrong: a token that no response of the case holds."""

    def __init__(self, name: str, token: int) -> None:
        self.name, self._token = name, token

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """Draft chains of exactly strategy.depth tokens, as far as there is room."""
        requests = len(batch.slots)
        tokens: Int64Array = np.full((requests, strategy.depth), self._token, np.int64)
        return Drafts(tokens, np.minimum(batch.room, strategy.depth))


def fixed(target: Target, text: str, eagle: str | None = None) -> Contender:
    """Use one strategy at every step."""
    strategy = Strategy.parse(text)
    options = SpeculationOptions(mode="fixed", strategies=(text,), eagle=EagleOptions(path=eagle))
    return Contender(text, lambda: FixedPolicy(strategy), lambda engine: build_drafters(options, target.model, engine))


def adaptive(
    target: Target,
    name: str = "adaptive",
    *,
    calibration: Calibration | None = None,
    mode: str = "adaptive",
    eagle: str | None = None,
    strategies: Sequence[str] | None = None,
    max_running: int | None = None,
    history: bool = True,
    learnt: bool = True,
) -> Contender:
    """Use the default policy. `history`: drafters know an earlier epoch. `learnt`: the chooser has decoded before."""
    options = SpeculationOptions.model_validate({"mode": mode, "strategies": strategies, "eagle": {"path": eagle}})
    if max_running is not None:
        options = options.model_copy(update={"max_running": max_running})
    names = sorted(build_drafters(options, target.model, EngineOptions(max_running=1, kv_tokens=64)))
    return Contender(
        name,
        lambda: build_policy(options, names, costs=CostModel(calibration)),
        lambda engine: build_drafters(options, target.model, engine),
        knows_history=history,
        learns=learnt,
    )


def hostile(
    token: int,
    names: Sequence[str] = ("ngram", "suffix"),
    *,
    calibration: Calibration | None = None,
    learnt: bool = True,
) -> Contender:
    """Use the default policy over drafters that are always wrong."""
    return Contender(
        "hostile" if learnt else "hostile, cold",
        lambda: build_policy(SpeculationOptions(), names, costs=CostModel(calibration)),
        lambda engine: {name: WrongDrafter(name, token) for name in names},
        knows_history=False,
        learns=learnt,
    )
