"""Why a rollout phase cannot go on."""

from launch.errors import PacelineError


class WorkerStartError(PacelineError):
    """A rollout worker did not come up at the start of the run; the message carries the engine's reason."""


class NoWorkersError(PacelineError):
    """Every rollout worker is lost and out of restarts."""


class StaleWeightsError(PacelineError):
    """A worker answers, or samples, with other weights than it was given. Its rollouts must not be trained on."""
