"""How a learner's group comes up on the run's reservation. Owns what its ranks are made with."""

from dataclasses import dataclass

from actors.engine.capabilities import capabilities_of
from actors.learner_group import LearnerGroup
from actors.placement import Placement
from config.model import ModelOptions
from launch.cluster.versions import NodeVersions
from launch.context import RunContext


@dataclass(frozen=True, slots=True)
class LearnerStarter:
    """Makes learner groups on the run's reservation, off nodes that may not be used."""

    context: RunContext
    model: ModelOptions
    placement: Placement
    versions: NodeVersions

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
            actor_options=self.placement.learner_options,
            start_timeout_s=config.cluster.start_timeout_s,
            context=self.context,
            pace=self.context.pace,
        )

    def missing(self) -> str:
        """What that reservation still waits for; "": nothing."""
        return self.placement.missing_learner()
