"""Start a learner's group on the run's reservation. Owns the arguments of its ranks."""

from dataclasses import dataclass

from actors.engine.capabilities import capabilities_of
from actors.learner_group import LearnerGroup
from actors.placement import Placement
from config.model import ModelOptions
from launch.cluster.versions import NodeVersions
from launch.context import RunContext


@dataclass(frozen=True, slots=True)
class LearnerStarter:
    """Makes learner groups on the run's reservation, avoiding nodes that may not be used."""

    context: RunContext
    model: ModelOptions
    placement: Placement
    versions: NodeVersions

    def undecided(self) -> bool:
        """Return whether the ranks' places depend on a node that has yet to say what it runs.

        A group that starts now would be kept off that node for good, even where no other node has room."""
        return self.versions.asking() and not self.placement.learners_are_off(self.versions.unvouched())

    def start(self) -> LearnerGroup:
        config = self.context.config
        self.placement.learners_off(self.versions.unvouched())
        return LearnerGroup(
            self.model,
            config.learner,
            config.objective,
            temperature=config.rollout.sampling.temperature,
            seed=config.run.seed,
            quantization=config.rollout.quantization,
            adapters_only=capabilities_of(config).adapters,
            actor_options=self.placement.learner_options(),
            start_timeout_s=config.cluster.start_timeout_s,
            context=self.context,
            pace=self.context.pace,
        )

    def missing(self) -> str:
        """Return what the reservation still waits for; "" if nothing."""
        return self.placement.missing_learner()
