"""Build the policy of a configuration."""

from collections.abc import Sequence

from config.speculation import SpeculationOptions
from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.speculation.bandit import BegMabPolicy
from policies.speculation.budget import DraftBudget
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.defaults import default_arms, default_ladder
from policies.speculation.length_aware import LengthAwareBudget
from policies.speculation.policy import FixedPolicy, StrategyPolicy
from policies.speculation.toggle import RooflinePolicy


def build_policy(
    options: SpeculationOptions,
    drafters: Sequence[str],
    *,
    trees: bool = True,
    lag: int = 0,
    costs: CostModel | None = None,
) -> StrategyPolicy | None:
    """Build the policy of an engine that has `drafters`. None: no speculation (mode off, or nothing to draft with). If
    the engine verifies no `trees`, the policy uses none unless they are named. `lag`: steps from a choice to its use.
    `costs`: of this engine's steps; the policy passes it every step.

    Raises ValueError for strategies that name a missing drafter, for mode fixed without exactly one strategy, and for
    mode roofline with anything but chains of one drafter.
    """
    if options.mode == "off":
        return None
    if options.strategies is None:
        arms = default_arms(drafters, trees=trees)
    else:
        arms = tuple(Strategy.parse(text) for text in options.strategies)
        for arm in arms:
            if arm != PLAIN and arm.drafter not in drafters:
                at_hand = ", ".join(drafters) or "none"
                raise ValueError(f"rollout.speculation.strategies: {arm} has no drafter here; at hand: {at_hand}")
    if options.mode == "fixed":
        if options.strategies is None or len(arms) != 1:
            raise ValueError(
                "rollout.speculation.mode: fixed needs exactly one entry in rollout.speculation.strategies"
            )
        return FixedPolicy(arms[0], options.running_limit, costs)
    if not arms:
        return None
    if options.mode == "paper":
        return BegMabPolicy(
            arms,
            thresholds=options.batch_thresholds,
            epsilon=options.epsilon,
            window=options.window,
            max_running=options.running_limit,
            seed=options.seed,
            costs=costs,
        )
    if options.mode == "roofline":
        return RooflinePolicy(
            default_ladder(drafters) if options.strategies is None else [arm for arm in arms if arm != PLAIN],
            margin=options.roofline.margin,
            near_ceiling=options.roofline.near_ceiling,
            patience=options.roofline.patience,
            max_running=options.running_limit,
            costs=costs,
        )
    drafting = [arm for arm in arms if arm != PLAIN]  # plain decoding is always an arm
    return AdaptivePolicy(
        drafting,
        max_running=options.running_limit,
        exploration=options.exploration,
        lag=lag,
        costs=costs,
    )


def build_budget(options: SpeculationOptions, policy: StrategyPolicy | None, slots: int) -> DraftBudget | None:
    """Build the draft budget of an engine with `slots` slots; None: the strategy alone limits drafts."""
    if options.budget == "none" or not isinstance(policy, AdaptivePolicy):
        return None
    return LengthAwareBudget(policy.costs, policy.acceptance, slots)
