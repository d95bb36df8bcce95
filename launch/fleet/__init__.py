"""Rollout workers that join and leave during a run: how many, where, and why.

autoscaler = Autoscaler(placement.plan, there=scaled())    # withdraws the request of a killed run
fleet = Fleet(dispatcher, placement, learner, versions, drafter, autoscaler, context)
fleet.look()                                      # often, whatever the driver waits for
fleet.drain(node_id, "AWS: spot interruption")    # its workers leave with their tokens, and others take their place
metrics = fleet.take()                            # of the RL step
"""

from launch.fleet.autoscaler import Autoscaler
from launch.fleet.fleet import Fleet, FleetState

__all__ = ["Autoscaler", "Fleet", "FleetState"]
