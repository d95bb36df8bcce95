"""Simulate runs of any size in virtual time: time and cost of a fleet, and the gain of each technique.

    from planner.simulate import load_scenario, simulate
    outcome = simulate(load_scenario(Path("scenario.yaml"), ["fleet.nodes=64"]))

The ledger, the coordinator, the budget and the speculation policies are the real ones. Engines, learner, network and
clouds are models (docs/howto/simulate.md). No Ray, no torch, no wall clock.
"""

from planner.simulate.outcome import Outcome, SimulatedStep
from planner.simulate.run import simulate
from planner.simulate.scenario import Scenario, load_scenario

__all__ = ["Outcome", "Scenario", "SimulatedStep", "load_scenario", "simulate"]
